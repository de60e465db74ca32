"""Attention to all of a picture's patches, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_numbers import made
from torch import Tensor

from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.table import TorchOps

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("scalar", [0, 1])
@pytest.mark.parametrize(
    ("heads", "size", "count"),
    [(1, 8, 1), (2, 64, 300), (3, 72, 257), (2, 20, 70), pytest.param(1, 80, 128, marks=pytest.mark.exhaustive)],
)
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


@pytest.mark.slow
@pytest.mark.parametrize(("size", "width"), [(72, 128), (20, 64)])
def test_padded_heads(size: int, width: int, triton_ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on compute capability 9.0, whose kernel takes heads of two sizes: what is added adds nothing."""
    from draftwing.ops.attention import triton_common, whole_triton

    q, k, v = made(triton_ops, torch.bfloat16, 150, 3, 2, size).unbind(1)
    alone = triton_ops.whole_attention(k, v, 0)(q)
    widths, attend = list[int](), whole_triton.prefill_attention

    def noted(q: Tensor, kv: Tensor, *rest: Any, **more: Any) -> None:
        widths.append(kv.shape[3])
        attend(q, kv, *rest, **more)

    monkeypatch.setattr(whole_triton, "prefill_attention", noted)
    monkeypatch.setattr(whole_triton, "pick_tiling", lambda kv: triton_common.TILING_HOPPER)
    found = triton_ops.whole_attention(k, v, 0)(q)
    assert widths == [width] and found.shape == alone.shape and (found - alone).abs().max() <= 2**-6


@pytest.mark.slow
def test_a_picture_has_its_bits_beside_others(triton_ops: TorchOps) -> None:
    """Keys and values of others lie around its own; tables and tiles are shared with pictures of as many patches."""
    every = made(triton_ops, torch.bfloat16, 500, 3, 2, 72)
    one, other = every[100:300], every[250:450].contiguous()
    alone = triton_ops.whole_attention(*one.contiguous().unbind(1)[1:], 0)(one[:, 0].contiguous())
    first = triton_ops.whole_attention(one[:, 1], one[:, 2], 0)
    triton_ops.whole_attention(other[:, 1], other[:, 2], 0)(other[:, 0])
    assert torch.equal(first(one[:, 0]), alone)
