"""What adapters (LoRA) add to the products of a model: the matrices stay as they are, and each row has its own adapter.

Slots of factors are fixed, so recorded steps and graphs know where they lie. Which slot a query has is known by the
model's `QueryAdapters`, one for all of its matrices; a forward without an adapted query looks at it and does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.table import LayerOps
from draftwing.parallel.ranks import Ranks


class AdaptedWeight:
    """What the adapters in the slots add to the outputs of one `Linear`."""

    def __init__(self, queries: QueryAdapters, weights: AdapterWeights, ops: LayerOps, ranks: Ranks | None) -> None:
        """ranks: over which outputs are summed, None: over none, or of all inputs."""
        self.queries, self.weights = queries, weights
        self._ops, self._ranks = ops, ranks

    def begin(self, x: Tensor) -> Tensor | None:
        """x [M, inputs] of a product that comes next -> what `add` is to be given."""
        slots = self.queries.slots
        if slots is None or not self._ops.adapts_ahead:
            return None
        return self._ops.adapter_down(x, self.weights, slots, self.queries.plan)

    def add(self, y: Tensor, x: Tensor, begun: Tensor | None = None) -> None:
        """x [M, inputs] of the product y [M, outputs], which is changed. begun: by `begin`."""
        slots, plan = self.queries.slots, self.queries.plan
        if slots is None:
            return
        if self._ranks is None and begun is None:
            self._ops.adapt(y, x, self.weights, slots, plan)
            return
        made = self._ops.adapter_down(x, self.weights, slots, plan) if begun is None else begun
        if self._ranks is not None:
            made = self._ranks.sum_rows(made, ops=self._ops)
        self._ops.adapter_up(y, made, self.weights, slots, plan)


class AdaptedGroups:
    """What the adapters in the slots add to products of rows with one matrix of several each: an expert's, or a head's.
    A slot of an adapter is a slot of `weights` for each of these matrices, one behind the other."""

    def __init__(self, queries: QueryAdapters, weights: AdapterWeights, ops: LayerOps, groups: int) -> None:
        """groups: how many matrices there are; others are without adapters."""
        self.queries, self._weights, self._ops, self._groups = queries, weights, ops, groups

    def add(self, y: Tensor, x: Tensor, groups: Tensor) -> None:
        """groups [M, n] int64: the matrices that each query's pairs are of; x [M or M * n, inputs] of the products y
        [M * n, outputs], which are changed."""
        if self.queries.slots is None:
            return
        slots, count = self.queries.slots.unsqueeze(1), groups.shape[1]
        mine = (slots > 0) & (groups >= 0) & (groups < self._groups)
        own = torch.where(mine, (slots - 1) * self._groups + groups + 1, 0)
        rows = x if len(x) == len(y) else x.repeat_interleave(count, 0)
        self._ops.adapt(y, rows, self._weights, own.flatten())
