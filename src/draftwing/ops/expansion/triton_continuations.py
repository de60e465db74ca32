"""Triton kernels that find a drafter's best continuations and their log probabilities.

A row of logits is cut into chunks, each of which gives its best continuations and its part of the normaliser
(`continuations`); whoever needs them merges the chunks first (`merge_chunks`).

Values with their places are held as one int64 whose order is "larger value, then lower place". All numbers that vary
between rows (temperature, seed, length) are read by row, so that a captured launch serves any mix of requests.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.noise.triton import gumbel, position_words
from draftwing.ops.triton.common import lanes, launch_options, start
from draftwing.ops.types import Continuations, RowTensors

LAST = tl.constexpr(-(1 << 63))  # after every key


# -- values and places as one integer --------------------------------------------------------------------------------


@triton.jit
def sort_key(value, place):
    """value float32, place int32 from 0 -> int64"""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 would come after 0.0
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats of a negative sign are ordered the wrong way round
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def key_value(key):
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def best_keys(key, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """key [C], distinct -> the largest COUNT, descending: [WIDTH], LAST past COUNT."""
    lane = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], LAST, tl.int64)
    for i in range(COUNT):
        top = tl.max(key, 0)
        best = tl.where(lane == i, top, best)
        key = tl.where(key == top, LAST, key)
    return best


@triton.jit
def _best_of_rows(key, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the best of each row of key [R, C]: [R, WIDTH]."""
    lane = tl.arange(0, WIDTH)[None, :]
    best = tl.full([key.shape[0], WIDTH], LAST, tl.int64)
    for i in range(COUNT):
        top = tl.max(key, 1)[:, None]
        best = tl.where(lane == i, top, best)
        key = tl.where(key == top, LAST, key)
    return best


# -- continuations ---------------------------------------------------------------------------------------------------


@triton.jit
def noisy_scores(
    ids, source, row, kv_len, seed, floats, target_ids, ahead, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Logits of the ids, of any shape, at kv_len + ahead of a row, with the noise of one that has a temperature; 0 past
    VOCAB. source: all its logits, floats: what it is drawn with."""
    valid = ids < VOCAB
    z = tl.load(source + ids, mask=valid, other=0.0).to(tl.float32)
    temperature, min_p = tl.load(floats), tl.load(floats + 2)
    if temperature > 0.0:
        if min_p > 0.0:  # each program looks through the row, which is in the caches: no launch for those without min-p
            peak = tl.full([BLOCK], float("-inf"), tl.float32)
            for first in range(0, VOCAB, BLOCK):
                at = first + tl.arange(0, BLOCK)
                every = tl.load(source + at, mask=at < VOCAB, other=float("-inf"))
                peak = tl.maximum(peak, every.to(tl.float32))
            z -= tl.maximum(tl.max(peak, 0) - z + temperature * tl.log(min_p), 0.0)
        named = ids
        if target_ids is not None:
            named = tl.load(target_ids + ids, mask=valid, other=0).to(tl.int32)
        low, high = position_words(tl.load(seed + row), tl.load(kv_len + row) + ahead)
        z = tl.fma(gumbel(low, high, named), temperature, z)  # not left to the compiler: all kernels must agree
    return z


@triton.jit
def merged_sums(sums, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """sums [CHUNKS, 2] of a row -> its peak, and the sum of exponentials below that."""
    chunk = tl.arange(0, CP)
    largest = tl.load(sums + chunk * 2, mask=chunk < CHUNKS, other=float("-inf"))
    total = tl.load(sums + chunk * 2 + 1, mask=chunk < CHUNKS, other=0.0)
    peak = tl.max(largest, 0)
    return peak, tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - peak), 0.0), 0)


@triton.jit(do_not_specialize=["per_row", "ahead"])
def _continuations_kernel(
    keys,
    sums,
    logits,
    logits_stride,
    rows,
    kv_len,
    seed,
    floats,
    floats_stride,
    target_ids,
    per_row,
    ahead,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    node, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + node // per_row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    valid = ids < VOCAB
    source = logits + node.to(tl.int64) * logits_stride
    z = noisy_scores(ids, source, row, kv_len, seed, floats + row * floats_stride, target_ids, ahead, VOCAB, BLOCK)
    key = tl.where(valid, sort_key(z, ids), LAST)
    best = best_keys(key, TOPK, KP)
    z = tl.where(valid, z, float("-inf"))
    largest = tl.max(z, 0)
    total = tl.sum(tl.where(z > float("-inf"), tl.exp(z - largest), 0.0), 0)
    at = node * CHUNKS + chunk
    lane = tl.arange(0, KP)
    tl.store(keys + at * TOPK + lane, best, mask=lane < TOPK)
    tl.store(sums + at * 2, largest)
    tl.store(sums + at * 2 + 1, total)


@triton.jit
def merge_chunks(
    keys, sums, target_ids, node, NODES: tl.constexpr, NP: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    TOPK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Chunks of the nodes node .. node + NODES - 1 -> target's ids (int64) and log probabilities [NP, KP]."""
    lane = tl.arange(0, NP)[:, None]
    at = tl.arange(0, CP * KP)[None, :]
    inside = (lane < NODES) & (at < CHUNKS * TOPK)
    key = tl.load(keys + (node + lane) * (CHUNKS * TOPK) + at, mask=inside, other=LAST)
    best = _best_of_rows(key, TOPK, KP)
    chunk = tl.arange(0, CP)[None, :]
    inside = (lane < NODES) & (chunk < CHUNKS)
    part = sums + ((node + lane) * CHUNKS + chunk) * 2
    largest = tl.load(part, mask=inside, other=float("-inf"))
    total = tl.load(part + 1, mask=inside, other=0.0)
    peak = tl.max(largest, 1)[:, None]
    total = tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - peak), 0.0), 1)[:, None]
    logp = key_value(best) - (peak + tl.log(total))
    ids = key_place(best)
    if target_ids is None:
        mapped = ids.to(tl.int64)
    else:
        column = tl.arange(0, KP)[None, :]
        mapped = tl.load(target_ids + ids, mask=(lane < NODES) & (column < TOPK), other=0)
    return mapped, logp


def continuations(
    logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, topk: int, target_ids: Tensor | None
) -> Continuations:
    """See `ExpansionOps.continuations`; which rows have a temperature is read on the device."""
    nodes, vocab = logits.shape
    assert nodes % rows.shape[0] == 0 and vocab >= topk and logits.stride(1) == 1
    assert target_ids is None or target_ids.shape[0] == vocab
    block = min(triton.next_power_of_2(vocab), 2048 if vocab <= 1 << 16 else 4096)
    chunks = triton.cdiv(vocab, block)
    keys = torch.empty(nodes, chunks, topk, dtype=torch.int64, device=logits.device)
    sums = torch.empty(nodes, chunks, 2, dtype=torch.float32, device=logits.device)
    _continuations_kernel[(nodes, chunks)](
        keys, sums, logits, logits.stride(0), rows, table.kv_len, table.seed, table.floats, table.floats.stride(0),
        target_ids, nodes // rows.shape[0], ahead, VOCAB=vocab, CHUNKS=chunks, BLOCK=block, TOPK=topk,
        KP=lanes(topk), num_warps=8 if block > 2048 else 4, **launch_options(logits.device),
    )  # fmt: skip
    return Continuations(keys, sums)


# -- pairs -----------------------------------------------------------------------------------------------------------


@triton.jit
def _log_sum(x):
    largest = tl.max(x, 0)
    return largest + tl.log(tl.sum(tl.exp(x - largest), 0))


@triton.jit(do_not_specialize=["per_row"], do_not_specialize_on_alignment=["keys", "sums"])  # those of a level
def _pairs_kernel(
    out_keys, out_sums, keys, sums, target_ids, above, gates, before, after, per_row,
    CHUNKS: tl.constexpr, CP: tl.constexpr, COUNT: tl.constexpr, KP: tl.constexpr, TOPK: tl.constexpr,
    RANK: tl.constexpr, RP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    node = tl.program_id(0)
    row = node // per_row
    at = tl.arange(0, CP * KP)
    best = best_keys(tl.load(keys + row * (CHUNKS * COUNT) + at, mask=at < CHUNKS * COUNT, other=LAST), COUNT, KP)
    peak, total = merged_sums(sums + row * CHUNKS * 2, CHUNKS, CP)
    lane = tl.arange(0, KP)
    known = lane < COUNT
    likely = tl.where(known, key_value(best) - (peak + tl.log(total)), float("-inf"))
    place = tl.where(known, key_place(best), 0)
    ids = place.to(tl.int64)
    if target_ids is not None:
        ids = tl.load(target_ids + place, mask=known, other=0)
    r = tl.arange(0, RP)
    gate = tl.load(gates + row.to(tl.int64) * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
    gate *= tl.load(before + tl.load(above + node) * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
    inside = known[:, None] & (r < RANK)[None, :]
    value = tl.load(after + ids[:, None] * RANK + r[None, :], mask=inside, other=0.0).to(tl.float32)
    scores = likely + tl.sum(value * gate[None, :], 1)
    scores += _log_sum(likely) - _log_sum(scores)
    best = best_keys(tl.where(known, sort_key(scores, place), LAST), TOPK, KP)
    tl.store(out_keys + node * TOPK + lane, best, mask=lane < TOPK)
    tl.store(out_sums + node * 2, 0.0)
    tl.store(out_sums + node * 2 + 1, 1.0)


def pair_continuations(
    candidates: Continuations, above: Tensor, gate: Tensor, before: Tensor, after: Tensor, topk: int,
    target_ids: Tensor | None,
) -> Continuations:  # fmt: skip
    """See `ExpansionOps.pair_continuations`: of the chunks of candidates a chunk for each node."""
    keys, sums = candidates
    (batch, chunks, count), nodes, rank = keys.shape, len(above), gate.shape[1]
    assert nodes % batch == 0 and topk <= count and all(x.is_contiguous() for x in (keys, sums, gate, before, after))
    found = Continuations(keys.new_empty(nodes, 1, topk), sums.new_empty(nodes, 1, 2))
    _pairs_kernel[(nodes,)](
        *found, keys, sums, target_ids, above, gate, before, after, nodes // batch, CHUNKS=chunks,
        CP=triton.next_power_of_2(chunks), COUNT=count, KP=lanes(count), TOPK=topk, RANK=rank,
        RP=triton.next_power_of_2(rank), num_warps=4, **launch_options(above.device),
    )  # fmt: skip
    return found
