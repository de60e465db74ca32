"""Rows of a table by token: of a model, of all its layers, and what layers do with theirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.mapped import MappedFormat
from draftwing.layers.norm import RMSNorm
from draftwing.layers.part_configs import NormConfig
from draftwing.ops.table import PLAIN, LayerOps


class Embedding(nn.Module):
    """Rows of `table` [vocab, size], a `Linear`, so that its weight is stored as any other; a tied head is the same
    one, and else it is never multiplied with."""

    def __init__(self, table: Linear) -> None:
        super().__init__()
        self.table = table
        self._ops: LayerOps | None = None

    @property
    def weight(self) -> nn.Parameter:
        """Returns the table as a parameter, of a dense format."""
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


class PerLayerEmbedding(nn.Module):
    """What each layer has of a token besides the residual stream: a row of its own table, joined by a product of the
    token's embedding. The tables are one matrix, which may be larger than all the rest, and stays in its file."""

    def __init__(
        self,
        hidden: int,
        size: int,
        layers: int,
        vocab: int,
        norm: NormConfig,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightFormat,
        ranks: int = 1,
    ) -> None:
        """size: of a layer's embedding.  vocab: tokens that have one; others have that of token 0.  form: of the matrix
        that is multiplied with.  ranks: that have the same."""
        super().__init__()
        self._shape, self._vocab = (layers, size), vocab
        self.embed = Embedding(Linear(layers * size, vocab, False, dtype, device, MappedFormat(ranks)))
        self.project = Linear(hidden, layers * size, False, dtype, device, form)
        self.norm = RMSNorm(size, norm.eps, norm.dtype(dtype), device)
        self.some = False  # whether there are other tokens
        # The root is rounded as the table is.
        self._factors = hidden**-0.5, torch.tensor(size**0.5, dtype=dtype).item(), 2**-0.5

    def forward(self, ids: Tensor, x: Tensor, ops: LayerOps) -> Tensor:
        """ids [M]; x [M, hidden], the scaled embedding -> [M, layers, size]"""
        known, rows = self.embed.source(ids.where(ids < self._vocab, 0) if self.some else ids)
        own = ops.add_scaled(rows if known is None else ops.take_rows(rows, known), None, self._factors[1])
        made = self.norm(ops.add_scaled(self.project(x), None, self._factors[0]).view(-1, self._shape[1]))
        return ops.add_scaled(made.view(own.shape), own, self._factors[2]).view(-1, *self._shape)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class LayerEnd(nn.Module):
    """What some layers do to the residual stream behind their MLP, with an embedding of their own, and a factor:
    (x + norm(out(gelu(gate(x)) * embedding))) * scalar, either part where the layer has it. On all ranks alike."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, size, form = config.hidden, config.per_layer, config.weight_format
        self.gate = Linear(hidden, size, False, dtype, device, form) if size else None
        self.out = Linear(size, hidden, False, dtype, device, form) if size else None
        self.norm = RMSNorm(hidden, config.norm.eps, config.norm.dtype(dtype), device) if size else None
        self.scalar = nn.Parameter(torch.ones(1, dtype=dtype, device=device)) if config.scaled else None
        self._ops: LayerOps = PLAIN

    def use(self, ops: LayerOps) -> None:
        """Lets the device do what lies between its matrices as it does it best."""
        self._ops = ops

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """x [M, hidden]; embedding [M, per_layer], whose rows may be apart -> [M, hidden]"""
        scale = 1.0 if self.scalar is None else self.scalar
        return self._ops.add_scaled(x, None if self.gate is None else self.made(x, embedding), scale)

    def made(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """x [M, hidden]; embedding [M, per_layer] -> norm(out(gelu(gate(x)) * embedding)), [M, hidden]"""
        assert self.gate is not None and self.out is not None and self.norm is not None and embedding is not None
        return self.norm(self.out(self._ops.gelu_mul(self._ops.concat_columns(self.gate(x), embedding))))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
