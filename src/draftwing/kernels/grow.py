"""Triton kernels of a model drafter: everything that growth and observing do around the head's own forward.

A row of logits is cut into chunks, each of which gives its best continuations and its part of the normaliser
(`continuations`); whoever needs them merges the chunks first. So a level of growth is the head and two launches: the
chunks, then one kernel that merges them, chooses the next nodes and writes everything the head is fed with.

Values with their places are held as one int64 whose order is "larger value, then lower place". All numbers that vary
between rows (temperature, seed, length) are read by row, so that a captured launch serves any mix of requests.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.kernels.noise import gumbel, position_words
from draftwing.kernels.triton_common import launch_options, start
from draftwing.spec.drafter import Draft
from draftwing.spec.grow import First, Level, LevelRows, capacity

if TYPE_CHECKING:
    from draftwing.engine.slots import SlotTable

_LAST = tl.constexpr(-(1 << 63))  # after every key

# A launch's integers are fields of one tensor [fields, pitch] int64, padded so that each begins at 16 bytes.
# Those of a level, [B, K] each:
_IDS, _POSITIONS, _SLOTS, _PATH_LEN, _PARENT, _NUMBER = (tl.constexpr(i) for i in range(6))
_FIELDS = 6

_COLUMNS = 1024  # of a feature, copied by one program
_TILE = 16  # candidates that a candidate is compared with at a time


def _fields(count: int, like: Tensor, *shape: int) -> tuple[Tensor, list[Tensor]]:
    """A tensor of `count` fields of this shape, and the fields."""
    size = math.prod(shape)
    ints = torch.empty(count, size + size % 2, dtype=torch.int64, device=like.device)
    return ints, [field[:size].view(shape) for field in ints.unbind(0)]


@triton.jit
def _pitch(size):
    return size + size % 2


# -- values and places as one integer --------------------------------------------------------------------------------


@triton.jit
def _key(value, place):
    """value float32, place int32 from 0 -> int64"""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 would come after 0.0
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats of a negative sign are ordered the wrong way round
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _best(key, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """key [C], distinct -> the largest COUNT, descending: [WIDTH], _LAST past COUNT."""
    lane = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], _LAST, tl.int64)
    for i in range(COUNT):
        top = tl.max(key, 0)
        best = tl.where(lane == i, top, best)
        key = tl.where(key == top, _LAST, key)
    return best


@triton.jit
def _best_of_rows(key, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """The same for each row of key [R, C]: [R, WIDTH]."""
    lane = tl.arange(0, WIDTH)[None, :]
    best = tl.full([key.shape[0], WIDTH], _LAST, tl.int64)
    for i in range(COUNT):
        top = tl.max(key, 1)[:, None]
        best = tl.where(lane == i, top, best)
        key = tl.where(key == top, _LAST, key)
    return best


# -- continuations ---------------------------------------------------------------------------------------------------


class Continuations(NamedTuple):
    """The best continuations of M nodes, chunk by chunk of the vocabulary."""

    keys: Tensor  # [M, chunks, topk] int64, noisy logits with the head's ids
    sums: Tensor  # [M, chunks, 2] float32: the chunk's largest, and its sum of exponentials relative to it


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
    z = tl.load(logits + node.to(tl.int64) * logits_stride + ids, mask=valid, other=0.0).to(tl.float32)
    temperature = tl.load(floats + row * floats_stride)
    if temperature > 0.0:
        named = ids
        if target_ids is not None:
            named = tl.load(target_ids + ids, mask=valid, other=0).to(tl.int32)
        low, high = position_words(tl.load(seed + row), tl.load(kv_len + row) + ahead)
        z += gumbel(low, high, named) * temperature
    key = tl.where(valid, _key(z, ids), _LAST)
    best = _best(key, TOPK, KP)
    z = tl.where(valid, z, float("-inf"))
    largest = tl.max(z, 0)
    total = tl.sum(tl.where(z > float("-inf"), tl.exp(z - largest), 0.0), 0)
    at = node * CHUNKS + chunk
    lane = tl.arange(0, KP)
    tl.store(keys + at * TOPK + lane, best, mask=lane < TOPK)
    tl.store(sums + at * 2, largest)
    tl.store(sums + at * 2 + 1, total)


@triton.jit
def _merge(
    keys, sums, target_ids, node, NODES: tl.constexpr, NP: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    TOPK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Chunks of the nodes node .. node + NODES - 1 -> target's ids (int64) and log probabilities [NP, KP]."""
    lane = tl.arange(0, NP)[:, None]
    at = tl.arange(0, CP * KP)[None, :]
    inside = (lane < NODES) & (at < CHUNKS * TOPK)
    key = tl.load(keys + (node + lane) * (CHUNKS * TOPK) + at, mask=inside, other=_LAST)
    best = _best_of_rows(key, TOPK, KP)
    chunk = tl.arange(0, CP)[None, :]
    inside = (lane < NODES) & (chunk < CHUNKS)
    part = sums + ((node + lane) * CHUNKS + chunk) * 2
    largest = tl.load(part, mask=inside, other=float("-inf"))
    total = tl.load(part + 1, mask=inside, other=0.0)
    peak = tl.max(largest, 1)[:, None]
    total = tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - peak), 0.0), 1)[:, None]
    logp = _value(best) - (peak + tl.log(total))
    ids = _place(best)
    if target_ids is None:
        mapped = ids.to(tl.int64)
    else:
        column = tl.arange(0, KP)[None, :]
        mapped = tl.load(target_ids + ids, mask=(lane < NODES) & (column < TOPK), other=0)
    return mapped, logp


def continuations(
    logits: Tensor, slots: SlotTable, rows: Tensor, ahead: int, topk: int, target_ids: Tensor | None
) -> Continuations:
    """The best `topk` next tokens of logits [M, V], M a multiple of the rows [B]: M / B nodes of each.

    Rows with a temperature get it times the Gumbel noise of (the row's seed, position kv_len + ahead, target's id).
    target_ids [V] int64: the target's id of each of the head's tokens, None where they are the same.
    """
    nodes, vocab = logits.shape
    assert nodes % rows.shape[0] == 0 and vocab >= topk and logits.stride(1) == 1
    assert target_ids is None or target_ids.shape[0] == vocab
    block = min(triton.next_power_of_2(vocab), 2048 if vocab <= 1 << 16 else 4096)
    chunks = triton.cdiv(vocab, block)
    keys = torch.empty(nodes, chunks, topk, dtype=torch.int64, device=logits.device)
    sums = torch.empty(nodes, chunks, 2, dtype=torch.float32, device=logits.device)
    _continuations_kernel[(nodes, chunks)](
        keys, sums, logits, logits.stride(0), rows, slots.kv_len, slots.seed, slots.floats, slots.floats.stride(0),
        target_ids, nodes // rows.shape[0], ahead, VOCAB=vocab, CHUNKS=chunks, BLOCK=block, TOPK=topk,
        KP=_lanes(topk), num_warps=8 if block > 2048 else 4, **launch_options(logits.device),
    )  # fmt: skip
    return Continuations(keys, sums)


def _lanes(count: int) -> int:
    """A block of at least `count`; two at least, for reductions over an axis of one are not worth a special case."""
    return max(2, triton.next_power_of_2(count))


# -- growth ----------------------------------------------------------------------------------------------------------


@triton.jit
def _write_level(
    ints, path, above_path, table, table_stride, b, row, root_at, level, ids, parent, number,
    TOPK: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, PATH: tl.constexpr, TAIL: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """The integers and the paths of the chosen nodes of row b; ids, parent, number [KP]. Paths have WIDTH entries at
    every level, so that attention is compiled once for all; those past the node are 0."""
    lane = tl.arange(0, KP)
    inside = lane < TOPK
    own = TAIL + (level - 1) * TOPK + lane  # page-table entry past kv_len
    field = _pitch(tl.num_programs(0) * TOPK)
    at = ints + b * TOPK + lane
    tl.store(at + _IDS * field, ids, mask=inside)
    # A row that is made of the token after its position stands one earlier than that token.
    tl.store(at + _POSITIONS * field, lane * 0 + (root_at + level - LOOKAHEAD), mask=inside)
    tl.store(
        at + _SLOTS * field, tl.load(table + row * table_stride + root_at + own, mask=inside, other=0), mask=inside
    )
    width = TAIL + level
    tl.store(at + _PATH_LEN * field, lane * 0 + width, mask=inside)
    tl.store(at + _PARENT * field, parent.to(tl.int64), mask=inside)
    tl.store(at + _NUMBER * field, number.to(tl.int64), mask=inside)
    step = tl.arange(0, PATH)[None, :]
    if above_path is None:
        entry = tl.zeros([KP, PATH], tl.int64)  # the root's, where it has one
    else:
        above = above_path + (b * TOPK + parent[:, None]) * WIDTH + step
        entry = tl.load(above, mask=inside[:, None] & (step < width - 1), other=0)
    entry = tl.where(step == width - 1, own[:, None].to(tl.int64), entry)
    tl.store(path + (b * TOPK + lane[:, None]) * WIDTH + step, entry, mask=inside[:, None] & (step < WIDTH))


@triton.jit
def _copy_features(
    feature, source, source_stride, b, from_row, TOPK: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """This program's columns of the source's rows from_row [KP] (int64) -> rows of b's nodes."""
    lane = tl.arange(0, KP)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (lane < TOPK) & (column < SIZE)
    value = tl.load(source + from_row[:, None] * source_stride + column, mask=inside, other=0.0)
    tl.store(feature + (b * TOPK + lane).to(tl.int64) * SIZE + column, value, mask=inside)


@triton.jit
def _first_level_kernel(
    ints,
    score,
    path,
    feature,
    prefix,
    candidate_ints,
    candidate_score,
    rows,
    kv_len,
    table,
    table_stride,
    first_ids,
    first_logp,
    first_stride,
    seed_feature,
    CANDIDATES: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    WIDTH: tl.constexpr,
    PATH: tl.constexpr,
    TAIL: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    row = tl.load(rows + b)
    lane = tl.arange(0, KP)
    inside = lane < TOPK
    if tl.program_id(1) == 0:
        ids = tl.load(first_ids + row * first_stride + lane, mask=inside, other=0)
        logp = tl.load(first_logp + row * first_stride + lane, mask=inside, other=0.0)
        at = b * CANDIDATES + lane
        tl.store(candidate_ints + at, ids, mask=inside)
        tl.store(candidate_ints + tl.num_programs(0) * CANDIDATES + at, lane.to(tl.int64) * 0 - 1, mask=inside)
        tl.store(candidate_score + at, logp, mask=inside)
        tl.store(score + b * TOPK + lane, logp, mask=inside)
        root_at = tl.load(kv_len + row)
        tl.store(prefix + b, root_at)
        _write_level(
            ints, path, None, table, table_stride, b, row, root_at, 1, ids, lane * 0, lane,
            TOPK, KP, WIDTH, PATH, TAIL, LOOKAHEAD,
        )  # fmt: skip
    if SIZE > 0:
        _copy_features(feature, seed_feature, SIZE, b, lane.to(tl.int64) * 0 + row, TOPK, KP, SIZE, COLUMNS)


@triton.jit
def _score_level(
    candidate_ints, candidate_score, keys, sums, target_ids, above_ints, above_score, b, base, STORE,
    CANDIDATES: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Candidates that a level's continuations are, stored from number `base` on if STORE: ids, scores [KP, KP]."""
    ids, logp = _merge(keys, sums, target_ids, b * TOPK, TOPK, KP, CHUNKS, CP, TOPK, KP)
    lane = tl.arange(0, KP)
    above = tl.load(above_score + b * TOPK + lane, mask=lane < TOPK, other=0.0)
    total = above[:, None] + logp
    if STORE:
        field = _pitch(tl.num_programs(0) * TOPK)
        number = tl.load(above_ints + _NUMBER * field + b * TOPK + lane, mask=lane < TOPK, other=0)
        column = tl.arange(0, KP)[None, :]
        inside = (lane[:, None] < TOPK) & (column < TOPK)
        at = b * CANDIDATES + base + lane[:, None] * TOPK + column
        tl.store(candidate_ints + at, ids, mask=inside)
        parent = tl.zeros([KP, KP], tl.int64) + number[:, None]
        tl.store(candidate_ints + tl.num_programs(0) * CANDIDATES + at, parent, mask=inside)
        tl.store(candidate_score + at, total, mask=inside)
    return ids, total


@triton.jit(do_not_specialize=["level"])
def _next_level_kernel(
    ints,
    score,
    path,
    feature,
    candidate_ints,
    candidate_score,
    keys,
    sums,
    target_ids,
    above_ints,
    above_score,
    above_path,
    hidden,
    hidden_stride,
    rows,
    prefix,
    table,
    table_stride,
    level,
    CANDIDATES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    WIDTH: tl.constexpr,
    PATH: tl.constexpr,
    TAIL: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program of a row chooses, for the columns that it copies; the first one writes."""
    start(PDL)
    b = tl.program_id(0)
    writes = tl.program_id(1) == 0
    base = TOPK + (level - 2) * (TOPK * TOPK)
    ids, total = _score_level(
        candidate_ints, candidate_score, keys, sums, target_ids, above_ints, above_score, b, base, writes,
        CANDIDATES, CHUNKS, CP, TOPK, KP,
    )  # fmt: skip
    lane = tl.arange(0, KP)
    inside = (lane[:, None] < TOPK) & (lane[None, :] < TOPK)
    key = tl.where(inside, _key(total, lane[:, None] * TOPK + lane[None, :]), _LAST)
    best = _best(tl.reshape(key, [KP * KP]), TOPK, KP)
    place = tl.where(lane < TOPK, _place(best), 0)
    parent = place // TOPK
    if writes:
        flat = tl.arange(0, KP * KP)[None, :]
        taken = flat == (parent * KP + place % TOPK)[:, None]  # [KP, KP * KP]
        chosen = tl.sum(tl.where(taken, tl.reshape(ids, [1, KP * KP]), 0), 1)
        tl.store(score + b * TOPK + lane, _value(best), mask=lane < TOPK)
        _write_level(
            ints, path, above_path, table, table_stride, b, tl.load(rows + b), tl.load(prefix + b), level, chosen,
            parent, base + place, TOPK, KP, WIDTH, PATH, TAIL, LOOKAHEAD,
        )  # fmt: skip
    if SIZE > 0:
        from_row = (b * TOPK + parent).to(tl.int64)
        _copy_features(feature, hidden, hidden_stride, b, from_row, TOPK, KP, SIZE, COLUMNS)


@triton.jit
def _draft_kernel(
    ints,
    alive,
    candidate_ints,
    candidate_score,
    keys,
    sums,
    target_ids,
    above_ints,
    above_score,
    rows,
    last,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last level's candidates, then the best NODES - 1 of all. CHUNKS = 0: there is one level only."""
    start(PDL)
    b = tl.program_id(0)
    if CHUNKS > 0:
        base: tl.constexpr = CANDIDATES - TOPK * TOPK
        _score_level(
            candidate_ints, candidate_score, keys, sums, target_ids, above_ints, above_score, b, base, True,
            CANDIDATES, CHUNKS, CP, TOPK, KP,
        )  # fmt: skip
        tl.debug_barrier()
    i = tl.arange(0, BLOCK)
    inside = i < CANDIDATES
    scores = candidate_score + b * CANDIDATES
    key = tl.where(inside, _key(tl.load(scores + i, mask=inside, other=0.0), i), _LAST)
    rank = tl.zeros([BLOCK], tl.int32)  # how many come before
    for first in tl.range(0, CANDIDATES, TILE, loop_unroll_factor=4):
        j = first + tl.arange(0, TILE)
        other = tl.load(scores + j, mask=j < CANDIDATES, other=0.0)
        other = tl.where(j < CANDIDATES, _key(other, j), _LAST)
        rank += tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
    chosen = inside & (rank < NODES - 1)
    count = chosen.to(tl.int32)
    before = tl.cumsum(count, 0) - count  # chosen candidates of lower numbers: parents before children
    ids = tl.load(candidate_ints + b * CANDIDATES + i, mask=inside, other=0)
    above = tl.load(candidate_ints + (tl.num_programs(0) + b) * CANDIDATES + i, mask=inside, other=-1).to(tl.int32)
    parent = tl.where(above < 0, 0, tl.gather(before, tl.maximum(above, 0), 0) + 1)
    at = b * NODES + 1 + before
    field = _pitch(tl.num_programs(0) * NODES)
    tl.store(ints + at, ids, mask=chosen)
    tl.store(ints + field + at, parent.to(tl.int64), mask=chosen)
    tl.store(alive + at, chosen, mask=chosen)
    root = b * NODES
    tl.store(ints + root, tl.load(last + tl.load(rows + b)))
    tl.store(ints + field + root, 0)
    tl.store(alive + root, True)


class RowGrowth:
    """What `spec.grow.RowGrowth` does: one launch a level, and one for the draft.

    What was written stays valid: every level has tensors of its own.
    """

    def __init__(
        self,
        slots: SlotTable,
        rows: Tensor,
        shape: TreeShape,
        first: First,
        tail: int,
        lookahead: int,
        target_ids: Tensor | None,
    ) -> None:
        """As there. target_ids: as for `continuations`, whose results `add` takes."""
        self._slots, self._rows, self._shape, self._first = slots, rows, shape, first
        self._tail, self._lookahead, self._target_ids = tail, lookahead, target_ids
        size, candidates = rows.shape[0], capacity(shape.depth, shape.topk)
        assert shape.nodes - 1 <= candidates, "more nodes than growth has candidates"
        self._number = 0  # of the level that was chosen last
        self._ints = self._score = self._path = rows  # of that level; nothing yet
        self._fields: list[Tensor] = []
        self._feature: Tensor | None = None
        self._added: tuple[tuple[Tensor, Tensor], Tensor] | None = None  # of that level's nodes
        self.root_at = torch.empty(size, dtype=torch.int64, device=rows.device)  # written with the first level
        self._candidate_ints = torch.empty(2, size, candidates, dtype=torch.int64, device=rows.device)  # ids, parents
        self._candidate_score = torch.empty(size, candidates, dtype=torch.float32, device=rows.device)

    def level(self) -> Level:
        slots, rows, first, topk = self._slots, self._rows, self._first, self._shape.topk
        self._number += 1
        size, features = rows.shape[0], first.feature.shape[1]
        ints, fields = _fields(_FIELDS, rows, size, topk)
        score = torch.empty(size, topk, dtype=torch.float32, device=rows.device)
        width = self._tail + max(self._shape.depth - 1, 1)
        path = torch.empty(size, topk, width, dtype=torch.int64, device=rows.device)
        feature = first.feature.new_empty(size * topk, features) if features else None
        grid = (size, max(1, triton.cdiv(features, _COLUMNS)))
        options = dict(
            CANDIDATES=self._candidate_score.shape[1], TOPK=topk, KP=_lanes(topk),
            WIDTH=width, PATH=_lanes(width), TAIL=self._tail, LOOKAHEAD=self._lookahead, SIZE=features,
            COLUMNS=min(_COLUMNS, _lanes(features)), num_warps=4 if topk <= 8 else 8,
            **launch_options(rows.device),
        )  # fmt: skip
        if self._added is None:
            _first_level_kernel[grid](
                ints, score, path, feature, self.root_at, self._candidate_ints, self._candidate_score, rows,
                slots.kv_len, slots.table, slots.table.stride(0), first.ids, first.logp, first.ids.stride(0),
                first.feature, **options,
            )  # fmt: skip
        else:
            (keys, sums), hidden = self._added
            chunks = keys.shape[1]
            _next_level_kernel[grid](
                ints, score, path, feature, self._candidate_ints, self._candidate_score, keys, sums, self._target_ids,
                self._ints, self._score, self._path, hidden, hidden.stride(0), rows, self.root_at, slots.table,
                slots.table.stride(0), self._number, CHUNKS=chunks, CP=triton.next_power_of_2(chunks), **options,
            )  # fmt: skip
        self._ints, self._fields = ints, fields
        self._score, self._path, self._feature = score, path, feature
        return Level(fields[_IDS.value], fields[_PARENT.value])

    def level_rows(self) -> LevelRows:
        fields = self._fields
        return LevelRows(
            positions=fields[_POSITIONS.value],
            write_slots=fields[_SLOTS.value],
            path=self._path,
            path_len=fields[_PATH_LEN.value],
            feature=self._feature,
        )

    def level_feature(self) -> Tensor:
        assert self._feature is not None
        return self._feature

    def add(self, following: tuple[Tensor, Tensor], hidden: Tensor) -> None:
        """following: `Continuations` of the nodes of the level; hidden [B, K, width]."""
        hidden = hidden.flatten(0, 1)
        assert hidden.stride(1) == 1 or not self._first.feature.shape[1]
        self._added = following, hidden

    def draft(self) -> Draft:
        rows, shape = self._rows, self._shape
        if not self._number:
            self.level()  # for its candidates
        keys, sums = self._added[0] if self._added is not None else (None, None)
        chunks = keys.shape[1] if keys is not None else 0
        size, candidates = self._candidate_score.shape
        ints, (tokens, parent) = _fields(2, rows, size, shape.nodes)
        alive = torch.empty(size, shape.nodes, dtype=torch.bool, device=rows.device)
        _draft_kernel[(size,)](
            ints, alive, self._candidate_ints, self._candidate_score, keys, sums, self._target_ids,
            self._ints, self._score, rows, self._slots.last, NODES=shape.nodes, CANDIDATES=candidates,
            BLOCK=_lanes(candidates), TILE=_TILE, CHUNKS=chunks, CP=triton.next_power_of_2(max(chunks, 1)),
            TOPK=shape.topk, KP=_lanes(shape.topk), num_warps=8, **launch_options(rows.device),
        )  # fmt: skip
        return Draft(tokens, parent, alive)


# -- committed text --------------------------------------------------------------------------------------------------


@triton.jit
def _newest_kernel(
    newest,
    seed_feature,
    hidden,
    hidden_stride,
    rows,
    count,
    QUERIES: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    source = b * QUERIES + tl.load(count + b) - LOOKAHEAD
    value = tl.load(hidden + source.to(tl.int64) * hidden_stride + column, mask=inside, other=0.0)
    tl.store(newest + b.to(tl.int64) * SIZE + column, value, mask=inside)
    if seed_feature is not None:
        tl.store(seed_feature + tl.load(rows + b).to(tl.int64) * SIZE + column, value, mask=inside)


def newest_rows(hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, seed_feature: Tensor | None) -> Tensor:
    """hidden [B * Q, H], Q rows of each batch row -> its row count[b] - lookahead, [B, H]; also written into
    seed_feature [R + 1, H], at rows [B]."""
    size = rows.shape[0]
    width = hidden.shape[1]
    newest = hidden.new_empty(size, width)
    assert hidden.shape[0] % size == 0 and hidden.stride(1) == 1
    assert seed_feature is None or (seed_feature.shape[1] == width and seed_feature.is_contiguous())
    _newest_kernel[(size, triton.cdiv(width, _COLUMNS))](
        newest, seed_feature, hidden, hidden.stride(0), rows, count, QUERIES=hidden.shape[0] // size,
        LOOKAHEAD=lookahead, SIZE=width, COLUMNS=_COLUMNS, num_warps=4, **launch_options(hidden.device),
    )  # fmt: skip
    return newest


@triton.jit
def _keep_first_kernel(
    first_ids,
    first_logp,
    first_stride,
    keys,
    sums,
    target_ids,
    rows,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    ids, logp = _merge(keys, sums, target_ids, b, 1, 1, CHUNKS, CP, TOPK, KP)
    lane = tl.arange(0, KP)[None, :]
    at = tl.load(rows + b) * first_stride + lane
    tl.store(first_ids + at, ids, mask=lane < TOPK)
    tl.store(first_logp + at, logp, mask=lane < TOPK)


def keep_first(
    following: tuple[Tensor, Tensor], rows: Tensor, first_ids: Tensor, first_logp: Tensor, target_ids: Tensor | None
) -> None:
    """Merges `Continuations` of one node for each of rows [B] into first_ids, first_logp [R + 1, topk]."""
    keys, sums = following
    chunks, topk = keys.shape[1:]
    assert first_ids.shape[1] == topk and first_ids.stride(0) == first_logp.stride(0)
    _keep_first_kernel[(rows.shape[0],)](
        first_ids, first_logp, first_ids.stride(0), keys, sums, target_ids, rows,
        CHUNKS=chunks, CP=triton.next_power_of_2(chunks), TOPK=topk, KP=_lanes(topk), num_warps=4,
        **launch_options(rows.device),
    )  # fmt: skip


@triton.jit
def _chain_kernel(
    ints,
    path,
    tokens,
    tokens_stride,
    table,
    table_stride,
    rows,
    prefix,
    WIDTH: tl.constexpr,
    WP: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    row, begin = tl.load(rows + b), tl.load(prefix + b)
    step = tl.arange(0, WP)
    inside = step < WIDTH
    position = begin + step
    field = _pitch(tl.num_programs(0) * WIDTH)
    at = ints + b * WIDTH + step
    tl.store(at, tl.load(tokens + row * tokens_stride + position, mask=inside, other=0), mask=inside)
    tl.store(at + field, position, mask=inside)
    tl.store(at + 2 * field, tl.load(table + row * table_stride + position, mask=inside, other=0), mask=inside)
    tl.store(at + 3 * field, step.to(tl.int64) + 1, mask=inside)
    square = path + (b * WIDTH + step[:, None]) * WIDTH + step[None, :]
    entry = tl.zeros([WP, WP], tl.int64) + step[None, :]
    tl.store(square, entry, mask=inside[:, None] & inside[None, :])


class Chain(NamedTuple):
    """A chain of Q known tokens in each row of a batch, as `attn.base.Batch` has them."""

    ids: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    write_slots: Tensor  # [B, Q]
    path_len: Tensor  # [B, Q]
    path: Tensor  # [B, Q, Q]


def chain(slots: SlotTable, rows: Tensor, prefix: Tensor, width: int) -> Chain:
    """Tokens at the positions prefix[b] .. prefix[b] + width - 1 of rows [B], from the token history."""
    size = rows.shape[0]
    ints, fields = _fields(4, rows, size, width)
    path = torch.empty(size, width, width, dtype=torch.int64, device=rows.device)
    _chain_kernel[(size,)](
        ints, path, slots.tokens, slots.tokens.stride(0), slots.table, slots.table.stride(0), rows, prefix,
        WIDTH=width, WP=_lanes(width), num_warps=1, **launch_options(rows.device),
    )  # fmt: skip
    ids, positions, write_slots, path_len = fields
    return Chain(ids, positions, write_slots, path_len, path)
