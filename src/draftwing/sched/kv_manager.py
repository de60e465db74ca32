"""KV slots and rows: who has which. Host only.

A KV slot belongs to the allocator, to the radix tree, or to one running request (`Req.owned`), and `release` is the
only function that takes slots and rows from a request. Freeing while a step that still writes those slots is in flight
is safe, because whoever gets them next is launched later on the same stream.

What prompts that wait have in common with one that is being prefilled is computed once (`InflightPrefixes`)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence

import numpy as np

from draftwing.core import NOBODY, Admission, IntArray
from draftwing.sched.inflight_prefixes import MIN_SHARED_TOKENS, InflightPrefixes
from draftwing.sched.radix import RadixCache
from draftwing.sched.req import Req
from draftwing.sched.state_slots import StateSizes, StateSlots

MAX_LEFT_PER_SHARED = 2  # tokens left of the other prompt for each one saved: its KV is there for others at its end


class SlotAllocator:
    """Free KV slots, a stack. Slot 0 is the pool's dummy and is never handed out."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._stack = np.arange(slots, 0, -1, dtype=np.int64)
        self.available = slots

    def alloc(self, count: int) -> IntArray:
        assert 0 <= count <= self.available, f"{count} slots wanted, {self.available} free"
        self.available -= count
        return self._stack[self.available : self.available + count].copy()

    def free(self, slots: IntArray) -> None:
        end = self.available + len(slots)
        assert end <= self.slots, "a slot was freed twice"
        self._stack[self.available : end] = slots
        self.available = end

    def free_slots(self) -> IntArray:
        """Returns the slots on the stack, for integrity checks."""
        return self._stack[: self.available].copy()


class KVManager:
    """Changes of the page tables wait here for the next plan: `take_changes`.

    pool: free slots.  radix: cached prefixes.  by_row: requests that hold a row.  states: of a model with recurrent
    layers.
    """

    def __init__(
        self, slots: int, rows: int, lookahead: int, cache: bool, room: int, states: StateSizes | None = None
    ) -> None:
        """slots: of the pool.  rows: requests that may run at once.  lookahead: tokens past t on which KV at t depends.
        cache: whether prefixes are kept.  room: slots past the committed length that two steps in flight may need.
        states: of a model with recurrent layers."""
        self.slots, self.room = slots, room
        self.pool = SlotAllocator(slots)
        self.radix = RadixCache(lookahead, cache)
        self.states = None if states is None else StateSlots(states, lookahead, cache)
        self.radix.drop_state = None if self.states is None else self.states.drop
        self.by_row: dict[int, Req] = {}
        self._rows, self._lookahead = rows, lookahead
        self._free_rows = deque(range(rows))  # first in, first out: row-indexed memories are all used
        self._admissions = 0
        self._admits: dict[int, Admission] = {}  # uploads of the next plan, by row
        self._new_slots: dict[int, list[tuple[int, IntArray]]] = {}  # of plans to come: (first position, slots)
        self._inflight = InflightPrefixes()
        self._quarantined: list[IntArray] = []  # slots, see `take_quarantined`
        self.spoilt: Callable[[], object] = lambda: None  # is told of each `quarantine`

    # -- to requests ------------------------------------------------------------------------------------------------

    @property
    def free_rows(self) -> int:
        """Returns how many more requests can be admitted, if there are slots for them."""
        return len(self._free_rows)

    @property
    def obtainable(self) -> int:
        """Returns slots that are free or cached."""
        return self.pool.available + self.radix.evictable

    @property
    def evicted(self) -> int:
        """Returns how much others have taken of what was cached: slots, and snapshots."""
        return self.radix.evicted + (0 if self.states is None else self.states.evictions)

    def prefix_being_computed(self, req: Req, tokens: IntArray, held: Container[Req] = ()) -> bool:
        """Returns whether the KV of its tokens, or of so many of them that it is worth it, is being computed for
        another request, so that it should wait. held: who does not go on now."""
        if not self.radix.enabled:
            return False
        steady = not held or not self._inflight.any_held(req, tokens, held)  # what is found holds until one is dropped
        if steady and self._inflight.remembers(req, tokens):
            return True
        same = self.states is None and self._inflight.has(req, held)  # with states it says where one is to be kept
        waits = same or self._saves(req, tokens, held)
        if waits and steady:
            self._inflight.remember(req, tokens)
        return waits

    def _saves(self, req: Req, tokens: IntArray, held: Container[Req]) -> bool:
        """Returns whether enough of its tokens is being computed for others."""
        found = self._inflight.common_prefixes(req, tokens, held)
        alike = [one for one in found if one[1] >= MIN_SHARED_TOKENS]
        if not alike:
            return False
        most = self.may_reuse(req)
        cached = len(self.radix.match(tokens, req.salt, most).slots)
        saved = [(self._reusable(other, min(common, most)) - cached, left) for other, common, left in alike]
        return any(less >= MIN_SHARED_TOKENS and left <= MAX_LEFT_PER_SHARED * less for less, left in saved)

    def _reusable(self, req: Req, common: int) -> int:
        """Returns how many of so many tokens that are being computed for a request others can go on from."""
        return common if self.states is None else self.states.want(req, common)

    def admit(self, req: Req, tokens: IntArray, reserve: int) -> bool:
        """Gives it a row and what is cached of its tokens; False, and nothing changes, where they would leave fewer
        than `reserve` slots to others who run."""
        most = self.may_reuse(req)
        match = self.radix.match(tokens, req.salt, most)
        self.radix.lock(match.node)
        cached = len(match.slots)
        short = self.by_row and len(tokens) - cached + self.room + reserve > self.obtainable
        if short or (self.states is not None and not self.states.has_room(match.node)):
            self.radix.unlock(match.node)
            return False
        req.node = match.node
        req.row = self._free_rows.popleft()
        req.admission = self._admissions
        self._admissions += 1
        req.covered = 0
        req.append_slots(match.slots)
        req.owned[:cached] = False
        req.kv = req.sent = req.bound = cached
        if not req.retractions:
            req.cached_tokens = cached
        self.by_row[req.row] = req
        if self.states is not None:
            self.states.admit(req, match.node, cached, match.reach)
        if cached < most:
            self._inflight.add(req, tokens)
        draft_salt = req.salt if req.draft_salt is None else req.draft_salt
        self._admits[req.row] = Admission(
            req.row, list(req.tokens), match.slots, req.request, req.seed, tuple(sorted(req.stop_ids)), draft_salt,
            req.edited, req.adapter, req.head,
        )  # fmt: skip
        return True

    def may_reuse(self, req: Req) -> int:
        """Returns most cached positions that a request can use: it must run the last one, and those whose outcome it
        wants."""
        most = len(req.tokens) - max(1, self._lookahead)
        wanted = req.next_prompt_logprob
        return most if wanted is None else min(most, max(wanted - 1, 0))

    def cached(self, req: Req) -> int:
        """Returns how many tokens of a waiting request it could begin with now."""
        match = self.radix.match(req.array, req.salt, self.may_reuse(req))
        self.radix.lock(match.node)
        self.radix.unlock(match.node)  # a root that nobody needs goes
        return len(match.slots)

    def bring_back(self, req: Req, upto: int, fill: Callable[[int, IntArray], int]) -> int:
        """Caches KV of a waiting request's tokens that lies elsewhere, as far as there are slots for all of it.

        upto: positions.  fill: called with the first position that is not cached and slots for it and those behind it;
        returns up to which position it has filled them. Returns up to which position there is KV now."""
        match = self.radix.match_kv(req.array, req.salt, upto)
        start = len(match.slots)
        need = upto - start
        self.radix.lock(match.node)
        try:
            if need <= 0 or need > self.obtainable:
                return start
            if need > self.pool.available:
                self.pool.free(self.radix.evict(need - self.pool.available))
            new, end = self.pool.alloc(need), start
            try:
                end = fill(start, new)
            finally:
                self.pool.free(new[end - start :])
            if end > start:
                slots, owned = np.concatenate((match.slots, new[: end - start])), np.arange(end) >= start
                self.radix.insert(req.array[: end + self._lookahead], slots, owned, req.salt)
            return end
        finally:
            self.radix.unlock(match.node)

    def bring_back_state(self, req: Req, position: int, fill: Callable[[int], bool]) -> bool:
        """Does so with a snapshot of recurrent states after so many tokens, whose KV is cached. fill: called with a
        state slot; whether it has filled it."""
        assert self.states is not None
        node = self.radix.node_at(req.array, req.salt, position)
        if node is None or node.state:
            return node is not None
        self.radix.lock(node)  # to take a slot may drop snapshots, and never evicts KV
        try:
            slot = self.states.take_free()
            if not slot:
                return False
            if not fill(slot):
                self.states.free(slot)
                return False
            self.states.keep(node, slot, True)
            return True
        finally:
            self.radix.unlock(node)

    def cover(self, req: Req, upto: int) -> bool:
        """Gives `req` slots for positions below `upto`; False, and nothing changes, where there are not enough."""
        need = upto - req.covered
        if need <= 0:
            return True
        if need > self.obtainable:
            return False
        if need > self.pool.available:
            self.pool.free(self.radix.evict(need - self.pool.available))
        new = self.pool.alloc(need)
        self._new_slots.setdefault(req.row, []).append((req.covered, new))
        req.append_slots(new)
        return True

    def ahead(self, reqs: Sequence[Req], span: int, most: int) -> int:
        """Returns slots beyond `span` to give each of them, at most `most`. When one row needs slots all get some in
        advance, where the pool has plenty: a step with nothing to upload costs the host less, and rows that grow alike
        run short together."""
        if all(req.bound + span <= req.covered for req in reqs):
            return 0
        return most if 4 * len(reqs) * (most + span) <= self.obtainable else 0

    def take_changes(self) -> tuple[tuple[Admission, ...], dict[int, list[tuple[int, IntArray]]]]:
        """Returns requests that were admitted and slots by row that were given since the last plan, for the next
        one."""
        out = tuple(self._admits.values()), self._new_slots
        self._admits, self._new_slots = {}, {}
        return out

    def take_states(self) -> IntArray:
        """Returns the same of state slots, as `Plan.states`."""
        return NOBODY if self.states is None else self.states.take_entries()

    def changes(self, row: int) -> bool:
        """Returns whether the next plan has to tell the device of other slots of a row."""
        return row in self._new_slots or row in self._admits

    # -- from requests ----------------------------------------------------------------------------------------------

    def release(self, req: Req) -> None:
        """Takes what a request has, which nothing else does: the committed prefix goes to the radix tree, all else that
        is owned back to the allocator, the row to the free rows."""
        assert req.running and req.node is not None
        self._inflight.drop(req)
        if not req.private:
            self.radix.insert(self._known(req), req.slots, req.owned, req.salt)
        if self.states is not None:
            self._keep_states(req, self.states, self.states.release(req))
        self.radix.unlock(req.node)
        self.pool.free(_owned(req))
        req.slots, req.owned, req.covered, req.node = np.empty(0, np.int64), np.empty(0, bool), 0, None
        self._admits.pop(req.row, None)
        self._new_slots.pop(req.row, None)
        del self.by_row[req.row]
        self._free_rows.append(req.row)

    def _keep_states(self, req: Req, states: StateSlots, found: Sequence[tuple[int, int]], last: int = 0) -> None:
        """Gives states of a request's committed tokens, each with its position, to the tree. last: of its prompt."""
        for position, slot in found:
            node = self.radix.node_at(self._known(req), req.salt, position) if self.radix.enabled else None
            if node is None:
                states.free(slot)
            else:
                states.keep(node, slot, position == last)

    def _known(self, req: Req) -> IntArray:
        """Returns the keys of the tokens that its committed KV depends on."""
        return req.keys(req.kv + self._lookahead)

    def share(self, req: Req) -> None:
        """Gives the prompt to the radix tree at once, so that others can use it.

        Where somebody else was first, the row moves over to the tree's slots (same content) and frees its own: with
        both pinned, a request could need twice its length. A step in flight still reads the old slots; whoever gets
        them is launched after it.
        """
        self._inflight.drop(req)
        if req.private:
            return
        node = self.radix.insert(self._known(req), req.slots, req.owned, req.salt)
        if self.states is not None:
            found = self.states.shared(req)
            last = max((position for position, _ in found), default=0)
            self._keep_states(req, self.states, found, last)
        assert req.node is not None
        self.radix.lock(node)
        self.radix.unlock(req.node)
        req.node = node
        held = self.radix.path_slots(node)
        twice = np.flatnonzero(req.owned[: len(held)])
        if len(twice):
            self.pool.free(req.slots[twice])
            req.slots[twice] = held[twice]
            req.owned[twice] = False
            start, end = int(twice[0]), int(twice[-1]) + 1
            self._new_slots.setdefault(req.row, []).append((start, held[start:end]))

    def flush(self) -> None:
        """Empties the prefix cache, as far as nobody reads it."""
        self.pool.free(self.radix.evict(self.radix.evictable))
        if self.states is not None:
            self.states.drop_all()

    def quarantine(self, req: Req) -> None:
        """Notes that its logits are not finite, before it is released. Neither its KV is kept nor what is cached and it
        may have read: some of it may be what spoils them."""
        self._quarantined.append(_owned(req))
        req.kv = 0
        self.spoilt()

    def quarantine_cache(self) -> None:
        """Does as `quarantine`, of what is cached and nobody reads."""
        self._quarantined.append(self.radix.evict(self.radix.evictable))
        self.pool.free(self._quarantined[-1])
        if self.states is not None:
            self.states.drop_all()

    def take_quarantined(self) -> IntArray | None:
        """Returns slots whose KV nobody may read, not even where it has no weight; mostly None."""
        if not self._quarantined:
            return None
        out, self._quarantined = np.concatenate(self._quarantined), []
        return out

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Asserts that, with nothing running, every slot is free or cached and every row is free: cheap enough for
        every pause."""
        owned = self.pool.available + self.radix.size
        assert owned == self.slots, f"{owned} slots are accounted for, the pool has {self.slots}"
        assert self.radix.locked == 0, "a lock outlived its request"
        if self.states is not None:
            self.states.check_idle()
        assert len(self._free_rows) == self._rows and not self.by_row, "a row was lost"

    def check_integrity(self) -> None:
        """Asserts that every slot has exactly one owner, every row one holder, every lock its request. For tests: it is
        slow."""
        running = list(self.by_row.values())
        slots = np.sort(np.concatenate([self.pool.free_slots(), self.radix.slots(), *map(_owned, running)]))
        assert len(slots) == self.slots, f"{len(slots)} slots are owned, the pool has {self.slots}"
        assert (slots[1:] > slots[:-1]).all(), "a slot has two owners"
        rows = Counter([*self._free_rows, *self.by_row])
        assert len(rows) == self._rows and max(rows.values()) == 1, "a row was lost or given twice"
        assert len(set(running)) == len(running)
        if self.states is not None:
            self.states.check_integrity(running, self.radix.nodes())
        if not running:
            assert self.radix.locked == 0, "a lock outlived its request"


def _owned(req: Req) -> IntArray:
    return req.slots[: req.covered][req.owned[: req.covered]]
