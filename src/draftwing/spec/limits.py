"""Limits a draft tree to what its request allows: nodes beyond the limits are dead.

`limit` runs after `propose` and before the target's batch is made. Draft extend still runs for every row, so the
drafter's KV stays complete. Depth 0 leaves only the root, which is plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.types import Draft


def limit(draft: Draft, depth_max: int, max_depth: Tensor, max_topk: Tensor, max_nodes: Tensor) -> Draft:
    """Returns the draft with fewer live nodes; tokens and parents stay.

    depth_max: of the shape, no node is deeper; max_depth, max_topk, max_nodes [B] int64, at least 0, 1, 1. A node is
    dead if it is deeper than max_depth, if max_topk or more live siblings come before it, if an ancestor is dead, or if
    max_nodes survivors of these rules, the root counted, come before it. Its parent is one of them, so what is left is
    a tree.
    """
    parent, alive = draft.parent, draft.alive
    nodes = parent.shape[1]
    if nodes == 1:
        return draft
    node = torch.arange(nodes, device=parent.device)
    earlier = (node < node[:, None]) & (node > 0)  # [N, N]: column before row; the root is nobody's sibling
    siblings = (parent[:, :, None] == parent[:, None]) & alive[:, None] & earlier
    keeps = alive & (siblings.sum(-1) < max_topk[:, None])
    keeps[:, 0].fill_(True)
    # Depths and the worst of all ancestors, over twice the distance in every round; the root is its own parent.
    depth = (node > 0).to(torch.int64).expand_as(parent)  # [B, N]
    jump, reach = parent, 1
    while reach < depth_max:
        keeps, depth = keeps & keeps.gather(1, jump), depth + depth.gather(1, jump)
        jump, reach = jump.gather(1, jump), 2 * reach
    keeps = keeps & (depth <= max_depth[:, None])
    return draft._replace(alive=keeps & (keeps.cumsum(1) <= max_nodes[:, None]))
