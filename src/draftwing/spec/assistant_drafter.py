"""The drafter for models that read the target's keys and values and have none: Gemma 4's assistants."""

from __future__ import annotations

import torch

from draftwing.models.heads.assistant import AssistantHead
from draftwing.ops.attention import AttnBackend, Batch
from draftwing.ops.types import Draft
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter


class AssistantDrafter(ModelDrafter):
    """A `Drafter` around an `AssistantHead`. Its row of the newest token is run with every step, nodes of trees when
    one is wanted; all read the text alone, to which no node belongs."""

    head: AssistantHead

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        super().attach(attn, 0, positions)  # the target's layers

    def extend(self, seen: SeenTokens) -> None:
        if seen.count is not None:
            self.catch_up(seen, True)
            return
        assert seen.aux_hidden is not None
        self._extend_chunks(seen.table, seen.batch, self.head.features(seen.aux_hidden), seen.next_ids, seen.noisy)

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy = step
        size, topk = rows.shape[0], shape.topk
        self._read_first(table, rows, noisy)
        expansion = self._expand(table, rows, shape)
        newest = self.ops.take_rows(table.kv_len, rows) - 1  # the last position whose keys are there
        entry = newest.new_zeros(size, topk, 1)  # behind `newest` positions, and so that one
        positions = newest.unsqueeze(1).expand(size, topk).flatten()
        for level in range(1, shape.depth):
            ids = expansion.level().ids
            at = expansion.level_rows()
            batch = Batch(
                rows=rows, ids=ids.flatten(), positions=positions, write_slots=at.write_slots.flatten(),
                table=table.page_table, prefix_len=newest, path=entry, path_len=torch.ones_like(ids), window=1,
                bound=max_kv_len,
            )  # fmt: skip
            hidden = self._run(batch, at.feature, level).view(size, topk, -1)
            expansion.add(self._continuations(table, rows, hidden, level + 1, topk, noisy), hidden)
        return expansion.draft()
