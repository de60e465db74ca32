"""What a draft tree means for the target (`derive`) and which of its path the target agrees with (`accept`).

Chains are trees with one child per node and plain decoding is a tree of one node, so this is the only accept path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops import use_triton


class Tree(NamedTuple):
    """Geometry of a batch of trees; D is the shape's depth.

    A dead node stands alone: depth 0, itself as its whole path. So its position is a valid one (the root's) and its
    attention reads nothing but committed tokens and itself.
    """

    depth: Tensor  # [B, N] int64, 0 for the root
    path: Tensor  # [B, N, D + 1] int64: the ancestor at depth 0, 1, ...; the node itself from its own depth on
    path_len: Tensor  # [B, N] int64, depth + 1


class Accepted(NamedTuple):
    """What a step commits for each row."""

    count: Tensor  # type: ignore[assignment]  # [B] int64: tokens committed, 1 .. D + 1; hides tuple.count
    order: Tensor  # [B, N] int64: the accepted path first, then the other nodes, each in ascending order
    committed: Tensor  # [B, D + 1] int64: the accepted drafts and the target's token after them; 0 past count
    leaf: Tensor  # [B] int64: the last accepted node


def derive(parent: Tensor, alive: Tensor, depth_max: int) -> Tree:
    """Depths and paths of trees no deeper than `depth_max`.

    parent [B, N] int64, parent[:, 0] = 0 and parent[:, i] < i; alive [B, N] bool, the root alive and the children of
    dead nodes dead. With depth_max 0 there is the root only: N = 1.
    """
    batch, nodes = parent.shape
    assert depth_max > 0 or nodes == 1, f"a tree of depth 0 has 1 node, found {nodes}"
    if use_triton(parent):
        from draftwing.ops.triton import tree as kernels

        return kernels.derive(parent, alive, depth_max)
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
    if use_triton(tokens):
        from draftwing.ops.triton import tree as kernels

        return kernels.accept(tokens, parent, alive, target, tree.path.shape[-1] - 1)
    width = tree.path.shape[-1]  # D + 1
    if width == 1:  # all of it is known, and there already
        return Accepted(tree.path_len[:, 0], tree.depth, target, tree.depth[:, 0])

    hit = (tokens == target.gather(1, parent)).logical_and_(alive)
    hit[:, 0].fill_(True)
    on_hits = hit.gather(1, tree.path.view(batch, -1)).view_as(tree.path).all(-1)  # [B, N]: so is every ancestor
    count, leaf = (tree.path_len * on_hits).max(1)  # [B]; no two such nodes are equally deep
    path = tree.path.gather(1, leaf[:, None, None].expand(-1, 1, width)).squeeze(1)  # [B, D + 1], the leaf to its end
    off_path = torch.ones_like(alive, dtype=torch.uint8).scatter_(1, path, 0)
    order = off_path.argsort(dim=-1, stable=True)
    live = torch.arange(width, device=tokens.device) < count[:, None]
    return Accepted(count, order, target.gather(1, path).mul_(live), leaf)
