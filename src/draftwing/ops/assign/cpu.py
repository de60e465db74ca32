"""What is worth verifying, in C (assign.c in ops/cpu/csrc): the same integers as torch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.assign.spec import AssignOps, spare_trees
from draftwing.ops.attention.batch import Ragged
from draftwing.ops.cpu.arguments import ints
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.types import (
    Assigned,
    Calibration,
    Draft,
    Queries,
    Ranked,
    RowTensors,
    TargetInputs,
    Tree,
)


class CpuAssignOps(InC, AssignOps):
    """Overrides all of `AssignOps`."""

    def rank(self, draft: Draft, tree: Tree, rows: Tensor, dummy: int, calibration: Calibration) -> Ranked:
        batch, nodes = draft.parent.shape
        ranked = Ranked(torch.empty(batch, nodes, dtype=torch.float32), ints(batch, nodes))
        grade = None if draft.grade is None else draft.grade.contiguous()
        held = [part.contiguous() for part in (draft.parent, draft.alive, tree.depth, rows)]
        self.raw.rank(*ranked, grade, *held, batch, nodes, dummy, *calibration)
        return ranked

    def assign(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, inputs: TargetInputs, ranked: Ranked,
        total: int,
    ) -> Assigned:  # fmt: skip
        batch, nodes, width = tree.path.shape
        assert batch <= total <= batch * nodes
        spare = spare_trees(batch, nodes, total)
        read = *ranked, draft.tokens, tree.path, tree.path_len, *inputs, rows
        held = [part.contiguous() for part in read]
        chosen = torch.empty(batch, nodes, dtype=torch.bool), ints(batch, nodes), ints(batch, nodes)
        ids, positions, slots, owners, prefix = (ints(total) for _ in range(5))
        queries = Queries(ids, positions, slots, owners, prefix, ints(total, 1, width), ints(total, 1))
        trees = ints(batch + spare), ints(batch + spare), ints(batch + spare + 1)
        self.raw.assign(*held, batch, nodes, width, total, spare, table.rows, *chosen, *queries, *trees)
        return Assigned(*chosen, Ragged(*trees, nodes, -(-total // batch)), queries)
