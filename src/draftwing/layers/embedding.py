"""Rows of a table by token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.linear import Linear
from draftwing.ops.torch.layer_ops import LayerOps


class Embedding(nn.Module):
    """Rows of `table` [vocab, size], a `Linear`, so that its weight is stored as any other; a tied head is the same
    one, and else it is never multiplied with."""

    def __init__(self, table: Linear) -> None:
        super().__init__()
        self.table = table
        self._ops: LayerOps | None = None

    @property
    def weight(self) -> nn.Parameter:
        """The table as a parameter, of a dense format."""
        return self.table.weight

    def pack(self, ops: LayerOps) -> None:
        """Lets the device look rows up from now on; without gradients. The table is packed by itself."""
        self._ops = ops

    def forward(self, ids: Tensor) -> Tensor:
        """ids [M] int64 -> [M, size]"""
        if self._ops is None:
            return F.embedding(ids, self.table.dense_weight())
        known, rows = self.source(ids)
        return rows if known is None else self._ops.take_rows(rows, known)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def source(self, ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """Returns where rows of tokens [M] are read from, for `LayerOps.fuse_inputs`: ids and a table [vocab, size], or
        None and the rows [M, size] themselves where the table is not stored as such."""
        weight = self.table.op.stored
        return (None, self.table.rows(ids)) if weight is None else (ids, weight)
