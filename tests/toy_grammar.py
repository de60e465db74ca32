"""A grammar that needs no library: for tests of what is done with grammars."""

from __future__ import annotations

import random

import numpy as np


class ToyGrammar:
    """What may come next is a function of the last three tokens; sometimes a single token, so that text is forced."""

    def __init__(self, seed: int, vocab: int, tokens: tuple[int, ...] = ()) -> None:
        self.seed, self.vocab, self.tokens = seed, vocab, list(tokens)

    def _allowed(self) -> set[int]:
        draw = random.Random(f"{self.seed} {self.tokens[-3:]}")
        count = 1 if draw.random() < 0.3 else draw.randint(2, 20)
        return set(draw.sample(range(self.vocab), count))

    done = complete = False
    ends_by_stop_id = True

    def mask(self, out=None):
        words = np.zeros(-(-self.vocab // 32), np.uint32)
        for token in self._allowed():
            words[token // 32] |= np.uint32(1 << (token % 32))
        if out is None:
            return words
        out[:] = words
        return out

    def advance(self, token: int) -> bool:
        legal = token in self._allowed()
        if legal:
            self.tokens.append(token)
        return legal

    def fork(self):
        return type(self)(self.seed, self.vocab, tuple(self.tokens))

    def run(self, tokens):
        return sum(self.advance(token) for token in tokens)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def forced(self) -> list[int]:
        ahead = ToyGrammar(self.seed, self.vocab, tuple(self.tokens))
        chain: list[int] = []
        while len(allowed := ahead._allowed()) == 1 and len(chain) < 6:
            chain += allowed
            ahead.tokens += allowed
        return chain
