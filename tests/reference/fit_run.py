"""A small training run: a tiny head, samples made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftwing.models.heads.config import BlockConfig
from draftwing.models.loader import load_model
from draftwing.train.fit import Fit, FitReport
from draftwing.train.fit_config import FitConfig, recipe
from draftwing.train.heads import TargetHead, new_block_head, new_eagle3_head, new_eagle_head
from draftwing.train.store import Sample, SourceMeta
from draftwing.train.ttt import Loss

KEPT = torch.arange(0, 64, 2)
BLOCK = BlockConfig((2, 4), 3, 63, True, (), (), 0, "rnn", 8, "markov")


class Random:
    """Samples of random numbers, 5 to 20 tokens long."""

    def __init__(self, meta: SourceMeta, count: int, seed: int) -> None:
        self.meta, self._seed = meta, seed
        self.lengths = [5 + 7 * i % 16 for i in range(count)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, i: int) -> Sample:
        self.reads += 1
        generator = torch.Generator().manual_seed(1000 * self._seed + i)
        length = self.lengths[i]
        ids = torch.randint(self.meta.vocab, (length,), generator=generator, dtype=torch.int32)
        aux_hidden = torch.randn(length, len(self.meta.aux_layers) * self.meta.hidden, generator=generator)
        final = torch.randn(length, self.meta.hidden, generator=generator)
        return Sample(ids, torch.arange(length) > 1, aux_hidden, final, str(i))

    def read_many(self, numbers: list[int]) -> list[Sample]:
        return [self.read(i) for i in numbers]


def config(algorithm: str, **changes: Any) -> FitConfig:
    loss = Loss(steps=3) if algorithm == "EAGLE3" else recipe(algorithm).loss
    small = {"tokens": 40, "steps": 11, "max_length": 18, "lr": 1e-2, "log_every": 4, "eval_every": 3, "save_every": 3}
    return recipe(algorithm, **{"loss": loss, "precision": "float32", **small, **changes})


def run(target_path: Path, out: Path, settings: FitConfig, algorithm: str = "EAGLE3") -> tuple[Any, FitReport]:
    target = load_model(target_path, torch.float32, "cpu")
    head: Any
    if algorithm == "DSPARK":
        head = new_block_head(target, BLOCK, KEPT, layers=2)
    else:
        head = new_eagle3_head(target, KEPT) if algorithm == "EAGLE3" else new_eagle_head(target)
    meta = SourceMeta(
        "tiny", algorithm, head.aux_layers, target.config.hidden_size, target.config.vocab_size, "float32"
    )
    # 23 samples: a few epochs, with batches that end between them
    sources = Random(meta, 23, 1), Random(meta, 5, 2)
    return head, Fit(head, TargetHead(target), *sources, settings, out).run()
