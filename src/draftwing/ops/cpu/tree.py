"""A tree step between forward passes in C (tree.c, assign.c and merge.c in ops/cpu/csrc): the same integers as torch.
Rows of padding stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.core import MAX_CONFIDENCE, TreeShape
from draftwing.ops.attention import Ragged
from draftwing.ops.drafts import graded
from draftwing.ops.reference.assign import AssignOps, spare_trees
from draftwing.ops.reference.merge import MergeOps
from draftwing.ops.reference.tree import FRACTION_BITS, TreeOps
from draftwing.ops.types import (
    AcceptedPath,
    Assigned,
    Calibration,
    Committed,
    Draft,
    Queries,
    Ranked,
    RowTensors,
    TargetInputs,
    Tree,
    packed_width,
)


class CpuTreeOps(TreeOps, AssignOps, MergeOps):
    """Overrides what every step does, and what makes one draft of two drafters'."""

    raw: Any

    def plain_inputs(self, table: RowTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, batch = rows.contiguous(), rows.shape[0]
        found = ints(batch), ints(batch), ints(batch)
        self.raw.plain_inputs(rows, batch, table.page_table, table.kv_len, table.last, table.length, *found)
        return found

    def tree_inputs(self, table: RowTensors, rows: Tensor, draft: Draft, depth_max: int) -> tuple[Tree, TargetInputs]:
        batch, nodes = draft.parent.shape
        parent, alive, rows = draft.parent.contiguous(), draft.alive.contiguous(), rows.contiguous()
        tree = Tree(ints(batch, nodes), ints(batch, nodes, depth_max + 1), ints(batch, nodes))
        found = TargetInputs(ints(batch * nodes), ints(batch * nodes), ints(batch))
        self.raw.target_inputs(
            parent, alive, batch, nodes, depth_max, *tree, rows, table.page_table, table.kv_len, table.length, *found
        )
        return tree, found

    def commit(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, prefix_len: Tensor,
        confidence: int, with_path: bool, mark: Tensor | None = None, calibration: Calibration | None = None,
    ) -> Committed:  # fmt: skip
        batch, nodes = draft.tokens.shape
        width = tree.path.shape[2]
        read = *draft[:3], tree.depth if mark is None else mark, target, rows
        held = [part.contiguous() for part in read]
        grade = None if draft.grade is None else draft.grade.contiguous()
        done = ints(batch, packed_width(width - 1, nodes)), ints(batch, width), ints(batch)
        path = AcceptedPath(*(ints(batch * width) for _ in range(4))) if with_path else None
        self.raw.commit(
            *held, batch, nodes, width - 1, table.page_table, table.tokens, table.kv_len, table.last, table.length,
            table.rows, confidence, *done, *(path or [None] * 4), grade, *(calibration or (None, None)),
        )  # fmt: skip
        return Committed(*done, path)

    def simulate(
        self, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor, chance: int, vocab: int
    ) -> Tensor:
        (batch, nodes), out = target.shape, ints(*target.shape)
        held = [part.contiguous() for part in (target, *draft[:3], tree.depth, tree.path, rows, kv_len)]
        self.raw.simulate(
            out.data_ptr(), *addresses(held), batch, nodes, tree.path.shape[2], chance, FRACTION_BITS, vocab
        )
        return out

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

    def merge(self, first: Draft, second: Draft, shape: TreeShape, calibration: Calibration) -> Draft:
        batch, nodes = first.tokens.shape[0], shape.nodes
        held = [part.contiguous() for part in (*graded(first), *graded(second)) if part is not None]
        seen, accepted = calibration
        assert seen.is_contiguous() and accepted.is_contiguous() and seen.dtype == accepted.dtype == torch.float32
        draft = empty_draft(batch, nodes)
        self.raw.merge(
            *held, batch, first.tokens.shape[1], second.tokens.shape[1], nodes, shape.depth, seen, accepted, *draft
        )
        return draft

    def raise_confidence(self, confidence: Tensor) -> Tensor:
        self.raw.raise_confidence(confidence, confidence.stride(0), confidence.shape[0], MAX_CONFIDENCE)
        return confidence


def ints(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64)


def empty_draft(batch: int, nodes: int) -> Draft:
    return Draft(
        ints(batch, nodes), ints(batch, nodes), torch.empty(batch, nodes, dtype=torch.bool), ints(batch, nodes)
    )


def addresses(tensors: Any) -> tuple[int, ...]:
    """Returns the addresses of contiguous tensors, which must be held for as long as these are used."""
    return tuple(part.data_ptr() for part in tensors)


def with_rows(x: Tensor) -> Tensor:
    """x [M, size] with adjacent columns; rows may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()
