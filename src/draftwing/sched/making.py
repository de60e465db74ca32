"""Prompts that are being prefilled. What others that wait have in common with them is computed once: of a crowd behind
one system prompt all but the first wait."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice

import numpy as np

from draftwing.core import IntArray
from draftwing.sched.req import Req

WORTH = 64  # tokens that have to be saved: fewer are computed beside others in no time, and to wait is a step
PATIENCE = 2  # tokens left of the other prompt for each one saved: its KV is there for others at its end
_LOOKED_AT = 8  # prompts that begin alike


class InTheMaking:
    """Prompts by their first tokens."""

    def __init__(self) -> None:
        self._by_head: dict[tuple[int, bytes], dict[Req, IntArray]] = {}
        self._heads: dict[Req, tuple[int, bytes]] = {}

    def add(self, req: Req, tokens: IntArray) -> None:
        """Its prompt is computed from now on."""
        head = self._heads[req] = _head(req.salt, tokens)
        self._by_head.setdefault(head, {})[req] = tokens

    def drop(self, req: Req) -> None:
        """It is cached, or nobody computes it any more. Nothing happens where there is none."""
        head = self._heads.pop(req, None)
        if head is None:
            return
        alike = self._by_head[head]
        del alike[req]
        if not alike:
            del self._by_head[head]

    def has(self, req: Req, tokens: IntArray) -> bool:
        """Whether there is a prompt of the very same tokens."""
        return any(len(its) == len(tokens) and bool((its == tokens).all()) for _, its in self._alike(req, tokens))

    def most_in_common(self, req: Req, tokens: IntArray, held: Container[Req]) -> Iterator[tuple[int, int]]:
        """Of each prompt that is like it: tokens in common, and those that are left to compute. held: whose prompts do
        not go on now. Left out are those of other clients and of lower priority, which may get less time."""
        asked = req.request
        for other, its in self._alike(req, tokens):
            before = other.request.client == asked.client and other.request.priority >= asked.priority
            if before and other not in held:
                yield _common(tokens, its), len(its) - other.sent

    def _alike(self, req: Req, tokens: IntArray) -> Iterator[tuple[Req, IntArray]]:
        return islice(self._by_head.get(_head(req.salt, tokens), {}).items(), _LOOKED_AT)


def _head(salt: int, tokens: IntArray) -> tuple[int, bytes]:
    return salt, tokens[:WORTH].tobytes()


def _common(a: IntArray, b: IntArray) -> int:
    """Tokens with which both begin."""
    size = min(len(a), len(b))
    other = a[:size] != b[:size]
    at = int(np.argmax(other)) if size else 0
    return at if size and other[at] else size
