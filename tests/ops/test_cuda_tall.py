"""GEMMs of many rows with quantised weights: there is room for each kernel, and on a GPU results are those of a float64
product. What they compute is tested without one, too, in test_cuda_tall_host.py."""

from __future__ import annotations

import pytest
import torch
from gemm_inputs import exact, quantized, random

from draftwing.ops.cuda.gemm_groups import Width
from draftwing.ops.cuda.gemm_tall import TallGemm, TallShape, shapes_for
from draftwing.ops.groups import WHOLE, pack, unpacked

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU: CUDA C++"
)
CASES = [
    (Width(4, False, 1), 128),
    (Width(4, True, -1), 32),
    (Width(8, False, WHOLE, True), 0),
    (Width(8, False, 0), 64),
]
CUTS = (
    TallShape(128, groups=2, row_tiles=2, stages=5, ahead=4),
    TallShape(128, groups=2, row_tiles=1, stages=3, ahead=3, cluster=4, blocks=2),
    TallShape(256, groups=2, row_tiles=1, stages=4, ahead=4, cluster=2),
)


@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_that_are_taken(bits: int) -> None:
    """There is room for them, and devices and types that have none have no kernels."""
    assert not shapes_for(bits, (8, 0), torch.bfloat16) and not shapes_for(bits, (9, 0), torch.float16)
    for shape in shapes_for(bits, (9, 0), torch.bfloat16).values():
        assert shape.blocks * (shape.shared_bytes(Width(bits, bits == 4, -1).part) + 1024) <= 228 << 10


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("width, wide", CASES)
def test_against_float64(width: Width, wide: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = {(kind, most): shape for most, shape in enumerate(CUTS) for kind in ("plain", "add", "silu")}
    ours = TallGemm(device, width, shapes)
    packed = pack(quantized(width, 416, 1088, 1, wide), torch.bfloat16, device)
    matrix = unpacked(packed)
    for (kind, most), rows in zip(shapes, (65, 128, 300) * len(CUTS), strict=True):
        ours.only = kind, most
        x, bias = random(rows, 1088, seed=0).to(device), random(416, seed=2).to(device)
        extra = random(rows, 416, seed=3).to(device)
        expected = exact(kind, x, matrix, bias, extra)
        if kind == "silu":
            got = ours.gated(x, packed, bias)
        else:
            got = ours.linear(x, packed, bias, extra if kind == "add" else None)
        assert got is not None
        torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=2e-3)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUTS)
def test_two_blocks_side_by_side(shape: TallShape) -> None:
    """So many blocks that a multiprocessor has as many as it has room for: each time the same bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    ours = TallGemm(device, Width(4, False, 1), {("plain", 512): shape})
    packed = pack(quantized(Width(4, False, 1), 6144, 4096, 1, 128), torch.bfloat16, device)
    x = random(333, 4096, seed=0).to(device)
    first = ours.linear(x, packed, None)
    assert first is not None and first.isfinite().all()
    for _ in range(20):
        again = ours.linear(x, packed, None)
        assert again is not None and torch.equal(again, first)
