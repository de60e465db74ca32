"""The C kernels do not depend on torch's default dtype."""

from __future__ import annotations

import pytest
import torch

from draftwing.core import TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.cpu.attention import NativeAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.types import First, SamplingRows

needs_kernels = pytest.mark.skipif(load_extension() is None, reason="the C kernels were not built")


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(torch.device("cpu"))


@needs_kernels
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])  # a wider one finds a mistake without harm
def test_buffers_do_not_take_the_default_dtype(ops: CpuOps, default: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 40, generator=generator)
    seed, positions, depth = torch.tensor([1, 2]), torch.arange(6).view(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    ones, zero = torch.ones(2), torch.zeros_like(seed)
    params = SamplingRows(seed, ones, zero + 20, ones * 0.9, ones * 0.01, zero, zero[:, None])
    weight, hidden, ids = torch.randn(40, 64), torch.randn(2, 64), torch.arange(8).view(2, 4)

    def floats() -> list[torch.Tensor]:
        found = [ops.candidates(logits, positions, depth, params, seed - 1, 4)[1]]
        found.append(ops.gumbel(seed, positions, 40))
        found.append(ops.top_tokens(logits.view(6, 40), 2, 4, (seed, seed, ones), None)[1])
        found.append(ops.exact_logits(hidden, weight, ids))
        return found

    expected = floats()
    first = First(torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4), torch.empty(2, 0))
    slots = RowTable(1, 40, CpuDevice())
    pool = KVPool([KVSpec(2, 16)], 40, torch.float32, torch.device("cpu"))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        found = floats()
        growth = ops.expand(slots, zero[:1], TreeShape(1, 4, 4), first, 0, 1, None)
        draft = growth.draft()
        scratch = NativeAttention(pool, ops.raw, ops.workers).scratch(9)
    finally:
        torch.set_default_dtype(before)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert growth._floats.dtype == scratch.dtype == torch.float32
    assert draft.tokens.tolist() == [[0, 0, 1, 2]] and bool(draft.alive.all())
