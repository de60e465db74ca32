"""Penalties and biases of drafts in C (ops/cpu/csrc/edits.c), of rows by value, so that calls may be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.tree import addresses
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.torch.expansion import TextEditor
from draftwing.ops.types import DraftEdits, RowTensors


class CpuLogitEditor:
    """A `LogitEditor`. Each call counts the text again, which takes less than the logits of a node."""

    def __init__(
        self, raw: Any, workers: Workers, scratch: Callable[[int, int], int], table: RowTensors, rows: Tensor,
        edits: DraftEdits, bound: int, vocab: int, draft_ids: Tensor | None,
    ) -> None:  # fmt: skip
        """raw: the extension module; scratch: as `CpuSamplingOps._scratch`; the others as for
        `ExpansionOps.logit_editor`. Finds out by value which rows have edits."""
        self._raw, self._workers, self._scratch = raw, workers, scratch
        self._vocab, self.batch = vocab, rows.shape[0]
        self._others = table, rows, edits, bound, vocab, draft_ids  # of an editor in torch
        rows, own = rows.contiguous(), edits[1:]
        assert table.tokens.is_contiguous() and all(part.is_contiguous() for part in own)
        self._held = rows
        prompt_len, penalties, bias_ids, bias_values = addresses(own)
        self.numbers = (
            rows.data_ptr(), table.tokens.data_ptr(), table.tokens.shape[1], table.kv_len.data_ptr(), prompt_len,
            penalties, bias_ids, bias_values, edits.bias_ids.shape[1],
            0 if draft_ids is None else draft_ids.data_ptr(),
        )  # fmt: skip

    def apply(self, logits: Tensor) -> None:
        if logits.dtype not in DTYPES:
            TextEditor(*self._others).apply(logits)
            return
        rows, vocab = logits.shape
        assert vocab == self._vocab and logits.stride(1) == 1
        scratch = self._scratch(self._workers.most, 2 * vocab)
        self._raw.edit_logits(
            logits, logits.dtype == torch.bfloat16, self.batch, rows // self.batch, logits.stride(0), vocab,
            scratch, self._workers.address, *self.numbers,
        )  # fmt: skip
