"""What the commit of a step does with states of rows, in one launch. The specification is `kv.pool`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.kv.pool import RowStates
from draftwing.ops.row_states.spec import StateOps
from draftwing.ops.triton.common import lanes, launch_options, start


@triton.jit(do_not_specialize_on_alignment=["rows", "prefix_len"])
def _advance_kernel(
    reads, writes, pages, lengths, fresh, node_slots, rows, prefix_len,
    LAZY: tl.constexpr, TREE: tl.constexpr, NODES: tl.constexpr, NODES_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B), of one warp, for it overwrites what it has read. LAZY: rows whose state is fresh keep it as it is.
    TREE: what follows the root may be accepted."""
    start(PDL)
    row = tl.load(rows + tl.program_id(0))
    read, write, page = tl.load(reads + row), tl.load(writes + row), 1 - tl.load(pages + row)
    left = (tl.load(fresh + row) > 0) & LAZY
    tl.store(fresh + row, tl.where(left | TREE, 0, 1).to(tl.int64))
    tl.store(reads + row, tl.where(left, read, write))
    tl.store(writes + row, tl.where(left, write, read))
    tl.store(pages + row, page)
    length = tl.load(prefix_len + tl.program_id(0)) + 1
    tl.store(lengths + row, tl.where(left, tl.load(lengths + row), length))
    node = tl.arange(0, NODES_PAD)
    tl.store(node_slots + (row * 2 + page) * NODES + node, tl.zeros([NODES_PAD], tl.int64), mask=node < NODES)


class TritonStateOps(StateOps):
    """In one launch."""

    lazy_states = True

    def advance_states(self, states: RowStates, rows: Tensor, prefix_len: Tensor, nodes: int = 0) -> None:
        rows, prefix_len = rows.contiguous(), prefix_len.contiguous()
        assert rows.dtype == prefix_len.dtype == torch.int64 and rows.shape == prefix_len.shape
        _advance_kernel[(len(rows),)](
            states.read, states.write, states.page, states.length, states.fresh, states.node_slots, rows, prefix_len,
            LAZY=states.lazy and nodes == 1, TREE=nodes > 1, NODES=states.nodes, NODES_PAD=lanes(states.nodes),
            num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
