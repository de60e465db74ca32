"""Ids of a row's largest logits: the largest of each group of neighbouring tokens, and the best of these groups."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.triton.continuations import key_place, sort_key
from draftwing.ops.triton.sampling import best_groups

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
