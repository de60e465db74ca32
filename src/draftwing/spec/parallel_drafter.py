"""The drafter for EAGLE-3 heads with a mask (P-EAGLE), which draft all levels of a tree in one pass.

The pass over committed text is EAGLE-3's, and its last row gives what may follow the newest token. Rows of masks after
it, in scratch entries past kv_len, give the levels below: each sees the text and the masks before it, and no token that
was drafted. So all nodes of a level have the same continuations, and depth costs a row rather than a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.models.heads.eagle import Eagle3Head
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Continuations, Draft, RowTensors
from draftwing.spec.drafter import Drafter, DraftStep
from draftwing.spec.model_drafter import ModelDrafter


class ParallelDrafter(ModelDrafter):
    """A `Drafter` around an `Eagle3Head` with a mask."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, rows: int, topk: int, dtype: torch.dtype, ops: TorchOps) -> None:
        super().__init__(head, rows, topk, dtype, ops)
        assert head.eagle.mask is not None
        self._mask = torch.tensor([head.eagle.mask], device=ops.device)
        # Nodes hand nothing down.
        self._roots = self._first._replace(feature=self._first.feature[:, :0])

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        return Drafter.menu(self, shape)  # what is not verified costs next to nothing

    def span(self, shape: TreeShape) -> int:
        """Returns the most of: verified nodes, committed tokens, rows of masks."""
        return max(shape.nodes, shape.max_commit)

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy, _ = step
        (size,), topk, below, ops, head = rows.shape, shape.topk, shape.depth - 1, self.ops, self.head
        editor = self._editor(step)
        self._read_first(table, rows, noisy, editor)
        expansion = ops.expand(table, rows, shape, self._roots, 0, 0, head.target_ids)
        if below:
            hidden = self._run_masks(table, rows, below, max_kv_len)
            all_logits = head.logits(ops.of_levels(hidden, size, 0, below))  # [D * B, V]
        nothing = self._roots.feature[:1].expand(size, topk, -1)
        for level in range(below):
            self._next_level(expansion, editor)
            logits = all_logits[level * size : (level + 1) * size]
            if editor is not None:
                editor.apply(logits)
            following = ops.continuations(logits, table, rows, level + 2, topk, head.target_ids, noisy)
            expansion.add(Continuations(*(ops.repeat_rows(x, topk) for x in following)), nothing)
        return expansion.draft()

    def _run_masks(self, table: RowTensors, rows: Tensor, width: int, max_kv_len: int) -> Tensor:
        """Returns the head's output of so many masks after the newest token of rows [B], [B * width, H]."""
        ops, count = self.ops, len(rows) * width
        prefix_len = ops.take_rows(table.kv_len, rows)
        chain = ops.chain(table, rows, prefix_len, width)._replace(ids=ops.repeat_rows(self._mask, count))
        bound = min(max_kv_len + width, table.page_table.shape[1])
        inputs = chain._asdict()
        batch = Batch(rows, table=table.page_table, prefix_len=prefix_len, window=width, bound=bound, **inputs)
        batch = batch._replace(turns=self._turns(table, rows, batch.positions))
        return self._run(batch, ops.repeat_rows(self.head.mask_feature(), count), 1)
