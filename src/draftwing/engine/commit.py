"""The end of a tree step: what the target accepted is committed to the slot table, and packed for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.engine.slots import SlotTable
from draftwing.kernels import use_triton
from draftwing.spec.drafter import Draft
from draftwing.spec.tree import Accepted, Tree, accept

HINT = 2  # column of a packed result


class Path(NamedTuple):
    """The accepted path of each row, a chain of D + 1 tokens that starts with the root; garbage past `count`."""

    ids: Tensor  # [B * (D + 1)] int64
    positions: Tensor  # [B * (D + 1)] int64
    write_slots: Tensor  # [B * (D + 1)] int64
    nodes: Tensor  # [B * (D + 1)] int64: which of the step's B * N nodes stands there


class Committed(NamedTuple):
    packed: Tensor  # [B, 3 + (D + 1) + N] int64: count, proposed, hint (0 so far), tokens, order
    tokens: Tensor  # [B, D + 1] int64, 0 past count
    count: Tensor  # type: ignore[assignment]  # [B] int64; hides tuple.count
    path: Path | None


def commit(
    slots: SlotTable, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, prefix_len: Tensor, observed: bool
) -> Committed:
    """Accepts, and advances the rows: permutes the page-table entries past kv_len so that the accepted path comes
    first, appends the tokens, moves kv_len and last. The dummy row stays empty.

    target [B, N]: what the target drew at every node; prefix_len [B]: kv_len of the rows; observed: whether a drafter
    wants to see the path.
    """
    depth = tree.path.shape[2] - 1
    if use_triton(rows):
        from draftwing.kernels.tree import accept_and_advance

        done = accept_and_advance(
            draft.tokens, draft.parent, draft.alive, target, rows, slots.table, slots.tokens, slots.kv_len, slots.last,
            depth, tail=0 if observed else None,
        )  # fmt: skip
        return Committed(
            done.packed, done.committed, done.count, Path(*done.path[:4]) if done.path is not None else None
        )
    accepted = accept(draft.tokens, draft.parent, draft.alive, tree, target)
    advance(slots, rows, accepted, prefix_len)
    proposed = draft.alive.sum(1) - 1 if depth else tree.depth.squeeze(1)  # none
    head = torch.stack((accepted.count, proposed, torch.zeros_like(proposed)), 1)
    packed = torch.cat((head, accepted.committed, accepted.order), 1)
    path = accepted_path(slots, rows, accepted, prefix_len) if observed else None
    return Committed(packed, accepted.committed, accepted.count, path)


def advance(slots: SlotTable, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> None:
    nodes, tokens = accepted.order.shape[1], accepted.committed.shape[1]
    column = rows.unsqueeze(1)
    if nodes > 1:
        entries = kv_len.unsqueeze(1) + torch.arange(nodes, device=rows.device)  # [B, N]
        window = slots.table[column, entries].gather(1, accepted.order)
        slots.table.index_put_((column, entries), window)
    # Entries past the count are overwritten before anybody reads them.
    where = kv_len.unsqueeze(1) + torch.arange(1, tokens + 1, device=rows.device)  # [B, D + 1]
    slots.tokens.index_put_((column, where), accepted.committed)
    slots.kv_len.index_copy_(0, rows, kv_len + accepted.count)
    newest = accepted.committed.gather(1, accepted.count.unsqueeze(1) - 1)
    slots.last.index_copy_(0, rows, newest.squeeze(1))
    slots.kv_len[slots.rows].zero_()


def accepted_path(slots: SlotTable, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> Path:
    """Of rows that have advanced from kv_len [B]."""
    (batch, nodes), tokens = accepted.order.shape, accepted.committed.shape[1]
    column = rows.unsqueeze(1)
    positions = kv_len.unsqueeze(1) + torch.arange(tokens, device=rows.device)  # [B, D + 1]
    first = torch.arange(0, batch * nodes, nodes, device=rows.device).unsqueeze(1)
    return Path(
        ids=slots.tokens[column, positions].flatten(),
        positions=positions.flatten(),
        write_slots=slots.table[column, positions].flatten(),
        nodes=(first + accepted.order[:, :tokens]).flatten(),
    )
