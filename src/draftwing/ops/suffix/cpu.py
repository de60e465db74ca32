"""The index of the suffix drafter in C (ops/cpu/csrc/suffix.c): the same state, confidences and trees as in torch.

Lengths are read from the tensors: no bounds of the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE
from draftwing.ops.assign.spec import LEVELS
from draftwing.ops.cpu.arguments import empty_draft
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.ngram.spec import CANDIDATES, OWN
from draftwing.ops.suffix.spec import BACK, LENGTHS, SCORE_BITS, WAYS, SuffixIndex
from draftwing.ops.types import Draft, RowTensors

assert (OWN, CANDIDATES, MAX_CONFIDENCE) == (8, 8, 31), "as in ops/cpu/csrc/ngram.c"
_CONSTANTS = BACK, len(LENGTHS), LENGTHS[-1], LEVELS, LOOKUP, SCORE_BITS, WAYS
assert _CONSTANTS == (3, 11, 32, 16, 2, 12, 8), "as in ops/cpu/csrc/suffix.c"


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
        self.raw.suffix_insert(*self._trie(table), rows, rows.shape[0], prefix_len, count, int(shared))

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(rows) if out is None else out
        self._grow_rows(table, rows.contiguous(), out, out.stride(0))
        return out

    def _grow_rows(self, table: RowTensors, rows: Tensor, out: Tensor | None = None, stride: int = 0) -> None:
        """Grows trees as far as their confidences need, which are written to `out`; without it those trees
        whole that are not."""
        kv_len = table.kv_len.contiguous()
        self.raw.suffix_grow(
            *self._trie(table), rows, rows.shape[0], kv_len, self.escape, self.starts, self.depth, self.nodes,
            self.width, self.least, MAX_CONFIDENCE, self.grown, self.whole, out, stride,
        )  # fmt: skip

    def emit(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        rows, last, batch = rows.contiguous(), table.last.contiguous(), rows.shape[0]
        self._grow_rows(table, rows)
        draft = empty_draft(batch, nodes)
        self.raw.suffix_emit(rows, batch, self.grown, self.rows + 1, self.nodes, last, depth, nodes, *draft)
        return draft

    def _trie(self, table: RowTensors) -> tuple[Any, ...]:
        tokens, lengths = table.tokens, len(self.lengths)
        assert tokens.is_contiguous()
        return (
            tokens, tokens.shape[1], self.owner, self.length, lengths, self.table, self.buckets, self.rows,
            self.image_token,
        )  # fmt: skip
