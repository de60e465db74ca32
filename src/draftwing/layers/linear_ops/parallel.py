"""Products whose weight is spread over ranks: what each rank's own operation gives is joined to the whole.

`Linear.pack` wraps the operation of the rank's share, whatever its format, so layers and models need not know of ranks.
A weight whose outputs are spread and stay so (q, k, v, gate and up) needs nothing.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from draftwing.layers.linear_ops.base import LinearOp
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import LayerOps
from draftwing.parallel.ranks import Ranks


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


class RowParallel(_Parallel):
    """Inputs are spread: every rank has columns of the weight, and outputs are sums over the ranks."""

    def __init__(self, op: LinearOp, ops: LayerOps, ranks: Ranks) -> None:
        super().__init__(op, ops, ranks)
        self.takes_fp8 = op.takes_fp8

    @property
    def sums_over(self) -> Ranks:
        return self._ranks

    def __call__(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        made = self._op(x, None)  # type: ignore[arg-type]  # quantised where that `takes_fp8`
        return self._ranks.sum_rows(made, bias, residual, self._ops)


class VocabParallel(_Parallel):
    """Outputs are spread, and all of them are wanted: an embedding and a head. Ids are those of the whole."""

    def __init__(self, op: LinearOp, ops: LayerOps, ranks: Ranks, whole: int) -> None:
        super().__init__(op, ops, ranks)
        self._share = ranks.share(whole)

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        assert residual is None
        start, size, _ = self._share
        own = None if bias is None else bias[start : start + size]
        return self._ranks.gather_columns(self._op(x, own), self._share)

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
