"""What a drafter cannot work with is refused by name when it is built."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_configs import decoder_config
from group_ops import GroupTorchOps
from reference.checkpoints import Checkpoint, mimo
from thread_ranks import meet

from draftwing.config.options import Options
from draftwing.config.trees import TreeShape
from draftwing.errors import ConfigError
from draftwing.layers.attention import Attention
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.linear import Linear, vocab_parallel
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.heads.base import FeatureHead, linear_of, quantized_copy
from draftwing.models.loader import load_model
from draftwing.models.towers.base import TowerConfig
from draftwing.ops.table import TorchOps
from draftwing.parallel.ranks import ALONE, Ranks
from draftwing.spec.build import copy_for_drafts, draft_head, ngram, suffix
from draftwing.spec.drafter import DraftContext


@pytest.mark.parametrize(("build", "name", "most"), [(ngram, "NGRAM", 2**22 - 2), (suffix, "SUFFIX", 2**22)])
def test_a_vocabulary_that_lookups_cannot_pack(build: Any, name: str, most: int) -> None:
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=most + 1))
    context = SimpleNamespace(options=Options(speculative_algorithm=name), target=target)
    with pytest.raises(ConfigError, match=f"{name}.*{most}.*{most + 1}"):
        build(context)


@pytest.mark.parametrize(("tower", "token"), [(None, -1), (TowerConfig(7, 64), 7)])
@pytest.mark.parametrize(("build", "name"), [(ngram, "NGRAM"), (suffix, "SUFFIX")])
def test_lookups_know_what_stands_for_images(build: Any, name: str, tower: TowerConfig | None, token: int) -> None:
    cpu = torch.device("cpu")
    config = decoder_config(
        1, hidden_size=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn_size=64, vocab_size=9, max_positions=64,
        tower=tower,
    )  # fmt: skip
    target: Any = SimpleNamespace(config=config, ranks=ALONE)
    options, ops = Options(speculative_algorithm=name), TorchOps(cpu)
    shape, path = TreeShape(2, 2, 4), Path()
    context = DraftContext(options, target, shape, 2, torch.float32, cpu, ops, path, None, lambda path: target)
    assert build(context).index.image_token == token


@pytest.mark.parametrize(("asked", "carried", "window"), [(None, None, 0), (None, 3, 3), (5, 3, 5), (5, None, 5)])
def test_how_far_back_layers_see(asked: int | None, carried: int | None, window: int, tmp_path: Path) -> None:
    """The option counts before what the head's config says."""
    own = {} if carried is None else {"draftwing": {"window": carried}}
    tensors, config = mimo(5, 2)
    cpu, folder = torch.device("cpu"), Checkpoint(tensors, config | own).write(tmp_path / "layers")
    target = load_model(Checkpoint(tensors, config).write(tmp_path / "target"), torch.float32, cpu)
    ops = TorchOps(cpu)
    options = Options(speculative_algorithm="NEXTN", speculative_draft_window_size=asked)
    shape = TreeShape(2, 2, 4)
    context = DraftContext(options, target, shape, 2, torch.float32, cpu, ops, folder, None, lambda path: target)
    head = draft_head(context).head
    assert [part.kind.window for part in head.modules() if isinstance(part, Attention)] == [window] * 2


def test_latents_have_no_windows() -> None:
    class Head(FeatureHead):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.layer = DecoderLayer.__new__(DecoderLayer)
            torch.nn.Module.__init__(self.layer)
            self.layer.mixer = torch.nn.Identity()

    with pytest.raises(ConfigError, match="-window-size: expected draft layers with plain attention"):
        Head().see_at_most(4)


@pytest.mark.parametrize(
    ("free", "fails", "made"),
    [([1 << 30, 1 << 30], (), True), ([1 << 30, 1 << 10], (), False), ([1 << 30, 1 << 30], (1,), False)],
)
def test_all_ranks_have_a_copy_of_the_lm_head_or_none(
    free: list[int], fails: tuple[int, ...], made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draft together, and one with a copy waits for what the others add to its best logits. fails: ranks on which
    memory ends while it is made, which is no reason to end a start that did not ask for it."""

    large: list[Linear] = []

    def quantized(lm_head: Linear, scheme: str, ops: Any) -> Linear | None:
        if lm_head in large:
            raise torch.OutOfMemoryError("no room")
        return quantized_copy(lm_head, scheme, ops)

    monkeypatch.setattr("draftwing.spec.build.quantized_copy", quantized)
    monkeypatch.setattr("draftwing.models.heads.base._LARGE", 0)
    ops = GroupTorchOps(torch.device("cpu"))

    def copy(rank: int, ranks: Ranks) -> Linear | None:
        lm_head = vocab_parallel(linear_of(torch.randn(16, 128).bfloat16(), None, DENSE), ranks, 32)
        lm_head.pack(ops)
        large.extend([lm_head] * (rank in fails))
        context: Any = SimpleNamespace(
            options=Options(), target=SimpleNamespace(ranks=ranks), ops=ops, draft_lm_head="w4a16",
            free_memory=lambda: free[rank],
        )  # fmt: skip
        return copy_for_drafts(context, lm_head)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(copy, range(2), meet(2)))
    assert [one is not None for one in found] == [made] * 2
