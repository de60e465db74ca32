"""A device of plain Python for the scheduler: its text is a function of what came before, its KV remembers its tokens.

It runs a plan as late as it may, and of a plan it sees only what survives pickling. A KV entry is the token and the
position that it was computed for; a drafter's entry of position p is the window of tokens p .. p + lookahead. Reading
checks every entry below the row's length, so a slot that two requests share by mistake, a page table that is not
permuted as the host believes, or a prefix that was cached too early is an AssertionError here.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Collection

import numpy as np
from step_marks import marks_of

from draftwing.config.trees import TreeShape
from draftwing.core import (
    MAX_BACKLOG,
    NO_DEFERRAL,
    Chunk,
    DraftChunk,
    DraftDeferral,
    DraftExtend,
    Plan,
    StepResult,
    TokenLogprobs,
)

VOCAB = 8


def mixed(tokens: list[int], *key: int) -> int:
    return zlib.crc32(bytes([*key, *tokens])) >> 7


def next_token(tokens: list[int], seed: int) -> int:
    """What plain decoding gives after `tokens`."""
    return mixed(tokens, seed) % VOCAB


def span(shape: TreeShape) -> int:
    """Page-table entries past the length that a step may write: its nodes, and what growing them scribbles."""
    return max(shape.nodes, 1 + shape.topk * max(shape.depth - 1, 0))


class Tree:
    """A draft after `tokens`: mostly right, sometimes with fewer nodes than there is room for."""

    def __init__(self, tokens: list[int], seed: int, shape: TreeShape) -> None:
        self.tokens, self.parent, self.depth = [tokens[-1]], [0], [0]
        self.text = [tokens]  # of each node, up to and with itself
        alive = shape.nodes if mixed(tokens, seed, 1) % 5 else 1 + shape.nodes // 2
        for i in range(1, shape.nodes):
            children = Counter(self.parent[1:])
            open_nodes = [j for j in range(i) if self.depth[j] < shape.depth and children[j] < shape.topk]
            if i >= alive or not open_nodes:
                parent, token, depth = 0, 1, 0  # a dead node
            else:
                parent = open_nodes[mixed(tokens, seed, i) % len(open_nodes)]
                taken = {self.tokens[j] for j in range(1, i) if self.parent[j] == parent}
                right = next_token(self.text[parent], seed)
                others = [t for t in range(VOCAB) if t not in taken]
                token = right if right not in taken and mixed(tokens, seed, i, 2) % 4 else others[0]
                depth = self.depth[parent] + 1
            self.tokens.append(token)
            self.parent.append(parent)
            self.depth.append(depth)
            self.text.append([*self.text[parent], token])

    def accepted(self, seed: int) -> list[int]:
        """Nodes of the longest path that agrees with the text, the root first."""
        good = [0]
        for i in range(1, len(self.tokens)):
            parent = self.parent[i]
            if self.depth[i] and parent in good and self.tokens[i] == next_token(self.text[parent], seed):
                good.append(i)
        path = [max(good, key=lambda i: self.depth[i])]
        while path[-1]:
            path.append(self.parent[path[-1]])
        return path[::-1]


class ToyDevice:
    def __init__(
        self, rows: int, entries: int, lookahead: int, tail: int, skips_extend: Collection[TreeShape] = (),
        max_backlog: int = MAX_BACKLOG, deferral: DraftDeferral = NO_DEFERRAL, with_states: bool = False,
    ) -> None:  # fmt: skip
        """entries: of a page-table row; skips_extend: shapes after which the drafter has something to catch up with.
        with_states: there are recurrent layers, whose state of some tokens is these tokens."""
        self.lookahead, self.tail, self.skips_extend, self.max_backlog = lookahead, tail, skips_extend, max_backlog
        self.seen: Counter[str] = Counter()
        self._queue: list[bytes] = []
        self._table = np.full((rows, entries), -1)
        self._kv_len, self._seed = [0] * rows, [0] * rows
        self._tokens: list[list[int]] = [[] for _ in range(rows)]  # the last one has no KV yet
        self._kv: dict[int, tuple[int, int]] = {}  # slot -> token, position
        self._draft_kv: dict[int, tuple[int, ...]] = {}
        self.kept_of_one = [0] * rows  # positions of the last chunk that was kept
        self._behind = [0] * rows  # positions that the drafter has not seen
        self._kept = [[-1] * max_backlog for _ in range(rows)]  # those whose hidden states are kept
        self._from_tokens, self._skipped = deferral.from_tokens, [False] * rows
        self._by_slot = deferral.by_slot  # then hidden states lie where the KV does
        self._places: dict[int, tuple[int, int]] = {}  # the same of prompts: row and position
        self._with_states = with_states
        self._states: dict[int, list[int]] = {0: []}  # by state slot
        self._read_slot, self._write_slot, self._length = [-1] * rows, [-1] * rows, [-1] * rows
        self._records: list[dict[int, int]] = [{} for _ in range(rows)]  # of the last step: tokens by KV slot
        self._touched: set[int] = set()  # slots that the newest plan's rows have read or written

    def launch(self, plan: Plan) -> None:
        self._queue += map(pickle.dumps, plan.parts)

    def wait(self) -> StepResult:
        """Runs the oldest plan, or the next of its parts: one after the other, though in truth they run together."""
        plan: Plan = pickle.loads(self._queue.pop(0))
        late = plan.catch_up is not None and plan.catch_up.late
        assert plan.catch_up is None or late == self._by_slot
        if plan.catch_up is not None and not late:
            self._catch_up(plan.catch_up)
        for admission in plan.admits:
            row, cached = admission.row, len(admission.slots)
            self._table[row] = -1
            self._table[row, :cached] = admission.slots
            self._kv_len[row], self._tokens[row], self._seed[row] = cached, list(admission.tokens), admission.seed
        for row, first, slots in plan.new_slots:
            assert first + len(slots) <= self._table.shape[1], "page-table row too short"
            self._table[row, first : first + len(slots)] = slots
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows), "a row runs twice"
        self._give_states(plan)
        for part in plan.shown:
            self._see(part)
        if plan.catch_up is not None and late:
            self._catch_up(plan.catch_up)
        beside, self._touched = self._touched, set()
        if plan.kind == "prefill":
            final = [chunk.final for chunk in plan.chunks]
            assert all(final[: sum(final)]), "those who draw come first"
            seen = [chunk.kept is None for chunk in plan.chunks]
            assert self._by_slot or all(seen[: sum(seen)]), "those that the drafter sees come before the others"
            steps = [self._prefill(row, chunk, plan) for row, chunk in zip(rows, plan.chunks, strict=True)]
        else:
            steps = [self._tree(row, plan) for row in rows]
        if plan.mixed and plan.kind == "prefill":
            places = [(chunk.row, p) for chunk in plan.chunks for p in range(chunk.start, chunk.start + chunk.length)]
            assert not beside & {self._slot(*place) for place in places}, "what another part reads or writes is written"
            assert plan.catch_up is None and not plan.admits, "they come with the part in front"
            self.seen["mixed"] += 1
        self.seen["plans of several rows"] += len(rows) > 1
        padded = np.zeros((len(rows), plan.shape.max_commit), np.int64)
        for i, (new, _, _) in enumerate(steps):
            padded[i, : len(new)] = new
        prompt_logprobs = []
        for part in plan.prompt_parts:
            first = plan.chunks[part.chunk].start + part.first + 1  # a query tells of the token after it
            known = self._tokens[rows[part.chunk]]
            prompt_logprobs.append([TokenLogprobs.of(known[p]) for p in range(first, first + part.length)])
        return StepResult(
            tokens=padded,
            count=np.asarray([len(new) for new, _, _ in steps]),
            order=np.asarray([order for _, order, _ in steps]),
            mark=marks_of([depth for _, _, depth in steps]),
            confidence=np.asarray([mixed(self._tokens[row], 3) % 3 for row in rows]),
            logprobs=tuple([TokenLogprobs.of(t) for t in steps[i][0]] for i, _ in plan.logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
        )

    def _give_states(self, plan: Plan) -> None:
        given = plan.states.tolist()
        assert len({row for row, *_ in given}) == len(given) and (self._with_states or not given)
        for row, *values in given:
            for kept, value in zip((self._read_slot, self._write_slot, self._length), values, strict=True):
                kept[row] = kept[row] if value < 0 else value
        if not self._with_states:
            return
        rows = plan.rows.tolist()
        written = [self._write_slot[row] for row in rows] + [s for chunk in plan.chunks for _, s in chunk.saves]
        assert 0 not in written and len(set(written)) == len(written), "a state is written twice"
        assert not {self._read_slot[row] for row in rows} & set(written), "what a row reads is written"

    def _run_states(self, row: int, start: int, end: int, saves: tuple[tuple[int, int], ...] = ()) -> None:
        """Over positions [start, end) of its text, and over those since its state that were accepted."""
        if not self._with_states:
            return
        tokens, length = self._tokens[row], self._length[row]
        assert self._states[self._read_slot[row]] == tokens[:length], "another's state, or another length"
        for p in range(length, start):
            assert self._records[row][self._slot(row, p)] == tokens[p], "no record of what was accepted"
        self.seen["replayed"] += length < start
        for after, slot in saves:
            assert 0 < after <= end - start
            self._states[slot] = tokens[: start + after]
            self.seen["snapshots"] += 1
        self._states[self._write_slot[row]] = tokens[:end]
        self._read_slot[row], self._write_slot[row] = self._write_slot[row], self._read_slot[row]
        self._length[row], self._records[row] = end, {}

    def _slot(self, row: int, position: int) -> int:
        slot = int(self._table[row, position])
        assert slot >= 0, "read or write past what the row was given"
        self._touched.add(slot)
        return slot

    def _read(self, row: int, length: int) -> None:
        for p in range(length):
            assert self._kv[self._slot(row, p)] == (self._tokens[row][p], p), "attention reads another's KV"

    def _observe(self, row: int, start: int, end: int, known: int) -> None:
        """Drafter KV of [start, end), and of those before whose window reached past the `known` tokens."""
        for p in range(max(0, min(start, known - self.lookahead)), end):
            window = tuple(self._tokens[row][p : p + 1 + self.lookahead])
            if p < start:  # complete windows may be shared by now
                old = self._draft_kv[self._slot(row, p)]
                assert len(old) < len(window) and old == window[: len(old)], "a complete window is written again"
            self._draft_kv[self._slot(row, p)] = window

    def _leave_unseen(self, row: int, start: int, end: int) -> None:
        """What stood there before is nothing that the drafter may read."""
        for p in range(start, end):
            self._draft_kv[self._slot(row, p)] = (-2,)

    def _check_drafter(self, row: int, length: int) -> None:
        for p in range(length):
            whole = tuple(self._tokens[row][p : p + 1 + self.lookahead])
            assert self._draft_kv[self._slot(row, p)] == whole, "the drafter reads another's KV"

    def _catch_up(self, who: DraftExtend) -> None:
        for part in who.texts:
            self._see(part)
        rows = who.rows.tolist()
        assert len(set(rows)) == len(rows), "a row catches up twice"
        for row in rows:
            n, behind = self._kv_len[row], self._behind[row]
            assert 0 < behind <= who.behind <= self.max_backlog and n <= who.max_kv_len, (
                "further behind than the host believes"
            )
            start = n - behind
            if self._by_slot:
                self._read(row, n)
            elif not self._from_tokens:
                assert [self._kept[row][p % self.max_backlog] for p in range(start, n)] == [*range(start, n)], (
                    "kept too long"
                )
            self._check_drafter(row, max(min(start, start + 1 - self.lookahead), 0))
            self._observe(row, start, n, start + 1)
            self._behind[row] = 0
            self.seen["far behind"] += behind > self.max_backlog // 2

    def _see(self, part: DraftChunk) -> None:
        row, start, length, at = part
        here = [(row, p) for p in range(start, start + length)]
        if self._by_slot:
            self._read(row, start + length)
        elif not self._from_tokens:
            assert here and [self._places[at + i] for i in range(length)] == here, "not what was kept there"
        assert start + length <= self._kv_len[row], "the target has not run over it"
        self._check_drafter(row, start)
        self._observe(row, start, start + length, len(self._tokens[row]))
        left = self._kv_len[row] - (start + length)
        self.seen["answer shown"] += self._behind[row] > left
        self._behind[row] = min(self._behind[row], left)
        self.seen["deferred"] += 1
        self.seen["deferred chunks"] += length > self.kept_of_one[row]

    def _prefill(self, row: int, chunk: Chunk, plan: Plan) -> tuple[list[int], list[int], list[int]]:
        tokens, end = self._tokens[row], chunk.start + chunk.length
        assert self._kv_len[row] == chunk.start < end <= plan.max_kv_len, "a chunk starts where the row ends"
        known = len(tokens)
        assert not self._with_states or self._length[row] == chunk.start, "a chunk cannot replay"
        self._run_states(row, chunk.start, end, chunk.saves)
        for p in range(chunk.start, end):
            self._kv[self._slot(row, p)] = (tokens[p], p)
        self._kv_len[row] = end
        self._read(row, end)
        self._behind[row] = 0
        if self._by_slot and chunk.kept is not None:
            self._leave_unseen(row, chunk.start, end)
            self.seen["prompts at rest"] += 1
            if chunk.final:
                assert end == known
                self._behind[row] = 1
                tokens.append(next_token(tokens, self._seed[row]))
            return tokens[known:], [0], [0]
        if self._from_tokens and chunk.kept is not None:
            self._leave_unseen(row, chunk.start, end)
        self._skipped[row] = chunk.final and chunk.kept is not None
        self.seen["skipped"] += self._skipped[row]
        if self._skipped[row]:
            assert self._from_tokens and end == known
            tokens.append(next_token(tokens, self._seed[row]))
            return tokens[-1:], [0], [0]
        if chunk.kept is not None:
            self._places |= {chunk.kept + i: (row, chunk.start + i) for i in range(chunk.length)}
            self.kept_of_one[row] = chunk.length
            return [], [0], [0]
        self._check_drafter(row, chunk.start)
        new = []
        if chunk.final:
            assert end == known
            new = [next_token(tokens, self._seed[row])]
            tokens += new
            for p in range(end, end + self.tail):
                self._draft_kv[self._slot(row, p)] = (-1,)
        self._observe(row, chunk.start, end, known)
        return new, [0], [0]

    def _tree(self, row: int, plan: Plan) -> tuple[list[int], list[int], list[int]]:
        n, tokens, seed, nodes = self._kv_len[row], self._tokens[row], self._seed[row], plan.shape.nodes
        assert n == len(tokens) - 1 and n <= plan.max_kv_len, "the row is longer than the host believes"
        self._read(row, n)
        lags = plan.shape in self.skips_extend
        if not lags and not self._skipped[row]:
            self._check_drafter(row, n)
            assert not self._behind[row]
            for p in range(n + (self.lookahead == 0), n + span(plan.shape)):  # scribbled on while the draft grows
                self._draft_kv[self._slot(row, p)] = (-1,)
        tree = Tree(tokens, seed, plan.shape)
        self._run_states(row, n, n + 1)
        for i in range(nodes):
            self._records[row][self._slot(row, n + i)] = tree.tokens[i]
            self._kv[self._slot(row, n + i)] = (tree.tokens[i], n + tree.depth[i])
        path = tree.accepted(seed)
        order = path + [i for i in range(nodes) if i not in path]
        self._table[row, n : n + nodes] = self._table[row, n : n + nodes][order]
        new = [tree.tokens[i] for i in path[1:]]
        new.append(next_token(tree.text[path[-1]], seed))
        tokens += new
        self._kv_len[row] = n + len(path)
        if self._skipped[row]:
            pass
        elif lags:
            self._behind[row] += len(path)
            if self._from_tokens or self._by_slot:
                self._leave_unseen(row, n, n + len(path))
            for p in range(n, n + plan.shape.max_commit):
                self._kept[row][p % self.max_backlog] = p if p < n + len(path) else -1
        else:
            self._observe(row, n, n + len(path), n + 1)
        self.seen["permuted"] += order != sorted(order)
        return new, order, tree.depth
