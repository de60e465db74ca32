"""Triton kernels that put pairs of rows and experts in the order of experts, and cut them into tiles for GEMMs."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.experts.routing import LARGE_TILE, SMALL_TILE, ExpertTiles
from draftwing.ops.triton.common import lanes, launch_options, start

FEW_PAIRS = 1024  # up to so many are sorted by comparing all with all, in one kernel; swept in docs/dev/gpu_kernels.md
# Up to so many tokens, or pairs of an expert on average, tiles have few rows. 128 tokens of 128 experts, of which each
# chooses 8, were measured (docs/dev/quantised_kernels.md).
FEW_TOKENS, FEW_OF_AN_EXPERT = 128, 8
# Pairs that a program places, those that they are compared with at a time, and that are counted at a time.
_BLOCK, _CHUNK, _COUNTED = 64, 128, 1024
# Of many pairs: those of a program, those that they are compared with at a time, and counts that are added at a time.
# With 256 and 128 the compiled comparison is 150 KB, and takes 50 us (docs/dev/gpu_kernels.md).
_SORTED, _NEAR, _ADDED = 128, 32, 8192


@triton.jit(do_not_specialize=["pairs", "tile_count", "max_tiles"])
def _tile_kernel(
    order,
    tiles,
    experts,
    pairs,
    tile_count,
    max_tiles,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Puts pairs in the order of experts, cut into tiles, at most `max_tiles` of an expert. The last program makes
    the tiles, the others place BLOCK pairs each; each compares its own with all pairs."""
    start(PDL)
    block = tl.program_id(0)
    if block < tl.num_programs(0) - 1:
        pair = block * BLOCK + tl.arange(0, BLOCK)
        there = pair < pairs
        own = tl.load(experts + pair, mask=there, other=0).to(tl.int32)[:, None]
        before = tl.zeros([BLOCK], tl.int32)
        for first in range(0, pairs, CHUNK):
            other = first + tl.arange(0, CHUNK)
            expert = tl.load(experts + other, mask=other < pairs, other=LANES).to(tl.int32)[None, :]
            before += tl.sum(((expert < own) | ((expert == own) & (other[None, :] < pair[:, None]))).to(tl.int32), 1)
        tl.store(order + before, pair, mask=there)
    else:
        counts = tl.zeros([LANES], tl.int32)
        for first in range(0, pairs, COUNTED):
            other = first + tl.arange(0, COUNTED)
            expert = tl.load(experts + other, mask=other < pairs, other=LANES - 2).to(tl.int32)
            counts += tl.histogram(expert + 1, LANES)
        _store_tiles(tiles, counts, tile_count, max_tiles, ROWS, LANES)


@triton.jit
def _store_tiles(tiles, counts, tile_count, max_tiles, ROWS: tl.constexpr, LANES: tl.constexpr):
    """counts [LANES]: pairs of expert lane - 1; the last is no expert's."""
    lane = tl.arange(0, LANES)
    begins = tl.cumsum(counts, 0) - counts
    own_tiles = tl.where((lane > 0) & (lane < LANES - 1), (counts + ROWS - 1) // ROWS, 0)
    at = tl.cumsum(own_tiles, 0) - own_tiles
    for i in range(0, max_tiles):
        there = i < own_tiles
        tl.store(tiles + at + i, lane - 1, mask=there)
        tl.store(tiles + tile_count + at + i, begins + i * ROWS, mask=there)
        tl.store(tiles + 2 * tile_count + at + i, tl.minimum(counts - i * ROWS, ROWS), mask=there)
    total = tl.sum(own_tiles, 0)
    for first in range(0, tile_count, LANES):
        tl.store(tiles + first + lane, lane * 0 - 1, mask=(first + lane >= total) & (first + lane < tile_count))


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(counts, experts, pairs, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """counts [blocks, LANES]: of BLOCK pairs those of expert lane - 1."""
    start(PDL)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + pair, mask=pair < pairs, other=LANES - 2).to(tl.int32)
    tl.store(counts + block * LANES + tl.arange(0, LANES), tl.histogram(expert + 1, LANES))


@triton.jit(do_not_specialize=["blocks", "tile_count", "max_tiles"])
def _begin_kernel(
    tiles,
    counts,
    blocks,
    tile_count,
    max_tiles,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the tiles, and in place of counts where each block's pairs of an expert begin."""
    start(PDL)
    row, lane = tl.arange(0, AT_ONCE)[:, None], tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    for first in range(0, blocks, AT_ONCE):
        place = counts + (first + row) * LANES + lane[None, :]
        total += tl.sum(tl.load(place, mask=first + row < blocks, other=0), 0)
    begin = tl.cumsum(total, 0) - total
    for first in range(0, blocks, AT_ONCE):
        place = counts + (first + row) * LANES + lane[None, :]
        own = tl.load(place, mask=first + row < blocks, other=0)
        tl.store(place, begin[None, :] + tl.cumsum(own, 0) - own, mask=first + row < blocks)
        begin += tl.sum(own, 0)
    _store_tiles(tiles, total, tile_count, max_tiles, ROWS, LANES)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    order, begins, experts, pairs, LANES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """begins [blocks, LANES]: where the pairs of expert lane - 1 among BLOCK pairs begin."""
    start(PDL)
    first = tl.program_id(0) * BLOCK
    pair = first + tl.arange(0, BLOCK)
    own = tl.load(experts + pair, mask=pair < pairs, other=LANES - 2).to(tl.int32)
    before = tl.load(begins + tl.program_id(0) * LANES + own + 1)
    for at in range(0, BLOCK, CHUNK):
        other = first + at + tl.arange(0, CHUNK)
        expert = tl.load(experts + other, mask=other < pairs, other=LANES - 2).to(tl.int32)
        before += tl.sum(((expert[None, :] == own[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    tl.store(order + before, pair, mask=pair < pairs)


def tile_rows(tokens: int, top_k: int, count: int, most: int = LARGE_TILE) -> int:
    """Returns pairs of a tile, with `top_k` of `count` experts for a token. most: that one may have."""
    few = tokens <= FEW_TOKENS or tokens * top_k <= FEW_OF_AN_EXPERT * count
    return SMALL_TILE if few else most


def tiles_of(experts: Tensor, count: int, rows: int, exact: bool = False) -> ExpertTiles:
    """experts [M, top_k] of `count` or -1, of a row no two others alike -> tiles of `rows` pairs, as many
    as there may be whatever was chosen. exact: as `ExpertTiles` has it."""
    pairs = experts.numel()
    max_tiles = min(pairs, count + pairs // rows)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(3, max_tiles, dtype=torch.int32, device=experts.device)
    most, places, options = triton.cdiv(experts.shape[0], rows), lanes(count + 2), launch_options(experts.device)
    if pairs > FEW_PAIRS:
        blocks = triton.cdiv(pairs, _SORTED)
        begins = torch.empty(blocks, places, dtype=torch.int32, device=experts.device)
        _count_kernel[(blocks,)](begins, experts, pairs, LANES=places, BLOCK=_SORTED, num_warps=4, **options)
        _begin_kernel[(1,)](
            tiles, begins, blocks, max_tiles, most, ROWS=rows, LANES=places, AT_ONCE=max(_ADDED // places, 1),
            num_warps=8, **options,
        )  # fmt: skip
        _place_kernel[(blocks,)](
            order, begins, experts, pairs, LANES=places, BLOCK=_SORTED, CHUNK=_NEAR, num_warps=8, **options
        )
    elif pairs:
        _tile_kernel[(triton.cdiv(pairs, _BLOCK) + 1,)](
            order, tiles, experts, pairs, max_tiles, most, ROWS=rows, LANES=places, BLOCK=_BLOCK, CHUNK=_CHUNK,
            COUNTED=_COUNTED, num_warps=4, **options,
        )  # fmt: skip
    return ExpertTiles(order, tiles, rows, exact)
