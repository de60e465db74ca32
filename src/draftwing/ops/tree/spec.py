"""What a draft tree means for the target, and what of it is committed.

Chains are trees with one child per node and plain decoding is a tree of one node, so this is the only accept path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.core import TOKEN
from draftwing.ops.assign.spec import learn
from draftwing.ops.noise.spec import position_words
from draftwing.ops.types import AcceptedPath, Calibration, Committed, Draft, RowTensors, TargetInputs, Tree

FRACTION_BITS = 24  # of the choice in `simulate`


class Accepted(NamedTuple):
    """What a step commits for each row."""

    count: Tensor  # type: ignore[assignment]  # [B] int64: tokens committed, 1 .. D + 1; hides tuple.count
    order: Tensor  # [B, N] int64: the accepted path first, then the other nodes, each in ascending order
    committed: Tensor  # [B, D + 1] int64: the accepted drafts and the target's token after them; 0 past count


class TreeOps:
    """The operations of a tree step between the forward passes."""

    def plain_inputs(self, table: RowTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, for plain decoding, ids, positions (which are kv_len) and write slots of the rows' last tokens, [B]
        int64 each."""
        ids, kv_len = table.last.index_select(0, rows), table.kv_len.index_select(0, rows)
        return ids, kv_len, table.slots_at(rows, kv_len)

    def tree_inputs(self, table: RowTensors, rows: Tensor, draft: Draft, depth_max: int) -> tuple[Tree, TargetInputs]:
        """Returns the trees' geometry, and where their nodes stand: node n of a row is written at page-table entry
        kv_len + n, and its position is kv_len + depth."""
        tree = derive(draft.parent, draft.alive, depth_max)
        kv_len = table.kv_len.index_select(0, rows)  # [B]
        column = kv_len.unsqueeze(1)
        write_slots = table.slots_at(rows.unsqueeze(1), column + table.steps[: draft.tokens.shape[1]])
        return tree, TargetInputs((column + tree.depth).flatten(), write_slots.flatten(), kv_len)

    def commit(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, prefix_len: Tensor,
        confidence: int, with_path: bool, mark: Tensor | None = None, calibration: Calibration | None = None,
    ) -> Committed:  # fmt: skip
        """Accepts, and advances the rows: permutes the page-table entries past kv_len so that the accepted path comes
        first, appends the tokens, moves kv_len and last. The dummy row stays empty.

        target [B, N]: what the target drew at every node, of which `core.NOT_FINITE` goes to the packed result alone;
        prefix_len [B]: kv_len of the rows; confidence: for the packed result; with_path: whether `Committed.path` is
        wanted; mark [B, N]: of the nodes, without one their depths; calibration: learns from what is accepted of the
        draft's live nodes.
        """
        drawn = accept(draft.tokens, draft.parent, draft.alive, tree, target)
        accepted = drawn._replace(committed=drawn.committed & TOKEN)
        _advance(table, rows, accepted, prefix_len)
        zero = tree.depth[:, :1]  # the root's
        head = zero + confidence if confidence else zero, accepted.count.unsqueeze(1)
        packed = torch.cat((*head, drawn.committed, accepted.order, tree.depth if mark is None else mark), 1)
        path = _accepted_path(table, rows, accepted, prefix_len) if with_path else None
        if calibration is not None:
            learn(draft, tree, packed, rows == table.rows, calibration)
        return Committed(packed, accepted.committed, accepted.count, path)

    def simulate(
        self, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor, chance: int, vocab: int
    ) -> Tensor:
        """Returns the samples to give to `commit` for a step that accepts a draft of each level with this chance, out
        of 2^FRACTION_BITS, if it has accepted one of the level before: as many levels as there are powers of the chance
        above a hash of (row, kv_len). target [B, N] -> [B, N]; vocab: the target's.

        The walk goes to the first of the deepest alive nodes that are not deeper than wanted. Where the sample there is
        one of its children, a token next to them is put in its place, which ends the walk.
        """
        nodes = target.shape[1]
        powers = powers_of(chance, tree.path.shape[2] - 1)
        bits = fraction_bits(rows, kv_len)
        wanted = sum(((bits < power).long() for power in powers), torch.zeros_like(bits))  # [B]
        node = torch.arange(nodes, device=target.device)
        fits = draft.alive & (tree.depth <= wanted[:, None])
        # Nodes are ranked by depth and then from the first to the last, without a tie.
        best = torch.where(fits, tree.depth * nodes + (nodes - 1 - node), -1).amax(1, keepdim=True)  # [B, 1]
        leaf, depth = nodes - 1 - best % nodes, best // nodes
        path = tree.path.gather(1, leaf[:, :, None].expand(-1, 1, tree.path.shape[-1])).squeeze(1)  # [B, D + 1]

        level = torch.arange(1, path.shape[1], device=target.device)
        where = torch.where(level <= depth, path[:, :-1], nodes)  # past the leaf into a column that is dropped
        altered = torch.cat((target, target[:, :1]), 1).scatter(1, where, draft.tokens.gather(1, path[:, 1:]))

        child = draft.alive & (draft.parent == leaf) & (node > 0)
        last = target.gather(1, leaf)
        hit = (child & (draft.tokens == last)).any(1, keepdim=True)
        above = draft.tokens.where(child, -1).amax(1, keepdim=True) + 1
        below = draft.tokens.where(child, vocab).amin(1, keepdim=True) - 1
        # Children with the first and with the last id of a vocabulary are not worth a third case: one draft too many.
        neighbour = torch.where(above < vocab, above, torch.where(below >= 0, below, last))
        return altered.scatter(1, leaf, torch.where(hit, neighbour, last))[:, :nodes]


def powers_of(chance: int, count: int) -> list[int]:
    """Returns the first, second, ... power of a chance out of 2^FRACTION_BITS, each rounded down."""
    powers = [chance]
    while len(powers) < count:
        powers.append(powers[-1] * chance >> FRACTION_BITS)
    return powers


def fraction_bits(rows: Tensor, kv_len: Tensor) -> Tensor:
    """Returns [B] int64, uniform below 2^FRACTION_BITS: a hash of a row and the position it has reached."""
    return position_words(rows, kv_len[:, None])[:, 0, 0].long() & ((1 << FRACTION_BITS) - 1)


def derive(parent: Tensor, alive: Tensor, depth_max: int) -> Tree:
    """Depths and paths of trees no deeper than `depth_max`.

    parent [B, N] int64, parent[:, 0] = 0 and parent[:, i] < i; alive [B, N] bool, the root alive and the children of
    dead nodes dead. With depth_max 0 there is the root only: N = 1.
    """
    batch, nodes = parent.shape
    assert depth_max > 0 or nodes == 1, f"a tree of depth 0 has 1 node, found {nodes}"
    if depth_max == 0:
        zero = torch.zeros_like(parent)
        return Tree(zero, zero[:, :, None], torch.ones_like(parent))

    # up[b, i, j] is the ancestor of node i that is j levels above it; the root is its own parent, so the chain stays
    # there once it arrives. Each round doubles the reach: jump = parent applied as often as `up` has columns.
    node = torch.arange(max(nodes, depth_max + 1), device=parent.device)
    up = torch.stack((node[:nodes].expand(batch, nodes), parent), -1)  # [B, N, 2]
    jump = parent
    while up.shape[-1] <= depth_max:
        jump = jump.gather(1, jump)
        up = torch.cat((up, up.gather(1, jump[:, :, None].expand_as(up))), -1)

    depth = (up != 0).sum(-1).mul_(alive)
    steps = depth[:, :, None] - node[: depth_max + 1]  # levels above the node
    return Tree(depth, up.gather(-1, steps.clamp_(min=0)), depth + 1)


def accept(tokens: Tensor, parent: Tensor, alive: Tensor, tree: Tree, target: Tensor) -> Accepted:
    """Walks from the root while a child equals the target's sample at its parent.

    tokens, parent [B, N] int64 and alive [B, N] bool as in `Draft` (siblings distinct, so there is one walk);
    tree from `derive`; target [B, N] int64, the target's sample at every node. Exact in distribution for any way of
    drafting, since what is committed are the target's own samples.
    """
    batch = tokens.shape[0]
    width = tree.path.shape[-1]  # D + 1
    if width == 1:  # all of it is known, and there already
        return Accepted(tree.path_len[:, 0], tree.depth, target)

    hit = (tokens == target.gather(1, parent)).logical_and_(alive)
    hit[:, 0].fill_(True)
    on_hits = hit.gather(1, tree.path.view(batch, -1)).view_as(tree.path).all(-1)  # [B, N]: so is every ancestor
    count, leaf = (tree.path_len * on_hits).max(1)  # [B]; no two such nodes are equally deep
    path = tree.path.gather(1, leaf[:, None, None].expand(-1, 1, width)).squeeze(1)  # [B, D + 1], the leaf to its end
    off_path = torch.ones_like(alive, dtype=torch.uint8).scatter_(1, path, 0)
    order = off_path.argsort(dim=-1, stable=True)
    live = torch.arange(width, device=tokens.device) < count[:, None]
    return Accepted(count, order, target.gather(1, path).mul_(live))


def _advance(table: RowTensors, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> None:
    """Writes what was accepted to rows whose length is kv_len [B]."""
    nodes, tokens = accepted.order.shape[1], accepted.committed.shape[1]
    after = kv_len + accepted.count  # [B]
    if tokens == 1:  # plain decoding
        newest = accepted.committed.squeeze(1)
        table.tokens.index_put_((rows, after), newest.to(table.tokens.dtype))
    else:
        column = rows.unsqueeze(1)
        entries = kv_len.unsqueeze(1) + table.steps[: max(nodes, tokens + 1)]  # [B, max(N, D + 2)]
        window, where = entries[:, :nodes], entries[:, 1 : tokens + 1]
        table.page_table.index_put_((column, window), table.page_table[column, window].gather(1, accepted.order))
        # Entries past the count are overwritten before anybody reads them.
        table.tokens.index_put_((column, where), accepted.committed.to(table.tokens.dtype))
        newest = accepted.committed.gather(1, accepted.count.unsqueeze(1) - 1).squeeze(1)
    table.kv_len.index_copy_(0, rows, after)
    table.last.index_copy_(0, rows, newest)
    table.dummy_len.zero_()


def _accepted_path(table: RowTensors, rows: Tensor, accepted: Accepted, kv_len: Tensor) -> AcceptedPath:
    """Returns the accepted path of rows that have advanced from kv_len [B]."""
    (batch, nodes), tokens = accepted.order.shape, accepted.committed.shape[1]
    column = rows.unsqueeze(1)
    positions = kv_len.unsqueeze(1) + table.steps[:tokens]  # [B, D + 1]
    first = torch.arange(0, batch * nodes, nodes, device=rows.device).unsqueeze(1)
    return AcceptedPath(
        ids=table.tokens_at(column, positions).flatten(),
        positions=positions.flatten(),
        write_slots=table.slots_at(column, positions).flatten(),
        nodes=(first + accepted.order[:, :tokens]).flatten(),
    )
