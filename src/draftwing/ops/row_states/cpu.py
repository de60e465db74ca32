"""What the commit of a step does with states of rows, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.kv.pool import RowStates
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.row_states.spec import StateOps


class CpuStateOps(InC, StateOps):
    """No states are lazy here."""

    def advance_states(self, states: RowStates, rows: Tensor, prefix_len: Tensor, nodes: int = 0) -> None:
        rows, prefix_len = rows.contiguous(), prefix_len.contiguous()
        assert not states.lazy
        assert rows.dtype == prefix_len.dtype == torch.int64 and rows.shape == prefix_len.shape
        self.raw.delta_advance(
            states.read, states.write, states.page, states.length, states.node_slots, states.nodes, rows, len(rows),
            prefix_len, 1,
        )  # fmt: skip
