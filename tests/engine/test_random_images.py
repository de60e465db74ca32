"""Random load with pictures on models of each kind that reads images, see `random_load`."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_rig
import pytest
import random_load
import torch
from engine_rig import Rig, spread, spread_rig, tiny_model
from gemma4_models import assistant_for
from image_models import FEW, KINDS, PAD, TEXT, encoded, loaded, picture, reference, write_model
from random_load import DRAFTERS, Shown

from draftwing.config.trees import TreeShape
from draftwing.images.processing import Tile
from draftwing.images.reader import Picture, Prompt, placed, read
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.assistant_loader import load_assistant
from draftwing.models.heads.base import DraftLM
from draftwing.models.heads.config import BlockConfig
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops import make_ops
from draftwing.spec.assistant_drafter import AssistantDrafter
from draftwing.spec.build import make_model_drafter
from draftwing.spec.lookup_drafter import SuffixDrafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.pair_drafter import PairDrafter
from draftwing.train.heads import new_block_head, new_eagle3_head, new_eagle_head

SIZES = (40, 30, 0), (40, 30, 3), (8, 8, 4), (64, 16, 2), (30, 40, 1)  # with a seed
CPU = torch.device("cpu")
ONE = SimpleNamespace(**{name: getattr(engine_rig, name) for name in ("VOCAB", "CONTEXT", "greedy", "seeded")})
ONE.Rig, ONE.make_book = Rig, engine_rig.make_book
TWO = SimpleNamespace(**{**vars(ONE), "Rig": spread_rig, "one_rank": Rig})
OTHERS = [kind for kind in KINDS if kind not in FEW]


def shown_to(processor: Any) -> Shown:
    @cache
    def pieces(number: int) -> tuple[Any, ...]:
        return tuple(read(Picture(encoded(picture(*SIZES[-1 - number])), "x"), processor))

    def expand(items: list[int]) -> tuple[list[int], Any]:
        ids: list[int] = []
        for item in items:
            if item >= 0:
                ids.append(7 if item == PAD else item)  # an answer may have drawn it
                continue
            ids += [40, *[PAD] * sum(isinstance(one, Tile) for one in pieces(item)), 41]
        return placed(ids, Prompt("", [list(pieces(item)) for item in items if item < 0]), processor)

    return Shown(tuple(range(-len(SIZES), 0)), expand)


@cache
def _draft() -> Any:
    return tiny_model(seed=3, sharpen=3.0, vocab=TEXT["vocab_size"])


def _reads_text() -> ModelDrafter:
    """Returns a draft model that reads no images."""
    return ModelDrafter(DraftLM(_draft(), TEXT["vocab_size"]), 7, 4, torch.float32, make_ops(CPU))


# What block heads differ in: DSpark's predict from the newest token on, DFlash2's have convolutions and a selector.
BLOCKS: dict[str, dict[str, Any]] = {
    "DFLASH": {"from_anchor": False},
    "DSPARK": {"from_anchor": True, "markov": "vanilla", "rank": 16, "confidence": "markov"},
    "DFLASH2": {"from_anchor": False, "rank": 16, "taps": 2, "group": 16, "candidates": 16},
}


def reads_states(model: DecoderModel, kind: str, seed: int) -> Any:
    """Returns a drafter with a head that is fed hidden states, and rows of images in place of their embeddings where
    it reads tokens of prompts; "EAGLE+SUFFIX": beside a lookup."""
    if kind.endswith("+SUFFIX"):
        tree, ops = TreeShape(8, 4, 32), make_ops(CPU)
        lookup = SuffixDrafter(7, ops, tree, capacity=4096, secret=1, image_token=PAD)
        return PairDrafter(reads_states(model, kind.removesuffix("+SUFFIX"), seed), lookup, tree, tree)
    if kind == "EAGLE3":
        head: Any = new_eagle3_head(model, None, (1, 2), 96, seed)
    elif kind == "EAGLE":
        head = new_eagle_head(model, 96, seed=seed)
    elif kind == "NEXTN":
        head, random = MTPHead(model, 1, torch.float32, CPU), torch.Generator().manual_seed(seed)
        for name, weight in head.named_parameters():
            weight.requires_grad_(False).normal_(1.0 if "norm" in name else 0.0, 0.1, generator=random)
    else:
        block = BlockConfig((1, 2), 9, model.config.vocab_size - 1, windows=(), causal=(), **BLOCKS[kind])
        head = new_block_head(model, block, layers=2, ffn_size=96, seed=seed)
    head = head.float().eval().requires_grad_(False)
    return make_model_drafter(head, 7, 4, torch.float32, make_ops(CPU))


def assistant(model: DecoderModel, kind: str, path: Path) -> Any:
    """Returns the drafter of a random assistant, which reads the target's keys and values."""
    assistant_for(SimpleNamespace(config=reference(kind).config.get_text_config())).save_pretrained(path)
    head = load_assistant(path, model, torch.float32, CPU)
    head.pack(make_ops(CPU))
    return AssistantDrafter(head, 7, 4, torch.float32, make_ops(CPU))


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return write_model(tmp_path_factory.mktemp("images") / request.param, request.param)


@pytest.mark.exhaustive  # what it meets has tests in test_images.py
@pytest.mark.slow
@pytest.mark.further(folder="gemma4-mutual")
@pytest.mark.further(seed=[*range(1, 150)])
# In the last two a request is retracted for a better-placed one, before which its image would have come in the step.
@pytest.mark.parametrize("seed", [*range(150), 5026, 5051])
def test_text_is_that_of_each_alone(folder: Path, seed: int) -> None:
    model, processor = loaded(folder)
    random_load.check(ONE, model, seed, shown_to(processor), (*DRAFTERS, _reads_text))


@pytest.mark.exhaustive  # tests/spec/test_heads_behind_images.py has what heads keep of pictures
@pytest.mark.slow
@pytest.mark.further(folder=OTHERS)
@pytest.mark.further(folder="qwen3.5", kind=["EAGLE", "EAGLE3", "DFLASH", "DSPARK"])
@pytest.mark.further(folder="gemma3", kind=["EAGLE", "NEXTN", "DFLASH2", "EAGLE+SUFFIX"])
@pytest.mark.further(seed=[*range(1, 25)])
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "NEXTN", *BLOCKS, "EAGLE+SUFFIX"])
@pytest.mark.parametrize("seed", range(25))
def test_heads_that_read_hidden_states(folder: Path, kind: str, seed: int) -> None:
    model, processor = loaded(folder)
    drafter = partial(reads_states, model, kind, seed)
    random_load.check(ONE, model, 1000 + seed, shown_to(processor), (drafter,))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.further(kind="gemma4-mutual")
@pytest.mark.further(seed=[*range(1, 25)])
@pytest.mark.parametrize("kind", ["gemma4", "gemma4-mutual"])
@pytest.mark.parametrize("seed", range(25))
def test_assistants(kind: str, seed: int, tmp_path: Path, one_thread: None) -> None:
    model, processor = loaded(write_model(tmp_path / kind, kind))
    drafter = partial(assistant, model, kind, tmp_path / "assistant")
    random_load.check(ONE, model, 3000 + seed, shown_to(processor), (drafter,))


@pytest.mark.exhaustive  # tests/engine/test_images.py has several answers, too
@pytest.mark.slow
@pytest.mark.further(folder=[kind for kind in KINDS if kind != "qwen3.5"])
@pytest.mark.further(seed=[*range(1, 30)])
@pytest.mark.parametrize("seed", range(30))
def test_several_answers(folder: Path, seed: int) -> None:
    model, processor = loaded(folder)
    random_load.check(ONE, model, 2000 + seed, shown_to(processor), n=2 + seed % 4)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.further(folder=[kind for kind in KINDS if kind != "gemma3"])
@pytest.mark.further(n=1)
@pytest.mark.further(seed=[*range(1, 30)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", range(30))
def test_two_ranks(folder: Path, seed: int, n: int) -> None:
    if folder.name == "gemma4":
        pytest.skip("tables of layers are in no weight map of these threads")
    model, processor = loaded(folder, packed=False)
    share = spread(model, make_ops(CPU))
    for one in (share, *share.others):
        one.tower = model.tower
    share.whole = (model,)
    random_load.check(TWO, share, seed, shown_to(processor), n=n)
