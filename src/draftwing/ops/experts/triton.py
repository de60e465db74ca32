"""Triton kernels of mixtures of experts besides their GEMMs: routing, tiles of pairs, and the sum over choices.

What a token gets depends on that token alone; how pairs are grouped into tiles has no influence on it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.experts.routing import ExpertTiles, Routed, Routing
from draftwing.ops.experts.spec import SWIGLU_ALPHA, TINY, ExpertOps
from draftwing.ops.experts.triton_tiles import LARGE_TILE, SMALL_TILE, tile_rows, tiles_of
from draftwing.ops.norms.triton import warps_of_row
from draftwing.ops.triton.common import is_hopper, lanes, launch_options, rounded_product, start

_COLUMNS = 1024  # of a row, summed by one program
# Of a thread of `_mix_norm_kernel`: as many as 16 warps can have. With fewer, which it takes where nothing is said, the
# compiler puts loads to where they are needed, and some wait for others.
_MIX_REGISTERS = 128
SMALL = tl.constexpr(TINY)


@triton.jit
def _in_best_groups(
    value,
    lane,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    LANES: tl.constexpr,
):
    """value [LANES], of which those of a group of SIZE lie beside each other -> whether each is in one of TOP_GROUPS
    groups with the largest sums of their TWO best, or with the largest best."""
    sums = tl.full([LANES], float("-inf"), tl.float32)  # of each lane's group
    for group in tl.static_range(GROUPS):
        of = lane // SIZE == group
        first = tl.max(tl.where(of, value, float("-inf")), 0)
        at = tl.min(tl.where(of & (value == first), lane, LANES), 0)
        second = tl.max(tl.where(of & (lane != at), value, float("-inf")), 0) if TWO and SIZE > 1 else 0.0
        sums = tl.where(of, first + second, sums)
    other = lane < SIZE * GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(other, sums, float("-inf")), 0)
        at = tl.min(tl.where(other & (sums == best), lane, LANES), 0)
        other &= lane // SIZE != at // SIZE
    return (lane < SIZE * GROUPS) & ~other


@triton.jit
def _order(value):
    """float32, no NaN -> int32 of the same order; of -0 that of 0"""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first", "end"])
def _route_kernel(
    experts,
    weights,
    logits,
    stride,
    correction,
    scatter,
    tiles,
    scale,
    first,
    end,
    COUNT: tl.constexpr,
    TOP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    NEAR: tl.constexpr,
    LANES: tl.constexpr,
    TOP_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row. Of equal scores the first counts; the experts are different ones whatever the logits are. SIGMOID: scores
    are sigmoids. first, end: the experts that are here; others become -1. SHARED: `Routing.shared_choices`. GATED: as
    `Routing.shared`. NEAR: `Routing.near`. tiles: to be filled, where there is but one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    place = tl.arange(0, TOP_LANES)
    if correction is not None:
        shift = tl.load(correction + lane, mask=lane < COUNT, other=0.0)  # no kernel writes it
    start(PDL)
    value = tl.load(logits + row * stride + lane, mask=lane < COUNT, other=float("-inf")).to(tl.float32)
    if scatter is not None:  # noqa: SIM102 (where there is none, none is loaded)
        if tl.load(scatter) != 0:
            value = tl.where(lane < COUNT, tl.rand(0, tl.program_id(0) * COUNT + lane), float("-inf"))
            if correction is not None:
                shift = shift * 0.0
    broken = tl.max((value != value).to(tl.int32), 0)
    value = tl.where(value == value, value, float("-inf"))  # what is no number equals nothing, and would not be found
    # As integers, which have the order of the numbers: a warp finds the largest of those by one instruction.
    largest = _from_order(tl.max(_order(value), 0))
    score = value
    if correction is not None:
        if SIGMOID:
            score = 1.0 / (1.0 + tl.exp(-value))
        else:
            odds = tl.exp(value - largest)
            score = odds / tl.sum(odds, 0)
        value = score + shift
    chosen = tl.zeros([TOP_LANES], tl.int32)
    found = tl.full([TOP_LANES], float("-inf"), tl.float32)
    free = lane < COUNT
    if GROUPS > 1:
        free = _in_best_groups(value, lane, COUNT // GROUPS, GROUPS, TOP_GROUPS, SIGMOID, LANES)
    key = tl.where(free, _order(value), -0x80000000)  # one below all for those that are not free
    bits = score.to(tl.int32, bitcast=True)
    for choice in tl.static_range(TOP):
        expert = tl.min(tl.where(key == tl.max(key, 0), lane, LANES), 0)
        its_bits = tl.max(tl.where(lane == expert, bits, -0x80000000), 0)
        chosen = tl.where(place == choice, expert, chosen)
        its = its_bits.to(tl.float32, bitcast=True)
        if NEAR > 0:
            far = (its - score) / tl.maximum(tl.abs(score), its) > NEAR
            its = 1.0 / tl.sum(tl.where((key == -0x80000000) | far, 0.0, tl.exp(score - its)), 0)
        found = tl.where(place == choice, its, found)
        key = tl.where(lane == expert, -0x80000000, key)
    there = place < TOP
    if correction is not None:
        weight = tl.where(there, found, 0.0)
        total = tl.sum(weight, 0) + SMALL if RENORMALISE else 1.0
    elif NEAR > 0:
        weight = found
        total = 1.0
    else:
        weight = tl.exp(found - largest)
        total = tl.sum(weight if RENORMALISE else tl.exp(score - largest), 0)
    weight = tl.where(broken == 0, weight / total * scale, float("nan"))  # so that the request fails
    here = there & (chosen >= first) & (chosen < end)
    own = tl.where(here, chosen - first, -1)
    PAIRS: tl.constexpr = TOP + SHARED
    if SHARED > 0:
        last = 1.0
        if GATED:
            last = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * stride + COUNT).to(tl.float32)))
        ends = (place >= TOP) & (place < PAIRS)
        own = tl.where(ends, COUNT + place - TOP, own)
        weight = tl.where(ends, last, weight)
        there, here = place < PAIRS, here | ends
    tl.store(experts + row * PAIRS + place, own.to(tl.int64), mask=there)
    tl.store(weights + row * PAIRS + place, tl.where(here, weight, 0.0), mask=there)
    if tiles is not None:  # those that are not there come last
        before = tl.cumsum(here.to(tl.int32), 0)
        at = tl.where(here, before - 1, tl.sum(here.to(tl.int32), 0) + place - before)
        tl.store(tiles + at, own, mask=there)
        tl.store(tiles + PAIRS + at, place, mask=there)
        tl.store(tiles + 2 * PAIRS + at, place * 0 + 1, mask=there)


@triton.jit(do_not_specialize=["rows", "tile_count"])
def _every_expert_kernel(
    experts, weights, order, tiles, rows, tile_count, COUNT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """A tile: of each expert there are as many, which have its rows in their order."""
    start(PDL)
    tile = tl.program_id(0)
    each = tile_count // COUNT
    expert, first = tile // each, tile % each * ROWS
    row = first + tl.arange(0, ROWS)
    pair, there = row * COUNT + expert, row < rows
    tl.store(experts + pair, pair * 0 + expert, mask=there)
    tl.store(weights + pair, pair * 0.0 + 1.0, mask=there)
    tl.store(order + expert * rows + row, pair, mask=there)
    tl.store(tiles + tile, expert)
    tl.store(tiles + tile_count + tile, expert * rows + first)
    tl.store(tiles + 2 * tile_count + tile, tl.minimum(rows - first, ROWS))


@triton.jit
def _mix_kernel(
    out,
    y,
    weights,
    residual,
    residual_stride,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP):
        weight = tl.load(weights + row * TOP + choice)
        there = mask
        if PARTIAL:  # what was left out was not written
            there &= tl.zeros([BLOCK], tl.float32) + weight != 0.0
        value = tl.load(y + (row * TOP + choice) * SIZE + col, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(value, weight, total)  # as in `_mix_norm_kernel`, not left to the compiler
    if RESIDUAL:
        total += tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + col, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _mix_norm_kernel(
    out, normed, y, weights, residual, residual_stride, norm,
    SIZE: tl.constexpr, TOP: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row of `_mix_kernel`, and under a norm."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < SIZE
    factor = tl.load(norm + col, mask=mask, other=0.0).to(tl.float32)  # no kernel writes weights
    start(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP):
        weight = tl.load(weights + row * TOP + choice)
        value = tl.load(y + (row * TOP + choice) * SIZE + col, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(value, weight, total)
    if SCALE != 1:
        total = rounded_product(total.to(y.dtype.element_ty).to(tl.float32), SCALE).to(y.dtype.element_ty)
        total = total.to(tl.float32)
    total += tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    stream = total.to(out.dtype.element_ty)
    tl.store(out + row * SIZE + col, stream, mask=mask)
    value = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    tl.store(normed + row * SIZE + col, (value * scale * factor).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def clamped_swiglu_of(gate, up, limit, ALPHA: tl.constexpr):
    """gate, up float32 -> float32"""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return tl.div_rn(gate, 1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)


@triton.jit
def _clamped_swiglu_kernel(
    out, x, x_stride, limit, FFN: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < FFN
    start(PDL)
    gate = tl.load(x + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + FFN + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * FFN + col, clamped_swiglu_of(gate, up, limit, ALPHA).to(out.dtype.element_ty), mask=mask)


def route(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    exact: bool = False,
    scatter: Tensor | None = None,
    own: range | None = None,
    most_pairs: int = LARGE_TILE,
) -> Routed:
    """See `ExpertOps.route`; with the tiles that kernels want."""
    rows, top_k, choices, shared = len(logits), routing.top_k, routing.choices, routing.shared_choices
    count = logits.shape[1] - (routing.shared == "gated")
    here = range(count) if own is None else own
    assert logits.stride(1) == 1 and top_k <= count and routing.has_correction == (correction is not None)
    assert own is None or not shared
    experts = torch.empty(rows, choices, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, choices, dtype=torch.float32, device=logits.device)
    tiles = torch.empty(3, choices, dtype=torch.int32, device=logits.device) if rows == 1 else None  # a pair each
    if rows:
        _route_kernel[(rows,)](
            experts, weights, logits, logits.stride(0), correction, scatter, tiles, routing.scale,
            here.start, here.stop, COUNT=count, TOP=top_k, RENORMALISE=routing.renormalise, GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups, SIGMOID=routing.sigmoid, SHARED=shared, GATED=routing.shared == "gated",
            NEAR=routing.near, LANES=lanes(count), TOP_LANES=lanes(choices), num_warps=1,
            **launch_options(logits.device),
        )  # fmt: skip
    most = max(most_pairs, LARGE_TILE) if not exact else most_pairs if is_hopper() else SMALL_TILE
    tile, held = tile_rows(rows, top_k, count, most), len(here) + shared
    made = tiles_of(experts, held, tile, exact) if tiles is None else ExpertTiles(None, tiles, tile, exact)
    return Routed(experts, weights, held, made, own is not None)


def every_expert(rows: int, count: int, device: torch.device) -> Routed:
    """See `ExpertOps.every_expert`; in small tiles, whose bits do not depend on the number of rows."""
    tile_count = count * triton.cdiv(rows, SMALL_TILE)
    experts = torch.empty(rows, count, dtype=torch.int64, device=device)
    weights = torch.empty(rows, count, dtype=torch.float32, device=device)
    order = torch.empty(rows * count, dtype=torch.int32, device=device)
    tiles = torch.empty(3, tile_count, dtype=torch.int32, device=device)
    if tile_count:
        _every_expert_kernel[(tile_count,)](
            experts, weights, order, tiles, rows, tile_count, COUNT=count, ROWS=SMALL_TILE, num_warps=1,
            **launch_options(device),
        )  # fmt: skip
    return Routed(experts, weights, count, ExpertTiles(order, tiles, SMALL_TILE))


def mix(y: Tensor, routed: Routed, residual: Tensor | None) -> Tensor:
    """See `ExpertOps.mix`."""
    (rows, top_k), size = routed.experts.shape, y.shape[1]
    out = torch.empty(rows, size, dtype=y.dtype, device=y.device)
    if rows == 0:
        return out
    assert y.is_contiguous() and (residual is None or residual.stride(1) == 1)
    block = min(triton.next_power_of_2(size), _COLUMNS)
    _mix_kernel[(rows, triton.cdiv(size, block))](
        out, y, routed.weights, residual, 0 if residual is None else residual.stride(0), SIZE=size, TOP=top_k,
        RESIDUAL=residual is not None, PARTIAL=routed.partial, BLOCK=block, num_warps=4, **launch_options(y.device),
    )  # fmt: skip
    return out


def mix_norm(
    y: Tensor, routed: Routed, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `LayerOps.mix_norm`."""
    (rows, top_k), size = routed.experts.shape, y.shape[1]
    out, normed = (torch.empty(rows, size, dtype=y.dtype, device=y.device) for _ in range(2))
    if rows:
        assert y.is_contiguous() and residual.stride(1) == 1 and weight.shape[0] == size
        block = triton.next_power_of_2(size)
        _mix_norm_kernel[(rows,)](
            out, normed, y, routed.weights, residual, residual.stride(0), weight, SIZE=size, TOP=top_k, EPS=eps,
            SCALE=scale, BLOCK=block, num_warps=warps_of_row(size, y.itemsize), maxnreg=_MIX_REGISTERS,
            **launch_options(y.device),
        )  # fmt: skip
    return out, normed


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """See `ExpertOps.clamped_swiglu`."""
    rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _clamped_swiglu_kernel[(rows, triton.cdiv(ffn, _COLUMNS))](
            out, gate_up, gate_up.stride(0), limit, FFN=ffn, ALPHA=SWIGLU_ALPHA, BLOCK=_COLUMNS, num_warps=4,
            **launch_options(gate_up.device),
        )  # fmt: skip
    return out


class TritonExpertOps(ExpertOps):
    mixes_under_norms = True
    route = staticmethod(route)
    every_expert = staticmethod(every_expert)
    clamped_swiglu = staticmethod(clamped_swiglu)
    mix = staticmethod(mix)
    mix_norm = staticmethod(mix_norm)
