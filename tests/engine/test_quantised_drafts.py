"""Draft heads and models beside targets that stay quantised, on a device that has kernels for these, as GPUs do: the
heads are quantised then, too. No text depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from group_ops import GroupTorchOps
from reference.block_heads import dflash2_head, dflash_head, domino_head, dspark_head, speculators_head
from reference.checkpoints import Checkpoint, eagle2_head, eagle3_head, llama_target, mimo, small_llama_draft
from tiny_checkpoint import write_tokenizer

from draftwing import LLM
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.ops.table import TorchOps

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # kernels take multiples
TARGET = llama_target(4, num_hidden_layers=5, **SIZES)
HEADS: dict[str, tuple[str, Callable[[], Checkpoint]]] = {
    "DFLASH2": ("DFLASH2", lambda: dflash2_head(TARGET)),
    "EAGLE": ("EAGLE", lambda: eagle2_head(TARGET, **SIZES)),
    "EAGLE3": ("EAGLE3", lambda: eagle3_head(TARGET, rows=64, **SIZES)),
    "DFLASH": ("DFLASH", lambda: dflash_head(TARGET)),
    "Domino": ("DFLASH", lambda: domino_head(TARGET)),
    "DSPARK": ("DSPARK", lambda: dspark_head(TARGET, markov_head_type="gated")),
    "rows of the target's lm_head": ("DSPARK", lambda: speculators_head(TARGET, rows=64, tied=True)),
    "two": ("EAGLE3+SUFFIX", lambda: eagle3_head(TARGET, **SIZES)),
    "a model": ("STANDALONE", lambda: small_llama_draft(num_hidden_layers=2, **SIZES)),
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]


class GroupDevice(CpuDevice):
    """Keeps quantised weights as they are, and computes in bfloat16."""

    def make_ops(self) -> TorchOps:
        return GroupTorchOps(self.device)

    def default_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        return torch.bfloat16


def tokens(target: Path, quantization: str, **options: Any) -> list[list[int]]:
    with LLM(
        str(target), device=GroupDevice, quantization=quantization, max_total_tokens=600, max_running_requests=2,
        context_length=64, speculative_fixed_shape=True, **options,
    ) as llm:  # fmt: skip
        found = llm.generate(PROMPTS, {"max_new_tokens": 10, "ignore_eos": True, "temperature": 0})
    if options["speculative_algorithm"] != "none":
        assert sum(one.meta_info["spec_num_proposed_drafts"] for one in found) > 0
    return [list(one.token_ids) for one in found]


@pytest.mark.slow
@pytest.mark.further(name=[*HEADS][1:])
@pytest.mark.further(quantization="w4a16")
@pytest.mark.parametrize("quantization", ["fp8", "w4a16"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_beside_a_quantised_target(name: str, quantization: str, tmp_path: Path) -> None:
    algorithm, make = HEADS[name]
    target, draft = TARGET.write(tmp_path / "target"), make().write(tmp_path / "draft")
    for folder in (target, draft):
        write_tokenizer(folder)
    plain = tokens(target, quantization, speculative_algorithm="none")
    more = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
    assert tokens(target, quantization, **more) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["fp8", "w4a16"])
def test_prediction_layers(quantization: str, tmp_path: Path) -> None:
    target = mimo(layers=2, num_hidden_layers=2, **SIZES).write(tmp_path / "target")
    write_tokenizer(target)
    plain = tokens(target, quantization, speculative_algorithm="none")
    assert tokens(target, quantization, speculative_algorithm="NEXTN") == plain
