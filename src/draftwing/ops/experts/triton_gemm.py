"""GEMMs with the weights of experts: a program per tile of pairs and outputs, so that of the weights only those of
experts that were chosen are read. Those of few tokens are `ops.experts.cuda`' where it takes the weight, and on Hopper
those of many with weights in 16 bits are `ops.experts.cuda_many`'s.

Weights that are quantised are dequantised in registers, to the values of `groups.unpacked`. A row's bits depend on that
row, its expert and the kind of tile. Where they are to be the same in any batch, and of quantised weights always,
columns are summed in the order of `ops.experts.cuda`: shares of every eighth chunk of 64, of which an instruction takes
the sets of 16 that a warp's lanes have there, of 32 columns or, where weights are quantised, of 64 (`spread_of`).
Weights are an instruction's first operand then, from registers: a lane loads columns that lie side by side, and has
what it multiplies (`_in_sets`). In float32 columns are summed as they lie.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.elementwise.triton import gated
from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts import cuda_many
from draftwing.ops.experts.routing import LARGE_TILE, SMALL_TILE, DeviceExpertGemm, Routed
from draftwing.ops.experts.rows import FP8, INT4, INT8, MX, STEP, expert_rows, fits
from draftwing.ops.experts.spec import SWIGLU_ALPHA
from draftwing.ops.experts.triton import clamped_swiglu_of
from draftwing.ops.experts.triton_order import in_order
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.shapes import SHARES
from draftwing.ops.gemm.stored import MX_BLOCK, MXRows
from draftwing.ops.triton.common import INTERPRETED, is_hopper, keep_cache, launch_options, let_next_come, wait

# How a weight is stored, and what becomes of a product.
DENSE = 0
_DENSE, _INT4, _INT8, _FP8, _MX = (tl.constexpr(i) for i in (DENSE, INT4, INT8, FP8, MX))
_PLAIN, _SILU, _CLAMPED = (tl.constexpr(i) for i in range(3))
_NAMES = ("plain", "silu", "clamped")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STEP = tl.constexpr(STEP)
CHUNK = 64  # columns of a share at a time, and of a weight that is not quantised
_SHARES = tl.constexpr(SHARES)
# By kind of weight and pairs of a tile, for products and for gated ones: outputs of a program (of a gated one twice as
# many rows of the weight), warps, stages.
SHAPES = {
    (DENSE, SMALL_TILE): ((32, 4, 4), (32, 4, 4)), (DENSE, LARGE_TILE): ((64, 4, 4), (64, 4, 3)),
    (INT4, SMALL_TILE): ((64, 4, 4), (32, 4, 4)), (INT4, LARGE_TILE): ((64, 4, 3), (64, 4, 3)),
    (INT8, SMALL_TILE): ((64, 4, 4), (32, 4, 4)), (INT8, LARGE_TILE): ((64, 4, 3), (64, 4, 3)),
    (FP8, SMALL_TILE): ((64, 4, 4), (32, 4, 4)), (FP8, LARGE_TILE): ((64, 4, 3), (64, 4, 4)),
    (MX, SMALL_TILE): ((64, 4, 4), (32, 4, 4)), (MX, LARGE_TILE): ((128, 4, 4), (64, 4, 3)),
}  # fmt: skip


@triton.jit
def _pair(words, AT: tl.constexpr, KIND: tl.constexpr):
    """Codes 2 AT and 2 AT + 1 of words, each a half of an int32: the bits of bfloat16s. Those of 4 bits from 0 are 128
    more; of floating point ones, exponents are what they are in the code."""
    if KIND == _INT4:
        found = ((words >> 4 * AT) & 0x000F000F) | 0x43004300
    elif KIND == _MX:
        if AT < 2:
            found = (words << 6 * AT) & -0x7E3F7E40
        elif AT == 2:
            found = ((words << 12) & -0x7FFF8000) | ((words << 12) & 0x01C00000) | ((words >> 20) & 0x000001C0)
        else:
            found = ((words << 2) & -0x7F3F7F40) | ((words >> 6) & 0x01000100)
    elif AT == 0:
        found = words & -0x780F7810
    else:
        found = ((words << 4) & -0x7F0F7F10) | ((words >> 4) & 0x07000700)
    return found


@triton.jit
def _halves(pair):
    """-> the bfloat16s, float32"""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _twice(value):
    """The bits of a float32 that is a bfloat16 -> two of those in an int32"""
    return value | ((value >> 16) & 0xFFFF)


@triton.jit
def _scaled_pair(pair, scale, zero, KIND: tl.constexpr, PACKED: tl.constexpr):
    """(pair + zero) * scale. scale, zero: bits of float32s, for PACKED twice those of bfloat16s."""
    if PACKED:
        if KIND == _INT4:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, u; mov.b32 u, 0x3F803F80; fma.rn.bf16x2 t, $2, u, $4; mov.b32 u, 0x80008000; "
                "fma.rn.bf16x2 t, t, $3, u; mov.b32 {$0, $1}, t;}",
                "=h,=h,r,r,r", [pair, scale, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, u; mov.b32 u, 0x80008000; fma.rn.bf16x2 t, $2, $3, u; mov.b32 {$0, $1}, t;}",
                "=h,=h,r,r", [pair, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        left, right = _halves(pair)
        factor = scale.to(tl.float32, bitcast=True)
        if KIND == _INT4:
            offset = zero.to(tl.float32, bitcast=True)
            return (left + offset) * factor, (right + offset) * factor
        else:
            return left * factor, right * factor


@triton.jit
def _whole_bytes(words, scale, AT: tl.constexpr):
    """Codes 2 AT and 2 AT + 1 of words of integers of 8 bits, times a scale, float32"""
    factor = scale.to(tl.float32, bitcast=True)
    left = (words << (24 - 8 * AT)) >> 24
    right = (words << (8 - 8 * AT)) >> 24
    return left.to(tl.float32) * factor, right.to(tl.float32) * factor


@triton.jit
def _of_words(
    values, feature, mask, k, rows, word, GROUPS: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """values [steps * GROUPS, rows] -> those of columns [k, k + COLUMNS), for each word [features, WORDS] or [features,
    1]"""
    at = values + feature
    if GROUPS == 0:
        found = tl.load(at, mask=mask, other=0)[:, None]
    else:
        TOUCHED: tl.constexpr = GROUPS * COLUMNS // _STEP if GROUPS * COLUMNS > _STEP else 1
        first = (k // _STEP) * GROUPS + (k - k // _STEP * _STEP) * GROUPS // _STEP
        found = tl.load(at + first * rows, mask=mask, other=0)[:, None]
        for i in tl.static_range(1, TOUCHED):
            more = tl.load(at + (first + i) * rows, mask=mask, other=0)[:, None]
            found = tl.where(word >= i * WORDS // TOUCHED, more, found)
    return found


@triton.jit
def _in_sets(found, FEATURES: tl.constexpr, STEP: tl.constexpr, SPREAD: tl.constexpr):
    """found [FEATURES, STEP], columns as they lie -> in the order of a product: of each set of 16, lane t of four
    multiplies columns 2t, 2t + 1, 2t + 8 and 2t + 9, which come from the SPREAD / 4 side by side that it has loaded."""
    parts = tl.reshape(found, [FEATURES, STEP // SPREAD, 4, SPREAD // 16, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 4, 2, 5)), [FEATURES, STEP])


@triton.jit
def _columns(STEP: tl.constexpr, SPREAD: tl.constexpr):
    """[STEP]: columns of a step in the order of a product. SPREAD: as `spread_of`, 0: as they lie"""
    at = tl.arange(0, STEP)
    if SPREAD:  # the compiler does not see that two are neighbours
        at = at // SPREAD * SPREAD + at % 8 // 2 * (SPREAD // 4) + at % SPREAD // 16 * 4 + at % 16 // 8 * 2 + at % 2
        at = tl.max_contiguous(tl.multiple_of(at, 2), 2)
    return at


@triton.jit
def _weight_tile(
    weight, scales, zeros, row, end, rows, k,
    DEPTH: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + FEATURES) of the weight up to `end`, and columns [k, k + STEP), [FEATURES, STEP], in the order
    of `_columns`. rows: of the weight."""
    feature = row + tl.arange(0, FEATURES)
    mask = feature < end
    if not EVEN:
        mask &= k < DEPTH
    if KIND == _DENSE:
        col = k + tl.arange(0, STEP)
        there = mask[:, None]
        if not EVEN:
            there &= (col < DEPTH)[None, :]
        found = tl.load(weight + feature[:, None].to(tl.int64) * DEPTH + col[None, :], mask=there, other=0.0)
    else:
        CODES: tl.constexpr = 8 if KIND == _INT4 or KIND == _MX else 4  # noqa: SIM109
        WORDS: tl.constexpr = STEP // CODES
        word = tl.arange(0, WORDS)[None, :]
        there = mask[:, None]
        if not EVEN:
            there &= k // CODES + word < DEPTH // CODES
        at = weight + feature[:, None].to(tl.int64) * (DEPTH // CODES) + (k // CODES + word)
        words = tl.load(at, mask=there, other=0)
        if KIND == _MX:
            four = tl.load(scales + (k // _STEP) * rows + feature, mask=mask, other=0)[:, None]
            exponent = (four >> 8 * ((k - k // _STEP * _STEP) // 32 + word // 4)) & 255
            scale = exponent << 23
        else:
            scale = _of_words(scales, feature, mask, k, rows, word, GROUPS, WORDS, STEP)
        zero = scale
        if KIND == _INT4:
            if zeros is None:
                zero = tl.full([1, 1], -136.0, tl.float32).to(tl.int32, bitcast=True)
            else:
                zero = _of_words(zeros, feature, mask, k, rows, word, GROUPS, WORDS, STEP)
                zero = (zero.to(tl.float32, bitcast=True) - 128.0).to(tl.int32, bitcast=True)
        if PACKED:
            scale, zero = _twice(scale), _twice(zero)
        scale, zero = tl.broadcast_to(scale, words.shape), tl.broadcast_to(zero, words.shape)
        if KIND == _INT8:
            v0, v1 = _whole_bytes(words, scale, 0)
            v2, v3 = _whole_bytes(words, scale, 1)
        else:
            v0, v1 = _scaled_pair(_pair(words, 0, KIND), scale, zero, KIND, PACKED)
            v2, v3 = _scaled_pair(_pair(words, 1, KIND), scale, zero, KIND, PACKED)
        if CODES == 4:
            found = tl.join(tl.join(v0, v2), tl.join(v1, v3))
        else:
            v4, v5 = _scaled_pair(_pair(words, 2, KIND), scale, zero, KIND, PACKED)
            v6, v7 = _scaled_pair(_pair(words, 3, KIND), scale, zero, KIND, PACKED)
            even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
            found = tl.join(even, tl.join(tl.join(v1, v5), tl.join(v3, v7)))
        found = tl.reshape(found, [FEATURES, STEP])
    return _in_sets(found, FEATURES, STEP, SPREAD) if SPREAD else found


@triton.jit
def _with_step(
    total, other, source, present, weight, scales, zeros, row, rows, weight_rows, k,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, ACT: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    PACKED: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, SPREAD: tl.constexpr,
    X_IN_SETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums with the products of columns [k, k + STEP), and of gated ones those of the ups: [FEATURES, ROWS] where
    there is SPREAD, else [ROWS, FEATURES]."""
    w = _weight_tile(
        weight, scales, zeros, row, rows, weight_rows, k, DEPTH, KIND, GROUPS, PACKED, FEATURES, STEP, EVEN, SPREAD,
    )  # fmt: skip
    if ACT != _PLAIN:
        u = _weight_tile(
            weight, scales, zeros, row + WIDTH, rows + WIDTH, weight_rows, k,
            DEPTH, KIND, GROUPS, PACKED, FEATURES, STEP, EVEN, SPREAD,
        )  # fmt: skip
    mask = present[:, None]
    if not EVEN:
        mask &= (k + _columns(STEP, 0 if X_IN_SETS else SPREAD) < DEPTH)[None, :]
    a = tl.load(source + k, mask=mask, other=0.0)
    total = _with_product(total, a, w.to(a.dtype), SPREAD, PRECISION)
    if ACT != _PLAIN:
        other = _with_product(other, a, u.to(a.dtype), SPREAD, PRECISION)
    return total, other


@triton.jit
def _with_product(total, a, w, SPREAD: tl.constexpr, PRECISION: tl.constexpr):
    if SPREAD:
        total = tl.dot(w, tl.trans(a), total, input_precision=PRECISION)
    else:
        total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["tile_count"])
def _expert_gemm_kernel(
    out, x, x_stride, weight, scales, zeros, bias, order, tiles, tile_count, limit, weight_rows,
    CHOICES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, SPREAD: tl.constexpr,
    X_IN_SETS: tl.constexpr, SHARE_STEPS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs, tiles of pairs). WIDTH: outputs of a pair. CHOICES: pairs that read a row of x.
    SPREAD: not 0: with the bits of gemm_experts.cu, whose chunks are steps then. X_IN_SETS: columns of x come in the
    order of `_columns`. SHARE_STEPS: of the longest share."""
    wait(PDL)
    let_next_come(PDL)  # behind the wait, for `gemm_experts.routes_known`
    expert = tl.load(tiles + tl.program_id(1))
    if expert >= 0:
        begin = tl.load(tiles + tile_count + tl.program_id(1))
        count = tl.load(tiles + 2 * tile_count + tl.program_id(1))
        lane, feature = tl.arange(0, ROWS), tl.program_id(0) * FEATURES
        if order is None:
            pair = (begin + lane).to(tl.int64)
        else:
            pair = tl.load(order + begin + lane, mask=lane < count, other=0).to(tl.int64)
        source = x + (pair // CHOICES)[:, None] * x_stride + _columns(STEP, 0 if X_IN_SETS else SPREAD)[None, :]
        OUTPUTS: tl.constexpr = WIDTH if ACT == _PLAIN else 2 * WIDTH  # of an expert
        row = expert * OUTPUTS + feature
        rows = expert * OUTPUTS + WIDTH
        total = tl.zeros([FEATURES, ROWS] if SPREAD else [ROWS, FEATURES], tl.float32)
        other = tl.zeros_like(total)
        if SPREAD:  # in one loop, so that what the next share reads is asked for while one ends
            part, part_other = tl.zeros_like(total), tl.zeros_like(other)
            for i in range(0, _SHARES * SHARE_STEPS):
                share = i // SHARE_STEPS
                if i == share * SHARE_STEPS:
                    total += part
                    part = tl.zeros_like(total)
                    if ACT != _PLAIN:
                        other += part_other
                        part_other = tl.zeros_like(other)
                part, part_other = _with_step(
                    part, part_other, source, lane < count, weight, scales, zeros, row, rows, weight_rows,
                    ((i - share * SHARE_STEPS) * _SHARES + share) * STEP, DEPTH, WIDTH, ACT, KIND, GROUPS, PACKED,
                    FEATURES, STEP, EVEN, SPREAD, X_IN_SETS, PRECISION,
                )  # fmt: skip
            total = tl.trans(total + part)
            if ACT != _PLAIN:
                other = tl.trans(other + part_other)
        else:
            for k in range(0, DEPTH, STEP):
                total, other = _with_step(
                    total, other, source, lane < count, weight, scales, zeros, row, rows, weight_rows, k, DEPTH, WIDTH,
                    ACT, KIND, GROUPS, PACKED, FEATURES, STEP, EVEN, SPREAD, X_IN_SETS, PRECISION,
                )  # fmt: skip
        col = feature + tl.arange(0, FEATURES)
        dtype = out.dtype.element_ty
        if bias is not None:
            total += tl.load(bias + row + tl.arange(0, FEATURES), mask=col < WIDTH, other=0.0).to(tl.float32)[None, :]
        if ACT != _PLAIN:
            if bias is not None:
                up = tl.load(bias + row + WIDTH + tl.arange(0, FEATURES), mask=col < WIDTH, other=0.0)
                other += up.to(tl.float32)[None, :]
            # Rounded first, as products are to which adapters add before gates are made of them.
            if ACT == _SILU:
                total = gated(total.to(dtype), other.to(dtype))
            else:
                gate, up = total.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
                total = clamped_swiglu_of(gate, up, limit, ALPHA)
        mask = (lane < count)[:, None] & (col < WIDTH)[None, :]
        tl.store(out + pair[:, None] * WIDTH + col[None, :], total.to(dtype), mask=mask)


def spread_of(kind: int) -> int:
    """Returns how many columns side by side the sets of 16 are of that gemm_experts.cu multiplies one after the other:
    of each, one of four lanes has four, and 8 or 16 columns in all."""
    return 32 if kind == DENSE else 64


class ExpertGemm:
    """The kernels with one weight. Quantised ones are brought into their layout."""

    def __init__(self, weight: Tensor | PackedGroups | MXRows, count: int) -> None:
        """count: of experts"""
        self.weight = weight if isinstance(weight, Tensor) else expert_rows(weight)
        self._count = count

    @property
    def rows(self) -> int:
        return self.weight.shape[0] if isinstance(self.weight, Tensor) else self.weight.rows

    def most_pairs(self, dtype: torch.dtype) -> int:
        if isinstance(self.weight, Tensor):
            many = is_hopper() and cuda_many.takes(self.weight, self.rows // self._count, dtype)
            return cuda_many.SIZE.pairs if many else LARGE_TILE
        # Small tiles of other weights that are dequantised have other columns in an instruction.
        return LARGE_TILE if gemm_experts.takes(self.weight, dtype) else SMALL_TILE

    def linear(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
        return self._run(x, bias, routed, self.rows // self._count, _PLAIN.value, 0.0)

    def gated(self, x: Tensor, bias: Tensor | None, routed: Routed, limit: float) -> Tensor:
        return self._run(x, bias, routed, self.rows // self._count // 2, (_CLAMPED if limit else _SILU).value, limit)

    def squared(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor | None:
        tiles = routed.tiles
        assert tiles is not None
        few = tiles.rows <= gemm_experts.MAX_PAIRS and gemm_experts.takes(self.weight, x.dtype)
        if not few and tiles.rows <= LARGE_TILE:
            return None
        return self._run(x, bias, routed, self.rows // self._count, _PLAIN.value, gemm_experts.SQUARES)

    def _run(self, x: Tensor, bias: Tensor | None, routed: Routed, width: int, act: int, limit: float) -> Tensor:
        weight, arguments, wide = self.weight, dict[str, Any](), x.dtype == torch.float32
        tiles = routed.tiles
        assert tiles is not None
        if not isinstance(weight, Tensor) and weight.order is not None:
            x = x.index_select(1, weight.order)
        if tiles.rows <= gemm_experts.MAX_PAIRS and gemm_experts.takes(weight, x.dtype):
            return gemm_experts.multiply(_NAMES[act], x, weight, bias, routed, width, limit)
        if tiles.rows > LARGE_TILE:
            assert isinstance(weight, Tensor)
            return cuda_many.multiply(_NAMES[act], in_order(x, spread_of(DENSE)), weight, bias, routed, width, limit)
        kind = DENSE if isinstance(weight, Tensor) else weight.kind
        features, warps, stages = SHAPES[kind, tiles.rows][act != _PLAIN.value]
        # Quantised weights have one form: by measured ratios it is no slower than one that sums columns as they lie.
        spread = spread_of(kind) if (tiles.exact or kind != DENSE) and not wide else 0
        if spread and kind != DENSE and is_hopper():
            features = max(features, 64)  # else products take wgmma and gates mma.sync, with other columns together
        x_in_sets = spread > 0 and x.shape[1] % spread == 0
        x = in_order(x, spread) if x_in_sets else x
        if isinstance(weight, Tensor):
            codes, scales, zeros, depth = weight, None, None, weight.shape[1]
            arguments = {"KIND": kind, "GROUPS": 0, "PACKED": False, "STEP": CHUNK}
        else:
            codes, scales, zeros, depth = weight.words, weight.scales, weight.zeros, weight.columns
            packed = x.dtype == torch.bfloat16 and weight.kind != INT8 and not INTERPRETED
            arguments = {"KIND": kind, "GROUPS": weight.groups, "PACKED": packed, "STEP": CHUNK if spread else STEP}
        assert x.shape[1] == depth and x.stride(1) == 1
        even, steps = depth % arguments["STEP"] == 0, triton.cdiv(triton.cdiv(depth, CHUNK), SHARES)
        if spread and steps * SHARES * CHUNK > depth:
            even = False  # some shares have a step more than others
        out = torch.empty(routed.pairs, width, dtype=x.dtype, device=x.device)
        if not routed.pairs:
            return out
        max_tiles, choices = tiles.tiles.shape[1], routed.choices(x)
        launched = _expert_gemm_kernel[(triton.cdiv(width, features), max_tiles)](
            out, x, x.stride(0), codes, scales, zeros, bias, tiles.order, tiles.tiles, max_tiles, limit, self.rows,
            CHOICES=choices, DEPTH=depth, WIDTH=width, ACT=act, ALPHA=SWIGLU_ALPHA, ROWS=tiles.rows,
            FEATURES=features, EVEN=even, SPREAD=spread, X_IN_SETS=x_in_sets, SHARE_STEPS=steps,
            PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=2 if wide else stages, **arguments,
            **launch_options(x.device),
        )  # fmt: skip
        keep_cache(launched)
        return out


def takes(weight: Tensor | PackedGroups | MXRows, count: int) -> bool:
    """Returns whether the kernels multiply with these weights of `count` experts."""
    if isinstance(weight, Tensor):
        return weight.dtype in DTYPES and weight.is_contiguous()
    return not isinstance(weight, MXRows) or (weight.columns % MX_BLOCK == 0 and fits(weight))


def expert_gemm(weight: Tensor | PackedGroups | MXRows, count: int) -> DeviceExpertGemm | None:
    """Returns GEMMs with the weights [count * out, in] of experts; None of weights that it has none for. A row has the
    same bits in any batch if `route` was asked for that."""
    return ExpertGemm(weight, count) if takes(weight, count) else None
