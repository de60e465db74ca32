"""Merges ranked candidate continuations into one draft tree, with vectorised operations and static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.spec.drafter import Draft

_INDEX_BITS = 20  # nodes of the widest tree of candidates, depth * candidates, stay below 2^20


class TreeBuilder:
    """Builds trees from `ways` ranked candidates per row; holds the constants that depend on options only.

    Score of a node (a distinct prefix of candidates): the sum over its candidates of w(m, rank, depth) =
    m^2 * 0.8^rank * (1 - 1 / (m + 2))^depth, with m the length of the candidate's match. A long match is trusted more
    and for longer; candidates of one length vote nearly as equals. The draft is not sensitive to these numbers.

    Children per node: falls linearly from max_breadth after a match of one token to min_breadth after max_window; a
    node's depth counts as further matched tokens, for it only matters when they were right. The children kept are
    those of the best ranked candidates.
    """

    def __init__(
        self, ways: int, depth: int, max_window: int, min_breadth: int, max_breadth: int, device: torch.device
    ) -> None:
        assert depth * ways < 1 << _INDEX_BITS
        self.ways = ways
        match = torch.arange(max_window + 1)[:, None]
        level = torch.arange(depth)
        # Both tables are indexed by match length and depth (0 = children of the root).
        self.weight = (match**2 * (1 - 1 / (match + 2)) ** level).float().to(device)
        known = (match - 1 + level).clamp(0, max_window - 1)
        drop = (max_breadth - min_breadth) * known // max(max_window - 1, 1)
        self.limit = (max_breadth - drop).to(device)
        self.by_rank = (0.8 ** torch.arange(ways)).float().to(device)
        self.rank = torch.arange(ways, device=device)
        self.reversed = torch.arange(ways, 0, -1, device=device)
        self.lower = torch.ones(ways, ways, dtype=torch.bool, device=device).tril(-1)
        self.index = torch.arange(depth * ways - 1, -1, -1, device=device)

    def build(self, candidates: Tensor, match: Tensor, last: Tensor, shape: TreeShape) -> Draft:
        """The `shape.nodes - 1` best nodes, as a tree under each row's last token.

        candidates [B, D, C]: token ids, C in rank order, -1 from where a candidate ends, 1 <= D <= shape.depth;
        match [B, C], 0 = no candidate; last [B]. Scores never grow with depth and a prefix's candidates are among its
        parent's, so the best nodes are closed under parents. Nodes are ordered by depth, then by rank.
        """
        batch, depth, ways = candidates.shape
        total, nodes = depth * ways, shape.nodes - 1
        # same[b, d, i, j]: candidates i and j agree up to and including depth d.
        same = (candidates[..., None] == candidates[:, :, None]).view(torch.uint8).cumprod(1)
        owner = ways - (same * self.reversed).amax(-1)  # [B, D, C] first candidate with this prefix, leads its node
        leads = (owner == self.rank) & (candidates >= 0)
        # Older siblings: leaders of better rank under the same parent.
        elder = leads[:, :, None] & self.lower
        under = torch.cat((elder[:, :1], elder[:, 1:] & same[:, :-1].bool()), 1).sum(-1)  # [B, D, C], for leaders
        limit = self.limit[:, :depth].index_select(0, match[:, 0])  # [B, D]
        within = (under < limit[..., None]).gather(2, owner).cumprod(1)  # nothing below what is cut off
        weight = self.weight[:, :depth].index_select(0, match.flatten()).view(batch, ways, depth).transpose(1, 2)
        score = (same * (weight * self.by_rank)[:, :, None]).sum(-1) * (leads & within.bool())

        # Positive floats are ordered like their bits; the index below them makes keys distinct, shallow ones first.
        key = (score.view(torch.int32).flatten(1).long() << _INDEX_BITS) + self.index[-total:]
        best = key.topk(min(nodes, total), dim=1).values
        chosen = (total - 1) - (best & ((1 << _INDEX_BITS) - 1))
        chosen = chosen.masked_fill_(best >> _INDEX_BITS == 0, total)
        if nodes > total:
            chosen = torch.cat((chosen, chosen.new_full((batch, nodes - total), total)), 1)
        # Ascending index is parents first; dead nodes go last.
        chosen = chosen.topk(nodes, dim=1, largest=False, sorted=True).values
        return self._assemble(candidates.flatten(1), owner.flatten(1), chosen, last)

    def _assemble(self, ids: Tensor, owner: Tensor, chosen: Tensor, last: Tensor) -> Draft:
        """ids, owner [B, total] of (depth, candidate); chosen [B, N - 1] ascending, total = dead; last [B]."""
        batch, total = ids.shape
        alive = chosen < total
        numbers = torch.arange(1, chosen.shape[1] + 1, device=ids.device).expand_as(chosen)
        place = ids.new_zeros(batch, total + 1).scatter_(1, chosen, numbers)  # node of each (depth, candidate)
        # The parent of (d, c) is (d - 1, leader of c at d - 1); the root's children have no such entry.
        deep = alive & (chosen >= self.ways)
        above = (chosen - self.ways).masked_fill_(~deep, 0)
        leader = above - above.remainder(self.ways) + owner.gather(1, above)
        parent = place.gather(1, leader).mul_(deep)
        tokens = torch.where(alive, ids.gather(1, chosen.clamp_max(total - 1)), last[:, None])
        root = torch.zeros_like(last)[:, None]
        return Draft(
            torch.cat((last[:, None], tokens), 1),
            torch.cat((root, parent), 1),
            torch.cat((root == 0, alive), 1),
        )
