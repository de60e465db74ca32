"""Fits draft trees to a grammar: illegal nodes die, forced text takes their nodes, every node gets its mask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftwing.core import IntArray
from draftwing.grammar.state import GrammarState, Mask

BoolArray = npt.NDArray[np.bool_]


class Guided:
    """The tree of one row after `guide`: tokens [N], parent [N] int64, alive [N] bool.

    The state must not move before `masks` was called; afterwards it stands where it stood.
    """

    def __init__(self, state: GrammarState, tokens: IntArray, parent: IntArray, alive: BoolArray) -> None:
        self.state = state
        self.tokens, self.parent, self.alive = tokens, parent, alive
        self._masks: npt.NDArray[np.uint32] | None = None

    def masks(self, out: npt.NDArray[np.uint32] | None = None) -> npt.NDArray[np.uint32]:
        """Returns what may follow each node, [N, W] uint32; the rows of dead nodes are the root's. Computed at the
        first call, one mask for each live node; meant for the time in which the target runs. Raises RequestError as
        `GrammarState.mask`."""
        if self._masks is None:
            root = self.state.mask()
            masks = np.empty((self.tokens.size, root.size), np.uint32) if out is None else out
            masks[:] = root
            children = _children(self.parent, self.alive)
            self._descend(0, children, masks)
            self._masks = masks
        return self._masks

    def _descend(self, node: int, children: list[list[int]], masks: npt.NDArray[np.uint32]) -> None:
        for child in children[node]:
            # Forced text is cut into tokens anew after every token, perhaps in another way. What is illegal is not in
            # its parent's mask, so it is never drawn, and its own mask is never read.
            if not self.state.advance(int(self.tokens[child])):
                continue
            row: Mask = masks[child]
            self.state.mask(row)
            self._descend(child, children, masks)
            self.state.rollback(1)


def guide(state: GrammarState, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int) -> Guided:
    """Fits a draft tree to the grammar.

    state: after the root's token.  tokens, parent [N] int64, alive [N] bool: a tree as `ops.reference.tree.derive`
    wants it, parent[0] = 0 and parent[i] < i; the root's token is not looked at.  max_depth: of the tree that comes
    back.

    Nodes keep their indices. Illegal ones die with all below them; the indices of dead nodes are given to text that the
    grammar forces after the root and after live nodes, the deepest first. Siblings stay distinct, parents stay before
    their children. The arrays given are not changed.
    """
    tokens, parent, alive = tokens.copy(), parent.copy(), alive.copy()
    alive[0] = True
    depth = np.zeros(tokens.size, np.int64)
    forced: dict[int, list[int]] = {}
    children = _children(parent, alive)
    alive[1:] = False
    _keep_legal(state, 0, tokens, children, alive, depth, forced)
    free = [i for i in range(1, tokens.size) if not alive[i]]
    deepest_first = sorted(forced, key=lambda node: (node != 0, -depth[node]))
    for node in deepest_first:
        if not free:
            break
        _insert(node, forced[node], tokens, parent, alive, depth, free, max_depth)
    parent[~alive] = 0
    return Guided(state, tokens, parent, alive)


def _children(parent: IntArray, alive: BoolArray) -> list[list[int]]:
    """Returns the live children of each node; those of a dead one are never reached."""
    found: list[list[int]] = [[] for _ in range(parent.size)]
    for node in range(1, parent.size):
        if alive[node]:
            found[int(parent[node])].append(node)
    return found


def _keep_legal(
    state: GrammarState,
    node: int,
    tokens: IntArray,
    children: list[list[int]],
    alive: BoolArray,
    depth: IntArray,
    forced: dict[int, list[int]],
) -> None:
    chain = state.forced()
    if chain:
        forced[node] = chain
    seen: set[int] = set()
    for child in children[node]:
        token = int(tokens[child])
        if token in seen or not state.advance(token):
            continue
        seen.add(token)
        alive[child] = True
        depth[child] = depth[node] + 1
        _keep_legal(state, child, tokens, children, alive, depth, forced)
        state.rollback(1)


def _insert(
    node: int,
    chain: list[int],
    tokens: IntArray,
    parent: IntArray,
    alive: BoolArray,
    depth: IntArray,
    free: list[int],
    max_depth: int,
) -> None:
    """Puts `chain` below `node`, as far as there are free nodes and as far as it is not there already."""
    for token in chain:
        if depth[node] >= max_depth:
            return
        known = np.flatnonzero(alive & (parent == node) & (tokens == token))
        known = known[known > 0]
        if known.size:
            node = int(known[0])
            continue
        index = next((i for i in free if i > node), None)
        if index is None:
            return
        free.remove(index)
        tokens[index], parent[index], alive[index], depth[index] = token, node, True, depth[node] + 1
        node = index
