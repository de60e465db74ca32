"""The n-gram drafter in C (ops/cpu/csrc/ngram.c): the same state, confidences and trees as in torch.

Two things differ, and nothing reads them: the dummy row is left alone, its confidence is 0; candidates behind a row's
last match (`match` 0) are not written. Lengths are read from the tensors: no bounds of the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.core import MAX_CONFIDENCE
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.tree import addresses, empty_draft
from draftwing.ops.reference.ngram import OWN, STEADY, NGramIndex
from draftwing.ops.reference.ngram_memory import CANDIDATES
from draftwing.ops.types import Draft, RowTensors

assert (OWN, CANDIDATES, MAX_CONFIDENCE) == (8, 8, 31), "as in ops/cpu/csrc/ngram.c"


class CpuNGramIndex(NGramIndex):
    """Searches in C."""

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
