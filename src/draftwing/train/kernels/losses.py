"""Triton kernels for the losses of a head's logits; one row per program, float32 inside. The references, and the
formulas, are in `train.losses`.

Every lane keeps a largest logit and a sum of exponentials of its own, the latter scaled by the former (the online
softmax of Milakov and Gimelshein 2018, arXiv 1805.02867), so that lanes meet once a row.

Heads that draft a block take two passes over the logits of a row. The first gives what there is to know of it
(`RowFacts`). What each term weighs is computed from that, for it may depend on the other rows of the block. The second
pass overwrites the logits with the gradient of the weighted sum.
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
    _cross_entropy_kernel[(rows,)](
        loss, best, logits, logits.stride(0), probs, probs.stride(0), counts, SLOPE=sloped,
        **_sizes(vocab), **launch_options(logits.device),
    )  # fmt: skip
    return loss, best, logits


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["place", "token"])
def _facts_kernel(
    facts, best, logits, logits_stride, probs, probs_stride, place, token, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """facts [6, rows]: log sum exp z, sum p, -sum p log q, -log q[t], sum min(p, q), sum of q where q < p"""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    probs += tl.load(place + row) * probs_stride
    lane = tl.arange(0, BLOCK)
    row_max, found, norm, mass, dot = one_pass(logits, probs, VOCAB, BLOCK)
    total = row_max + tl.log(norm)
    both, inner = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for first in range(0, VOCAB, BLOCK):
        col = first + lane
        here = col < VOCAB
        z = tl.load(logits + col, mask=here, other=0.0).to(tl.float32)
        p = tl.load(probs + col, mask=here, other=0.0).to(tl.float32)
        q = tl.where(here, tl.exp(z - total), 0.0)
        both += tl.minimum(p, q)
        inner += tl.where(q < p, q, 0.0)
    said = tl.load(logits + tl.maximum(tl.load(token + row), 0)).to(tl.float32)
    tl.store(best + row, found.to(tl.int64))
    tl.store(facts + row, total)
    tl.store(facts + rows + row, mass)
    tl.store(facts + 2 * rows + row, total * mass - dot)
    tl.store(facts + 3 * rows + row, total - said)
    tl.store(facts + 4 * rows + row, tl.sum(both, 0))
    tl.store(facts + 5 * rows + row, tl.sum(inner, 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["place", "token"])
def _slope_kernel(
    logits, logits_stride, probs, probs_stride, place, token, facts, shares, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shares [3, rows]: weights of -log q[t], of -sum p log q and of 1 - sum min(p, q)"""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    probs += tl.load(place + row) * probs_stride
    t = tl.load(token + row)
    total, mass = tl.load(facts + row), tl.load(facts + rows + row)
    inner = tl.load(facts + 5 * rows + row)
    a, b, c = (tl.load(shares + row), tl.load(shares + rows + row), tl.load(shares + 2 * rows + row))
    counted = (a != 0.0) | (b != 0.0) | (c != 0.0)
    for first in range(0, VOCAB, BLOCK):
        col = first + tl.arange(0, BLOCK)
        here = col < VOCAB
        z = tl.load(logits + col, mask=here, other=0.0).to(tl.float32)
        p = tl.load(probs + col, mask=here, other=0.0).to(tl.float32)
        q = tl.exp(z - total)
        less = tl.where(q < p, 1.0, 0.0)
        slope = q * (a + b * mass - c * (less - inner)) - b * p - tl.where(col == t, a, 0.0)
        tl.store(logits + col, tl.where(counted, slope, 0.0).to(logits.dtype.element_ty), mask=here)


def row_facts(logits: Tensor, probs: Tensor, place: Tensor, token: Tensor) -> tuple[Tensor, ...]:
    """logits [r, V], probs [n, V], each in one of DTYPES; place [r] int64: each row's distribution; token [r] int64:
    the text's, -1 for none -> `train.losses.RowFacts` in float32."""
    rows, vocab = logits.shape
    assert probs.shape[1] == vocab and place.shape == token.shape == (rows,)
    assert logits.stride(1) == probs.stride(1) == place.stride(0) == token.stride(0) == 1
    assert logits.dtype in DTYPES and probs.dtype in DTYPES
    facts = torch.empty(6, rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _facts_kernel[(rows,)](
            facts, best, logits, logits.stride(0), probs, probs.stride(0), place, token, rows,
            **_sizes(vocab), **launch_options(logits.device),
        )  # fmt: skip
    return best, facts[2], facts[3], facts[4], facts


def slopes(
    logits: Tensor, probs: Tensor, place: Tensor, token: Tensor, facts: Tensor, shares: tuple[Tensor, ...]
) -> Tensor:
    """Arguments as of `row_facts`, the last of what that gave, and the weights [r] of the three terms, all 0 where a
    row does not count -> the logits, overwritten with the gradient of the weighted sum in their dtype."""
    rows, vocab = logits.shape
    weights = torch.stack(shares).to(torch.float32)
    assert facts.shape == (6, rows) and weights.shape == (3, rows)
    if rows:
        _slope_kernel[(rows,)](
            logits, logits.stride(0), probs, probs.stride(0), place, token, facts, weights, rows,
            **_sizes(vocab), **launch_options(logits.device),
        )  # fmt: skip
    return logits


def _sizes(vocab: int) -> dict[str, int]:
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    return {"VOCAB": vocab, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}
