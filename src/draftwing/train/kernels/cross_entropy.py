"""Triton kernel for a head's cross-entropy with the target's distribution; one row per program, float32 inside.

With logits z and probs p of a row: -sum p log softmax(z) = log(sum exp z) sum p - sum p z, whose gradient is
softmax(z) sum p - p. Every lane keeps a largest logit and a sum of exponentials of its own, the latter scaled by the
former (the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867), so that lanes meet once a row. The
reference is the loop over pieces in `train.cross_entropy`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 2048  # 8 elements of a thread: one load of 16 bytes in half precision


@triton.jit
def one_pass(logits, probs, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Returns of a row: its largest logit, the first place of it, sum exp(z - that), sum p, sum p z"""
    lane = tl.arange(0, BLOCK)
    # Finite, so that no difference of infinities arises in lanes past the end, whose logits are lower still.
    top = tl.full([BLOCK], -3e38, tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    norm, mass, dot = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for first in range(0, VOCAB, BLOCK):
        col = first + lane
        here = col < VOCAB
        z = tl.where(here, tl.load(logits + col, mask=here, other=0.0).to(tl.float32), -3.4e38)
        p = tl.load(probs + col, mask=here, other=0.0).to(tl.float32)
        more = z > top
        by = tl.exp(-tl.abs(z - top))
        norm = tl.where(more, norm * by + 1.0, norm + by)
        at = tl.where(more, col, at)
        top = tl.where(more, z, top)
        mass += p
        dot += p * z
    row_max = tl.max(top, 0)
    # Not a number anywhere: a place that there is, and a loss that shows it.
    place = tl.min(tl.where(top == row_max, at, VOCAB - 1), 0)
    norm_sum = tl.sum(norm * tl.exp(top - row_max), 0)
    mass_sum = tl.sum(mass, 0)
    return row_max, place, norm_sum, mass_sum, tl.sum(dot, 0)


@triton.jit(do_not_specialize_on_alignment=["counts"])
def _cross_entropy_kernel(
    loss, best, logits, logits_stride, probs, probs_stride, counts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SLOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    probs += row * probs_stride
    lane = tl.arange(0, BLOCK)
    row_max, place, norm_sum, mass_sum, dot = one_pass(logits, probs, VOCAB, BLOCK)
    cross = (row_max + tl.log(norm_sum)) * mass_sum - dot
    counted = tl.load(counts + row) != 0
    tl.store(best + row, place.to(tl.int64))
    tl.store(loss + row, tl.where(counted, cross, 0.0))
    if SLOPE:
        ratio = mass_sum / norm_sum
        for first in range(0, VOCAB, BLOCK):
            col = first + lane
            here = col < VOCAB
            z = tl.load(logits + col, mask=here, other=0.0).to(tl.float32)
            p = tl.load(probs + col, mask=here, other=0.0).to(tl.float32)
            slope = tl.where(counted, tl.exp(z - row_max) * ratio - p, 0.0)
            tl.store(logits + col, slope.to(logits.dtype.element_ty), mask=here)


def cross_entropy(logits: Tensor, probs: Tensor, counts: Tensor, sloped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logits [r, V], probs [r, V], each in one of DTYPES, counts [r] bool
    -> -sum p log softmax(z) [r] float32, 0 for rows that do not count; the largest logit's place [r] int64, the first
    of equals; and the logits.

    sloped: these are overwritten with the gradient of the sum of the first, in their dtype.
    """
    rows, vocab = logits.shape
    assert probs.shape == logits.shape and counts.shape == (rows,) and counts.dtype == torch.bool
    assert logits.stride(1) == probs.stride(1) == counts.stride(0) == 1
    assert logits.dtype in DTYPES and probs.dtype in DTYPES
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return loss, best, logits
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _cross_entropy_kernel[(rows,)](
        loss, best, logits, logits.stride(0), probs, probs.stride(0), counts, VOCAB=vocab, BLOCK=block,
        SLOPE=sloped, num_warps=min(8, max(1, block // 256)), **launch_options(logits.device),
    )  # fmt: skip
    return loss, best, logits
