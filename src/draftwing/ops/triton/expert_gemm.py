"""GEMMs with the weights of experts: a program per tile of pairs and outputs, so that of the weights only those of
experts that were chosen are read.

A row's bits depend on that row, its expert and the kind of tile. Weights that are quantised are multiplied out in
registers, to the values of `groups.unpacked`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.groups import CHUNK, TALL, PackedGroups, units_of
from draftwing.ops.torch.experts import SWIGLU_ALPHA, Routed
from draftwing.ops.triton.common import keep_cache, launch_options, start
from draftwing.ops.triton.experts import LARGE_TILE, SMALL_TILE, clamped_swiglu_of
from draftwing.ops.types import MX_BLOCK, MXRows

# How a weight is stored, and what becomes of a product.
_DENSE, _NIBBLES, _BYTES, _FP8, _MX = (tl.constexpr(i) for i in range(5))
_PLAIN, _SILU, _CLAMPED = (tl.constexpr(i) for i in range(3))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Pairs of a tile -> outputs of a program (of a gated one: twice as many rows of the weight), warps, stages
SHAPES = {SMALL_TILE: (32, 4, 4), LARGE_TILE: (128, 4, 3)}
GATED_SHAPES = {SMALL_TILE: (32, 4, 4), LARGE_TILE: (64, 4, 3)}


@triton.jit
def _nibbles(codes, tile, chunk, CHUNKS: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr):
    """-> [TILES * 16, 64] float32, 0 to 15. codes: int32. tile [TILES]: tiles of 16 rows."""
    word = tl.load(codes + (tile[:, None].to(tl.int64) * CHUNKS + chunk) * 128 + tl.arange(0, 128)[None, :])
    word = word.to(tl.uint32, bitcast=True)
    if FIRST:
        word = (word >> FIRST) | (word << (32 - FIRST))
    word = tl.reshape(word, [TILES, 8, 4, 2, 2, 1, 1])  # feature, part, half of the columns, half of the features
    shift = 4 * tl.arange(0, 4)[:, None] + 16 * tl.arange(0, 2)[None, :]  # which pair of columns, which of the pair
    code = (word >> tl.reshape(shift, [1, 1, 1, 1, 1, 4, 2]).to(tl.uint32)) & 15
    return tl.reshape(tl.permute(code, [0, 4, 1, 3, 2, 5, 6]), [TILES * 16, 64]).to(tl.float32)


@triton.jit
def _bytes(codes, tile, chunk, CHUNKS: tl.constexpr, TILES: tl.constexpr):
    """-> [TILES * 16, 64] float32, -128 to 127. codes: uint8."""
    code = tl.load(codes + (tile[:, None].to(tl.int64) * CHUNKS + chunk) * 1024 + tl.arange(0, 1024)[None, :])
    code = tl.reshape(code, [TILES, 2, 8, 4, 2, 2, 2, 2])
    code = tl.reshape(tl.permute(code, [0, 4, 2, 1, 3, 5, 7, 6]), [TILES * 16, 64])
    return code.to(tl.float32) - 128.0


@triton.jit
def _fp8(codes, tile, chunk, CHUNKS: tl.constexpr, TILES: tl.constexpr):
    """-> [TILES * 16, 64] float32. codes: int16, each of two values in the bits of bfloat16, the second rotated."""
    word = tl.load(codes + (tile[:, None].to(tl.int64) * CHUNKS + chunk) * 512 + tl.arange(0, 512)[None, :])
    word = tl.reshape(word.to(tl.int32), [TILES, 2, 8, 4, 2, 2, 1, 2])
    odd = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 2, 1])
    first = word & 0x87F0
    second = ((word & 0x0800) << 4) | ((word & 15) << 4) | (((word >> 12) & 7) << 8)
    bits = tl.where(odd == 0, first, second)
    bits = tl.reshape(tl.permute(bits, [0, 4, 2, 1, 3, 5, 6, 7]), [TILES * 16, 64])
    sign, body = bits & 0x8000, bits & 0x7FF0
    # What is below the least normal number there is not, once it is multiplied by 2^120: computed as an integer.
    small = (body >> 4).to(tl.float32) * 0.001953125  # 2^-9
    normal = ((body << 16) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(body < 0x80, small, normal)
    return tl.where(sign != 0, -value, value)


@triton.jit
def _mx(codes, exponents, feature, mask, k, DEPTH: tl.constexpr):
    """-> [features, 64] float32. codes uint8 [rows, DEPTH / 2], exponents uint8 [rows, DEPTH / 32]."""
    row = feature.to(tl.int64)[:, None]
    byte = k // 2 + tl.arange(0, 32)[None, :]
    # Of the last chunk the second half may be missing.
    pair = tl.load(codes + row * (DEPTH // 2) + byte, mask=mask & (byte < DEPTH // 2), other=0).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), [feature.shape[0], 64])
    one, power = code & 1, (code >> 1) & 3
    doubled = tl.where(power == 0, one, (2 + one) << (tl.maximum(power, 1) - 1)).to(tl.float32)
    block = exponents + row * (DEPTH // 32) + k // 32
    left = tl.load(block, mask=mask, other=0).to(tl.int32)
    right = tl.load(block + 1, mask=mask & (k + 32 < DEPTH), other=0).to(tl.int32)
    exponent = tl.where(tl.arange(0, 64)[None, :] < 32, left, right)
    scale = (exponent << 23).to(tl.float32, bitcast=True) * 0.5
    return tl.where(code >= 8, -doubled, doubled) * scale


@triton.jit
def _by_row(values, tile, group, GROUPS: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr):
    """values [tiles, GROUPS, 8, 2] -> those of a group, [TILES * 16] float32. Integers are the bits of zeros, so small
    that what they are is their mantissa."""
    found = tl.load(values + (tile[:, None].to(tl.int64) * GROUPS + group) * 16 + tl.arange(0, 16)[None, :])
    found = tl.reshape(tl.permute(tl.reshape(found, [TILES, 8, 2]), [0, 2, 1]), [TILES * 16])
    if found.dtype == tl.int16:
        bits = found.to(tl.int32)
        found = tl.where(bits < 0, -((bits & 0x7FFF) >> FIRST), bits >> FIRST)
    return found.to(tl.float32)


@triton.jit
def _by_code(values, tile, chunk, GROUPS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr):
    """values [tiles, GROUPS, 8, 2] -> [TILES * 16, 64 or 1] float32, of a chunk's codes"""
    if SHIFT >= 0:
        found = _by_row(values, tile, chunk >> SHIFT, GROUPS, FIRST, TILES)[:, None]
    else:
        left = _by_row(values, tile, 2 * chunk, GROUPS, FIRST, TILES)[:, None]
        right = _by_row(values, tile, 2 * chunk + 1, GROUPS, FIRST, TILES)[:, None]
        found = tl.where(tl.arange(0, 64)[None, :] < 32, left, right)
    return found


@triton.jit
def _times_power(values, POWER: tl.constexpr):
    """values * 2^POWER. In two steps: the factor alone, or its inverse, need not be a number of float32."""
    HALF: tl.constexpr = POWER // 2
    return values * (2.0**HALF) * (2.0 ** (POWER - HALF))


@triton.jit
def _weight_tile(
    weight, scales, zeros, row, rows, k,
    DEPTH: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr,
    UNIT: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + FEATURES) of the weight, of which there are `rows`, and columns [k, k + STEP), [FEATURES, STEP]:
    dense as they are, others in float32."""
    if KIND == _DENSE:
        feature, col = row + tl.arange(0, FEATURES), k + tl.arange(0, STEP)
        mask = (feature < rows)[:, None]
        if not EVEN:
            mask &= (col < DEPTH)[None, :]
        found = tl.load(weight + feature[:, None].to(tl.int64) * DEPTH + col[None, :], mask=mask, other=0.0)
    elif KIND == _MX:
        feature = row + tl.arange(0, FEATURES)
        found = _mx(weight, scales, feature, (feature < rows)[:, None], k, DEPTH)
    else:
        TILES: tl.constexpr = FEATURES // 16
        CHUNKS: tl.constexpr = DEPTH // 64
        tile, chunk = tl.minimum(row // 16 + tl.arange(0, TILES), rows // 16 - 1), k // 64
        scale = _times_power(_by_code(scales, tile, chunk, GROUPS, SHIFT, FIRST, TILES), UNIT)
        if KIND == _NIBBLES:
            found = _nibbles(weight, tile, chunk, CHUNKS, FIRST, TILES)
            if zeros is None:
                found -= 8.0
            else:
                found += _by_code(zeros, tile, chunk, GROUPS, SHIFT, FIRST, TILES)
        elif KIND == _BYTES:
            found = _bytes(weight, tile, chunk, CHUNKS, TILES)
        else:
            found = _fp8(weight, tile, chunk, CHUNKS, TILES)
        found *= scale
    return found


@triton.jit(do_not_specialize=["tile_count"])
def _expert_gemm_kernel(
    out, x, x_stride, weight, scales, zeros, bias, order, tiles, tile_count, limit,
    CHOICES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs, tiles of pairs). WIDTH: outputs of a pair. CHOICES: pairs that read a row of x."""
    start(PDL)
    expert = tl.load(tiles + tl.program_id(1))
    if expert >= 0:
        begin = tl.load(tiles + tile_count + tl.program_id(1))
        count = tl.load(tiles + 2 * tile_count + tl.program_id(1))
        lane, feature = tl.arange(0, ROWS), tl.program_id(0) * FEATURES
        pair = tl.load(order + begin + lane, mask=lane < count, other=0).to(tl.int64)
        source = x + (pair // CHOICES)[:, None] * x_stride + tl.arange(0, STEP)[None, :]
        OUTPUTS: tl.constexpr = WIDTH if ACT == _PLAIN else 2 * WIDTH  # of an expert
        row = expert * OUTPUTS + feature
        rows = expert * OUTPUTS + WIDTH
        total = tl.zeros([ROWS, FEATURES], tl.float32)
        other = tl.zeros([ROWS, FEATURES], tl.float32)
        for k in range(0, DEPTH, STEP):
            mask = (lane < count)[:, None]
            if not EVEN:
                mask &= (k + tl.arange(0, STEP) < DEPTH)[None, :]
            a = tl.load(source + k, mask=mask, other=0.0)
            w = _weight_tile(
                weight, scales, zeros, row, rows, k,
                DEPTH, KIND, GROUPS, SHIFT, FIRST, UNIT, FEATURES, STEP, EVEN,
            )  # fmt: skip
            total = tl.dot(a, tl.trans(w.to(a.dtype)), total, input_precision=PRECISION)
            if ACT != _PLAIN:
                u = _weight_tile(
                    weight, scales, zeros, row + WIDTH, rows + WIDTH, k,
                    DEPTH, KIND, GROUPS, SHIFT, FIRST, UNIT, FEATURES, STEP, EVEN,
                )  # fmt: skip
                other = tl.dot(a, tl.trans(u.to(a.dtype)), other, input_precision=PRECISION)
        col = feature + tl.arange(0, FEATURES)
        dtype = out.dtype.element_ty
        if bias is not None:
            total += tl.load(bias + row + tl.arange(0, FEATURES), mask=col < WIDTH, other=0.0).to(tl.float32)[None, :]
        if ACT != _PLAIN:
            if bias is not None:
                up = tl.load(bias + row + WIDTH + tl.arange(0, FEATURES), mask=col < WIDTH, other=0.0)
                other += up.to(tl.float32)[None, :]
            if ACT == _SILU:
                total = (total / (1.0 + tl.exp(-total))) * other
            else:
                total = clamped_swiglu_of(total, other, limit, ALPHA)
        mask = (lane < count)[:, None] & (col < WIDTH)[None, :]
        tl.store(out + pair[:, None] * WIDTH + col[None, :], total.to(dtype), mask=mask)


class ExpertGemm:
    """The kernels with one weight."""

    def __init__(self, weight: Tensor | PackedGroups | MXRows, count: int) -> None:
        self._weight, self._count = weight, count

    @property
    def rows(self) -> int:
        return self._weight.shape[0] if isinstance(self._weight, Tensor) else self._weight.rows

    def linear(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
        return self._run(x, bias, routed, self.rows // self._count, _PLAIN.value, 0.0)

    def gated(self, x: Tensor, bias: Tensor | None, routed: Routed, limit: float) -> Tensor:
        return self._run(x, bias, routed, self.rows // self._count // 2, (_CLAMPED if limit else _SILU).value, limit)

    def _run(self, x: Tensor, bias: Tensor | None, routed: Routed, width: int, act: int, limit: float) -> Tensor:
        weight = self._weight
        arguments: dict[str, Any]
        if isinstance(weight, Tensor):
            codes, scales, zeros, depth = weight, None, None, weight.shape[1]
            arguments = _WITHOUT_GROUPS | {"KIND": _DENSE.value}
        elif isinstance(weight, MXRows):
            codes, scales, zeros, depth = weight.codes, weight.exponents, None, weight.columns
            arguments = _WITHOUT_GROUPS | {"KIND": _MX.value}
        else:
            codes, scales, depth = _codes(weight), weight.scales, weight.columns
            zeros = None if weight.zeros is None else weight.zeros.view(torch.int16)
            arguments = _settings(weight)
            x = x if weight.order is None else x.index_select(1, weight.order)
        tiles = routed.tiles
        assert tiles is not None and x.shape[1] == depth and x.stride(1) == 1
        out = torch.empty(routed.pairs, width, dtype=x.dtype, device=x.device)
        if not routed.pairs:
            return out
        features, warps, stages = (SHAPES if act == _PLAIN.value else GATED_SHAPES)[tiles.rows]
        wide = x.dtype == torch.float32
        most = tiles.tiles.shape[1]
        launched = _expert_gemm_kernel[(triton.cdiv(width, features), most)](
            out, x, x.stride(0), codes, scales, zeros, bias, tiles.order, tiles.tiles, most, limit,
            CHOICES=routed.choices(x), DEPTH=depth, WIDTH=width, ACT=act, ALPHA=SWIGLU_ALPHA, ROWS=tiles.rows,
            FEATURES=features, STEP=CHUNK, EVEN=depth % CHUNK == 0, PRECISION="ieee" if wide else "tf32",
            num_warps=warps, num_stages=2 if wide else stages, **arguments, **launch_options(x.device),
        )  # fmt: skip
        keep_cache(launched)
        return out


_WITHOUT_GROUPS: dict[str, Any] = {"GROUPS": 1, "SHIFT": 0, "FIRST": 0, "UNIT": 0}


def _codes(weight: PackedGroups) -> Tensor:
    if weight.bits == 4:
        return weight.codes.view(torch.int32)
    return weight.codes.view(torch.int16) if weight.fp8 else weight.codes


def _settings(weight: PackedGroups) -> dict[str, Any]:
    unit, first = units_of(weight)
    kind = _NIBBLES if weight.bits == 4 else _FP8 if weight.fp8 else _BYTES
    return {
        "KIND": kind.value, "GROUPS": weight.scales.shape[1], "SHIFT": weight.shift, "FIRST": first, "UNIT": unit,
    }  # fmt: skip


def takes(weight: Tensor | PackedGroups | MXRows, count: int) -> bool:
    """Whether the kernels multiply with these weights of `count` experts."""
    if isinstance(weight, Tensor):
        return weight.dtype in DTYPES and weight.is_contiguous()
    if isinstance(weight, MXRows):
        return weight.columns % MX_BLOCK == 0
    rows = weight.rows // count
    return rows % (2 * TALL) == 0
