"""The state of an answer in its grammar, and how draft trees are fitted to it: illegal nodes die, forced text takes
their nodes, every node gets its mask. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwing.core import IntArray
from draftwing.errors import RequestError

logger = logging.getLogger(__name__)
Mask = npt.NDArray[np.uint32]  # [W], W = ceil(V / 32): bit i % 32 of word i // 32 is token i, 1 when it is allowed


def reason(matcher: Any) -> str:
    """Returns what the library says about an error of its matcher. What it says about a bug of its own is for the
    log."""
    message: str = matcher.get_error()
    if "panic: " in message or "panicked at" in message:
        logger.error("the grammar library failed: %.2000s", message)
        return "the grammar library fails on it"
    return message.split("<state>")[0].strip()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What all states of a server have in common.

    tokens: the library's tokenizer.  stop_ids: may end an answer.  reserved_ids: those, and the library's own end.
    stop: mask of the stop ids.  keep: mask of the tokens that the grammar decides about.
    """

    tokens: Any
    stop_ids: frozenset[int]
    reserved_ids: frozenset[int]
    stop: Mask
    keep: Mask


class GrammarState:
    """The state of one answer: the grammar after the tokens so far. Not for several threads at once, but different
    states are independent of each other, and `mask` gives up the interpreter's lock.

    A token is legal if it is in the mask. Where the grammar forces text, the mask is the one token that the tokenizer
    itself would choose, so that the answer's tokens look like those that the model was trained on.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: Any, ended: int = 0) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._ended = ended  # stop ids that came last

    @property
    def may_end(self) -> bool:
        """Tells whether the text so far is a whole answer."""
        return bool(self._ended or self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Tells whether nothing but a stop id may follow."""
        if self._ended or (self._matcher.is_stopped() and not self._matcher.is_error()):
            return True
        return bool(self._matcher.is_accepting()) and not (self._own_mask() & self._vocabulary.keep).any()

    @property
    def complete(self) -> bool:
        """Tells whether nothing at all may follow: the answer must end, and there is no stop id to say so."""
        return not self._vocabulary.stop_ids and self.done

    @property
    def ends_by_stop_id(self) -> bool:
        """Tells whether every answer does; else one may be `complete`."""
        return bool(self._vocabulary.stop_ids)

    def mask(self, out: Mask | None = None) -> Mask:
        """Returns the legal tokens, [W] uint32, in `out` if it is given; all zeros when the answer must end but there
        are no stop ids. Raises RequestError when the grammar becomes too complex here."""
        out = np.empty_like(self._vocabulary.keep) if out is None else out
        if self._ended:
            out[:] = self._vocabulary.stop
            return out
        np.bitwise_and(self._own_mask(), self._vocabulary.keep, out=out)
        if self._matcher.is_accepting():
            out |= self._vocabulary.stop
        return out

    def _own_mask(self) -> Mask:
        words = np.zeros_like(self._vocabulary.keep)
        size = (self._vocabulary.tokens.vocab_size + 31) // 32
        if size <= words.size:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, size * 4)
        else:  # the logits are narrower than the vocabulary
            wide = np.zeros(size, np.uint32)
            self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, size * 4)
            words[:] = wide[: words.size]
        self._raise_if_broken()
        return words

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar became too complex: {reason(self._matcher)[:300]}", "grammar")

    def advance(self, token: int) -> bool:
        """Takes `token`; False, and nothing changes, if it is illegal. Raises RequestError as `mask`."""
        if token in self._vocabulary.reserved_ids:
            legal = token in self._vocabulary.stop_ids and self.may_end
            self._ended += legal
            return legal
        if self._ended or not 0 <= token < self._vocabulary.tokens.vocab_size:
            return False
        forced = self._matcher.compute_ff_tokens()
        if forced and forced[0] != token:
            return False
        taken: int = self._matcher.try_consume_tokens([token])
        if not taken:
            self._raise_if_broken()
        return taken == 1

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        stops = min(count, self._ended)
        self._ended -= stops
        if count > stops:
            taken_back = self._matcher.rollback(count - stops)
            self._raise_if_broken()
            assert taken_back

    def fork(self) -> GrammarState:
        """Returns an independent copy."""
        return GrammarState(self._vocabulary, self._matcher.deep_copy(), self._ended)

    def forced(self) -> list[int]:
        """Returns the tokens that must follow, in order and without stop ids; empty where there is a choice."""
        if self._ended or self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        for i, token in enumerate(tokens):
            if token in self._vocabulary.reserved_ids:
                return tokens[:i]
        return tokens

    def run(self, tokens: Sequence[int]) -> int:
        """Takes tokens up to the first illegal one; returns how many."""
        for i, token in enumerate(tokens):
            if not self.advance(token):
                return i
        return len(tokens)


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

    state: after the root's token.  tokens, parent [N] int64, alive [N] bool: a tree as `ops.tree.spec.derive`
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
