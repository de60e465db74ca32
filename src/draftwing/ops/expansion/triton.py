"""Tree expansion in Triton: everything around the head's own forward.

A level is the head and two launches: the chunks of its continuations (`continuations`), then one kernel that merges
them, chooses the next nodes and writes everything the head is fed with.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.config.trees import MODEL, TreeShape
from draftwing.ops.assign.spec import LEVELS
from draftwing.ops.assign.triton import level_of
from draftwing.ops.expansion.spec import capacity
from draftwing.ops.expansion.triton_continuations import LAST, best_keys, key_place, key_value, merge_chunks, sort_key
from draftwing.ops.triton.common import FEATURE_COLUMNS, field_pitch, int_fields, lanes, launch_options, start
from draftwing.ops.types import Continuations, Draft, First, Level, LevelRows, RowTensors

# Fields of a level's integers (`int_fields`), [B, K] each:
_IDS, _POSITIONS, _SLOTS, _PATH_LEN, _PARENT, _NUMBER = (tl.constexpr(i) for i in range(6))
_FIELDS = 6

_TILE = 16  # candidates that a candidate is compared with at a time


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
    field = field_pitch(tl.num_programs(0) * TOPK)
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
    """Copies this program's columns of the source's rows from_row [KP] (int64) -> rows of b's nodes."""
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
    ids, logp = merge_chunks(keys, sums, target_ids, b * TOPK, TOPK, KP, CHUNKS, CP, TOPK, KP)
    lane = tl.arange(0, KP)
    above = tl.load(above_score + b * TOPK + lane, mask=lane < TOPK, other=0.0)
    total = above[:, None] + logp
    if STORE:
        field = field_pitch(tl.num_programs(0) * TOPK)
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
    key = tl.where(inside, sort_key(total, lane[:, None] * TOPK + lane[None, :]), LAST)
    best = best_keys(tl.reshape(key, [KP * KP]), TOPK, KP)
    place = tl.where(lane < TOPK, key_place(best), 0)
    parent = place // TOPK
    if writes:
        flat = tl.arange(0, KP * KP)[None, :]
        taken = flat == (parent * KP + place % TOPK)[:, None]  # [KP, KP * KP]
        chosen = tl.sum(tl.where(taken, tl.reshape(ids, [1, KP * KP]), 0), 1)
        tl.store(score + b * TOPK + lane, key_value(best), mask=lane < TOPK)
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
    GRADE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last level's candidates, then the best NODES - 1 of all. CHUNKS = 0: there is one level only. GRADE: of a
    node of level 0."""
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
    key = tl.where(inside, sort_key(tl.load(scores + i, mask=inside, other=0.0), i), LAST)
    rank = tl.zeros([BLOCK], tl.int32)  # how many come before
    for first in tl.range(0, CANDIDATES, TILE, loop_unroll_factor=4):
        j = first + tl.arange(0, TILE)
        other = tl.load(scores + j, mask=j < CANDIDATES, other=0.0)
        other = tl.where(j < CANDIDATES, sort_key(other, j), LAST)
        rank += tl.sum((other[None, :] > key[:, None]).to(tl.int32), 1)
    chosen = inside & (rank < NODES - 1)
    count = chosen.to(tl.int32)
    before = tl.cumsum(count, 0) - count  # chosen candidates of lower numbers: parents before children
    ids = tl.load(candidate_ints + b * CANDIDATES + i, mask=inside, other=0)
    above = tl.load(candidate_ints + (tl.num_programs(0) + b) * CANDIDATES + i, mask=inside, other=-1).to(tl.int32)
    parent = tl.where(above < 0, 0, tl.gather(before, tl.maximum(above, 0), 0) + 1)
    given = tl.load(scores + above, mask=chosen & (above >= 0), other=0.0)
    logp = tl.load(scores + i, mask=chosen, other=0.0) - given  # if the node above is right
    at = b * NODES + 1 + before
    field = field_pitch(tl.num_programs(0) * NODES)
    tl.store(ints + at, ids, mask=chosen)
    tl.store(ints + field + at, parent.to(tl.int64), mask=chosen)
    tl.store(ints + 2 * field + at, GRADE + level_of(logp), mask=chosen)
    tl.store(alive + at, chosen, mask=chosen)
    root = b * NODES
    tl.store(ints + root, tl.load(last + tl.load(rows + b)))
    tl.store(ints + field + root, 0)
    tl.store(ints + 2 * field + root, 0)
    tl.store(alive + root, True)


class TritonTreeExpansion:
    """An `Expansion` in Triton: one launch a level, and one for the draft.

    What was written stays valid: every level has tensors of its own.
    """

    def __init__(
        self,
        table: RowTensors,
        rows: Tensor,
        shape: TreeShape,
        first: First,
        tail: int,
        lookahead: int,
        target_ids: Tensor | None,
    ) -> None:
        """See `ExpansionOps.expand`."""
        self._table, self._rows, self._shape, self._first = table, rows, shape, first
        self._tail, self._lookahead, self._target_ids = tail, lookahead, target_ids
        size, candidates = rows.shape[0], capacity(shape.depth, shape.topk)
        assert shape.nodes - 1 <= candidates, "more nodes than expansion has candidates"
        self._number = 0  # of the level that was chosen last
        self._ints = self._score = self._path = rows  # of that level; nothing yet
        self._fields: list[Tensor] = []
        self._feature: Tensor | None = None
        self._added: tuple[Continuations, Tensor] | None = None  # of that level's nodes
        self.root_at = torch.empty(size, dtype=torch.int64, device=rows.device)  # written with the first level
        self._candidate_ints = torch.empty(2, size, candidates, dtype=torch.int64, device=rows.device)  # ids, parents
        self._candidate_score = torch.empty(size, candidates, dtype=torch.float32, device=rows.device)

    def level(self) -> Level:
        table, rows, first, topk = self._table, self._rows, self._first, self._shape.topk
        self._number += 1
        size, features = rows.shape[0], first.feature.shape[1]
        ints, fields = int_fields(_FIELDS, rows, size, topk)
        score = torch.empty(size, topk, dtype=torch.float32, device=rows.device)
        width = self._tail + max(self._shape.depth - 1, 1)
        path = torch.empty(size, topk, width, dtype=torch.int64, device=rows.device)
        feature = first.feature.new_empty(size * topk, features) if features else None
        grid = (size, max(1, triton.cdiv(features, FEATURE_COLUMNS)))
        options = dict(
            CANDIDATES=self._candidate_score.shape[1], TOPK=topk, KP=lanes(topk),
            WIDTH=width, PATH=lanes(width), TAIL=self._tail, LOOKAHEAD=self._lookahead, SIZE=features,
            COLUMNS=min(FEATURE_COLUMNS, lanes(features)), num_warps=4 if topk <= 8 else 8,
            **launch_options(rows.device),
        )  # fmt: skip
        if self._added is None:
            _first_level_kernel[grid](
                ints, score, path, feature, self.root_at, self._candidate_ints, self._candidate_score, rows,
                table.kv_len, table.page_table, table.page_table.stride(0), first.ids, first.logp, first.ids.stride(0),
                first.feature, **options,
            )  # fmt: skip
        else:
            (keys, sums), hidden = self._added
            chunks = keys.shape[1]
            _next_level_kernel[grid](
                ints, score, path, feature, self._candidate_ints, self._candidate_score, keys, sums, self._target_ids,
                self._ints, self._score, self._path, hidden, hidden.stride(0), rows, self.root_at, table.page_table,
                table.page_table.stride(0), self._number, CHUNKS=chunks, CP=triton.next_power_of_2(chunks), **options,
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

    def add(self, following: Continuations, hidden: Tensor) -> None:
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
        ints, (tokens, parent, grade) = int_fields(3, rows, size, shape.nodes)
        alive = torch.empty(size, shape.nodes, dtype=torch.bool, device=rows.device)
        _draft_kernel[(size,)](
            ints, alive, self._candidate_ints, self._candidate_score, keys, sums, self._target_ids,
            self._ints, self._score, rows, self._table.last, NODES=shape.nodes, CANDIDATES=candidates,
            BLOCK=lanes(candidates), TILE=_TILE, CHUNKS=chunks, CP=triton.next_power_of_2(max(chunks, 1)),
            TOPK=shape.topk, KP=lanes(shape.topk), GRADE=LEVELS * MODEL, num_warps=8, **launch_options(rows.device),
        )  # fmt: skip
        return Draft(tokens, parent, alive, grade)
