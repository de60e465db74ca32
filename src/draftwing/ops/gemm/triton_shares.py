"""GEMMs of many rows in 16 bits with the bits of gemm.cu, for GPUs that gemm_dense_many.cu does not run on.

K is cut into shares of every eighth chunk of 64 columns. Each is summed in order, then shares are added in order.
Columns come as lanes of gemm.cu's instruction have them (`in_lanes`). This one is the same, and an instruction may sum
its 16 columns in two steps; which devices do so was not measured.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.elementwise.triton import gated
from draftwing.ops.gemm.shapes import SHARES
from draftwing.ops.triton.common import keep_cache, launch_options, start

CHUNK = 64  # columns
ROWS, FEATURES, WARPS, STAGES = 128, 128, 8, 3  # of a tile, not swept; of gates and ups half of the features each
_TOGETHER = tl.constexpr(8)  # tiles of rows whose features are done before others begin: they stay in the L2 cache


@triton.jit(do_not_specialize=["rows", "features"])
def _shares_kernel(
    x, w, bias, residual, out, rows, features,
    K: tl.constexpr, SHARE_STEPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr, CHUNK: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles. x [rows, K], w [features or, gates and then ups, 2 * features, K]. SHARE_STEPS: chunks of the
    longest share. EVEN: all have as many."""
    start(PDL)
    blocks, wide = tl.cdiv(rows, ROWS), tl.cdiv(features, FEATURES)
    first = tl.program_id(0) // (_TOGETHER * wide) * _TOGETHER
    some = tl.minimum(_TOGETHER, blocks - first)
    within = tl.program_id(0) - first * wide
    row = (first + within % some) * ROWS + tl.arange(0, ROWS)
    feature = within // some * FEATURES + tl.arange(0, FEATURES)
    column, there = tl.arange(0, CHUNK), (row < rows)[:, None]
    at_x = x + row[:, None].to(tl.int64) * K + column[None, :]
    at_w, real = w + feature[None, :].to(tl.int64) * K + column[:, None], (feature < features)[None, :]
    total, up = tl.zeros([ROWS, FEATURES], tl.float32), tl.zeros([ROWS, FEATURES], tl.float32)
    part, part_up = total, up
    for i in range(0, SHARES * SHARE_STEPS):
        share = i // SHARE_STEPS
        if i == share * SHARE_STEPS:
            total += part
            part = tl.zeros_like(total)
            if GATED:
                up += part_up
                part_up = tl.zeros_like(up)
        k = ((i - share * SHARE_STEPS) * SHARES + share) * CHUNK
        inside = True if EVEN else k < K
        a = tl.load(at_x + k, mask=there & inside, other=0.0)
        part = tl.dot(a, tl.load(at_w + k, mask=real & inside, other=0.0), part)
        if GATED:
            at_up = at_w + tl.cast(features, tl.int64) * K
            part_up = tl.dot(a, tl.load(at_up + k, mask=real & inside, other=0.0), part_up)
    total += part
    if bias is not None:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up += part_up
        if bias is not None:
            up += tl.load(bias + features + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
        total = gated(total.to(out.dtype.element_ty), up.to(out.dtype.element_ty))  # as of products that are stored
    to = row[:, None].to(tl.int64) * features + feature[None, :]
    if residual is not None:
        total += tl.load(residual + to, mask=there & real, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=there & real)


def in_lanes(x: Tensor) -> Tensor:
    """x [R, K] in 16 bits, K a multiple of 32 -> the same with columns in the order of lanes of gemm.cu's instructions:
    a thread has eight neighbours of 32, two for each half of two instructions."""
    pairs = x.contiguous().view(torch.int32).unflatten(1, (-1, 4, 2, 2))  # thread, instruction, half
    return pairs.permute(0, 1, 3, 4, 2).contiguous().view(x.dtype).view(x.shape)


class TritonSharesGemm:
    """Products of many rows with the bits that gemm.cu gives."""

    weights_in_sets = False  # they come in their own order

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once. fresh: as `SmallMGemm` has
        it."""
        return self._run(x, weight, bias, residual, False)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self._run(x, weight, bias, None, True)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
        (rows, columns), features = x.shape, weight.shape[0] // (2 if gated else 1)
        assert takes(weight) and (residual is None or residual.is_contiguous())
        out = x.new_empty(rows, features)
        chunks, wide = columns // CHUNK, FEATURES // 2 if gated else FEATURES
        grid = (triton.cdiv(rows, ROWS) * triton.cdiv(features, wide),)
        launched = _shares_kernel[grid](
            in_lanes(x), in_lanes(weight), bias, residual, out, rows, features, K=columns,
            SHARE_STEPS=triton.cdiv(chunks, SHARES), EVEN=chunks % SHARES == 0, GATED=gated, ROWS=ROWS, FEATURES=wide,
            CHUNK=CHUNK, SHARES=SHARES, num_warps=WARPS, num_stages=STAGES, **launch_options(x.device),
        )  # fmt: skip
        keep_cache(launched)
        return out


def takes(weight: Tensor) -> bool:
    """Returns whether the kernel multiplies with this matrix."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and weight.is_contiguous() and weight.shape[1] % CHUNK == 0
