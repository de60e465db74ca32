"""A tree step between forward passes in C (tree.c in ops/cpu/csrc): the same integers as torch.
Rows of padding stay as they are."""

from __future__ import annotations

from torch import Tensor

from draftwing.ops.cpu.arguments import addresses, ints
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.tree.spec import FRACTION_BITS, TreeOps
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


class CpuTreeOps(InC, TreeOps):
    """Overrides all of `TreeOps`."""

    def plain_inputs(self, table: RowTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, batch = rows.contiguous(), rows.shape[0]
        ids, positions, slots = ints(batch), ints(batch), ints(batch)
        self.raw.line(  # of one token: its position is how many are before it, and nobody reads of its path
            None, table.page_table, table.length, table.kv_len, table.last, rows, batch, 1, 0, ids, positions, slots,
            positions, slots, slots,
        )  # fmt: skip
        return ids, positions, slots

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
