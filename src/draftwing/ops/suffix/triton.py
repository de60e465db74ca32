"""The suffix drafter on the GPU, three launches a step: insert, grow, emit.

The kernels work on the tensors of `ops.suffix.spec` and use its terms. What two rows write in one step may be one
bucket's: a bucket is one program's, which takes rows in turn. The dummy row learns and proposes nothing.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE
from draftwing.ops.assign.spec import LEVELS
from draftwing.ops.suffix.spec import BACK, BASE, FIRST, MAX_COUNT, SCORE_BITS, SECOND, WAYS, SuffixIndex
from draftwing.ops.triton.common import INTERPRETED, launch_options, start
from draftwing.ops.types import Draft, RowTensors

PARTS = 16  # programs that share the buckets of one length
_POOL = 32  # places for what follows a node
_LONG_ROW = 64  # tokens of a row from which on the interpreter has several programs, too
_LANES = 32  # tokens that a program looks at together

assert BACK * WAYS <= _POOL and WAYS == 8

_WAYS: tl.constexpr = tl.constexpr(8)
_TOKEN_BITS: tl.constexpr = tl.constexpr(22)
_CHECK_BITS: tl.constexpr = tl.constexpr(31)
_NAME_BITS: tl.constexpr = tl.constexpr(53)
_TOKEN: tl.constexpr = tl.constexpr((1 << 22) - 1)
_CHECK: tl.constexpr = tl.constexpr((1 << 31) - 1)
_NAME: tl.constexpr = tl.constexpr((1 << 53) - 1)
_MAX_COUNT: tl.constexpr = tl.constexpr(MAX_COUNT)
_BASE: tl.constexpr = tl.constexpr(BASE)
_FIRST: tl.constexpr = tl.constexpr(FIRST)
_SECOND: tl.constexpr = tl.constexpr(SECOND)
_GRADE: tl.constexpr = tl.constexpr(LOOKUP * LEVELS)
_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_SCORE: tl.constexpr = tl.constexpr(1 << SCORE_BITS)


@triton.jit
def _bucket(key, BUCKETS: tl.constexpr):
    """The bucket among those of one length, and the check of its ways."""
    key = key * _FIRST
    key = (key ^ ((key >> 32) & 0xFFFFFFFF)) * _SECOND
    key = key ^ ((key >> 29) & 0x7FFFFFFFF)
    return (key >> _CHECK_BITS) & (BUCKETS - 1), key & _CHECK


@triton.jit
def _learn(ways_ptr, check, token):
    """The token moves to the first way of the bucket, what it passes moves on by one; and what followed the context
    instead counts half."""
    way = tl.arange(0, _WAYS)
    name = (check << _TOKEN_BITS) | token
    ways = tl.load(ways_ptr + way)
    before = tl.load(ways_ptr + way - 1, mask=way > 0, other=0)
    same = (ways & _NAME) == name
    at = tl.min(tl.where(same, way, _WAYS - 1), 0)
    count = tl.minimum(tl.sum(tl.where(same & (way == at), ways >> _NAME_BITS, 0), 0) + 1, _MAX_COUNT)
    tl.debug_barrier()  # all is read before anything is written
    moved = tl.where(way <= at, before, ways)
    halved = ((((moved >> _NAME_BITS) + 1) >> 1) << _NAME_BITS) | (moved & _NAME)
    moved = tl.where(((moved >> _TOKEN_BITS) & _CHECK) == check, halved, moved)
    tl.store(ways_ptr + way, tl.where(way == 0, (count << _NAME_BITS) | name, moved))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["context", "real", "batch", "limit"])
def _insert_kernel(
    tokens_ptr, context, rows_ptr, batch, limit, real, prefix_ptr, count_ptr, owner_ptr, length_ptr, factors_ptr,
    table_ptr,
    BUCKETS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
    LANES: tl.constexpr, IMAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (lengths, PARTS): a program learns all that goes to its share of the buckets of one length, row by row, so
    that the table is the same each time, and on each rank."""
    start(PDL)
    w = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(length_ptr + w)
    table = table_ptr + w.to(tl.int64) * (BUCKETS * _WAYS)
    k = tl.arange(0, WIDTH_BLOCK)
    lane = tl.arange(0, LANES)
    factors = tl.load(factors_ptr + w * WIDTH + k, mask=k < WIDTH, other=0)
    NONE: tl.constexpr = 2 * LANES
    for first in range(0, batch * limit, LANES):
        b = (first + lane) // limit
        inside = b < batch
        row = tl.load(rows_ptr + b, mask=inside, other=0)
        at = tl.load(prefix_ptr + b, mask=inside, other=0) + 1 + (first + lane) % limit
        end = tl.load(prefix_ptr + b, mask=inside, other=0) + 1 + tl.load(count_ptr + b, mask=inside, other=0)
        known = inside & (row < real) & (at < tl.minimum(end, context)) & (at >= length)
        text = tokens_ptr + row * context
        token = tl.load(text + at, mask=known, other=0)
        known = known & (token != IMAGE)
        place = at[:, None] - WIDTH + k[None, :]  # of the context that ends before the token
        here = known[:, None] & (k < WIDTH)[None, :] & (place >= 0)
        cells = tl.load(text[:, None] + place, mask=here, other=-1) + 1
        hashed = tl.sum(cells * factors[None, :], 1)
        own, check = _bucket(hashed + tl.load(owner_ptr + 2 * row, mask=known, other=0), BUCKETS)
        all_, all_check = _bucket(hashed + tl.load(owner_ptr + 2 * row + 1, mask=known, other=0), BUCKETS)
        own_left = known & (own % PARTS == part)
        all_left = known & (all_ % PARTS == part) & SHARED
        turn = _next(own_left, all_left, lane, NONE)
        while turn < NONE:
            chosen = lane == turn // 2
            to_all = chosen & (turn % 2 == 1)
            to_own = chosen & (turn % 2 == 0)
            bucket = tl.sum(tl.where(to_own, own, 0) + tl.where(to_all, all_, 0), 0)
            named = tl.sum(tl.where(to_own, check, 0) + tl.where(to_all, all_check, 0), 0)
            _learn(table + bucket * _WAYS, named, tl.sum(tl.where(chosen, token, 0), 0))
            own_left = own_left & (to_own == 0)
            all_left = all_left & (to_all == 0)
            turn = _next(own_left, all_left, lane, NONE)


@triton.jit
def _next(own, shared, lane, NONE: tl.constexpr):
    """The first that is left, of a token the row's own before that of its salt; NONE: nothing is."""
    return tl.minimum(tl.min(tl.where(own, 2 * lane, NONE), 0), tl.min(tl.where(shared, 2 * lane + 1, NONE), 0))


@triton.jit
def _known(
    context_ptr, own, salt, behind, end, length_ptr, factors_ptr, table_ptr,
    BUCKETS: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """Looks up, for each length and owner, the row's own second: whether that end of a context is known, where its
    bucket begins, and the check of its ways. [2 * COUNT_BLOCK] each."""
    k = tl.arange(0, WIDTH_BLOCK)[None, :]
    pair = tl.arange(0, 2 * COUNT_BLOCK)
    w = pair // 2
    cells = tl.load(context_ptr + k, mask=k < WIDTH, other=0)
    factors = tl.load(factors_ptr + w[:, None] * WIDTH + k, mask=(k < WIDTH) & (w[:, None] < COUNT), other=0)
    hashed = tl.sum(cells * factors, 1)
    bucket, check = _bucket(hashed + tl.where(pair % 2 == 1, own, salt), BUCKETS)
    length = tl.load(length_ptr + w, mask=w < COUNT, other=0)
    fits = (w < end) & (w < COUNT) & (length <= behind)
    first = (w.to(tl.int64) * BUCKETS + bucket) * _WAYS
    way = tl.arange(0, _WAYS)[None, :]
    ways = tl.load(table_ptr + first[:, None] + way, mask=fits[:, None], other=0)
    counts = (ways > 0) & (((ways >> _TOKEN_BITS) & _CHECK) == check[:, None])
    return tl.max(counts.to(tl.int32), 1) > 0, first, check


@triton.jit
def _open(
    known, first, check, mine, least, starts, table_ptr, escape_ptr, paths_ptr, tokens_ptr, grades_ptr,
    COUNT_BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Writes what follows a node by the BACK best of the known contexts: probabilities of the paths, tokens and
    grades."""
    pair = tl.arange(0, 2 * COUNT_BLOCK)
    way = tl.arange(0, _WAYS)
    left = mine * 0 + 1  # of the probability, for what the contexts so far have not seen
    newer = tl.zeros([_WAYS], tl.int64) - 1
    older = tl.zeros([_WAYS], tl.int64) - 1
    for back in tl.static_range(BACK):
        best = tl.max(tl.where(known, pair, -1), 0)
        chosen = known & (pair == best)
        where = tl.sum(tl.where(chosen, first, 0), 0)
        wanted = tl.sum(tl.where(chosen, check, 0), 0)
        known = known & (pair != best)
        ways = tl.load(table_ptr + where + way, mask=(way >= 0) & (best >= 0), other=0)
        token = ways & _TOKEN
        fresh = (ways > 0) & (((ways >> _TOKEN_BITS) & _CHECK) == wanted)
        seen = (token[:, None] == newer[None, :]) | (token[:, None] == older[None, :])
        fresh = fresh & (tl.max(seen.to(tl.int32), 1) == 0)
        count = tl.where(fresh, ways >> _NAME_BITS, 0).to(tl.float32)
        escape = tl.load(escape_ptr + tl.maximum(best ^ 1, 0) * (_WAYS + 1) + tl.sum(fresh.to(tl.int32), 0))
        total = tl.sum(count, 0) + escape
        some = total > 0
        total = tl.where(some, total, 1.0)
        single = left * tl.div_rn(count, count * 0 + total)
        onwards = mine * single
        high = (single[:, None] >= starts[None, :]).to(tl.int64)
        tl.store(tokens_ptr + back * _WAYS + way, token)
        tl.store(grades_ptr + back * _WAYS + way, tl.sum(high, 1) + _GRADE)
        tl.store(paths_ptr + back * _WAYS + way, tl.where(fresh & (onwards >= least), onwards, 0.0))
        left = tl.where(some, left * tl.div_rn(escape, total), left)
        older = newer
        newer = tl.where(fresh, token, -1)


@triton.jit(do_not_specialize=["context", "real", "out_stride"])
def _grow_kernel(
    tokens_ptr, context, kv_len_ptr, rows_ptr, real, owner_ptr, length_ptr, factors_ptr, table_ptr, escape_ptr,
    starts_ptr, least_ptr, grown_ptr, pitch, contexts_ptr, reach_ptr, path_ptr, token_ptr, grade_ptr,
    out_ptr, out_stride,
    BUCKETS: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, DEPTH: tl.constexpr, NODES: tl.constexpr, NODES_BLOCK: tl.constexpr,
    BACK: tl.constexpr, MAX_CONFIDENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    newest = tl.load(kv_len_ptr + row)
    own = tl.load(owner_ptr + 2 * row)
    salt = tl.load(owner_ptr + 2 * row + 1)
    least = tl.load(least_ptr)
    behind = tl.where(row < real, newest + 1, 0)
    grown = grown_ptr + row * NODES
    contexts = contexts_ptr + b * (NODES * WIDTH)
    reaches = reach_ptr + b * NODES
    SIZE: tl.constexpr = BACK * _WAYS
    POOL: tl.constexpr = NODES_BLOCK * 32  # a power of two, at least NODES * SIZE
    paths, tokens, grades = path_ptr + b * POOL, token_ptr + b * POOL, grade_ptr + b * POOL

    k = tl.arange(0, WIDTH_BLOCK)
    node = tl.arange(0, NODES_BLOCK)
    inside = node < NODES
    for field in tl.static_range(4):
        tl.store(grown + field * pitch + node, tl.zeros([NODES_BLOCK], tl.int64), mask=inside)
    waiting = tl.arange(0, POOL)
    level = tl.arange(0, _LEVELS)
    tl.store(paths + waiting, tl.zeros([POOL], tl.float32))
    place = tl.maximum(newest - (WIDTH - 1) + k, 0)
    cells = tl.load(tokens_ptr + row * context + place, mask=k < WIDTH, other=0).to(tl.int64) + 1
    starts = tl.load(starts_ptr + level, mask=level < _LEVELS - 1, other=2.0)
    tl.debug_barrier()

    depth = newest * 0
    end = newest * 0 + COUNT
    mine = least * 0 + 1
    total = newest * 0
    n = 0
    while n < NODES:
        if n > 0:
            path = tl.load(paths + waiting)
            mine = tl.max(path, 0)
            best = tl.min(tl.where(path == mine, waiting, POOL), 0)  # of equals the first
            parent = best // SIZE
            depth = tl.load(grown + 2 * pitch + parent) + 1
            end = tl.load(reaches + parent)
            token = tl.load(tokens + best)
            grade = tl.load(grades + best)
            cells = tl.load(contexts + parent * WIDTH + k + 1, mask=k < WIDTH - 1, other=0)
            cells = tl.where(k == WIDTH - 1, token + 1, cells)
            tl.debug_barrier()  # all is read before anything is written
            if mine > 0:
                tl.store(paths + best, 0.0)
                tl.store(grown + n, token)
                tl.store(grown + pitch + n, parent.to(tl.int64))
                tl.store(grown + 2 * pitch + n, depth)
                tl.store(grown + 3 * pitch + n, grade)
                total += (mine * _SCORE).to(tl.int64)
        if mine > 0:
            tl.store(contexts + n * WIDTH + k, cells, mask=k < WIDTH)
            tl.debug_barrier()
            if (depth < DEPTH) & (n < NODES - 1):
                known, first, check = _known(
                    contexts + n * WIDTH, own, salt, behind + depth, end, length_ptr, factors_ptr, table_ptr,
                    BUCKETS, COUNT, COUNT_BLOCK, WIDTH, WIDTH_BLOCK,
                )  # fmt: skip
                here = n * SIZE
                _open(
                    known, first, check, mine, least, starts, table_ptr, escape_ptr, paths + here, tokens + here,
                    grades + here, COUNT_BLOCK, BACK,
                )  # fmt: skip
                reach = tl.max(tl.where(known, tl.arange(0, 2 * COUNT_BLOCK), -1), 0) // 2 + 2
                tl.store(reaches + n, tl.minimum(reach, COUNT).to(tl.int64))
            tl.debug_barrier()
            n += 1
        else:
            n = NODES
    score = (total + _SCORE // 2) // _SCORE
    one = tl.load(grown + 2 * pitch + 1)  # whether there is a node at all
    score = tl.maximum(score, tl.minimum(one, 1))
    tl.store(out_ptr + b * out_stride, tl.minimum(score, MAX_CONFIDENCE))


@triton.jit(do_not_specialize=["depth"])
def _emit_kernel(
    grown_ptr, pitch, last_ptr, rows_ptr, place_ptr, tokens_ptr, parent_ptr, alive_ptr, grade_ptr, depth,
    KEPT: tl.constexpr, KEPT_BLOCK: tl.constexpr, NODES: tl.constexpr, NODES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    root = tl.load(last_ptr + row)
    grown = grown_ptr + row * KEPT
    n = tl.arange(0, KEPT_BLOCK)
    level = tl.load(grown + 2 * pitch + n, mask=n < KEPT, other=0)
    fits = (level > 0) & (level <= depth)
    place = tl.cumsum(fits.to(tl.int64), 0)
    fits = fits & (place < NODES)
    place = tl.where(fits, place, 0)
    tl.store(place_ptr + b * KEPT_BLOCK + n, place)
    tl.debug_barrier()
    above = tl.load(grown + pitch + n, mask=fits, other=0)
    parent = tl.load(place_ptr + b * KEPT_BLOCK + above, mask=fits, other=0)
    token = tl.load(grown + n, mask=fits, other=0)
    grade = tl.load(grown + 3 * pitch + n, mask=fits, other=0)
    first = b * NODES
    tl.store(tokens_ptr + first + place, token, mask=fits)
    tl.store(parent_ptr + first + place, parent, mask=fits)
    tl.store(grade_ptr + first + place, grade, mask=fits)
    tl.store(alive_ptr + first + place, fits.to(tl.uint8), mask=fits)
    node = tl.arange(0, NODES_BLOCK)
    rest = (node < NODES) & ((node == 0) | (node > tl.sum(fits.to(tl.int32), 0)))
    zero = tl.zeros([NODES_BLOCK], tl.int64)
    tl.store(tokens_ptr + first + node, zero + root, mask=rest)
    tl.store(parent_ptr + first + node, zero, mask=rest)
    tl.store(grade_ptr + first + node, zero, mask=rest)
    tl.store(alive_ptr + first + node, (node == 0).to(tl.uint8), mask=rest)


class TritonSuffixIndex(SuffixIndex):
    """The trie in Triton."""

    def insert(
        self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int, shared: bool = True
    ) -> None:
        tokens, lengths = table.tokens, len(self.lengths)
        parts = 1 if INTERPRETED and limit < _LONG_ROW else PARTS
        _insert_kernel[(lengths, parts)](
            tokens, tokens.shape[1], rows, rows.shape[0], limit, self.rows, prefix_len, count, self.owner, self.length,
            self.factors, self.table,
            BUCKETS=self.buckets, WIDTH=self.width, WIDTH_BLOCK=triton.next_power_of_2(self.width), PARTS=parts,
            SHARED=shared, LANES=_LANES, IMAGE=self.image_token, num_warps=1, **launch_options(tokens.device),
        )  # fmt: skip

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(rows) if out is None else out
        tokens, batch, nodes, count = table.tokens, rows.shape[0], self.nodes, len(self.lengths)
        block = triton.next_power_of_2(nodes)
        contexts = rows.new_empty(batch, nodes, self.width)
        reach = rows.new_empty(batch, nodes)
        path = torch.empty(batch, block * _POOL, dtype=torch.float32, device=rows.device)
        token, grade = rows.new_empty(2, batch, block * _POOL)
        _grow_kernel[(batch,)](
            tokens, tokens.shape[1], table.kv_len, rows, self.rows, self.owner, self.length, self.factors, self.table,
            self.escape, self.starts, self.least, self.grown, self.grown.stride(0), contexts, reach, path, token,
            grade, out, out.stride(0),
            BUCKETS=self.buckets, COUNT=count, COUNT_BLOCK=triton.next_power_of_2(count), WIDTH=self.width,
            WIDTH_BLOCK=triton.next_power_of_2(self.width), DEPTH=self.depth, NODES=nodes, NODES_BLOCK=block, BACK=BACK,
            MAX_CONFIDENCE=MAX_CONFIDENCE, num_warps=4, **launch_options(rows.device),
        )  # fmt: skip
        return out

    def emit(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        batch, kept = rows.shape[0], triton.next_power_of_2(self.nodes)
        place = rows.new_empty(batch, kept)
        tokens, parent, grade = rows.new_empty(3, batch, nodes)
        alive = torch.empty(batch, nodes, dtype=torch.bool, device=rows.device)
        _emit_kernel[(batch,)](
            self.grown, self.grown.stride(0), table.last, rows, place, tokens, parent, alive.view(torch.uint8), grade,
            depth, KEPT=self.nodes, KEPT_BLOCK=kept, NODES=nodes, NODES_BLOCK=triton.next_power_of_2(nodes),
            num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return Draft(tokens, parent, alive, grade)
