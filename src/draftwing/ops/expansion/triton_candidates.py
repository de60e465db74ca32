"""The best of a vocabulary for all levels of a block at once, where they are more than a chunk should look for one by
one (`triton_continuations`): the largest of each group of neighbouring tokens, then the best of the best groups."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.expansion.triton_continuations import LAST, best_keys, merged_sums, noisy_scores, sort_key
from draftwing.ops.sampling.triton import best_groups
from draftwing.ops.triton.common import lanes, launch_options, start
from draftwing.ops.types import Continuations, RowTensors

_GROUP = 128  # tokens, at most: 16 groups of it are about as many values as a vocabulary of 250,000 has groups
_BLOCK = 4096  # tokens of a program, as of `continuations`; another was not swept
_FAN = 16  # groups of a block of groups


@triton.jit(do_not_specialize=["batch", "ahead"])
def _peaks_kernel(
    peaks, sums, logits, logits_stride, rows, kv_len, seed, floats, floats_stride, target_ids, batch, ahead,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, chunks of BLOCK tokens). peaks [M, GROUPS], sums [M, chunks, 2]."""
    start(PDL)
    node, chunk = tl.program_id(0), tl.program_id(1)
    group = chunk * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = logits + node.to(tl.int64) * logits_stride
    row = tl.load(rows + node % batch)
    z = noisy_scores(
        ids, source, row, kv_len, seed, floats + row * floats_stride, target_ids, ahead + node // batch, VOCAB, BLOCK
    )  # fmt: skip
    z = tl.where(ids < VOCAB, z, float("-inf"))
    peak = tl.max(z, 1)
    tl.store(peaks + node.to(tl.int64) * GROUPS + group, peak, mask=group < GROUPS)
    largest = tl.max(peak, 0)
    total = tl.sum(tl.sum(tl.where(z > float("-inf"), tl.exp(z - largest), 0.0), 1), 0)
    at = sums + (node * tl.num_programs(1) + chunk) * 2
    tl.store(at, largest)
    tl.store(at + 1, total)


@triton.jit(do_not_specialize=["batch", "ahead"])
def _candidates_kernel(
    out_keys, out_sums, peaks, sums, logits, logits_stride, rows, kv_len, seed, floats, floats_stride, target_ids,
    batch, ahead,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FAN: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, COUNT: tl.constexpr, KP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M,). out_keys [M, 1, COUNT], out_sums [M, 1, 2]."""
    start(PDL)
    node = tl.program_id(0)
    group = best_groups(peaks + node.to(tl.int64) * GROUPS, GROUPS, BLOCKS, FAN, KP)
    ids = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [KP * GROUP])
    source = logits + node.to(tl.int64) * logits_stride
    row = tl.load(rows + node % batch)
    z = noisy_scores(
        ids, source, row, kv_len, seed, floats + row * floats_stride, target_ids, ahead + node // batch, VOCAB, BLOCK
    )  # fmt: skip
    best = best_keys(tl.where(ids < VOCAB, sort_key(z, ids), LAST), COUNT, KP)
    lane = tl.arange(0, KP)
    tl.store(out_keys + node * COUNT + lane, best, mask=lane < COUNT)
    peak, total = merged_sums(sums + node * CHUNKS * 2, CHUNKS, CP)
    tl.store(out_sums + node * 2, peak)
    tl.store(out_sums + node * 2 + 1, total)


def candidates(
    logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, count: int, target_ids: Tensor | None
) -> Continuations:
    """logits [L * B, V], level by level of rows [B] -> the best `count` of each as one chunk: keys [L * B, 1, count],
    sums [L * B, 1, 2]; level l at kv_len + ahead + l. See `ExpansionOps.level_candidates`."""
    (nodes, vocab), width = logits.shape, lanes(count)
    assert nodes % len(rows) == 0 and vocab >= count and logits.stride(1) == 1
    assert target_ids is None or target_ids.shape[0] == vocab
    group = min(_GROUP, 1 << max((vocab // width).bit_length() - 1, 0))  # at least as many groups as are wanted
    block = max(min(triton.next_power_of_2(vocab), _BLOCK), group)
    groups, chunks = triton.cdiv(vocab, group), triton.cdiv(vocab, block)
    peaks, sums, out_sums = (
        torch.empty(size, dtype=torch.float32, device=logits.device)
        for size in ((nodes, groups), (nodes, chunks, 2), (nodes, 1, 2))
    )
    keys = torch.empty(nodes, 1, count, dtype=torch.int64, device=logits.device)
    read = (
        logits, logits.stride(0), rows, table.kv_len, table.seed, table.floats, table.floats.stride(0), target_ids,
        len(rows), ahead,
    )  # fmt: skip
    sizes = {"VOCAB": vocab, "GROUPS": groups, "GROUP": group, "BLOCK": block, **launch_options(logits.device)}
    _peaks_kernel[(nodes, chunks)](peaks, sums, *read, **sizes, num_warps=8 if block > 2048 else 4)
    _candidates_kernel[(nodes,)](
        keys, out_sums, peaks, sums, *read, BLOCKS=max(width, triton.next_power_of_2(triton.cdiv(groups, _FAN))),
        FAN=_FAN, CHUNKS=chunks, CP=triton.next_power_of_2(chunks), COUNT=count, KP=width, num_warps=8, **sizes,
    )  # fmt: skip
    return Continuations(keys, out_sums)
