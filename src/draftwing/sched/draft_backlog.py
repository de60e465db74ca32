"""When a drafter with KV catches up with what it has not seen (`engine.draft_kv_backlog`): the host knows bounds of how
much that is.

Before a step that drafts with the model all rows of the step do. Else a row does before it is too far behind, together
with others that are nearly as far, and when it is released: what it gave to the radix tree must be complete for whoever
uses it first, and that is a plan to come. A plan's catch-up runs before its uploads, so slots and page tables are those
of the plan before.

A drafter that needs tokens alone may be much further behind, and needs not see how an answer ends. It sees what the
host knows of a text as it sees prompts, many rows in one pass, and what steps in flight commit after it.

Of a prompt that is prefilled in chunks it sees all but the last in few passes, at the latest right before the last. A
pass takes a GPU hardly longer for a thousand positions than for a hundred.

Where each KV slot has a hidden state (`DraftDeferral.by_slot`) a drafter that needs them can see any text at any time,
too. While nothing is drafted it sees nothing, neither prompts nor answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from draftwing.config.trees import TreeShape
from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, DraftChunk, DraftDeferral, DraftExtend, IntArray
from draftwing.sched.req import Req

MAX_JOINING = 16  # as many catch up at once if nobody has to: a decode gap is then not much longer than others
RESTED = 8  # steps in a row without drafts after which a drafter sees no prompts either, if it can see them later
UNSEEN = 512  # positions of a prompt that it may lack then: it sees them all before a step, which others wait for


class DraftExtendPlanner:
    """prompts: chunks that the drafter has not seen."""

    def __init__(
        self,
        skips_extend: Collection[TreeShape],
        max_backlog: int = MAX_BACKLOG,
        deferral: DraftDeferral = NO_DEFERRAL,
        slots: int = 0,
    ) -> None:
        """skips_extend: shapes whose steps the drafter does not see; max_backlog: of a row, which it may see in a
        pass over rows, and lack if it needs more than tokens.  slots: of the pool."""
        assert all(shape.max_commit + deferral.by_slot <= max_backlog for shape in skips_extend)
        self._skips_extend, self._max_backlog, self._pass = frozenset(skips_extend), max_backlog, deferral.most
        self._next: list[tuple[int, int, int]] = []  # of the next plan: row, behind, upper bound of kv_len
        self.prompts: PromptBacklog
        if deferral.by_slot:
            self.prompts = HiddenStatePool(deferral, slots, max_backlog)
        elif deferral.from_tokens:
            self.prompts = RecomputeFromTokens(deferral, slots)
        else:
            self.prompts = HiddenStateBuffer(deferral)

    def plan(self, step: int, shape: TreeShape, reqs: Sequence[Req]) -> None:
        """Notes that a tree step of this number is planned for these requests; `Req.bound` does not count it yet."""
        if not self._skips_extend:
            return
        skips, reqs = shape in self._skips_extend, [req for req in reqs if not req.skipped]
        self.prompts.stepped(skips)
        if skips:
            for req in self.prompts.far(reqs, shape.max_commit):
                self.prompts.show(req)
        for req in self._due(reqs, shape.max_commit) if skips else reqs:
            self._add(req)
            req.caught_up = step
        if skips:
            for req in reqs:
                req.behind += shape.max_commit

    def passes(self, reqs: Sequence[Req]) -> tuple[int, int]:
        """Returns in how many passes the drafter would catch up with these requests now, but for one where only one is
        needed, and the positions in all but that one."""
        far = [req.behind for req in reqs if req.behind > self._max_backlog and not req.skipped]
        return 1 + self._passes(far), sum(far)

    def commit(self, step: int, shape: TreeShape, req: Req, count: int) -> None:
        """Notes that the step of this number has committed `count` tokens of the request."""
        if step >= req.caught_up and shape in self._skips_extend and not req.skipped:
            req.behind -= shape.max_commit - count

    def release(self, req: Req, cached: bool) -> None:
        """Notes that the request is about to give its row away. cached: whether others may use its KV."""
        self.prompts.release(req, cached)
        if cached and not self.prompts.sees_later:
            self._add(req)
        req.behind = 0

    def take(self) -> DraftExtend | None:
        """Returns the catch-up of the next plan."""
        texts = self.prompts.take_texts()
        if not self._next and not texts:
            return None
        rows, behind, bound = np.asarray(self._next, np.int64).reshape(-1, 3).T.copy()
        self._next = []
        passes = self._passes(part.length for part in texts) + (len(rows) > 0)
        late = self.prompts.late
        return DraftExtend(rows, int(behind.max(initial=0)), int(bound.max(initial=0)), texts, passes, late)

    def clear(self) -> None:
        """Forgets what has been released, as nobody will use it."""
        self._next = []
        self.prompts.take_texts()

    def _passes(self, lengths: Iterable[int]) -> int:
        """Returns in how many passes it sees texts of these lengths."""
        return -(-sum(lengths) // max(self._pass, 1))

    def _due(self, reqs: Sequence[Req], commit: int) -> list[Req]:
        """Returns who must catch up before a step that commits so many tokens at most, and who joins. Where many are
        far behind some begin early, so that they do not all have to at once."""
        if self.prompts.late:  # one step is in flight at most, and it can be shown all but what that commits
            return [req for req in reqs if req.behind and commit >= self._max_backlog]
        if self.prompts.sees_later:
            return [req for req in reqs if min(req.behind, req.bound - req.kv + 1) + commit > self._max_backlog]
        near = max(commit, self._max_backlog // 4)
        must = sum(req.behind + commit > self._max_backlog for req in reqs)
        far = sorted((req for req in reqs if req.behind + near > self._max_backlog), key=lambda req: -req.behind)
        return far[: max(must, MAX_JOINING)] if must or self._next or len(far) > MAX_JOINING else []

    def _add(self, req: Req) -> None:
        if req.behind > self._max_backlog or (req.behind and self.prompts.late):
            self.prompts.show(req)
        if req.behind:
            assert req.behind <= self._max_backlog
            self._next.append((req.row, req.behind, req.bound))
            req.behind = 0


class PromptBacklog(Protocol):
    """Chunks that the drafter has not seen."""

    sees_later: bool = False  # whether it can be shown any text at any time
    late: bool = False  # whether its catch-ups are `DraftExtend.late`

    def stepped(self, skips: bool) -> None:
        """Notes that a tree step is planned that the drafter does not see (`skips`), or for which it has seen all."""
        return None

    def plan(self, req: Req, length: int, final: bool) -> int | None:
        """Notes that a chunk of so many tokens is planned, from `Req.sent` on. Returns its `Chunk.kept`."""
        ...

    def share(self, req: Req) -> None:
        """Notes that the prompt's KV may be another request's from now on."""
        return None

    def release(self, req: Req, cached: bool) -> None:
        """Does what `DraftExtendPlanner.release` promises."""
        ...

    def far(self, reqs: Sequence[Req], commit: int) -> list[Req]:
        """Returns who is shown its answer before a step that the drafter does not see, which commits so many tokens at
        most."""
        return []

    def show(self, req: Req) -> None:
        """The drafter sees its answer as far as the host knows it, but for a position: it drafts from what it made of
        the newest one when it caught up with the row."""
        raise AssertionError("it needs hidden states, which only the device knows where to find")

    def take(self) -> tuple[DraftChunk, ...]:
        """Returns `Plan.shown` of the next plan: what the drafter sees of prompts, of rows that run."""
        ...

    def take_texts(self) -> tuple[DraftChunk, ...]:
        """`DraftExtend.texts` of the next plan."""
        ...

    def seen(self, slots: IntArray) -> np.ndarray:
        """Returns of which cached slots [n] the drafter has its own KV."""
        return np.ones(len(slots), bool)  # what is cached is complete

    def note_seen(self, slots: IntArray, seen: np.ndarray) -> None:
        """Notes what `seen` has said of KV that lies in these slots [n] now."""
        return None


class HiddenStateBuffer(PromptBacklog):
    """Keeps the target's hidden states for a drafter that needs them, each prompt's in places of its own. Where
    there are none for it, or no room for a chunk, the drafter sees the chunk at once."""

    def __init__(self, deferral: DraftDeferral) -> None:
        self._places, self._max_pass = deferral.places, deferral.most
        self._kept: dict[int, tuple[DraftChunk, int]] = {}  # by row: what is deferred, and its places
        self._due: list[DraftChunk] = []  # with the next plan
        self._released: list[DraftChunk] = []

    def plan(self, req: Req, length: int, final: bool) -> int | None:
        if final:
            self._show(req.row, req.sent, self._due)
            return None
        kept, places = self._kept.get(req.row) or self._new(req)
        if kept.length + length > places:
            self._show(req.row, req.sent, self._due)
            kept = kept._replace(start=req.sent, length=0)
        if length > places:
            return None
        self._kept[req.row] = kept._replace(length=kept.length + length), places
        return kept.at + kept.length

    def release(self, req: Req, cached: bool) -> None:
        """Notes that others may use what is committed, as far as they may use anything: the drafter must have seen
        that."""
        self._show(req.row, req.kv if cached else 0, self._released)

    def take(self) -> tuple[DraftChunk, ...]:
        due, self._due = tuple(self._due), []
        return due

    def take_texts(self) -> tuple[DraftChunk, ...]:
        due, self._released = tuple(self._released), []
        return due

    def _show(self, row: int, end: int, due: list[DraftChunk]) -> None:
        """The drafter sees what is deferred below position `end`; the places are free."""
        kept, _ = self._kept.pop(row, (None, 0))
        if kept is not None and (length := min(kept.start + kept.length, end) - kept.start) > 0:
            due.append(kept._replace(length=length))

    def _new(self, req: Req) -> tuple[DraftChunk, int]:
        """Places a request of which nothing is deferred, in the first gap that is long enough; no places if there is
        none. Places that became free with this plan are read before they are written."""
        wanted, at = min(self._max_pass, req.unsent), 0
        for kept, places in sorted(self._kept.values(), key=lambda one: one[0].at):
            if kept.at - at >= wanted:
                break
            at = kept.at + places
        return DraftChunk(req.row, req.sent, 0, at), wanted if at + wanted <= self._places else 0


class RecomputeFromTokens(PromptBacklog):
    """Serves a drafter that makes its KV of tokens alone. It can see any part of a text at any time, so it need not see
    prompts of `Req.skipped`, nor one that ends early, nor the end of an answer: which slots have its KV is noted, and a
    request that goes on from others has it see these first.

    At rest it sees answers at about `DraftDeferral.backlog` tokens, of several rows in one pass, and one pass before a
    step: the device does not need it, and a step takes longer with it. Most answers end before."""

    sees_later = True

    def __init__(self, deferral: DraftDeferral, slots: int) -> None:
        self._max_pass, self._backlog = deferral.most, deferral.backlog
        self._texts: list[DraftChunk] = []  # of answers, with the next plan
        self._seen = np.zeros(slots + 1, bool)  # by slot
        self._due: dict[int, tuple[IntArray, int]] = {}  # by row: slots of its first positions, and which are due

    def plan(self, req: Req, length: int, final: bool) -> int | None:
        begin, end = req.sent, req.sent + length
        self._seen[req.slots[begin:end]] = final and not req.skipped
        if req.skipped:
            return 0
        first = self._first(req, begin)
        if final or end - first > self._max_pass:
            self._due[req.row] = req.slots[:begin], first
        return None if final else 0

    def share(self, req: Req) -> None:
        if not req.skipped and (first := self._first(req, req.kv)) < req.kv:
            self._due[req.row] = req.slots[: req.kv], first

    def seen(self, slots: IntArray) -> np.ndarray:
        return self._seen[slots]

    def note_seen(self, slots: IntArray, seen: np.ndarray) -> None:
        self._seen[slots] = seen

    def _first(self, req: Req, end: int) -> int:
        """Returns the first of its positions below `end` that the drafter has not seen, `end` if there is none."""
        unseen = np.flatnonzero(~self._seen[req.slots[:end]])
        return int(unseen[0]) if len(unseen) else end

    def release(self, req: Req, cached: bool) -> None:
        self._due.pop(req.row, None)
        seen = 0 if req.skipped else req.kv - req.behind  # at least
        self._seen[req.slots[req.sent : req.kv]] = np.arange(req.sent, req.kv) < seen

    def far(self, reqs: Sequence[Req], commit: int) -> list[Req]:
        """Returns as many as fit into a pass, those first that are furthest behind."""
        if all(req.behind + commit <= self._backlog for req in reqs):
            return []
        far = sorted((req for req in reqs if 2 * req.behind > self._backlog), key=lambda req: -req.behind)
        together = np.cumsum([req.behind for req in far]) <= self._max_pass
        return far[: max(int(together.sum()), 1)]

    def show(self, req: Req) -> None:
        start, end = max(req.kv - req.behind, req.sent), req.kv - 1  # what comes before `start` it has seen
        if start < end:
            self._texts += self._parts(req.row, start, end)
            req.behind = min(req.behind, req.bound - end)

    def take(self) -> tuple[DraftChunk, ...]:
        found = []
        for row, (slots, first) in self._due.items():
            self._seen[slots[first:]] = True
            found += self._parts(row, first, len(slots))
        self._due = {}
        return tuple(found)

    def take_texts(self) -> tuple[DraftChunk, ...]:
        texts, self._texts = tuple(self._texts), []
        return texts

    def _parts(self, row: int, start: int, end: int) -> list[DraftChunk]:
        """Returns positions [start, end), as many at once as a pass has."""
        return [DraftChunk(row, at, min(self._max_pass, end - at), 0) for at in range(start, end, self._max_pass)]


class HiddenStatePool(RecomputeFromTokens):
    """Serves a drafter that needs the target's hidden states, one for each slot of the KV pool. While nothing is
    drafted it sees nothing but what is longer than `UNSEEN` of a prompt, or twice that of a row: `Req.behind` counts
    all that it lacks, of the prompt, too. Before a step that drafts it sees what the host knows of that, as it sees
    prompts. While something is drafted it sees each chunk of a prompt at once, after whatever it lacks before it."""

    late = True

    def __init__(self, deferral: DraftDeferral, slots: int, max_backlog: int) -> None:
        """max_backlog: as of `DraftExtendPlanner`."""
        super().__init__(deferral, slots)
        self._row_pass, self._rested = max_backlog, 0

    def stepped(self, skips: bool) -> None:
        self._rested = self._rested + 1 if skips else 0

    def plan(self, req: Req, length: int, final: bool) -> int | None:
        begin, end = req.sent, req.sent + length
        first = self._first(req, begin)
        rests = self._rested > RESTED and end - first <= UNSEEN
        self._seen[req.slots[begin:end]] = not rests
        if rests:
            req.behind = end - first
            return 0
        if first < begin:
            self._due[req.row] = req.slots[:begin], first
        req.behind = 0
        return None

    def share(self, req: Req) -> None:
        first = self._first(req, req.kv)
        if first == req.kv:
            return
        if req.bound - req.behind < req.kv:  # it had not seen the row's own prompt either
            req.behind = max(req.behind, req.bound - first)
        else:
            self._due[req.row] = req.slots[: req.kv], first

    def far(self, reqs: Sequence[Req], commit: int) -> list[Req]:
        """Returns one with a long answer, if there is any."""
        return [req for req in reqs if req.behind > 2 * UNSEEN][:1]

    def show(self, req: Req) -> None:
        """Shows it what it lacks, all but what a pass over the row sees anyway: the newest position that the host
        knows, and what steps in flight commit."""
        end, first = max(req.kv, req.sent), self._first(req, req.sent)
        if first == req.sent and req.behind <= self._row_pass:
            return
        # Others may have been shown the whole prompt; the device counts its last position for this row all the same.
        start = first if first < req.sent else max(req.bound - req.behind, first - 1)
        self._seen[req.slots[start:end]] = True
        if start < end - 1:
            self._texts += self._parts(req.row, start, end - 1)
        req.behind = min(req.behind, req.bound - end + 1)
