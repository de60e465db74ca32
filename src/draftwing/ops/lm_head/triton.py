"""Logits of chosen ids in float32, and ids of a row's largest.

These are found as the largest of each group of neighbouring tokens, and the best of these groups.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.expansion.triton_continuations import key_place, sort_key
from draftwing.ops.lm_head.spec import LogitOps
from draftwing.ops.sampling.triton import best_groups
from draftwing.ops.triton.common import launch_options, let_next_come, start, wait

_MOST_STEP = 1024  # columns that are multiplied at once
_MANY = 128  # rows above which some share what is read of a weight, see docs/dev/gpu_kernels.md
_IN_REGISTERS, _IDS = 8192, 16  # columns of all rows of a program then, and ids
_GROUP = 128  # tokens, at most: then one of the best four of 250,000 lies beside another in one case of 300
_FAN = 16  # groups of a block of groups
_TILE, _WARPS = 8, 4  # groups of a program, and its warps


@triton.jit
def _peaks_kernel(
    peaks, logits, logits_stride, VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of TILE groups, M). peaks [M, GROUPS]."""
    start(PDL)
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    tl.store(peaks + row * GROUPS + group, tl.max(x, 1), mask=group < GROUPS)


@triton.jit
def _largest_kernel(
    out, peaks, logits, logits_stride, VOCAB: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    FAN: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M,). out [M, COUNT]."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = best_groups(peaks + row * GROUPS, GROUPS, BLOCK, FAN, COUNT)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    # A NaN may come after what is past VOCAB; whoever scatters by an id from there stops the device.
    best = tl.minimum(key_place(tl.max(sort_key(x, ids), 1)), VOCAB - 1)
    tl.store(out + row * COUNT + tl.arange(0, COUNT), best.to(tl.int64))


def largest(logits: Tensor, count: int) -> Tensor:
    """See `LayerOps.largest`; count: a power of two."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and vocab >= count
    group = min(_GROUP, 1 << (vocab // count).bit_length() - 1)  # at least as many groups as are wanted
    groups = triton.cdiv(vocab, group)
    peaks = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    sizes = {"VOCAB": vocab, "GROUPS": groups, "GROUP": group, **launch_options(logits.device)}
    _peaks_kernel[(triton.cdiv(groups, _TILE), rows)](
        peaks, logits, logits.stride(0), TILE=_TILE, **sizes, num_warps=_WARPS
    )  # fmt: skip
    blocks = max(count, triton.next_power_of_2(triton.cdiv(groups, _FAN)))
    _largest_kernel[(rows,)](
        ids, peaks, logits, logits.stride(0), BLOCK=blocks, FAN=_FAN, COUNT=count, **sizes, num_warps=8
    )  # fmt: skip
    return ids


class TritonLogitOps(LogitOps):
    largest = staticmethod(largest)

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Torch's sum on a GPU takes another order when there are more rows."""
        return chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2)).view(ids.shape)

    def every_logit(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return chosen_logits(hidden, weight, None) if len(hidden) <= _MANY else logits_of_many(hidden, weight)

    def share_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor, begin: int) -> Tensor:
        return chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2), begin).view(ids.shape)


@triton.jit(do_not_specialize=["count", "begin", "known"], do_not_specialize_on_alignment=["ids"])
def _chosen_logits_kernel(
    out,
    hidden,
    hidden_stride,
    weight,
    ids,
    count,
    begin,
    known,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, count), which is no constant because clients choose it. A sum per column of STEP, then over the columns:
    in an order that follows from SIZE alone. SHARE: the weight has the rows [begin, begin + known) of ids alone. ids:
    None are all rows of the weight."""
    let_next_come(PDL)
    if ids is not None:
        wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row * count + tl.program_id(1)
    own = tl.program_id(1).to(tl.int64) if ids is None else tl.load(ids + place).to(tl.int64)
    there = True
    if SHARE:
        own -= begin
        there = (own >= 0) & (own < known)
        own = tl.where(there, own, 0)
    source = weight + own * SIZE
    weights = ()
    for first in tl.static_range(0, SIZE, STEP):  # no kernel writes them
        col = first + tl.arange(0, STEP)
        weights = weights + (tl.load(source + col, mask=col < SIZE, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    if ids is None:
        wait(PDL)
    total = tl.zeros([STEP], tl.float32)
    for part in tl.static_range(0, len(weights)):
        col = part * STEP + tl.arange(0, STEP)
        x = tl.load(hidden + row * hidden_stride + col, mask=col < SIZE, other=0.0).to(tl.float32)
        total = tl.fma(weights[part].to(tl.float32), x, total)
    result = tl.sum(total, 0)
    if SHARE:
        result = tl.where(there, result, 0.0)
    tl.store(out + place, result)


def chosen_logits(hidden: Tensor, weight: Tensor, ids: Tensor | None, begin: int | None = None) -> Tensor:
    """hidden [M, size], weight [vocab, size], ids [M, K] int64 -> hidden @ weight[ids], [M, K] float32. None: all rows.

    A logit's bits depend on its row of `hidden` and its id alone, and no row of the weight is copied. The weight begins
    at a multiple of 16 bytes, as an allocation does: Triton sums in another order where it does not.

    begin: the weight has the rows from there on of those that ids name; 0 for others. None: all."""
    rows, size = hidden.shape
    count = len(weight) if ids is None else ids.shape[1]
    assert hidden.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == size
    assert weight.data_ptr() % 16 == 0 and (ids is None or ids.shape[0] == rows)
    out = torch.empty(rows, count, dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out
    ids = None if ids is None else ids.contiguous()
    _chosen_logits_kernel[(rows, count)](
        out, hidden, hidden.stride(0), weight, ids, count, begin or 0, len(weight), SIZE=size,
        STEP=min(triton.next_power_of_2(size), _MOST_STEP), SHARE=begin is not None, num_warps=4,
        **launch_options(hidden.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "count"])
def _every_logit_kernel(
    out, hidden, hidden_stride, weight, rows, count,
    SIZE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows, blocks of IDS ids). Sums have the order of `_chosen_logits_kernel`."""
    start(PDL)
    PARTS: tl.constexpr = (SIZE + STEP - 1) // STEP
    first = tl.program_id(0).to(tl.int64) * ROWS
    x = ()
    for i in tl.static_range(0, ROWS * PARTS):
        row, col = tl.minimum(first + i // PARTS, rows - 1), i % PARTS * STEP + tl.arange(0, STEP)
        x = x + (tl.load(hidden + row * hidden_stride + col, mask=col < SIZE, other=0.0).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    begin = tl.program_id(1).to(tl.int64) * IDS
    for number in tl.range(0, tl.minimum(IDS, count - begin)):
        own, weights = begin + number, ()
        for part in tl.static_range(0, PARTS):
            col = part * STEP + tl.arange(0, STEP)
            weights = weights + (tl.load(weight + own * SIZE + col, mask=col < SIZE, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(0, ROWS):
            total = tl.zeros([STEP], tl.float32)
            for part in tl.static_range(0, PARTS):
                total = tl.fma(weights[part].to(tl.float32), x[i * PARTS + part], total)
            tl.store(out + (first + i) * count + own, tl.sum(total, 0), mask=first + i < rows)


def logits_of_many(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [M, size], weight [vocab, size] -> hidden @ weight^T, [M, vocab] float32

    With the bits of `chosen_logits`. Rows share what is read of the weight."""
    rows, size = hidden.shape
    assert hidden.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == size
    assert weight.data_ptr() % 16 == 0
    out = torch.empty(rows, len(weight), dtype=torch.float32, device=hidden.device)
    own = min(4, max(1, _IN_REGISTERS // size))
    _every_logit_kernel[(triton.cdiv(rows, own), triton.cdiv(len(weight), _IDS))](
        out, hidden, hidden.stride(0), weight, rows, len(weight), SIZE=size,
        STEP=min(triton.next_power_of_2(size), _MOST_STEP), ROWS=own, IDS=_IDS, num_warps=4,
        **launch_options(hidden.device),
    )  # fmt: skip
    return out
