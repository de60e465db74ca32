"""The index of the n-gram drafter in C (ops/cpu/csrc/ngram.c): the same state, confidences and trees as in torch.

Lengths are read from the tensors: no bounds of the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.config.trees import MAX_CONFIDENCE
from draftwing.ops.cpu.arguments import empty_draft
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.ngram.spec import STEADY, NGramIndex
from draftwing.ops.types import Draft, RowTensors


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
            rows, rows.shape[0], tokens, tokens.shape[1], tokens.numel(), memory.row, memory.log, memory.table,
            memory.factors, memory.mask, self.max_window, self.image_token, prefix_len, count, limit,
            memory.cells, memory.clock,
        )  # fmt: skip

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        memory, tokens, window = self.memory, table.tokens, self.max_window
        out = torch.empty_like(rows) if out is None else out
        assert tokens.is_contiguous()
        rows, kv_len = rows.contiguous(), table.kv_len.contiguous()
        self.raw.ngram_confidence(
            rows, rows.shape[0], tokens, tokens.shape[1], tokens.numel(), memory.row, memory.log, memory.table,
            memory.factors, memory.mask, window, self.image_token, kv_len, self.candidates, self.match,
            self.gap, self.branch_length, self.min_window, min(STEADY, window), MAX_CONFIDENCE, out, out.stride(0),
        )  # fmt: skip
        return out

    def build(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        rows, last, weight = rows.contiguous(), table.last.contiguous(), self.tree.weight
        batch = rows.shape[0]
        draft = empty_draft(batch, nodes)
        self.raw.ngram_build(
            rows, batch, self.candidates, self.match, last, weight, weight.shape[0], self.branch_length, depth, nodes,
            *draft,
        )  # fmt: skip
        return draft
