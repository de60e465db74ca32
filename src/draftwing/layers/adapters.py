"""What adapters (LoRA) add to the products of a model: the matrices stay as they are, and each row has its own adapter.

Slots of factors are fixed, so recorded steps and graphs know where they lie. Which slot a query has is known by the
model's `QueryAdapters`, one for all of its matrices; a forward without an adapted query looks at it and does nothing.
"""

from __future__ import annotations

from torch import Tensor

from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.table import LayerOps
from draftwing.parallel.ranks import Ranks


class AdaptedWeight:
    """What the adapters in the slots add to the outputs of one `Linear`."""

    def __init__(
        self, queries: QueryAdapters, weights: AdapterWeights, ops: LayerOps, ranks: Ranks | None, one_way: bool
    ) -> None:
        """ranks: over which outputs are summed, None: over none, or of all inputs.  one_way: whether gates are never
        fused with the product, for that rounds in another way, and a row must have the same bits in any batch."""
        self.weights = weights
        self._queries, self._ops, self._ranks, self._one_way = queries, ops, ranks, one_way

    @property
    def adds(self) -> bool:
        """Returns whether a query of this forward has an adapter."""
        return self._queries.slots is not None

    @property
    def ungated(self) -> bool:
        """Returns whether the product and what is made of it by a gate are two operations."""
        return self._one_way or self.adds

    def add(self, y: Tensor, x: Tensor) -> None:
        """x [M, inputs] of the product y [M, outputs], which is changed."""
        slots = self._queries.slots
        if slots is None:
            return
        if self._ranks is None:
            self._ops.adapt(y, x, self.weights, slots)
            return
        made = self._ranks.sum_rows(self._ops.adapter_down(x, self.weights, slots), ops=self._ops)
        self._ops.adapter_up(y, made, self.weights, slots)
