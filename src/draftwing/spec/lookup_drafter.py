"""A drafter that looks up what followed the newest tokens before; its index finds and keeps, it says what enters."""

from __future__ import annotations

from torch import Tensor

from draftwing.ops.reference.ngram import NGramIndex
from draftwing.ops.reference.suffix import SuffixIndex
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep


class LookupDrafter(Drafter):
    """Without weights and without KV, around an index. Derived classes write `extend`."""

    initial_confidence = 0
    fixed_confidence = False

    def __init__(self, index: NGramIndex | SuffixIndex, in_parts: bool) -> None:
        """in_parts: as in `Drafter`."""
        self.index, self.in_parts = index, in_parts

    def flush(self) -> None:
        self.index.flush()

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Returns how good what was found is: see the index."""
        return self.index.confidence(table, rows, max_kv_len, out)

    def propose(self, step: DraftStep) -> Draft:
        return self.index.propose(step.table, step.rows, step.shape)
