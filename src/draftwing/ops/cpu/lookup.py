"""The indexes of drafters without a model in C (ops/cpu/csrc/ngram.c and suffix.c): the same state, confidences and
trees as in torch. Lengths are read from the tensors: no bounds of the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.core import LOOKUP, MAX_CONFIDENCE
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.tree import addresses, empty_draft
from draftwing.ops.drafts import LEVELS
from draftwing.ops.reference.ngram import OWN, STEADY, NGramIndex
from draftwing.ops.reference.ngram_memory import CANDIDATES
from draftwing.ops.reference.suffix import BACK, LENGTHS, SCORE_BITS, WAYS, SuffixIndex
from draftwing.ops.types import Draft, RowTensors

assert (OWN, CANDIDATES, MAX_CONFIDENCE) == (8, 8, 31), "as in ops/cpu/csrc/ngram.c"
_CONSTANTS = BACK, len(LENGTHS), LENGTHS[-1], LEVELS, LOOKUP, SCORE_BITS, WAYS
assert _CONSTANTS == (3, 11, 32, 16, 2, 12, 8), "as in ops/cpu/csrc/suffix.c"


class CpuNGramIndex(NGramIndex):
    """Searches in C. Two things differ, and nothing reads them: the dummy row is left alone, its confidence is 0;
    candidates behind a row's last match (`match` 0) are not written."""

    raw: Any

    def __init__(self, rows: int, device: torch.device, *more: Any, **settings: Any) -> None:
        super().__init__(rows, device, *more, **settings)
        self.raw = load_extension()

    def insert(self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        memory, tokens = self.memory, table.tokens
        assert tokens.is_contiguous() and 0 < limit < memory.cells - 1
        rows, prefix_len, count = rows.contiguous(), prefix_len.contiguous(), count.contiguous()
        self.raw.ngram_insert(
            rows.data_ptr(), rows.shape[0], tokens.data_ptr(), tokens.shape[1], tokens.numel(),
            memory.row.data_ptr(), memory.log.data_ptr(), memory.table.data_ptr(), memory.factors.data_ptr(),
            memory.mask, self.max_window, prefix_len.data_ptr(), count.data_ptr(), limit, memory.cells,
            memory.clock.data_ptr(),
        )  # fmt: skip

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        memory, tokens, window = self.memory, table.tokens, self.max_window
        out = torch.empty_like(rows) if out is None else out
        assert tokens.is_contiguous()
        rows, kv_len = rows.contiguous(), table.kv_len.contiguous()
        self.raw.ngram_confidence(
            rows.data_ptr(), rows.shape[0], tokens.data_ptr(), tokens.shape[1], tokens.numel(),
            memory.row.data_ptr(), memory.log.data_ptr(), memory.table.data_ptr(), memory.factors.data_ptr(),
            memory.mask, window, kv_len.data_ptr(), *addresses((self.candidates, self.match, self.gap)),
            self.branch_length, self.min_window, min(STEADY, window), MAX_CONFIDENCE, out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return out

    def build(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        rows, last, weight = rows.contiguous(), table.last.contiguous(), self.tree.weight
        batch = rows.shape[0]
        draft = empty_draft(batch, nodes)
        self.raw.ngram_build(
            rows.data_ptr(), batch, *addresses((self.candidates, self.match, last, weight)), weight.shape[0],
            self.branch_length, depth, nodes, *addresses(draft),
        )  # fmt: skip
        return draft


class CpuSuffixIndex(SuffixIndex):
    """The trie in C.

    A tree grows whole when it is proposed. Before, it has as many nodes as the confidence needs: in most steps nothing
    is drafted, and many nodes that are improbable together take longer than those that count. It then grows from the
    table as it is: what other rows have written since its confidence was given is in it, where in torch it is not.
    """

    raw: Any

    def __init__(self, rows: int, device: torch.device, *more: Any, **settings: Any) -> None:
        super().__init__(rows, device, *more, **settings)
        self.raw = load_extension()

    def _constants(self, device: torch.device) -> None:
        super()._constants(device)
        self.whole = torch.ones(self.rows + 1, dtype=torch.int64)  # whether `grown` is the row's whole tree

    def flush(self) -> None:
        super().flush()
        self.whole.fill_(1)

    def begin(self, table: RowTensors, rows: Tensor, longest: int) -> None:
        super().begin(table, rows, longest)
        self.whole.index_fill_(0, rows, 1)

    def insert(
        self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int, shared: bool = True
    ) -> None:
        rows, prefix_len, count = rows.contiguous(), prefix_len.contiguous(), count.contiguous()
        self.raw.suffix_insert(
            *self._trie(table), rows.data_ptr(), rows.shape[0], prefix_len.data_ptr(), count.data_ptr(), int(shared)
        )

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(rows) if out is None else out
        self._grow_rows(table, rows.contiguous(), out.data_ptr(), out.stride(0))
        return out

    def _grow_rows(self, table: RowTensors, rows: Tensor, out: int = 0, stride: int = 0) -> None:
        """Grows trees as far as their confidences need, which are written to the address `out`; without it those trees
        whole that are not."""
        kv_len = table.kv_len.contiguous()
        self.raw.suffix_grow(
            *self._trie(table), rows.data_ptr(), rows.shape[0], *addresses((kv_len, self.escape, self.starts)),
            self.depth, self.nodes, self.width, self.least.data_ptr(), MAX_CONFIDENCE,
            *addresses((self.grown, self.whole)), out, stride,
        )  # fmt: skip

    def emit(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        rows, last, batch = rows.contiguous(), table.last.contiguous(), rows.shape[0]
        self._grow_rows(table, rows)
        draft = empty_draft(batch, nodes)
        self.raw.suffix_emit(
            rows.data_ptr(), batch, self.grown.data_ptr(), self.rows + 1, self.nodes, last.data_ptr(), depth, nodes,
            *addresses(draft),
        )  # fmt: skip
        return draft

    def _trie(self, table: RowTensors) -> tuple[int, ...]:
        tokens = table.tokens
        assert tokens.is_contiguous()
        return (
            tokens.data_ptr(), tokens.shape[1], self.owner.data_ptr(), self.length.data_ptr(), len(self.lengths),
            self.table.data_ptr(), self.buckets, self.rows,
        )  # fmt: skip
