"""Norms and gates of what gated delta nets and state-space layers give. The reference is `ops.delta_net.spec`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.ops.attention.batch import DeltaWeights
from draftwing.ops.fp8.spec import WIDE, Fp8Rows
from draftwing.ops.fp8.triton import empty_rows, parts_of, store_fp8
from draftwing.ops.triton.common import launch_options, let_next_come, wait

_ELEMENTS = 512  # of a program
# Of a thread of a norm over a group, which wants 82: with fewer the compiler puts loads to where they are needed,
# and some wait for others.
_MOST_REGISTERS = 128


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["padded"], do_not_specialize_on_alignment=["tokens"])
def _norm_kernel(
    out, codes, scales, padded, o, z, norm, tokens, z_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (queries * blocks of BLOCK heads). SIGMOID: whether gates are sigmoids, else SiLU. Dead nodes get zeros."""
    BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    query, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    dim = tl.arange(0, PAD)
    weight = tl.load(norm + dim, mask=dim < DIM, other=0.0)
    let_next_come(PDL)
    live = tl.load(tokens + query * 4) > 0
    wait(PDL)
    head = block * BLOCK + tl.arange(0, BLOCK)
    at = head[:, None] * DIM + dim[None, :]
    mask = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    x = tl.load(o + query * (HEADS * DIM) + at, mask=mask & live, other=0.0)
    gate = tl.load(z + query * z_stride + at, mask=mask & live, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None] * weight[None, :]
    gate = sigmoid(gate) if SIGMOID else gate * sigmoid(gate)
    result = (x * gate).to(z.dtype.element_ty)
    if codes is None:
        tl.store(out + query * (HEADS * DIM) + at, result, mask=mask)
    else:  # a head is 128 columns
        store_fp8(codes, scales, result.to(tl.float32), query + 0 * head, head, head < HEADS, padded)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _group_norm_kernel(
    out, o, z, norm, tokens, z_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (queries * GROUPS). Of a state-space layer: SIZE, values of a group; norm: None where there is none.
    FIRST: whether gates come before it. Dead nodes get zeros."""
    query, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    lane = tl.arange(0, PAD)
    at, mask = group * SIZE + lane, lane < SIZE
    if norm is not None:
        weight = tl.load(norm + at, mask=mask, other=0.0)
    let_next_come(PDL)
    live = tl.load(tokens + query * 4) > 0
    wait(PDL)
    x = tl.load(o + query * (GROUPS * SIZE) + at, mask=mask & live, other=0.0)
    gate = tl.load(z + query * z_stride + at, mask=mask & live, other=0.0).to(tl.float32)
    gate = gate * sigmoid(gate)
    if FIRST:
        x = x * gate
    if norm is not None:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPS) * weight
    if not FIRST:
        x = x * gate
    tl.store(out + query * (GROUPS * SIZE) + at, x.to(z.dtype.element_ty), mask=mask)


def heads_of(dim_pad: int) -> int:
    """Returns how many heads a program takes, however many there are: the order of its sums over a head depends on
    it, and a rank may have a few of the heads."""
    return max(_ELEMENTS // dim_pad, 1)


def gated_norm(spec: DeltaSpec, o: Tensor, z: Tensor, weights: DeltaWeights, tokens: Tensor) -> Tensor | Fp8Rows:
    """o [M, value_heads * value_dim] float32; z as `DeltaInputs` has it; tokens: of `Walks` -> as z"""
    count, device, values = *z.shape[:1], z.device, spec.value_heads * spec.value_dim
    options = launch_options(device)
    value_pad = max(triton.next_power_of_2(spec.value_dim), 2)
    block = heads_of(value_pad)
    if not spec.corrects:
        result, size = z.new_empty(count, values), values // spec.key_heads
        pad, norm = triton.next_power_of_2(size), weights.norm if weights.norm.numel() else None
        _group_norm_kernel[(count * spec.key_heads,)](
            result, o, z, norm, tokens, z.stride(0), SIZE=size, GROUPS=spec.key_heads, PAD=pad, EPS=weights.eps,
            FIRST=weights.gates_first, num_warps=min(max(pad // 512, 1), 8), maxnreg=_MOST_REGISTERS, **options,
        )  # fmt: skip
        return result
    fp8 = weights.fp8 and spec.value_dim == WIDE
    out: Tensor | Fp8Rows = empty_rows((count, values), device) if fp8 else z.new_empty(count, values)
    _norm_kernel[(count * triton.cdiv(spec.value_heads, block),)](
        *parts_of(out), o, z, weights.norm, tokens, z.stride(0), HEADS=spec.value_heads, DIM=spec.value_dim,
        PAD=value_pad, EPS=weights.eps, BLOCK=block, SIGMOID=spec.by_channel, num_warps=4, **options,
    )  # fmt: skip
    return out
