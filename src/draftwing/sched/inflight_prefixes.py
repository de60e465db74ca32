"""Prompts that are being prefilled, by what they begin with: what others that wait have in common with one of them is
computed once. Of a crowd behind one system prompt all but the first wait."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice

import numpy as np

from draftwing.core import IntArray
from draftwing.sched.req import Req

MIN_SHARED_TOKENS = 64  # tokens saved: to compute fewer takes less than to wait for a step
_MAX_COMPARED = 8  # prompts that begin alike


class InflightPrefixes:
    """Prompts by their first tokens."""

    def __init__(self) -> None:
        self._by_head: dict[tuple[int, bytes], dict[Req, IntArray]] = {}
        self._by_all: dict[tuple[int, bytes], dict[Req, None]] = {}  # the same by all of their tokens
        self._keys: dict[Req, tuple[tuple[int, bytes], tuple[int, bytes]]] = {}
        self._waiting: dict[tuple[int, bytes], set[Req]] = {}  # requests that were found to wait, by first tokens

    def add(self, req: Req, tokens: IntArray) -> None:
        """Notes that its prompt is computed from now on."""
        head, key = self._keys[req] = _head(req.salt, tokens), (req.salt, req.digest)
        self._by_head.setdefault(head, {})[req] = tokens
        self._by_all.setdefault(key, {})[req] = None

    def drop(self, req: Req) -> None:
        """Removes what is cached, or nobody computes any more. Nothing happens where there is none."""
        if req not in self._keys:
            return
        head, key = self._keys.pop(req)
        alike, same = self._by_head[head], self._by_all[key]
        del alike[req], same[req]
        self._waiting.pop(head, None)
        if not alike:
            del self._by_head[head]
        if not same:
            del self._by_all[key]

    def remember(self, req: Req, tokens: IntArray) -> None:
        """Remembers that a request waits for a prompt that begins like its own: it does until one of these is
        dropped, so nobody need look at them again before each step."""
        self._waiting.setdefault(_head(req.salt, tokens), set()).add(req)

    def remembers(self, req: Req, tokens: IntArray) -> bool:
        """Returns whether a request still waits, as `remember` noted."""
        return req in self._waiting.get(_head(req.salt, tokens), ())

    def any_held(self, req: Req, tokens: IntArray, held: Container[Req]) -> bool:
        """Returns whether a prompt that begins like its own does not go on now. held: see `common_prefixes`."""
        return any(other in held for other in self._alike(req, tokens))

    def has(self, req: Req, held: Container[Req] = ()) -> bool:
        """Returns whether there is a prompt of the very same tokens. held: see `common_prefixes`."""
        same = self._by_all.get((req.salt, req.digest), ())
        return any(_before(other, req, held) for other in same)

    def common_prefixes(self, req: Req, tokens: IntArray, held: Container[Req]) -> Iterator[tuple[Req, int, int]]:
        """Yields each request whose prompt is like it: tokens in common, and those that are left to compute. held:
        whose prompts do not go on now. Left out are those of other clients and of lower priority, which may get less
        time."""
        before = (pair for pair in self._alike(req, tokens).items() if _before(pair[0], req, held))
        for other, its in islice(before, _MAX_COMPARED):
            yield other, _common(tokens, its), len(its) - other.sent

    def _alike(self, req: Req, tokens: IntArray) -> dict[Req, IntArray]:
        return self._by_head.get(_head(req.salt, tokens), {})


def _before(other: Req, req: Req, held: Container[Req]) -> bool:
    """Returns whether a request may wait for the other one's prompt."""
    theirs, asked = other.request, req.request
    return theirs.client == asked.client and theirs.priority >= asked.priority and other not in held


def _head(salt: int, tokens: IntArray) -> tuple[int, bytes]:
    return salt, tokens[:MIN_SHARED_TOKENS].tobytes()


def _common(a: IntArray, b: IntArray) -> int:
    """Returns tokens with which both begin."""
    size = min(len(a), len(b))
    other = a[:size] != b[:size]
    at = int(np.argmax(other)) if size else 0
    return at if size and other[at] else size
