"""Products whose weight is spread over ranks: what each rank's own operation gives is joined to the whole.

`Linear.pack` wraps the operation of the rank's share, whatever its format, so layers and models need not know of ranks.
A weight whose outputs are spread and stay so (q, k, v, gate and up) needs nothing. Where results are to have the bits
of one rank (`Ranks.invariant`), a weight whose inputs are spread is not cut along them: see `JoinedOutputs`.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.layers.linear_ops.base import LinearOp
from draftwing.ops.adapters.spec import QueryAdapters
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.columns import Columns, every_rank, places
from draftwing.parallel.ranks import NextNorm, Ranks


class _Parallel(LinearOp):
    """The operation of this rank's share of a weight."""

    def __init__(self, op: LinearOp, ops: LayerOps, ranks: Ranks) -> None:
        super().__init__(op.layer)
        self._op, self._ops, self._ranks = op, ops, ranks

    @property
    def sizes(self) -> Counter[str]:
        return self._op.sizes

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, _Parallel)
        self._op.copy_from(other._op)

    @property
    def can_copy(self) -> bool:
        return self._op.can_copy

    def dense_weight(self) -> Tensor:
        """Returns this rank's share."""
        return self._op.dense_weight()


class NormedSum:
    """Sums over ranks, made together with the norm that reads them next where that is known."""

    def __init__(self, ranks: Ranks, ops: LayerOps) -> None:
        self._ranks, self._ops = ranks, ops
        self._norm: NextNorm | None = None
        self._queries: QueryAdapters | None = None
        self._under: Tensor | Fp8Rows | None = None

    def use(self, ops: LayerOps) -> None:
        self._ops = ops

    def lead_to(self, norm: NextNorm | None) -> None:
        """Makes sums with a residual under this norm, too, from now on; with None no longer."""
        self._norm = norm

    def take_adapters(self, queries: QueryAdapters) -> None:
        """Makes no sums under the norm in forwards where adapters add to them yet."""
        self._queries = queries

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        adds = self._queries is not None and self._queries.adds
        if self._norm is None or residual is None or adds:
            return self._ranks.sum_rows(partial, bias, residual, self._ops)
        total, self._under = self._ranks.sum_under(self._norm, partial, bias, residual, self._ops)
        return total

    def take(self) -> Tensor | Fp8Rows | None:
        """Returns the last sum under the norm, once."""
        under, self._under = self._under, None
        return under


class RowParallel(_Parallel):
    """Inputs are spread: every rank has columns of the weight, and outputs are sums over the ranks."""

    def __init__(self, op: LinearOp, ops: LayerOps, ranks: Ranks) -> None:
        super().__init__(op, ops, ranks)
        self.takes_fp8 = op.takes_fp8
        self.sum = NormedSum(ranks, ops)

    @property
    def sums_over(self) -> Ranks:
        return self._ranks

    def __call__(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        made = self._op(x, None)  # type: ignore[arg-type]  # quantised where that `takes_fp8`
        return self.sum(made, bias, residual)


class VocabParallel(_Parallel):
    """Outputs are spread, and all of them are wanted: an embedding and a head. Ids are those of the whole."""

    def __init__(self, op: LinearOp, ops: LayerOps, ranks: Ranks, whole: int) -> None:
        super().__init__(op, ops, ranks)
        self._share = ranks.share(whole)
        self._columns = Columns.of_shares([each.share(whole) for each in every_rank(ranks)])

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        assert residual is None
        start, size, _ = self._share
        own = None if bias is None else bias[start : start + size]
        return joined(self._ranks, self._op(x, own), self._columns, self._ops)

    def rows(self, ids: Tensor) -> Tensor:
        weight = self._op.stored
        if weight is not None and ids.dim() == 1:
            return self._of_owners(self._ops.share_rows(weight, ids, self._share.start))
        own, mine = self._own(ids)
        return self._of_owners(torch.where(mine.unsqueeze(-1), self._op.rows(own), 0))

    def exact_logits(self, hidden: Tensor, ids: Tensor, ops: LayerOps) -> Tensor:
        weight = self._op.stored
        if weight is not None:
            return self._of_owners(ops.share_logits(hidden, weight, ids, self._share.start))
        own, mine = self._own(ids)
        return self._of_owners(torch.where(mine, self._op.exact_logits(hidden, own, ops), 0))

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows of this rank's weight, and whether `ids` are there."""
        start, size, _ = self._share
        own = ids - start
        return own.clamp(0, size - 1), (own >= 0) & (own < size)

    def _of_owners(self, x: Tensor) -> Tensor:
        """x [...], 0 but on the one rank that has it -> the same on all, to the bit but for the sign of 0."""
        return self._ranks.sum_rows(x.reshape(-1, x.shape[-1]), ops=self._ops).view(x.shape)


class JoinedOutputs:
    """Joins what goes into a product and what comes out of it: each rank has some of the inputs, and the weight of some
    of the outputs. An output is one sum over all inputs then, as on one rank."""

    def __init__(self, ranks: Ranks, inputs: Columns, outputs: int) -> None:
        """inputs: of each rank.  outputs: of all ranks."""
        self.share, self.inputs = ranks.output_share(outputs), inputs.whole
        self._ranks, self._inputs, self._ops = ranks, inputs, PLAIN
        self._outputs = Columns.of_shares([each.output_share(outputs) for each in every_rank(ranks)])

    def use(self, ops: LayerOps) -> None:
        """Lets the device gather as it does it best."""
        self._ops = ops

    def all_inputs(self, x: Tensor) -> Tensor:
        """x [M, inputs of this rank] -> [M, inputs]"""
        return joined(self._ranks, x, self._inputs, self._ops)

    def own(self, x: Tensor | None) -> Tensor | None:
        """x [M, outputs] -> a copy of those of this rank"""
        start, size, _ = self.share
        return None if x is None else x[:, start : start + size].contiguous()

    def all_outputs(self, y: Tensor) -> Tensor:
        """y [M, outputs of this rank] -> [M, outputs]"""
        return joined(self._ranks, y, self._outputs, self._ops)


def joined(ranks: Ranks, x: Tensor, columns: Columns, ops: LayerOps) -> Tensor:
    """x [M, columns of this rank] -> [M, columns.whole]"""
    found = ranks.gather_side_by_side(F.pad(x, (0, columns.most - x.shape[1])) if x.shape[1] < columns.most else x, ops)
    order = places(columns, x.device)
    return found[:, : columns.whole].contiguous() if order is None else found.index_select(1, order)
