"""GEMMs with quantised weights on a GPU: a row has the bits that the dequantised matrix gives, in any batch. What
they compute is tested without one, too, in test_cuda_groups_host.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_inputs import quantized
from torch import Tensor

from draftwing.ops.cuda.gemm import Shape, TallShape, cuts_of, has_few_left, key_of, small_m_gemm
from draftwing.ops.cuda.gemm_groups import TILES, GroupGemm, Width, group_gemm, shapes_for, tile_of
from draftwing.ops.groups import WHOLE, pack, unpacked

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA C++")
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 70, 130)
MAX_ROWS = ROWS[-1]
CASES = [  # a width, and rows, columns and columns of a group
    (Width(4, False, 0), 96, 128, 64), (Width(4, False, 0), 224, 576, 192), (Width(4, False, 1), 320, 4096, 128),
    (Width(4, False, -1), 96, 8256, 32), (Width(4, False, WHOLE), 96, 8256, 8256), (Width(4, True, 0), 224, 576, 64),
    (Width(4, True, 1), 320, 4096, 128), (Width(4, True, -1), 96, 704, 32), (Width(8, False, WHOLE), 224, 576, 576),
    (Width(8, False, WHOLE, True), 224, 576, 576), (Width(8, False, 1, True), 320, 4096, 128),
    (Width(8, False, WHOLE, True), 96, 8256, 8256),
    # Features that no `key_of` takes for narrow.
    (Width(4, False, 1), 4352, 8320, 128), (Width(8, False, WHOLE, True), 4352, 8256, 8256),
]  # fmt: skip


def test_tiles() -> None:
    assert [tile_of(rows, TILES) for rows in (1, 8, 9, 17, 33, 64, 65, 300)] == [8, 8, 16, 32, 64, 64, 64, 64]
    assert [tile_of(rows, (2, 64, 128)) for rows in (1, 3, 65, 300)] == [2, 64, 128, 128]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes(bits: int, capability: tuple[int, int]) -> None:
    """There is a kernel for every GEMM and there is room for it."""
    shapes = shapes_for(bits, capability)
    assert {(kind, tile) for kind in ("plain", "add", "silu") for tile in TILES} <= shapes.keys()
    most = 227 << 10 if capability[0] == 9 else 99 << 10  # bytes that a block may have
    usual, largest = Width(bits, False, 1).part, Width(bits, bits == 4, -1).part
    for (_, tile), shape in shapes.items():
        assert shape.tokens == tile and shape.shared_bytes(largest) <= most and shape.blocks * shape.warps * 32 <= 1536
        assert shape.cluster in ((1, 2, 4, 8) if capability >= (9, 0) else (1,))
        assert shape.blocks * (shape.shared_bytes(usual) + 1024) <= 228 << 10


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, features, depth, wide", CASES)
def test_bits(width: Width, dtype: torch.dtype, features: int, depth: int, wide: int) -> None:
    if width.bits == 8 and dtype != torch.bfloat16:
        return
    ours: GroupGemm = group_gemm(device(), dtype, width)
    weight = pack(quantized(width, features, depth, 1, wide), dtype, device())
    matrix, plain = ours.dense(weight), small_m_gemm(device(), dtype)
    assert weight.shift == width.shift and torch.equal(matrix, unpacked(weight))
    x, extra = random(MAX_ROWS, depth, seed=2, dtype=dtype), random(MAX_ROWS, features, seed=3, dtype=dtype)
    bias = random(features, seed=4, dtype=dtype) if depth > 600 else None
    for rows in ROWS:
        for first in (0, MAX_ROWS - rows):
            part = slice(first, first + rows)
            assert torch.equal(ours.linear(x[part], weight, bias), plain.linear(x[part], matrix, bias)), rows
            expected = plain.linear(x[part], matrix, bias, extra[part])
            assert torch.equal(ours.linear(x[part], weight, bias, extra[part]), expected), rows
            assert torch.equal(ours.gated(x[part], weight, bias), plain.gated(x[part], matrix, bias)), rows


def test_narrow_widths_may_be_cut_otherwise() -> None:
    kernels = {("plain", 8), ("plain_narrow", 8), ("plain_tiny", 8), ("plain", 64), ("plain_slim", 64), ("silu", 8)}
    assert key_of(kernels, "plain", 8, 32 * 132, 132) == ("plain_narrow", 8)
    assert key_of(kernels, "plain", 8, 32 * 132 + 16, 132) == ("plain", 8)
    assert key_of(kernels, "plain", 8, 4 * 132 + 16, 132) == ("plain_narrow", 8)
    assert key_of(kernels, "plain", 8, 4 * 132, 132) == ("plain_tiny", 8)
    assert key_of(kernels, "plain", 64, 64, 132) == ("plain_slim", 64) and key_of(kernels, "silu", 8, 64, 132) == (
        "silu",
        8,
    )


def test_cuts_that_fill_their_turns() -> None:
    """Gates and ups of 17,408 features are 136 blocks of 64 rows, of which 132 run at once, and 544 smaller ones, of
    which 528 do, or 264 of 128 rows."""
    shapes: dict[tuple[str, int], tuple[Any, Shape | TallShape]] = {
        key: (None, shape) for key, shape in shapes_for(8, (9, 0)).items()
    }
    for kind, features, rows, processors, expected in (
        ("silu", 17408, 64, 132, [("silu_turns", range(16896)), ("silu_uneven", range(16896, 17408))]),
        ("silu", 17408, 128, 132, [("silu_turns", range(16896)), ("silu_uneven", range(16896, 17408))]),
        ("silu", 17408, 32, 132, [("silu_uneven", range(17408))]), ("silu", 17408, 16, 132, [("silu", range(17408))]),
        ("silu", 14336, 32, 132, [("silu", range(14336))]), ("silu", 14336, 64, 132, [("silu", range(14336))]),
        ("silu", 14336, 128, 132, [("silu", range(14336))]), ("silu", 17408, 64, 144, [("silu_turns", range(17408))]),
        ("silu", 27648, 64, 132, [("silu", range(27648))]), ("silu", 128, 64, 132, [("silu", range(128))]),
        ("plain", 17408, 64, 132, [("plain", range(17408))]),
        ("plain", 16384, 128, 132, [("plain_turns", range(16384))]),
        ("plain", 17408, 128, 132, [("plain_turns", range(16896)), ("plain", range(16896, 17408))]),
        ("plain", 6144, 128, 132, [("plain", range(6144))]),
        # Not so many that the blocks of the other cut are whole.
        ("silu", 16912, 64, 132, [("silu_uneven", range(16912))]),
    ):  # fmt: skip
        found = cuts_of(shapes, (kind, rows), rows, features, processors)
        assert found == [((name, rows), part) for name, part in expected], (kind, features, rows)
        assert [one for _, part in found for one in part] == list(range(features))


def test_few_blocks_are_left() -> None:
    shape = TallShape(256, groups=2, row_tiles=1, stages=4, ahead=4)  # 64 features of gates and ups
    assert has_few_left(shape, "silu", 256, 17408, 132) and has_few_left(shape, "silu", 512, 17408, 132)
    assert not has_few_left(shape, "silu", 512, 14336, 132) and not has_few_left(shape, "silu", 256, 8192, 132)
    assert not has_few_left(shape, "silu", 256, 64 * 132, 132) and has_few_left(shape, "silu", 256, 64 * 133, 132)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 32, 33, 64, 100, 128])
@pytest.mark.parametrize("width", [Width(8, False, 1, True), Width(4, True, 1)])
def test_bits_of_other_cuts(rows: int, width: Width) -> None:
    """Those for turns of few blocks, and products in two parts, with so many features that they are taken."""
    ours, plain = GroupGemm(device(), torch.bfloat16, width), small_m_gemm(device(), torch.bfloat16)
    x = random(rows, 704, seed=2, dtype=torch.bfloat16)
    processors = torch.cuda.get_device_properties(device()).multi_processor_count
    for outputs in (128 * processors, 128 * processors + 512):
        weight = pack(quantized(width, 2 * outputs, 704, 1, 128), torch.bfloat16, device())
        matrix, bias = ours.dense(weight), random(2 * outputs, seed=4, dtype=torch.bfloat16)
        assert torch.equal(ours.gated(x, weight, bias), plain.gated(x, matrix, bias))
        extra = random(rows, 2 * outputs, seed=3, dtype=torch.bfloat16)
        assert torch.equal(ours.linear(x, weight, bias), plain.linear(x, matrix, bias))
        assert torch.equal(ours.linear(x, weight, bias, extra), plain.linear(x, matrix, bias, extra))


@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_of_panels_have_the_bits(bits: int) -> None:
    shapes = [shape for shape in shapes_for(bits, (9, 0)).values() if isinstance(shape, TallShape)]
    assert shapes and all(shape.exact for shape in shapes)
