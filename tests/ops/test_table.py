"""Devices with kernels have one for each operation of the bookkeeping of drafts; those in C do not depend on torch's
default dtype."""

from __future__ import annotations

import pytest
import torch

from draftwing.config.trees import TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.table import TorchOps
from draftwing.ops.types import First, NoiseKey, SamplingRows

TREES = ["plain_inputs", "tree_inputs", "commit", "simulate"]
BOOKKEEPING = [*TREES, "rank", "assign", "merge", "raise_confidence"]


def left_to_torch(ops: TorchOps) -> set[str]:
    plain = TorchOps(ops.device)
    found = {name for name in BOOKKEEPING if getattr(ops, name).__func__ is getattr(plain, name).__func__}
    return found | {name for name in ("ngram_index", "suffix_index") if getattr(ops, name) is getattr(plain, name)}


def test_torch_has_all_of_it() -> None:
    assert left_to_torch(TorchOps()) == {*BOOKKEEPING, "ngram_index", "suffix_index"}


def test_c_has_all_of_it() -> None:
    assert not left_to_torch(CpuOps(torch.device("cpu")))


def test_triton_has_all_of_it() -> None:
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    assert not left_to_torch(TritonOps(torch.device("meta")))


def test_an_operation_as_a_method_of_a_table_is_refused() -> None:
    """It would not be asked: the table has the function of the class that it was given."""

    class Mine(TorchOps):
        def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up

    with pytest.raises(TypeError, match="silu_mul"):
        Mine()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])  # a wider one finds a mistake without harm
def test_buffers_do_not_take_the_default_dtype(cpu_ops: CpuOps, default: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 40, generator=generator)
    seed, positions, depth = torch.tensor([1, 2]), torch.arange(6).view(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    ones, zero = torch.ones(2), torch.zeros_like(seed)
    params = SamplingRows(seed, ones, zero + 20, ones * 0.9, ones * 0.01, zero, zero[:, None])
    weight, hidden, ids = torch.randn(40, 64), torch.randn(2, 64), torch.arange(8).view(2, 4)

    def floats() -> list[torch.Tensor]:
        found = [cpu_ops.candidates(logits, positions, depth, params, seed - 1, 4)[1]]
        found.append(cpu_ops.gumbel(seed, positions, 40))
        found.append(cpu_ops.top_tokens(logits.view(6, 40), 2, 4, NoiseKey(seed, seed, ones.expand(3, 2)), None)[1])
        found.append(cpu_ops.exact_logits(hidden, weight, ids))
        return found

    expected = floats()
    first = First(torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4), torch.empty(2, 0))
    slots = RowTable(1, 40, CpuDevice())
    pool = KVPool([KVSpec(2, 16)], 40, torch.float32, torch.device("cpu"))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        found = floats()
        growth = cpu_ops.expand(slots, zero[:1], TreeShape(1, 4, 4), first, 0, 1, None)
        draft = growth.draft()
        scratch = NativeAttention(pool, cpu_ops.runtime.raw, cpu_ops.workers).scratch(9)
    finally:
        torch.set_default_dtype(before)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert growth._floats.dtype == scratch.dtype == torch.float32
    assert draft.tokens.tolist() == [[0, 0, 1, 2]] and bool(draft.alive.all())
