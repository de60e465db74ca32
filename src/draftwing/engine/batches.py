"""Makes the batches of steps: what a forward pass of the target, or a drafter that extends, gets for its queries.

Works on the row table, on the device alone. What is the same in every step of one size is made once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.core import Plan, TreeShape
from draftwing.engine.row_table import RowTable, Upload
from draftwing.ops.attention import Batch, spans_of
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import AcceptedPath, Calibration, Draft, Tree


class DraftBatch(NamedTuple):
    """A draft, and the target's batch for it."""

    draft: Draft  # alive: the nodes that are verified
    batch: Batch
    tree: Tree
    mark: Tensor | None = None  # [B, N] int64, see `core.MARK_DEPTH`; None for roots alone
    place: Tensor | None = None  # [B, N] int64: which of the batch's queries a node is; None: all are, in their order


class Batches:
    def __init__(self, table: RowTable, ops: TorchOps) -> None:
        self._table, self._ops = table, ops
        self._roots: dict[int, tuple[tuple[Tensor, Tensor], Tree]] = {}
        self._chains: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def prompts(self, plan: Plan, upload: Upload, tail: int) -> Batch:
        """Returns a prefill's chunks; tail: page-table entries past a prompt's end that the drafter may write."""
        table = self._table
        return Batch(
            rows=upload.rows,
            ids=table.tokens_at(upload.token_rows, upload.positions),
            positions=upload.positions,
            write_slots=table.slots_at(upload.token_rows, upload.positions),
            table=table.page_table,
            prefix_len=table.kv_len[upload.rows],
            chunks=spans_of(plan.chunks),
            bound=plan.max_kv_len + tail,
        )

    def last_tokens(self, rows: Tensor, max_kv_len: int) -> DraftBatch:
        """Returns trees of the rows' last tokens alone, for plain decoding."""
        (parent, alive), tree = self.roots(rows.shape[0])
        ids, kv_len, write_slots = self._ops.plain_inputs(self._table, rows)
        batch = Batch(
            rows, ids, kv_len, write_slots, self._table.page_table, kv_len, tree.path, tree.path_len,
            window=1, bound=max_kv_len + 1,
        )  # fmt: skip
        return DraftBatch(Draft(ids.unsqueeze(1), parent, alive), batch, tree)

    def trees(
        self, rows: Tensor, draft: Draft, shape: TreeShape, max_kv_len: int, calibration: Calibration, total: int
    ) -> DraftBatch:
        """Drafts, of which the best `total` nodes of the batch are verified, all if it is 0. Node n of a row is written
        at page-table entry kv_len + n."""
        table = self._table
        tree, inputs = self._ops.tree_inputs(table, rows, draft, shape.depth)
        ranked = self._ops.rank(draft, tree, rows, table.rows, calibration)
        if total and total < draft.tokens.numel():
            done = self._ops.assign(table, rows, draft, tree, inputs, ranked, total)
            queries, bound = done.queries, max_kv_len + shape.nodes
            batch = Batch(
                queries.rows, queries.ids, queries.positions, queries.write_slots, table.page_table,
                queries.prefix_len, queries.path, queries.path_len, window=shape.nodes, bound=bound,
                ragged=done.trees,
            )  # fmt: skip
            return DraftBatch(draft._replace(alive=done.alive), batch, tree, done.mark, done.place)
        batch = Batch(
            rows, draft.tokens.flatten(), inputs.positions, inputs.write_slots, self._table.page_table,
            inputs.prefix_len, tree.path, tree.path_len, window=shape.nodes, bound=max_kv_len + shape.nodes,
        )  # fmt: skip
        return DraftBatch(draft, batch, tree, ranked.mark)

    def accepted(self, rows: Tensor, before: Tensor, path: AcceptedPath | None, width: int, bound: int) -> Batch:
        """Returns the accepted paths, chains of `width` tokens; before [B]: kv_len before the step; bound: of it now.
        Without paths which rows went on, and from where, is all that the batch has."""
        if path is None:
            nothing = rows[:0]
            return Batch(rows, nothing, nothing, nothing, self._table.page_table, before)
        size = rows.shape[0]
        known = self._chains.get((size, width))
        if known is None:
            step = torch.arange(width, device=rows.device)
            chain, chain_len = step.expand(size, width, width), (step + 1).expand(size, width)
            known = self._chains[size, width] = chain.contiguous(), chain_len.contiguous()
        return Batch(
            rows, path.ids, path.positions, path.write_slots, self._table.page_table, before, *known, window=width,
            bound=bound + 1,  # up to the newest token's entry
        )  # fmt: skip

    def roots(self, size: int) -> tuple[tuple[Tensor, Tensor], Tree]:
        """Parents, which nodes are alive, and geometry of `size` trees that are a root each."""
        known = self._roots.get(size)
        if known is None:
            zero = torch.zeros(size, 1, dtype=torch.int64, device=self._table.kv_len.device)
            known = self._roots[size] = (zero, zero == 0), Tree(zero, zero[:, :, None], zero + 1)
        return known
