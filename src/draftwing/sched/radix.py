"""Prefix cache: a radix tree from token windows to KV slots.

The key of position t is the window of tokens t .. t + lookahead, because a drafter's KV at t may depend on that many
tokens beyond t; with lookahead 0 it is the token itself. Slots in the tree belong to the tree; a running request
locks the path it reads. `evict` is the only way a slot leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from draftwing.core import IntArray


class Node:
    """An edge of the tree with the node at its end: `keys` [m, window] and the `slots` [m] that hold them. state: slot
    of the recurrent layers' state at the end, 0: there is none; pins: requests that are about to read it."""

    __slots__ = ("alive", "children", "keys", "parent", "pins", "queued", "refs", "salt", "slots", "state", "used")

    def __init__(self, keys: IntArray, slots: IntArray, parent: Node | None, used: int, salt: int) -> None:
        self.keys = keys
        self.slots = slots
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.used = used
        self.salt = salt
        self.alive = True
        self.queued = False  # has an entry in the eviction heap
        self.state = self.pins = 0


class Match(NamedTuple):
    node: Node
    slots: IntArray  # [matched positions]
    reach: int = 0  # positions with cached KV; more than are matched, where there is no state at the last


class RadixCache:
    """Tree per cache salt, least recently used leaves evicted first. `size` and `locked` count slots."""

    def __init__(self, lookahead: int, enabled: bool = True) -> None:
        self.window = 1 + lookahead
        self.enabled = enabled
        self.size = 0
        self.locked = 0
        self.evicted = 0  # slots, so far
        # Takes a node's snapshot away, of a model with recurrent layers.
        self.drop_state: Callable[[Node], object] | None = None
        self._clock = 0
        self._order = count()  # breaks ties in the heap
        self._heap: list[tuple[int, int, Node]] = []  # (used, order, leaf); entries may be stale
        self._roots: dict[int, Node] = {}

    @property
    def evictable(self) -> int:
        return self.size - self.locked

    def root(self, salt: int) -> Node:
        """Returns the root of a salt's tree; it is dropped again when nothing is in the tree and nobody holds it."""
        node = self._roots.get(salt)
        if node is None:
            empty = np.empty(0, np.int64)
            node = self._roots[salt] = Node(empty.reshape(0, self.window), empty, None, 0, salt)
        return node

    def match(self, tokens: IntArray, salt: int, limit: int) -> Match:
        """Returns the longest cached prefix of `tokens`, at most `limit` positions, of a model with recurrent layers
        the longest at whose end there is a state. The node ends exactly at the match."""
        node = self.root(salt)
        if not self.enabled:
            return Match(node, np.empty(0, np.int64))
        node, reach = self._walk(node, self.windows(tokens)[: max(limit, 0)])
        if self.drop_state is not None:
            node = next(step for step in _path(node) if step.state or step.parent is None)
        return Match(node, self.path_slots(node), reach)

    def match_kv(self, tokens: IntArray, salt: int, limit: int) -> Match:
        """Returns the longest prefix with cached KV, whether or not there is a state at its end."""
        node, reach = self._walk(self.root(salt), self.windows(tokens)[: max(limit, 0)])
        return Match(node, self.path_slots(node), reach)

    def snapshots(self, node: Node) -> list[tuple[int, int]]:
        """Returns positions with a state on the path to the end of `node`, and the state's slot, the last one first."""
        end, found = sum(len(step.slots) for step in _path(node)), []
        for step in _path(node):
            if step.state:
                found.append((end, step.state))
            end -= len(step.slots)
        return found

    def node_at(self, tokens: IntArray, salt: int, length: int) -> Node | None:
        """Returns the node at the end of so many positions; None where they are not all cached."""
        node, done = self._walk(self.root(salt), self.windows(tokens)[:length])
        return node if done == length else None

    def path_slots(self, node: Node) -> IntArray:
        """Returns slots of all positions from the root to the end of `node`."""
        return np.concatenate([step.slots for step in _path(node)][::-1])

    def insert(self, tokens: IntArray, slots: IntArray, owned: np.ndarray, salt: int) -> Node:
        """Adds the windows of `tokens`; slots of positions that are new move to the tree (their `owned` bit is
        cleared), those of positions it already has stay with the caller. Returns the node at the end."""
        node = self.root(salt)
        if not self.enabled:
            return node
        keys = self.windows(tokens)
        node, done = self._walk(node, keys)
        if done < len(keys):
            assert owned[done : len(keys)].all(), "a slot beyond the tree's path must be the caller's"
            leaf = Node(keys[done:].copy(), slots[done : len(keys)].copy(), node, self._clock, salt)
            node.children[keys[done].tobytes()] = leaf
            owned[done : len(keys)] = False
            self.size += len(leaf.slots)
            self._offer(leaf)
            node = leaf
        return node

    def lock(self, node: Node) -> None:
        for step in _path(node):
            if step.refs == 0:
                self.locked += len(step.slots)
            step.refs += 1

    def unlock(self, node: Node) -> None:
        for step in _path(node):
            step.refs -= 1
            assert step.refs >= 0, "unlocked more often than locked"
            if step.refs == 0:
                self.locked -= len(step.slots)
                self._offer(step)

    def evict(self, wanted: int) -> IntArray:
        """Frees `wanted` slots (asserted to be evictable), from the ends of the least recently used leaves."""
        assert wanted <= self.evictable, f"{wanted} slots to evict, {self.evictable} evictable"
        self.evicted += wanted
        out: list[IntArray] = []
        while wanted > 0:
            used, _, leaf = heapq.heappop(self._heap)
            leaf.queued = False
            if not self._is_evictable(leaf):
                continue
            if leaf.used != used:
                self._offer(leaf)
                continue
            keep = max(len(leaf.slots) - wanted, 0)
            out.append(leaf.slots[keep:])
            wanted -= len(leaf.slots) - keep
            self.size -= len(leaf.slots) - keep
            if leaf.state and self.drop_state is not None:
                self.drop_state(leaf)
            if keep:
                leaf.keys, leaf.slots = _part(leaf.keys[:keep]), _part(leaf.slots[:keep])
                self._offer(leaf)
            else:
                self._remove(leaf)
        return np.concatenate(out) if out else np.empty(0, np.int64)

    def slots(self) -> IntArray:
        """Returns every slot in the tree, for integrity checks."""
        parts = [node.slots for node in self.nodes()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def windows(self, tokens: IntArray) -> IntArray:
        """Returns the keys of all positions that have one, [positions, window]."""
        if len(tokens) < self.window:
            return np.empty((0, self.window), np.int64)
        return sliding_window_view(tokens, self.window)

    def _walk(self, node: Node, keys: IntArray) -> tuple[Node, int]:
        """Follows `keys` as far as the tree has them, splitting an edge where they part; marks the path as used."""
        self._clock += 1
        done = 0
        while done < len(keys):
            child = node.children.get(keys[done].tobytes())
            if child is None:
                break
            same = min(len(child.slots), len(keys) - done)
            differs = (child.keys[:same] != keys[done : done + same]).any(axis=1)
            same = int(differs.argmax()) if differs.any() else same
            node = child if same == len(child.slots) else self._split(child, same)
            node.used = self._clock
            done += same
        return node, done

    def _split(self, child: Node, at: int) -> Node:
        """Cuts the edge of `child` after `at` positions; returns the new upper node."""
        parent = child.parent
        assert parent is not None and 0 < at < len(child.slots)
        upper = Node(_part(child.keys[:at]), _part(child.slots[:at]), parent, child.used, child.salt)
        upper.refs = child.refs
        parent.children[child.keys[0].tobytes()] = upper
        child.keys, child.slots, child.parent = _part(child.keys[at:]), _part(child.slots[at:]), upper
        upper.children[child.keys[0].tobytes()] = child
        return upper

    def _is_evictable(self, node: Node) -> bool:
        return node.alive and node.refs == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Enters what may be evicted into the heap, once; drops a root that nobody needs."""
        if self._is_evictable(node) and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.used, next(self._order), node))
        if node.parent is None and not node.children and node.refs == 0:
            self._roots.pop(node.salt, None)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        # `leaf.keys` still holds the whole edge: only its end may have been cut by an earlier eviction.
        del parent.children[leaf.keys[0].tobytes()]
        leaf.alive = False
        self._offer(parent)

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes, the roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _part(view: IntArray) -> IntArray:
    """Returns the view, or a copy where most of what it keeps in memory is not its own: a short beginning that many
    have in common stays for long, and the prompt that first had it may have been long."""
    return view.copy() if view.base is not None and 2 * view.size < view.base.size else view


def _path(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
