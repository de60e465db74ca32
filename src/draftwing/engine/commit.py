"""The end of a tree step: what the target accepted is committed to the slot table, and packed for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.core import IntArray, TreeShape
from draftwing.engine.row_table import SlotTable
from draftwing.ops import use_triton
from draftwing.ops.cpu.tree import tree_kernels_for
from draftwing.ops.torch.tree import Accepted, Tree, accept
from draftwing.spec.drafter import Draft

HINT, COUNT, HEAD = range(3)  # columns of a packed result; the tokens begin at HEAD


class Path(NamedTuple):
    """The accepted path of each row, a chain of D + 1 tokens that starts with the root; garbage past `count`."""

    ids: Tensor  # [B * (D + 1)] int64
    positions: Tensor  # [B * (D + 1)] int64
    write_slots: Tensor  # [B * (D + 1)] int64
    nodes: Tensor  # [B * (D + 1)] int64: which of the step's B * N nodes stands there


class Committed(NamedTuple):
    packed: Tensor  # [B, 2 + (D + 1) + N + N] int64: hint, count, tokens, order, depth of the nodes; see `unpack`
    tokens: Tensor  # [B, D + 1] int64, 0 past count
    count: Tensor  # type: ignore[assignment]  # [B] int64; hides tuple.count
    path: Path | None


class Unpacked(NamedTuple):
    """Views of a packed result on the host, see `StepResult`."""

    hint: IntArray  # [B]
    count: IntArray  # type: ignore[assignment]  # [B]; hides tuple.count
    tokens: IntArray  # [B, D + 1]
    order: IntArray  # [B, N]
    depth: IntArray  # [B, N]


def unpack(packed: IntArray, shape: TreeShape) -> Unpacked:
    commit, nodes = HEAD + shape.max_commit, shape.nodes
    assert packed.shape[1] == commit + 2 * nodes, f"a result of {shape} with {packed.shape[1]} columns"
    return Unpacked(
        packed[:, HINT],
        packed[:, COUNT],
        packed[:, HEAD:commit],
        packed[:, commit : commit + nodes],
        packed[:, commit + nodes :],
    )


def commit(
    slots: SlotTable, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, prefix_len: Tensor, hint: int,
    observed: bool,
) -> Committed:  # fmt: skip
    """Accepts, and advances the rows: permutes the page-table entries past kv_len so that the accepted path comes
    first, appends the tokens, moves kv_len and last. The dummy row stays empty.

    target [B, N]: what the target drew at every node; prefix_len [B]: kv_len of the rows; hint: for the packed result;
    observed: whether a drafter wants to see the path.
    """
    if use_triton(rows):
        from draftwing.ops.triton.tree import accept_and_advance

        done = accept_and_advance(
            draft.tokens, draft.parent, draft.alive, tree.depth, target, rows, slots.table, slots.tokens, slots.kv_len,
            slots.last, tree.path.shape[2] - 1, hint, tail=0 if observed else None,
        )  # fmt: skip
        return Committed(
            done.packed, done.committed, done.count, Path(*done.path[:4]) if done.path is not None else None
        )
    kernels = tree_kernels_for(rows)
    if kernels is not None:
        packed, committed, count, found = kernels.settle(slots, rows, draft, tree, target, hint, observed)
        return Committed(packed, committed, count, Path(*found) if found is not None else None)
    accepted = accept(draft.tokens, draft.parent, draft.alive, tree, target)
    advance(slots, rows, accepted, prefix_len)
    zero = tree.depth[:, :1]  # the root's
    head = zero + hint if hint else zero, accepted.count.unsqueeze(1)
    packed = torch.cat((*head, accepted.committed, accepted.order, tree.depth), 1)
    path = accepted_path(slots, rows, accepted, prefix_len) if observed else None
    return Committed(packed, accepted.committed, accepted.count, path)


def advance(slots: SlotTable, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> None:
    nodes, tokens = accepted.order.shape[1], accepted.committed.shape[1]
    after = kv_len + accepted.count  # [B]
    if tokens == 1:  # plain decoding
        newest = accepted.committed.squeeze(1)
        slots.tokens.index_put_((rows, after), newest)
    else:
        column = rows.unsqueeze(1)
        entries = kv_len.unsqueeze(1) + slots.steps[: max(nodes, tokens + 1)]  # [B, max(N, D + 2)]
        window, where = entries[:, :nodes], entries[:, 1 : tokens + 1]
        slots.table.index_put_((column, window), slots.table[column, window].gather(1, accepted.order))
        # Entries past the count are overwritten before anybody reads them.
        slots.tokens.index_put_((column, where), accepted.committed)
        newest = accepted.committed.gather(1, accepted.count.unsqueeze(1) - 1).squeeze(1)
    slots.kv_len.index_copy_(0, rows, after)
    slots.last.index_copy_(0, rows, newest)
    slots.dummy_len.zero_()


def accepted_path(slots: SlotTable, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> Path:
    """Of rows that have advanced from kv_len [B]."""
    (batch, nodes), tokens = accepted.order.shape, accepted.committed.shape[1]
    column = rows.unsqueeze(1)
    positions = kv_len.unsqueeze(1) + slots.steps[:tokens]  # [B, D + 1]
    first = torch.arange(0, batch * nodes, nodes, device=rows.device).unsqueeze(1)
    return Path(
        ids=slots.tokens[column, positions].flatten(),
        positions=positions.flatten(),
        write_slots=slots.table[column, positions].flatten(),
        nodes=(first + accepted.order[:, :tokens]).flatten(),
    )
