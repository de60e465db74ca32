"""Drafts copied from what was seen: the request's own prompt and output, and what other requests generated."""

from __future__ import annotations

from draftwing.core import MAX_CONFIDENCE
from draftwing.errors import ConfigError
from draftwing.ops.reference.ngram import NGramIndex, NGramOps
from draftwing.spec.drafter import SeenTokens
from draftwing.spec.lookup_drafter import LookupDrafter


class NGramDrafter(LookupDrafter):
    """Tree drafts from token matches; a `LookupDrafter` around an `NGramIndex`."""

    index: NGramIndex

    def __init__(
        self,
        rows: int,
        ops: NGramOps,
        min_window: int = 1,
        max_window: int = 12,
        min_breadth: int = 1,
        max_breadth: int = 10,
        branch_length: int = 18,
        capacity: int = 10_000_000,
    ) -> None:
        """Takes what `NGramIndex` does. Raises ConfigError for numbers that cannot be."""
        if not 1 <= min_window <= max_window <= MAX_CONFIDENCE:
            found = f"{min_window} and {max_window}"
            raise ConfigError(f"n-gram match windows: expected 1 <= min <= max <= {MAX_CONFIDENCE}, found {found}")
        if not 1 <= min_breadth <= max_breadth:
            raise ConfigError(f"n-gram breadths: expected 1 <= min <= max, found {min_breadth} and {max_breadth}")
        if branch_length < 1 or capacity < 1:
            raise ConfigError(f"n-gram branch length and capacity: expected >= 1, found {branch_length}, {capacity}")
        index = ops.ngram_index(
            rows, ops.device, min_window, max_window, min_breadth, max_breadth, branch_length, capacity
        )
        super().__init__(index, ops.draws_by_row and not ops.records_calls)

    def extend(self, seen: SeenTokens) -> None:
        """Decoding: the count[b] newest tokens of each row enter the memory. The end of a prefill: the row begins anew;
        prompts stay out of the memory."""
        batch, rows = seen.batch, seen.batch.rows
        if seen.count is not None:
            self.index.insert(seen.table, rows, batch.prefix_len, seen.count, seen.width)
        elif final := sum(chunk.final for chunk in batch.chunks):  # the first ones
            self.index.begin(seen.table, rows[:final])
