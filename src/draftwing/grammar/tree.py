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
    children = _children(parent, alive)
    tokens, parent, alive = tokens.copy(), parent.copy(), np.zeros_like(alive)
    alive[0] = True
    depth = np.zeros(tokens.size, np.int64)
    forced: dict[int, list[int]] = {}

    def keep_legal(node: int) -> None:
        if chain := state.forced():
            forced[node] = chain
        seen: set[int] = set()
        for child in children[node]:
            token = int(tokens[child])
            if token in seen or not state.advance(token):
                continue
            seen.add(token)
            alive[child], depth[child] = True, depth[node] + 1
            keep_legal(child)
            state.rollback(1)

    keep_legal(0)
    free = [i for i in range(1, tokens.size) if not alive[i]]
    for node in sorted(forced, key=lambda node: (node != 0, -depth[node])):
        for token in forced[node]:  # as far as there are free nodes; some of it may be there already
            if depth[node] >= max_depth or not free:
                break
            known = np.flatnonzero(alive & (parent == node) & (tokens == token))
            known = known[known > 0]
            index = int(known[0]) if known.size else next((i for i in free if i > node), None)
            if index is None:
                break
            if not known.size:
                free.remove(index)
                tokens[index], parent[index], alive[index], depth[index] = token, node, True, depth[node] + 1
            node = index
    parent[~alive] = 0
    return Guided(state, tokens, parent, alive)


def _children(parent: IntArray, alive: BoolArray) -> list[list[int]]:
    """Returns the live children of each node; those of a dead one are never reached."""
    found: list[list[int]] = [[] for _ in range(parent.size)]
    for node in range(1, parent.size):
        if alive[node]:
            found[int(parent[node])].append(node)
    return found
