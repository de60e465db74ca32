"""The n-gram drafter on the GPU, three launches a step: insert, confidence, build.

The kernels work on the tensors of `ops.ngram.spec` and `ngram_memory` and use their terms. Lengths are read on the
device: a launch covers the longest context, and programs past the end of a row's text exit at once. The dummy row is
left alone; it has nothing to propose.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE
from draftwing.ops.assign.spec import LEVELS
from draftwing.ops.ngram.spec import CANDIDATES, OWN, STEADY, WAYS, NGramIndex
from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.types import Draft, RowTensors

CHUNK = 1024  # positions of the context that a program searches at a time
_MAX_BATCH = 4096  # rows of a step, padding included
MAX_SPLITS = 128  # programs that search one row's context, at most

# Matches are ranked by a key, the least first: 3 * (max_window - length) + kind in the bits from 24 on, below them the
# gap or the number of a shared result. Kind 0 goes on where the row was copying from, 1 is any other of its own, 2 is
# of the shared memory. The same order as the reference's 64-bit keys, in 31 bits, whose minimum is one instruction.
_BITS: tl.constexpr = tl.constexpr(24)
_LOW: tl.constexpr = tl.constexpr((1 << 24) - 1)
_NONE: tl.constexpr = tl.constexpr((1 << 31) - 1)
MAX_CONTEXT = (1 << 24) - 1

_INSERT: tl.constexpr = tl.constexpr(1 << 32)  # a table value is the number of the insert above, the cell below
_CELL: tl.constexpr = tl.constexpr((1 << 32) - 1)
_ID: tl.constexpr = tl.constexpr((1 << 22) - 1)  # of a cell: 1 + token id
_COLUMNS: tl.constexpr = tl.constexpr(5)  # of the memory's row table: base, tag, quota, cursor, newest
_TIE: tl.constexpr = tl.constexpr(1e-9)
_LEVELS, _LOOKUP = tl.constexpr(LEVELS), tl.constexpr(LEVELS * LOOKUP)


@triton.jit(do_not_specialize=["size", "context"])
def _insert_kernel(
    tokens_ptr, size, context, rows_ptr, prefix_ptr, count_ptr,
    state_ptr, log_ptr, table_ptr, clock_ptr, ticket_ptr, factors_ptr,
    CELLS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr, LONGEST: tl.constexpr,
    WAYS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, IMAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b)
    prefix = tl.load(prefix_ptr + b)
    state = state_ptr + row * _COLUMNS
    base = tl.load(state)
    tag = tl.load(state + 1)
    quota = tl.load(state + 2)
    cursor = tl.load(state + 3)
    place = tl.load(state + 4)
    clock = tl.load(clock_ptr) + _INSERT
    tl.debug_barrier()  # all is read before anything is written in its place
    real = quota > 0
    count = tl.minimum(tl.load(count_ptr + b), quota)
    place = tl.where(cursor != prefix, place + 2, place)
    tl.store(state + 3, prefix + count, mask=real)
    tl.store(state + 4, place + count, mask=real)

    ahead = tl.arange(0, BLOCK)
    used = (ahead < LIMIT + 2) & real
    first = row * context + prefix
    where = (place + ahead) % CELLS + base
    at = tl.minimum(tl.maximum(first + ahead, 0), size - 1)
    token = tl.load(tokens_ptr + at, mask=used, other=0)
    tl.store(log_ptr + where, tl.where((ahead <= count) & (token != IMAGE), token + tag, 0), mask=used)

    # The windows that end at each token whose successor is stored.
    known = used & (ahead < LIMIT) & (ahead < count)
    value = where + clock
    for w in tl.static_range(LENGTHS):
        mixed = tl.zeros([BLOCK], tl.int64)
        for k in tl.static_range(LONGEST):
            at = tl.minimum(tl.maximum(first + ahead - k, 0), size - 1)
            cell = tl.load(tokens_ptr + at, mask=known, other=0) + tag
            mixed += cell * tl.load(factors_ptr + w * WINDOW + WINDOW - 1 - k)
        entry = ((mixed >> 24) & MASK) + (where & (WAYS - 1))
        tl.atomic_max(table_ptr + entry, value, mask=known)

    # Whoever comes last moves the clock, which all have read by then.
    if tl.atomic_add(ticket_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(ticket_ptr, 0)
        tl.store(clock_ptr, clock)


@triton.jit
def _least(keys, best, OWN: tl.constexpr):
    """The OWN least of two vectors of distinct keys, in order; _NONE where there are fewer."""
    place = tl.arange(0, OWN)
    result = tl.full([OWN], _NONE, tl.int32)
    for i in range(OWN):
        least = tl.minimum(tl.min(keys, 0), tl.min(best, 0))
        result = tl.where(place == i, least, result)
        keys = tl.where(keys == least, _NONE, keys)
        best = tl.where(best == least, _NONE, best)
    return result


@triton.jit
def _search(
    text, newest, source, split, splits, chunks,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr, IMAGE: tl.constexpr,
):  # fmt: skip
    """Keys of the best matches that end in the chunks split, split + splits, ... of a row's own text."""
    best = tl.full([OWN], _NONE, tl.int32)
    chunk = split
    while chunk < chunks:
        end = chunk * CHUNK + tl.arange(0, CHUNK)
        matches = end < newest
        if IMAGE >= 0:  # before an image is nothing to copy
            matches = matches & (tl.load(text + end + 1, mask=matches, other=IMAGE) != IMAGE)
        length = tl.zeros([CHUNK], tl.int32)
        for k in tl.static_range(WINDOW):
            wanted = tl.load(text + tl.maximum(newest - k, 0))
            token = tl.load(text + end - k, mask=matches & (end >= k), other=-2)
            matches = matches & (token == wanted)
            length += matches.to(tl.int32)
        gap = newest - 1 - end
        kind = (gap != source).to(tl.int32)
        key = (((WINDOW - length) * 3 + kind) << _BITS) | gap
        best = _least(tl.where(length > 0, key, _NONE), best, OWN)
        chunk += splits
    return best


@triton.jit
def _lookup(
    suffix, tag, log_ptr, table_ptr, factors_ptr,
    MASK: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr, BRANCH: tl.constexpr,
    BRANCH_BLOCK: tl.constexpr, FOUND: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """`NGramMemory.lookup` of one row: missing [FOUND] int32 and what follows [FOUND, BRANCH_BLOCK]."""
    found = tl.arange(0, FOUND)
    k = tl.arange(0, WINDOW_BLOCK)[None, :]
    window = k < WINDOW
    cells = tl.where(window, suffix[None, :] + tag, 0)  # [1, WINDOW_BLOCK]
    factor = tl.load(factors_ptr + (found // WAYS)[:, None] * WINDOW + k, mask=window, other=0)
    entry = ((tl.sum(factor * cells, 1) >> 24) & MASK) + found % WAYS
    place = (tl.load(table_ptr + entry) & _CELL)[:, None]
    known = place > 0
    before = tl.load(log_ptr + place + 1 - WINDOW + k, mask=known & window, other=0)
    missing = tl.max(tl.where((before != cells) & window, k + 1, 0), 1)
    step = tl.arange(0, BRANCH_BLOCK)[None, :]
    after = tl.load(log_ptr + place + 1 + step, mask=known & (step < BRANCH), other=0) & _ID
    end = tl.min(tl.where(after == 0, step, BRANCH_BLOCK), 1)  # of the stretch
    missing = tl.where(end == 0, WINDOW, missing)
    return missing, tl.where(step < end[:, None], after - 1, -1)


@triton.jit(do_not_specialize=["context", "confidence_stride", "splits"])
def _confidence_kernel(
    tokens_ptr, context, kv_len_ptr, rows_ptr, state_ptr, log_ptr, table_ptr, factors_ptr,
    candidates_ptr, match_ptr, gap_ptr, confidence_ptr, confidence_stride, partial_ptr, ticket_ptr, splits,
    MASK: tl.constexpr, MIN_WINDOW: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    STEADY: tl.constexpr, BRANCH: tl.constexpr, BRANCH_BLOCK: tl.constexpr, FOUND: tl.constexpr, WAYS: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, MAX_CONFIDENCE: tl.constexpr, IMAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + b)
    newest = tl.load(kv_len_ptr + row).to(tl.int32)
    source = tl.load(gap_ptr + row).to(tl.int32)
    text = tokens_ptr + row * context
    chunks = tl.cdiv(newest, CHUNK)
    active = tl.maximum(tl.minimum(chunks, splits), 1)
    if split < active:
        own = _search(text, newest, source, split, splits, chunks, WINDOW, CHUNK, OWN, IMAGE)
        i = tl.arange(0, OWN)
        last = active == 1
        if active > 1:  # the last of the row's programs goes on with what all have found
            tl.store(partial_ptr + (b * splits + split) * OWN + i, own)
            tl.debug_barrier()
            last = tl.atomic_add(ticket_ptr + b, 1) == active - 1
        if last:
            if active > 1:
                tl.store(ticket_ptr + b, 0)
                every = tl.arange(0, SPLITS * OWN)
                keys = tl.load(partial_ptr + b * splits * OWN + every, mask=every < active * OWN, other=_NONE)
                own = _least(keys, tl.full([OWN], _NONE, tl.int32), OWN)

            state = state_ptr + row * _COLUMNS
            tag = tl.load(state + 1)
            real = tl.load(state + 2) > 0
            k = tl.arange(0, WINDOW_BLOCK)
            suffix = tl.load(text + tl.maximum(newest - (WINDOW - 1) + k, 0), mask=k < WINDOW, other=0)
            missing, continued = _lookup(
                suffix, tag, log_ptr, table_ptr, factors_ptr,
                MASK, WINDOW, WINDOW_BLOCK, BRANCH, BRANCH_BLOCK, FOUND, WAYS,
            )  # fmt: skip
            j = tl.arange(0, FOUND)
            shared = ((missing * 3 + 2) << _BITS) | j

            # Place of each in the order of all. No key of one list equals one of the other.
            own_rank = i + tl.sum((shared[None, :] < own[:, None]).to(tl.int32), 1)
            shared_rank = tl.sum((own[:, None] < shared[None, :]).to(tl.int32), 0)
            shared_rank += tl.sum((shared[:, None] < shared[None, :]).to(tl.int32), 0)

            step = tl.arange(0, BRANCH_BLOCK)[None, :]
            gap = (own & _LOW)[:, None]
            # What follows a match runs into the newest token after gap + 1 tokens; it goes on by repeating itself.
            follow = newest - gap + step % (gap + 1)
            some = (own < _NONE)[:, None] & (step < BRANCH)
            copied = tl.load(text + follow, mask=some, other=-1)
            if IMAGE >= 0:
                end = tl.min(tl.where(copied == IMAGE, step, BRANCH_BLOCK), 1)
                copied = tl.where(step < end[:, None], copied, -1)
            kept = candidates_ptr + row * (BRANCH * (OWN + FOUND)) + step * (OWN + FOUND)
            tl.store(kept + own_rank[:, None], copied, mask=real & (step < BRANCH))
            tl.store(kept + shared_rank[:, None], continued, mask=real & (step < BRANCH))

            match = WINDOW - (own >> _BITS) // 3
            match = tl.where(match >= MIN_WINDOW, match, 0)
            tl.store(match_ptr + row * (OWN + FOUND) + own_rank, match.to(tl.int64), mask=real)
            match = WINDOW - missing
            match = tl.where(match >= MIN_WINDOW, match, 0)
            tl.store(match_ptr + row * (OWN + FOUND) + shared_rank, match.to(tl.int64), mask=real)

            first = tl.min(own, 0)
            copying = (first >> _BITS) < 3 * (WINDOW - STEADY) + 2
            tl.store(gap_ptr + row, (first & _LOW).to(tl.int64), mask=real & copying)
            level = tl.minimum(first, tl.min(shared, 0)) >> _BITS
            length = WINDOW - level // 3
            confidence = tl.minimum(tl.where(level % 3 == 0, length + WINDOW, length), MAX_CONFIDENCE)
            confidence = tl.where((length >= MIN_WINDOW) & real, confidence, 0)
            tl.store(confidence_ptr + b * confidence_stride, confidence.to(tl.int64))


@triton.jit
def _build_kernel(
    candidates_ptr, match_ptr, last_ptr, rows_ptr, weight_ptr,
    key_ptr, owner_ptr, place_ptr, tokens_ptr, parent_ptr, alive_ptr, grade_ptr,
    BRANCH: tl.constexpr, MATCHES: tl.constexpr, DEPTH: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
    WAYS: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b)
    root = tl.load(last_ptr + row)
    candidates = candidates_ptr + row * (BRANCH * WAYS)
    d = tl.arange(0, DEPTH_BLOCK)
    c = tl.arange(0, WAYS)
    deep = d[:, None, None]
    inside = deep < DEPTH
    left = tl.load(candidates + deep * WAYS + c[None, :, None], mask=inside, other=-1)
    right = tl.load(candidates + deep * WAYS + c[None, None, :], mask=inside, other=-1)
    parting = tl.min(tl.where(left == right, DEPTH_BLOCK, deep), 0)  # [WAYS, WAYS] first level where two differ

    number = d[:, None] * WAYS + c[None, :]  # of a node, less 1
    level = d[:, None] < DEPTH
    token = tl.load(candidates + number, mask=level, other=-1)
    best = tl.load(match_ptr + row * WAYS)
    match = tl.load(match_ptr + row * WAYS + c)[None, :]
    index = ((best * MATCHES + match) * WAYS + c[None, :]) * BRANCH + d[:, None]
    vote = tl.load(weight_ptr + index, mask=level, other=0.0)  # [DEPTH_BLOCK, WAYS] float64
    same = deep < parting[None, :, :]
    score = tl.sum(tl.where(same, vote[:, None, :], 0.0), 2)
    owner = tl.min(tl.where(same, c[None, None, :], WAYS), 2)  # first candidate with this prefix, leads its node
    key = tl.where((owner == c[None, :]) & (token >= 0), score - number * _TIE, 0.0)

    ALL: tl.constexpr = DEPTH_BLOCK * WAYS
    tl.store(key_ptr + b * ALL + number, key)
    tl.store(owner_ptr + b * ALL + number, owner)
    tl.debug_barrier()
    m = tl.arange(0, ALL)
    mine = tl.load(key_ptr + b * ALL + m)
    picked = mine > 0
    ahead = tl.zeros([ALL, WAYS], tl.int32)  # nodes that come before mine, the best first
    levels = tl.where(tl.sum(picked.to(tl.int32), 0) < NODES, 0, DEPTH)  # where all find room the rank is no matter
    q = levels * 0
    while q < levels:
        n = q * WAYS + c
        other = tl.load(key_ptr + b * ALL + n)[None, :]
        before = (other > mine[:, None]) | ((other == mine[:, None]) & (n[None, :] < m[:, None]))
        ahead += before.to(tl.int32)
        q += 1
    picked = picked & (tl.sum(ahead, 1) < NODES - 1)

    place = tl.where(picked, tl.cumsum(picked.to(tl.int32), 0), 0)  # in the tree; 0 is the root's
    tl.store(place_ptr + b * ALL + m, place)
    tl.debug_barrier()
    below = picked & (m >= WAYS)
    leader = tl.load(owner_ptr + b * ALL + m - WAYS, mask=below, other=0)
    parent = tl.load(place_ptr + b * ALL + (m // WAYS - 1) * WAYS + leader, mask=below, other=0)
    token = tl.load(candidates + m, mask=picked, other=0)
    first = b * NODES
    tl.store(tokens_ptr + first + place, token, mask=picked)
    tl.store(parent_ptr + first + place, parent.to(tl.int64), mask=picked)
    tl.store(alive_ptr + first + place, picked.to(tl.uint8), mask=picked)
    rank = m % WAYS  # of the candidate that leads the node: the first one is trusted by the length of its match
    match = tl.load(match_ptr + row * WAYS + rank, mask=picked, other=0)
    level = tl.where(rank == 0, tl.minimum(match + 3, _LEVELS - 1), tl.minimum(match // 3, 3))
    tl.store(grade_ptr + first + place, _LOOKUP + level, mask=picked)
    node = tl.arange(0, LANES)
    rest = (node < NODES) & ((node == 0) | (node > tl.sum(picked.to(tl.int32), 0)))
    tl.store(tokens_ptr + first + node, tl.zeros([LANES], tl.int64) + root, mask=rest)
    tl.store(parent_ptr + first + node, tl.zeros([LANES], tl.int64), mask=rest)
    tl.store(alive_ptr + first + node, (node == 0).to(tl.uint8), mask=rest)
    tl.store(grade_ptr + first + node, tl.zeros([LANES], tl.int64), mask=rest)


class TritonNGramIndex(NGramIndex):
    """Searches in Triton. The host's bounds are not used."""

    def __init__(self, rows: int, device: torch.device, *more: int, **settings: int) -> None:
        super().__init__(rows, device, *more, **settings)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)  # these two: 0 between launches
        self.tickets = torch.zeros(_MAX_BATCH, dtype=torch.int32, device=device)

    def insert(self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        memory, tokens, block = self.memory, table.tokens, triton.next_power_of_2(limit + 2)
        assert 0 < limit < memory.cells - 1
        _insert_kernel[(rows.shape[0],)](
            tokens, tokens.numel(), tokens.shape[1], rows, prefix_len, count,
            memory.row, memory.log, memory.table, memory.clock, self.ticket, memory.factors,
            CELLS=memory.cells, MASK=memory.mask, WINDOW=self.max_window, LENGTHS=len(memory.lengths),
            LONGEST=max(memory.lengths), WAYS=WAYS, LIMIT=limit, BLOCK=block, IMAGE=self.image_token,
            num_warps=1 if block <= 64 else 4, **launch_options(tokens.device),
        )  # fmt: skip

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        memory, tokens, window, branch = self.memory, table.tokens, self.max_window, self.branch_length
        out = torch.empty_like(rows) if out is None else out
        batch, context = rows.shape[0], tokens.shape[1]
        assert context <= MAX_CONTEXT and batch <= _MAX_BATCH
        splits = min(triton.cdiv(context, CHUNK), MAX_SPLITS, max(4, triton.cdiv(512, batch)))
        partial = torch.empty(batch, splits, OWN, dtype=torch.int32, device=rows.device)
        _confidence_kernel[(batch, splits)](
            tokens, context, table.kv_len, rows, memory.row, memory.log, memory.table, memory.factors,
            self.candidates, self.match, self.gap, out, out.stride(0), partial, self.tickets, splits,
            MASK=memory.mask, MIN_WINDOW=self.min_window, WINDOW=window, WINDOW_BLOCK=triton.next_power_of_2(window),
            STEADY=min(STEADY, window), BRANCH=branch, BRANCH_BLOCK=triton.next_power_of_2(branch), FOUND=CANDIDATES,
            WAYS=WAYS, OWN=OWN, CHUNK=CHUNK, SPLITS=MAX_SPLITS, MAX_CONFIDENCE=MAX_CONFIDENCE,
            IMAGE=self.image_token, num_warps=4, **launch_options(rows.device),
        )  # fmt: skip
        return out

    def build(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        candidates, weight, batch, ways = self.candidates, self.tree.weight, rows.shape[0], OWN + CANDIDATES
        block, new = triton.next_power_of_2(depth), candidates.new_empty
        key = torch.empty(batch, block * ways, dtype=torch.float64, device=rows.device)
        owner, place = torch.empty(2, batch, block * ways, dtype=torch.int32, device=rows.device)
        tokens, parent, grade = new(batch, nodes), new(batch, nodes), new(batch, nodes)
        alive = torch.empty(batch, nodes, dtype=torch.bool, device=rows.device)
        _build_kernel[(batch,)](
            candidates, self.match, table.last, rows, weight, key, owner, place, tokens, parent,
            alive.view(torch.uint8), grade,
            BRANCH=self.branch_length, MATCHES=weight.shape[0], DEPTH=depth, DEPTH_BLOCK=block,
            WAYS=ways, NODES=nodes, LANES=triton.next_power_of_2(nodes),
            num_warps=8 if block > 8 else 4, **launch_options(rows.device),
        )  # fmt: skip
        return Draft(tokens, parent, alive, grade)
