"""The drafter for models that read the target's keys and values and have none: Gemma 4's assistants."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.models.heads.assistant import AssistantHead
from draftwing.ops.attention import AttnBackend, Batch
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import Draft, Expansion, RowTensors
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter


class AssistantDrafter(ModelDrafter):
    """A `Drafter` around an `AssistantHead`. Its row of the newest token is run with every step, nodes of trees when
    one is wanted; all read the text alone, to which no node belongs."""

    head: AssistantHead

    def __init__(self, head: AssistantHead, rows: int, topk: int, dtype: torch.dtype, ops: TorchOps) -> None:
        super().__init__(head, rows, topk, dtype, ops)
        # A node's path is one entry, the first behind the prefix. Constants, for torch makes none while a CPU records.
        self._entry = torch.zeros(rows * topk, dtype=torch.int64, device=ops.device)
        self._one = torch.ones_like(self._entry)

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        super().attach(attn, 0, positions)  # the target's layers

    def extend(self, seen: SeenTokens) -> None:
        table, batch, aux_hidden, next_ids, count, noisy = seen
        assert aux_hidden is not None
        if count is None:
            self._extend_chunks(table, batch, self.head.features(aux_hidden), next_ids, noisy)
            return
        rows = batch.rows

        def newest(x: Tensor) -> Tensor:
            """x [B * Q, n] -> [B, n]"""
            return self.ops.newest_rows(x, count, 1, rows, None)

        position = newest(batch.positions.unsqueeze(1)).flatten()  # [B]
        ids = newest(next_ids.unsqueeze(1)).flatten()
        batch = self._reading(table, rows, ids, position, position, batch.write_slots, batch.bound)
        hidden = self._run(batch, newest(aux_hidden), 0)
        self.ops.put_rows(self._first.feature, rows, hidden)
        self._keep_first(table, rows, hidden, noisy)

    def _expand(self, table: RowTensors, rows: Tensor, shape: TreeShape) -> Expansion:
        # Rows of the first level stand where the newest key is, as those of a head that looks one token further would.
        return self.ops.expand(table, rows, shape, self._first, self.tail, self.lookahead + 1, self.head.target_ids)

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy = step
        size, topk = rows.shape[0], shape.topk
        self._read_first(table, rows, noisy)
        expansion = self._expand(table, rows, shape)
        positions = newest = rows  # those of all levels; nothing yet
        for level in range(1, shape.depth):
            ids = expansion.level().ids
            at = expansion.level_rows()
            if level == 1:
                positions = at.positions.flatten()
                newest = self.ops.of_levels(positions, size, 0, 1)  # [B], the first node's
            batch = self._reading(table, rows, ids.flatten(), positions, newest, at.write_slots.flatten(), max_kv_len)
            hidden = self._run(batch, at.feature, level).view(size, topk, -1)
            expansion.add(self._continuations(table, rows, hidden, level + 1, topk, noisy), hidden)
        return expansion.draft()

    def _reading(
        self, table: RowTensors, rows: Tensor, ids: Tensor, positions: Tensor, newest: Tensor, write_slots: Tensor,
        bound: int,
    ) -> Batch:  # fmt: skip
        """Rows of K tokens ids [B * K] of each of rows [B], each of which reads its row's keys, up to position newest
        [B]. positions [B * K]: the same.  write_slots: what is never written."""
        count, (size,) = ids.shape[0], rows.shape
        return Batch(
            rows, ids, positions, write_slots, table.page_table, newest, self._entry[:count].view(size, -1, 1),
            self._one[:count].view(size, -1), window=1, bound=bound,
        )  # fmt: skip
