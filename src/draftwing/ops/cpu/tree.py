"""A tree step between forward passes in C (ops/cpu/csrc/tree.c): the same integers as torch. Rows of padding stay as
they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.ops.reference.tree import TreeOps
from draftwing.ops.types import (
    AcceptedPath,
    Calibration,
    Committed,
    Draft,
    RowTensors,
    TargetInputs,
    Tree,
    packed_width,
)


class CpuTreeOps(TreeOps):
    """Overrides what every step does."""

    raw: Any

    def plain_inputs(self, table: RowTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, batch = rows.contiguous(), rows.shape[0]
        found = ints(batch), ints(batch), ints(batch)
        self.raw.plain_inputs(
            rows.data_ptr(), batch, table.page_table.data_ptr(), table.kv_len.data_ptr(), table.last.data_ptr(),
            table.length, *addresses(found),
        )  # fmt: skip
        return found

    def tree_inputs(self, table: RowTensors, rows: Tensor, draft: Draft, depth_max: int) -> tuple[Tree, TargetInputs]:
        batch, nodes = draft.parent.shape
        parent, alive, rows = draft.parent.contiguous(), draft.alive.contiguous(), rows.contiguous()
        tree = Tree(ints(batch, nodes), ints(batch, nodes, depth_max + 1), ints(batch, nodes))
        found = TargetInputs(ints(batch * nodes), ints(batch * nodes), ints(batch))
        self.raw.target_inputs(
            parent.data_ptr(), alive.data_ptr(), batch, nodes, depth_max, *addresses(tree), rows.data_ptr(),
            table.page_table.data_ptr(), table.kv_len.data_ptr(), table.length, *addresses(found),
        )  # fmt: skip
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
            *addresses(held), batch, nodes, width - 1, table.page_table.data_ptr(), table.tokens.data_ptr(),
            table.kv_len.data_ptr(), table.last.data_ptr(), table.length, table.rows, confidence, *addresses(done),
            *(addresses(path) if path is not None else (0, 0, 0, 0)),
            0 if grade is None else grade.data_ptr(), *(addresses(calibration) if calibration is not None else (0, 0)),
        )  # fmt: skip
        return Committed(*done, path)


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
