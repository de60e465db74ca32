"""Drafts copied from what was seen: the request's own prompt and output, and what other requests generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.config.drafters import SUFFIXES
from draftwing.config.trees import TreeShape
from draftwing.ops.ngram.spec import NGramIndex
from draftwing.ops.suffix.spec import SuffixIndex
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep, PastText, SeenTokens


class LookupDrafter(Drafter):
    """Without weights and without KV, around an index. Derived classes write `extend`."""

    initial_confidence = 0
    fixed_confidence = False

    def __init__(self, index: NGramIndex | SuffixIndex, ops: TorchOps) -> None:
        self.index, self.in_parts = index, ops.draws_by_row and not ops.can_record

    def flush(self) -> None:
        self.index.flush()

    def remember(self, table: RowTensors, texts: Sequence[PastText]) -> None:
        """Learns from what followed the first token of each answer, as when it was generated."""
        for at in range(0, len(texts), table.rows):
            part = texts[at : at + table.rows]
            length = min(max(len(text.tokens) for text in part), table.length)
            host = np.zeros((len(part), length), np.int64)
            for row, text in enumerate(part):
                host[row, : len(text.tokens)] = text.tokens[:length]
            facts = [(text.salt, text.first, max(len(text.tokens[:length]) - 1 - text.first, 0)) for text in part]
            salt, first, count = torch.tensor(facts, device=table.tokens.device).unbind(1)
            table.tokens[: len(part), :length] = torch.from_numpy(host).to(table.tokens.device)
            table.salt[: len(part)] = salt
            self.index.remember(table, torch.arange(len(part), device=salt.device), first, count, length)

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Returns how good what was found is: see the index."""
        return self.index.confidence(table, rows, max_kv_len, out)

    def begin(self, step: DraftStep) -> bool:
        return True  # neither is read

    def propose(self, step: DraftStep) -> Draft:
        return self.index.propose(step.table, step.rows, step.shape)


class NGramDrafter(LookupDrafter):
    """Tree drafts from token matches; a `LookupDrafter` around an `NGramIndex`."""

    index: NGramIndex

    def __init__(self, rows: int, ops: TorchOps, **numbers: int) -> None:
        """rows: R + 1, the rows of the row table with its dummy.  numbers: what `NGramIndex` takes."""
        super().__init__(ops.ngram_index(rows, ops.device, **numbers), ops)

    def extend(self, seen: SeenTokens) -> None:
        """Takes what was decoded: the count[b] newest tokens of each row enter the memory. The end of a prefill: the
        row begins anew; prompts stay out of the memory."""
        batch, rows = seen.batch, seen.batch.rows
        if seen.count is not None:
            self.index.insert(seen.table, rows, batch.prefix_len, seen.count, seen.width)
        elif final := sum(chunk.final for chunk in batch.chunks):  # the first ones
            self.index.begin(seen.table, rows[:final])


class SuffixDrafter(LookupDrafter):
    """Trees from counts of what followed; a `LookupDrafter` around a `SuffixIndex`."""

    index: SuffixIndex

    def __init__(self, rows: int, ops: TorchOps, shape: TreeShape = SUFFIXES, **numbers: Any) -> None:
        """rows: R + 1, the rows of the row table with its dummy.  shape: the largest tree that will be asked for.
        numbers: what else `SuffixIndex` takes, the secret the same on all ranks."""
        super().__init__(ops.suffix_index(rows, ops.device, shape.depth, shape.nodes, **numbers), ops)

    def extend(self, seen: SeenTokens) -> None:
        """Takes what was decoded: the trie learns the count[b] newest tokens of each row. The end of a prefill: all
        tokens of the row, for that row alone."""
        batch, rows = seen.batch, seen.batch.rows
        if seen.count is not None:
            self.index.insert(seen.table, rows, batch.prefix_len, seen.count, seen.width)
            return
        final = [chunk for chunk in batch.chunks if chunk.final]  # the first ones
        if final:
            longest = max(chunk.start + chunk.length for chunk in final)
            self.index.begin(seen.table, rows[: len(final)], longest)
