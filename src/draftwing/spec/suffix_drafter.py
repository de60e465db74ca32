"""Drafts from a suffix trie: what most often followed the newest tokens, here and in earlier answers."""

from __future__ import annotations

from draftwing.config.drafters import SUFFIXES
from draftwing.core import TreeShape
from draftwing.errors import ConfigError
from draftwing.ops.reference.suffix import LENGTHS, SuffixIndex, SuffixOps
from draftwing.spec.drafter import SeenTokens
from draftwing.spec.lookup_drafter import LookupDrafter


class SuffixDrafter(LookupDrafter):
    """Trees from counts of what followed; a `LookupDrafter` around a `SuffixIndex`."""

    index: SuffixIndex

    def __init__(
        self,
        rows: int,
        ops: SuffixOps,
        shape: TreeShape = SUFFIXES,
        max_context: int = 24,
        min_prob: float = 0.005,
        capacity: int = 1_000_000,
        secret: int | None = None,
    ) -> None:
        """rows: R + 1, the rows of the row table with its dummy. shape: the largest tree that will be asked for.
        max_context: tokens of the longest context; min_prob: of a node's path, or it is not proposed; capacity: tokens
        that the trie remembers; secret: as of `SuffixIndex`, the same on all ranks."""
        if not 1 <= max_context <= LENGTHS[-1]:
            raise ConfigError(f"suffix contexts: expected 1 to {LENGTHS[-1]} tokens, found {max_context}")
        if not 0 < min_prob <= 1:
            raise ConfigError(f"suffix probability: expected above 0 and at most 1, found {min_prob:g}")
        if capacity < 1:
            raise ConfigError(f"suffix capacity: expected >= 1, found {capacity}")
        index = ops.suffix_index(rows, ops.device, shape.depth, shape.nodes, max_context, min_prob, capacity, secret)
        super().__init__(index, ops.draws_by_row and not ops.records_calls)

    def extend(self, seen: SeenTokens) -> None:
        """Decoding: the trie learns the count[b] newest tokens of each row. The end of a prefill: all tokens of the
        row, for that row alone."""
        batch, rows = seen.batch, seen.batch.rows
        if seen.count is not None:
            self.index.insert(seen.table, rows, batch.prefix_len, seen.count, seen.width)
            return
        final = [chunk for chunk in batch.chunks if chunk.final]  # the first ones
        if final:
            longest = max(chunk.start + chunk.length for chunk in final)
            self.index.begin(seen.table, rows[: len(final)], longest)
