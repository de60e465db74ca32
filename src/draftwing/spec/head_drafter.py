"""What drafters with a head have in common: how they reach its KV, what they keep of roots, and that another head may
take its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftwing.models.heads.base import DraftHead, FeatureHead
from draftwing.models.heads.swap import HeadSwap
from draftwing.ops.attention import Attend, AttnBackend, Batch
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import First, LogitEditor
from draftwing.spec.drafter import Drafter, DraftStep


class HeadDrafter(Drafter):
    """A `Drafter` around a `DraftHead`."""

    swap: HeadSwap | None = None  # of heads that are read from a folder

    def __init__(self, head: DraftHead, rows: int, topk: int, width: int, dtype: torch.dtype, ops: TorchOps) -> None:
        """rows: those of the row table, its dummy included; topk: the largest of any shape that will be asked for;
        width, dtype: of the feature that is kept of a root."""
        self.head, self.topk, self.ops = head, topk, ops
        self.aux_layers, self.kv_layers = head.aux_layers, head.kv_layers
        self._draft_ids = head.draft_ids()
        self._first = First(  # the root's best continuations and its feature, row-indexed as `ops.expand` reads them
            ids=torch.zeros(rows, topk, dtype=torch.int64, device=ops.device),
            logp=torch.zeros(rows, topk, dtype=torch.float32, device=ops.device),
            feature=torch.zeros(rows, width, dtype=dtype, device=ops.device),
        )
        self._constrained: Any = None  # what `constrain` leaves for the next `propose`
        self._attn: AttnBackend | None = None
        self._first_layer = 0

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        self._attn, self._first_layer = attn, first_layer
        self.head.set_max_positions(positions)

    def unconstrain(self) -> None:
        """Undoes `constrain`, which no `propose` follows."""
        self._constrained = None

    def _bind(self, batch: Batch) -> Attend:
        assert self._attn is not None, "attach comes first"
        return self._attn.bind(batch, self._first_layer)

    def _editor(self, step: DraftStep) -> LogitEditor | None:
        if step.edits is None:
            return None
        where = step.table, step.rows, step.edits, step.max_kv_len
        return self.ops.logit_editor(*where, self.head.vocab, self._draft_ids)

    def read_head(self, folder: Path | None) -> FeatureHead:
        return super().read_head(folder) if self.swap is None else self.swap.read(folder)

    def take_head(self, head: FeatureHead) -> None:
        assert self.swap is not None
        self.swap.take(head)
        draft_ids = self.head.draft_ids()
        if self._draft_ids is not None and draft_ids is not None:
            self._draft_ids.copy_(draft_ids)  # recorded calls know where it is
