"""A drafter that looks up what followed the newest tokens before; its index finds and keeps, it says what enters."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep


class LookupIndex(Protocol):
    """Row-indexed state on the device (`ops.reference.ngram.NGramIndex`, `ops.reference.suffix.SuffixIndex`)."""

    def flush(self) -> None:
        """Forgets what requests share."""
        ...

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Finds what may follow the newest tokens of rows [B] and keeps it; as `Drafter.confidence`."""
        ...

    def propose(self, table: RowTensors, rows: Tensor, shape: TreeShape) -> Draft:
        """Returns a tree of what the last `confidence` kept."""
        ...


class LookupDrafter(Drafter):
    """Without weights and without KV, around an index. Derived classes write `extend`."""

    initial_confidence = 0
    fixed_confidence = False

    def __init__(self, index: LookupIndex, in_parts: bool) -> None:
        """in_parts: as in `Drafter`."""
        self._lookup, self.in_parts = index, in_parts

    def flush(self) -> None:
        self._lookup.flush()

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """How good what was found is: see the index."""
        return self._lookup.confidence(table, rows, max_kv_len, out)

    def propose(self, step: DraftStep) -> Draft:
        return self._lookup.propose(step.table, step.rows, step.shape)
