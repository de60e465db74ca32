"""The drafter for models that read the target's keys and values and have none of their own: Gemma 4's assistants."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from draftwing.models.heads.assistant import AssistantHead
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft, RowTensors
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter, prompt_ends


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
            rows, newest = prompt_ends(batch)
            if not len(rows):
                return
        else:  # [M, n] -> [B, n]: of the query before each row's newest token
            rows = batch.rows
            newest = partial(self.ops.newest_rows, count=count, lookahead=1, rows=rows, kept=None)
        ids = newest(next_ids.unsqueeze(1)).flatten()
        hidden = self._run(self._reading(table, rows, ids, batch.bound), newest(aux_hidden), 0)
        self.ops.put_rows(self._first.feature, rows, hidden)
        self._keep_first(table, rows, hidden, noisy)

    def catch_up(self, seen: SeenTokens, drafts: bool) -> None:
        if drafts or seen.count is None:
            self.extend(seen)

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy, _ = step
        size, topk = rows.shape[0], shape.topk
        editor = self._editor(step)
        self._read_first(table, rows, noisy, editor)
        expansion, batch = self._expand(table, rows, shape), None
        for level in range(1, shape.depth):
            ids = self._next_level(expansion, editor).ids.flatten()
            batch = self._reading(table, rows, ids, max_kv_len) if batch is None else batch._replace(ids=ids)
            hidden = self._run(batch, expansion.level_feature(), level).view(size, topk, -1)
            expansion.add(self._continuations(table, rows, hidden, level + 1, topk, noisy, editor), hidden)
        return expansion.draft()

    def _reading(self, table: RowTensors, rows: Tensor, ids: Tensor, bound: int) -> Batch:
        """Returns tokens ids [B * K] of rows [B], each at the position of its row's newest token, reading all keys
        before it: those up to the one before that, and a path of one entry."""
        count, (size,) = ids.shape[0], rows.shape
        kv_len = self.ops.take_rows(table.kv_len, rows)
        before = self.ops.noise_key(table, rows, -1).position  # kv_len - 1, by the call that there is
        return Batch(
            rows, ids, positions=self.ops.repeat_rows(kv_len, count // size), write_slots=ids,  # nothing is written
            table=table.page_table, prefix_len=before, path=self._entry[:count].view(size, -1, 1),
            path_len=self._one[:count].view(size, -1), window=1, bound=bound,
        )  # fmt: skip
