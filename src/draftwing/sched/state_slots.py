"""State slots of models with recurrent layers: who has which. Host only.

A running row has two, which its steps read and write by turns (`RowStates`); the device swaps them, and the host
does as it does; where states are lazy, every second plain step writes none. All others are *snapshots*, at nodes of the
radix tree, or free. A row begins with a snapshot, or with the state of an empty text, which is slot 0; it reads that
once and writes a slot of its own, and it gets its second one with the plan after that.

What a row writes is its own until it is released, so a slot may be given away while a step in flight writes it: whoever
gets it is launched later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np

from draftwing.core import NOBODY, IntArray
from draftwing.sched.radix import Node
from draftwing.sched.req import HeldStates, Req

EVERY = 512  # tokens between snapshots of a long prompt, whose end others may replace; they compute half as many again
GRAIN = 64  # the last snapshot of a prompt is at a multiple of so many tokens: at the same place for who begins alike
ROW_SLOTS = 2  # of a running request
LEAST_SLOTS = ROW_SLOTS + 1  # a request that runs alone, and the snapshot that it begins with


class StateSizes(NamedTuple):
    """slots: state slots.  every, grain: as `EVERY` and `GRAIN`.  lazy: as of `RowStates`."""

    slots: int
    every: int = EVERY
    grain: int = GRAIN
    lazy: bool = False


class StateSlots:
    """hits: requests that began with a snapshot.  evictions: snapshots whose slots others needed."""

    def __init__(self, sizes: StateSizes, lookahead: int, cache: bool = True) -> None:
        """lookahead: tokens that a cached prefix must leave of a text.  cache: whether prefixes are kept."""
        assert sizes.slots >= LEAST_SLOTS, f"{sizes.slots} state slots, at the least {LEAST_SLOTS} are needed"
        self.slots, self.every, self.grain, self._lazy = sizes
        self.hits = self.evictions = 0
        self._lookahead, self._cache = lookahead, cache
        self._free = list(range(sizes.slots, 0, -1))
        # Nodes with snapshots, each queue the first to be evicted first. A conversation goes on from the last snapshot
        # of its prompt, once: `_next` has those that are waited for (True) or that several began with. `_past` has what
        # it has gone past, and what only helps where an end is replaced; it is evicted before.
        self._next: OrderedDict[Node, bool] = OrderedDict()
        self._past: OrderedDict[Node, None] = OrderedDict()
        self._pinned = 0  # of these
        self._entries: dict[int, tuple[int, int, int]] = {}  # of the next plan, by row

    @property
    def kept(self) -> int:
        """Snapshots in the tree."""
        return len(self._next) + len(self._past)

    def stats(self) -> dict[str, int]:
        """Counts: all state slots, snapshots, requests that began with one, and snapshots that were evicted."""
        return {
            "state_slots": self.slots, "snapshots": self.kept, "snapshot_hits": self.hits,
            "snapshot_evictions": self.evictions,
        }  # fmt: skip

    def has_room(self, node: Node) -> bool:
        """Returns whether a request can run that begins with the state of a node, if it has one."""
        free = len(self._free) + self.kept - self._pinned
        return free - (node.state > 0 and not node.pins) >= ROW_SLOTS

    # -- snapshots --------------------------------------------------------------------------------------------------

    def keep(self, node: Node, slot: int, awaited: bool) -> None:
        """Gives a node a snapshot, whose slot is the tree's then; frees it where it has one. awaited: whether it is the
        last one of a prompt."""
        if node.state:
            self._free.append(slot)
        else:
            node.state = slot
        if awaited:
            self._past.pop(node, None)
            self._await(node, True)
        elif node not in self._next and node not in self._past:
            self._past[node] = None
            self._past.move_to_end(node, last=False)

    def drop(self, node: Node) -> None:
        """Takes a node's snapshot away."""
        assert not node.pins, "a row is about to read it"
        del (self._next if node in self._next else self._past)[node]
        self._free.append(node.state)
        node.state = 0

    def drop_all(self) -> None:
        """Takes the snapshots of all nodes whose state no row is about to read."""
        for node in [node for node in (*self._past, *self._next) if not node.pins]:
            self.drop(node)

    def take_free(self) -> int:
        """Returns a free slot, or that of the first snapshot to be evicted; 0 where there is none."""
        if not self._free:
            node = next((node for node in chain(self._past, self._next) if not node.pins), None)
            if node is None:
                return 0
            self.drop(node)
            self.evictions += 1
        return self._free.pop()

    def _begun(self, node: Node) -> None:
        """A request begins with a snapshot."""
        self.hits += 1
        if self._next.pop(node, False):
            self._past[node] = None
        else:
            self._past.pop(node, None)
            self._await(node, False)

    def _await(self, node: Node, first: bool) -> None:
        self._next[node] = first
        self._next.move_to_end(node)
        if len(self._next) > self.slots // ROW_SLOTS:  # as many as can run: others have been left, most likely
            self._past[self._next.popitem(last=False)[0]] = None

    # -- requests ---------------------------------------------------------------------------------------------------

    def admit(self, req: Req, node: Node, length: int, reach: int) -> None:
        """Gives a request that has its row, and room, its slots. node, length: at whose state it begins, and how many
        tokens that has. reach: how many of its tokens have cached KV."""
        if node.state:
            self._begun(node)
            self._pinned += not node.pins
            node.pins += 1
        read, write, spare = node.state, self.take_free(), self.take_free()
        assert write and spare, "there was no room"
        req.states = HeldStates(read, write, spare, node if read else None, self._positions(req, length, reach))
        self._entries[req.row] = read, write, length

    def _positions(self, req: Req, start: int, reach: int) -> set[int]:
        """Returns where snapshots of its prompt are taken: every so many tokens, where it leaves what is cached, and
        near its end. One prompt takes a quarter of all slots at most, or one."""
        if not self._cache or req.private:
            return set()
        end, every = len(req.tokens) - 1 - self._lookahead, self.every
        while (end - start) // every > max(self.slots // 4, 1):
            every *= 2
        near = reach - start < self.grain  # to compute them takes less than a state is worth
        found = {
            start if near else reach,
            end // self.grain * self.grain,
            *range(start // every * every + every, end + 1, every),
        }
        return {position for position in found if position > start}

    def want(self, req: Req, position: int) -> int:
        """Has a snapshot taken of a prompt at a position where another one leaves it, if that is not too late. Returns
        the last position up to there with one."""
        held = req.states
        assert held is not None
        if req.sent < position:
            held.wanted.add(position)
            return position
        return max((at for at, _ in held.saves if at <= position), default=0)

    def saves(self, req: Req, length: int) -> tuple[tuple[int, int], ...]:
        """`Chunk.saves` of its next chunk of so many tokens."""
        held, found = req.states, []
        assert held is not None
        for position in sorted(held.wanted):
            if req.sent < position <= req.sent + length and (slot := self.take_free()):
                held.saves.append((position, slot))
                found.append((position - req.sent, slot))
        return tuple(found)

    def planned(self, reqs: Iterable[Req], nodes: int = 0) -> None:
        """Notes that a step of these requests was planned, and its plan is made. nodes: of each tree; 0: of chunks."""
        for req in reqs:
            held = req.states
            assert held is not None
            if self._lazy and nodes == 1 and held.fresh:
                held.fresh = False
                held.writes.append(0)
                continue
            held.fresh = nodes < 2
            held.writes.append(held.write)
            if not held.spare:
                held.read, held.write = held.write, held.read
                continue
            held.read, held.write, held.spare = held.write, held.spare, 0
            self._entries[req.row] = -1, held.write, -1
            self._unpin(held)

    def committed(self, req: Req, length: int) -> None:
        """Notes that the oldest step in flight has run, and if it has written a state, that of so many tokens."""
        held = req.states
        assert held is not None
        if slot := held.writes.popleft():
            held.newest, held.length = slot, length

    def shared(self, req: Req) -> list[tuple[int, int]]:
        """Hands its snapshots over to the tree: position and slot."""
        held = req.states
        assert held is not None
        found, held.saves = held.saves, []
        return found

    def release(self, req: Req) -> list[tuple[int, int]]:
        """Takes all that a request has. Returns the states of its committed tokens, for the tree: position and slot."""
        held = req.states
        assert held is not None
        found = [save for save in held.saves if save[0] <= req.kv]
        if 0 < held.length <= req.kv and held.newest not in held.writes:  # else a step in flight writes there
            found.append((held.length, held.newest))
        theirs = {slot for _, slot in found}
        slots = [*held.own, *(slot for _, slot in held.saves)]
        self._free += [slot for slot in slots if slot not in theirs]
        self._unpin(held)
        self._entries.pop(req.row, None)
        req.states = None
        return found

    def free(self, slot: int) -> None:
        """Frees a state that has no place in the tree."""
        self._free.append(slot)

    def take_entries(self) -> IntArray:
        """`Plan.states` of the next plan."""
        if not self._entries:
            return NOBODY
        entries, self._entries = self._entries, {}
        return np.asarray([(row, *entry) for row, entry in entries.items()], np.int64)

    def _unpin(self, held: HeldStates) -> None:
        if held.begun is not None:
            held.begun.pins -= 1
            self._pinned -= not held.begun.pins
            held.begun = None

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Asserts that with nothing running every slot is free or a snapshot."""
        count = len(self._free) + self.kept
        assert count == self.slots and not self._pinned, f"{count} state slots are accounted for, of {self.slots}"

    def check_integrity(self, running: Iterable[Req], nodes: Iterable[Node]) -> None:
        """Asserts that every slot has one owner. nodes: of the tree."""
        with_state = {node for node in nodes if node.state}
        assert with_state == {*self._next, *self._past}, "a snapshot is of no node of the tree"
        held = [req.states for req in running if req.states is not None]
        slots = [*self._free, *(node.state for node in with_state)]
        for one in held:
            slots += [*one.own, *(slot for _, slot in one.saves)]
        assert sorted(slots) == list(range(1, self.slots + 1)), "a state slot was lost, or has two owners"
        assert self._pinned == len({one.begun for one in held} - {None})
