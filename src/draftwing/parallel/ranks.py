"""The processes that run one model together, seen from one of them, and what passes between them on a step's path.

Every rank runs the same steps on its share of each weight. Two things need all of them: sums of what each has computed
of its share, and columns that each has some of. Both are made of one gather, and sums are taken in the order of the
ranks, so all ranks hold the same bits and none of them has to learn what another one decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps

UNITS = 128, 64, 32, 16  # outputs of a matrix that kernels, or a format's groups, want together
UNIT, MANY = 64, 4  # of a vocabulary, and how many of them a rank has at least where it has whole ones


class Share(NamedTuple):
    """`[start, start + size)` of `whole`: what one rank has."""

    start: int
    size: int
    whole: int


class NextNorm(NamedTuple):
    """The norm that reads a sum next."""

    weight: Tensor  # [n]
    eps: float
    quantises: bool  # whether products behind it want activations in fp8


class Ranks(ABC):
    """size: how many there are; rank: which one this is, from 0; expert_parallel: whether each has some of the experts
    whole, in place of a share of every one; invariant: whether results have the bits of one rank, so that no product is
    a sum over ranks: each rank makes some outputs of all inputs."""

    size: int
    rank: int
    expert_parallel = False
    invariant = False
    title = "none"  # how sums are taken, for people

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """x [...], of the same shape on every rank -> [size, ...], in the order of the ranks."""

    def sum_rows(
        self, partial: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, ops: LayerOps = PLAIN
    ) -> Tensor:
        """partial [M, n] of each rank, bias [n] and residual [M, n], the same on all -> their sum [M, n], taken in
        float32 and rounded once. ops: of the device."""
        return ops.sum_parts(self.gather(partial), bias, residual)

    def sum_under(
        self, norm: NextNorm, partial: Tensor, bias: Tensor | None, residual: Tensor, ops: LayerOps
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        """Returns `sum_rows`, and the norm of it, to the bit the same in one kernel or in two. residual: rows may be
        apart."""
        total = self.sum_rows(partial, bias, residual.contiguous(), ops)
        return total, (ops.rms_norm_fp8 if norm.quantises else ops.rms_norm)(total, norm.weight, norm.eps)

    def sum_in_shares(self, partial: Tensor, bias: Tensor | None, residual: Tensor | None, ops: LayerOps) -> Tensor:
        """Sums as `sum_rows` does, to the bit: every rank sums a share of the rows, and all gather these. That is two
        rounds, and 2 / size of the bytes."""
        rows, width = partial.shape
        share_rows = -(-rows // self.size)
        begin, more = self.rank * share_rows, share_rows * self.size - rows
        if more:  # else it would be a copy
            partial = F.pad(partial, (0, 0, 0, more))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, more))
        if residual is not None:
            residual = residual[begin : begin + share_rows]
        parts = self.swap(partial.view(self.size, share_rows, width))
        return self.gather(ops.sum_parts(parts, bias, residual)).view(-1, width)[:rows]

    def swap(self, x: Tensor) -> Tensor:
        """x [size, ...]: what each rank is to get of this one -> what this one gets of each, in their order."""
        return self.gather(x)[:, self.rank].contiguous()

    def gather_side_by_side(self, x: Tensor, ops: LayerOps = PLAIN) -> Tensor:
        """x [M, n], of the same shape on every rank -> [M, size * n], in the order of the ranks. ops: of the device."""
        return self.gather(x).transpose(0, 1).flatten(1)

    def share(self, whole: int) -> Share:
        """Returns this rank's share of so many rows or columns, which need not be a multiple of the ranks."""
        share_rows = -(-whole // self.size)
        least_units = max(MANY, self.size)  # with fewer units each, the last one might have nothing
        if self.invariant and whole >= least_units * UNIT * self.size:  # so kernels take a share that take the whole
            share_rows = -(-share_rows // UNIT) * UNIT
        start = min(self.rank * share_rows, whole)
        return Share(start, min(share_rows, whole - start), whole)

    def output_share(self, whole: int) -> Share:
        """Returns this rank's share of so many outputs of a matrix: as many on all ranks where these are whole units
        of kernels and formats, else in units as large as can be."""
        even = (unit for unit in UNITS if whole % (unit * self.size) == 0)
        some = (unit for unit in (*UNITS[1:], 1) if whole % unit == 0 and whole >= unit * self.size)
        return self.even_share(whole, next(even, 0) or next(some, 1))

    def even_share(self, whole: int, unit: int = 1) -> Share:
        """Returns this rank's share of so many heads or columns, of which units of so many stay together: some
        ranks may have a unit more than others."""
        start, end = (-(-at * (whole // unit) // self.size) * unit for at in (self.rank, self.rank + 1))
        return Share(start, end - start, whole)

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values, on the host. Not for the path of a step."""
        return int(self.gather(self.scalar(value)).min())

    def first(self, value: int) -> int:
        """Returns rank 0's value, on the host. Not for the path of a step."""
        return int(self.gather(self.scalar(value))[0])

    def scalar(self, value: int) -> Tensor:
        """Returns [1] int64, where `gather` wants its tensors."""
        return torch.tensor([value])

    def shorten_timeouts(self) -> None:  # noqa: B027
        """Notes that all ranks are at work: from now on none has to be waited for for long."""

    def release(self) -> None:  # noqa: B027
        """Gives up a rank that is gone: what waits for it is not to wait any longer, and may give anything. From any
        thread."""

    def close(self) -> None:  # noqa: B027
        """Leaves the others. No graph may be left that passes anything to them."""


class Alone(Ranks):
    """The one rank of an engine without others."""

    size, rank = 1, 0

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def first(self, value: int) -> int:
        return value


ALONE = Alone()


class Absent(Ranks):
    """One of several ranks whose others are not there: shapes are right, and data is this rank's own."""

    def __init__(self, size: int, rank: int = 0, expert_parallel: bool = False, invariant: bool = False) -> None:
        self.size, self.rank, self.expert_parallel, self.invariant = size, rank, expert_parallel, invariant

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def first(self, value: int) -> int:
        return value
