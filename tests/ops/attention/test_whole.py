"""Attention to all of a picture's patches, against float64."""

from __future__ import annotations

import pytest
import torch
from layer_numbers import made

from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.table import TorchOps

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("scalar", [0, 1])
@pytest.mark.parametrize(("heads", "size", "count"), [(1, 8, 1), (2, 64, 300), (3, 72, 257), (2, 20, 70)])
def test_each_query_sees_all(heads: int, size: int, count: int, scalar: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Of keys and values that lie apart, and with weights between none and all."""
    q, k, v = made(ops, dtype, count, 3, heads, size).unbind(1)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * (scalar or size) ** -0.5
    expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.double()).flatten(1)
    attend = ops.whole_attention(k, v, scalar)
    for some in (slice(None), slice(count // 2, None), slice(count - 1, count)):
        found = attend(q[some])
        assert found.dtype == dtype and found.shape == expected[some].shape
        assert (found.double() - expected[some]).abs().max() < ERRORS[dtype] * (1 + size / 8 * (scalar == 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_cuts_and_threads(dtype: torch.dtype, cpu_ops: CpuOps, same_threads: None) -> None:
    q, k, v = made(cpu_ops, dtype, 700, 3, 2, 72).unbind(1)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        attend = cpu_ops.whole_attention(k, v, 0)
        for size in (1, 7, 192, 333, 700):
            found.append(torch.cat([attend(part) for part in q.split(size)]))
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_pictures_at_the_same_time(cpu_ops: CpuOps) -> None:
    """A layer's work on one goes on between parts of another's."""
    made_of = [made(cpu_ops, torch.float32, count, 3, 2, 64, seed=count).unbind(1) for count in (300, 520)]
    alone = [cpu_ops.whole_attention(k, v, 0)(q) for q, k, v in made_of]
    both = [(q, cpu_ops.whole_attention(k, v, 0)) for q, k, v in made_of]
    parts = [[attend(part) for part in q.split(100)] for q, attend in both]
    assert all(torch.equal(torch.cat(each), whole) for each, whole in zip(parts, alone, strict=True))
