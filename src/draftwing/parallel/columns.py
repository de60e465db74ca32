"""Which columns of a whole each rank has, and how what is gathered of all ranks becomes that whole."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.parallel.ranks import Absent, Ranks, Share

Run = tuple[int, int]  # the first column, and how many


class Columns(NamedTuple):
    """runs: of each rank, in the order in which it has them; each column of `whole` is in one of them, or in several
    that hold the same."""

    runs: tuple[tuple[Run, ...], ...]
    whole: int

    @classmethod
    def of(cls, runs: Iterable[Iterable[Run]], whole: int) -> Columns:
        return cls(tuple(tuple(of_rank) for of_rank in runs), whole)

    @classmethod
    def of_shares(cls, shares: Sequence[Share]) -> Columns:
        """shares: of each rank."""
        return cls.of((((start, size),) for start, size, _ in shares), shares[0].whole)

    @property
    def most(self) -> int:
        """Returns the columns of the rank that has most of them."""
        return max(map(self.count, range(len(self.runs))))

    def count(self, rank: int) -> int:
        """Returns the columns of one rank."""
        return sum(size for _, size in self.runs[rank])


@functools.lru_cache(maxsize=256)  # layers are alike
def places(columns: Columns, device: torch.device) -> Tensor | None:
    """Returns [whole] int64: where each column lies among `most` of each rank, one rank behind the other; None where
    they lie in their order."""
    found = [0] * columns.whole
    for rank in reversed(range(len(columns.runs))):  # the first that has a column
        at = rank * columns.most
        for start, size in columns.runs[rank]:
            found[start : start + size] = range(at, at + size)
            at += size
    return None if found == list(range(columns.whole)) else torch.tensor(found, device=device)


def every_rank(ranks: Ranks) -> list[Ranks]:
    """Returns all of them, as far as their shares are concerned."""
    kinds = ranks.expert_parallel, ranks.invariant
    return [Absent(ranks.size, rank, *kinds) for rank in range(ranks.size)]
