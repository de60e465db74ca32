"""Merges ranked candidate continuations into one draft tree, with vectorised operations and static shapes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import LOOKUP
from draftwing.ops.drafts import LEVELS
from draftwing.ops.types import Draft

_TIE = 1e-9  # far below the smallest difference of scores that matters, and below the smallest score


def grade_of(rank: Tensor, match: Tensor) -> Tensor:
    """rank, match: of the candidate that leads a node, int64 -> its grade: the best candidate is trusted by the length
    of its match, others are rarely right."""
    return LEVELS * LOOKUP + torch.where(rank == 0, (match + 3).clamp(max=LEVELS - 1), (match // 3).clamp(max=3))


class _Constants(NamedTuple):
    """What depends on the depth alone, for D levels of C candidates."""

    weight: Tensor  # [(W + 1) * (W + 1) * C, D] float64, by match of the best candidate, own match and rank
    tie: Tensor  # [D * C] float64: the earlier node wins
    leader: Tensor  # [D - 1, 1] int64: number of a level's first node


class TreeBuilder:
    """Builds trees from `ways` ranked candidates per row; holds the constants that depend on options only.

    Score of a node (a distinct prefix of candidates): the sum over its candidates of w(m, rank, depth) =
    m^2 * 0.8^rank * (1 - 1 / (m + 2))^depth, with m the length of the candidate's match. A long match is trusted more
    and for longer; candidates of one length vote nearly as equals. The draft is not sensitive to these numbers.

    Breadth: of the candidates only the first ones take part, max_breadth after a match of one token and linearly fewer
    down to min_breadth after max_window. No node has more children than candidates take part.
    """

    def __init__(
        self, ways: int, depth: int, max_window: int, min_breadth: int, max_breadth: int, device: torch.device
    ) -> None:
        self.ways, self.device = ways, device
        match = torch.arange(max_window + 1, dtype=torch.float64)
        self.stride = match.numel() * ways
        rank = torch.arange(ways)
        drop = (max_breadth - min_breadth) * (match.long() - 1).clamp_min(0) // max(max_window - 1, 1)
        taking_part = rank < (max_breadth - drop)[:, None]  # [W + 1, C] by match of the best
        decay = (1 - 1 / (match + 2))[:, None] ** torch.arange(depth)  # [W + 1, D]
        by_match = (match**2)[:, None] * 0.8**rank  # [W + 1, C]
        weight = taking_part[:, None, :, None] * by_match[..., None] * decay[:, None]  # [W + 1, W + 1, C, D]
        self.weight = weight.to(device)
        self.rank = torch.arange(ways, device=device)
        self._constants: dict[int, _Constants] = {}

    def _for(self, depth: int) -> _Constants:
        if depth not in self._constants:
            weight = self.weight[..., :depth].reshape(-1, depth)
            tie = torch.arange(depth * self.ways, dtype=torch.float64, device=self.device) * _TIE
            leader = 1 + torch.arange(depth - 1, device=self.device)[:, None] * self.ways
            self._constants[depth] = _Constants(weight, tie, leader)
        return self._constants[depth]

    def build(self, candidates: Tensor, match: Tensor, last: Tensor, nodes: int) -> Draft:
        """The `nodes - 1` best nodes, as a tree under each row's last token.

        candidates [B, D, C]: token ids, C in rank order, -1 from where a candidate ends, D at least 1;
        match [B, C], 0 = no candidate; last [B]. Scores never grow with depth and a prefix's candidates are among its
        parent's, so the best nodes are closed under parents. Nodes are ordered by depth, then by rank.
        """
        depth = candidates.shape[1]
        weight, tie, leader = self._for(depth)
        index = torch.add(self.rank, match, alpha=self.ways).add_(match[:, :1], alpha=self.stride)
        votes = weight.index_select(0, index.flatten()).view(*match.shape, depth).transpose(1, 2)  # [B, D, C]
        # same[b, d, i, j]: candidates i and j agree up to and including depth d.
        same = (candidates[..., None] == candidates[:, :, None]).cumprod(1)
        owner = same.argmax(-1)  # [B, D, C] first candidate with this prefix, leads its node
        score = (same * votes[:, :, None]).sum(-1)
        score.mul_(owner == self.rank).mul_(candidates >= 0)
        # Numbers from here on: 0 the root, 1 + d * C + c a node, `dead` none.
        total = depth * self.ways
        dead = total + 1
        best = pad(score.flatten(1) - tie, (1, 0), value=math.inf).topk(min(nodes, dead), dim=1)
        chosen = best.indices.masked_fill_(best.values <= 0, dead).sort(dim=1).values  # parents first, dead nodes last
        if nodes > dead:
            chosen = pad(chosen, (0, nodes - dead), value=dead)

        root = last[:, None]
        tokens = torch.cat((root, candidates.flatten(1), root), 1).gather(1, chosen)
        # The parent of (d, c) is (d - 1, leader of c at d - 1); the root is its own and a dead node's.
        above = pad((owner[:, :-1] + leader).flatten(1), (1 + self.ways, 1)).gather(1, chosen)
        numbers = torch.arange(nodes, device=last.device).expand_as(chosen)
        rank = (chosen - 1).remainder(self.ways)  # of the candidate that leads the node
        grade = torch.where((chosen > 0) & (chosen < dead), grade_of(rank, match.gather(1, rank)), 0)
        place = chosen.new_zeros(chosen.shape[0], dead + 1).scatter_(1, chosen, numbers)
        return Draft(tokens, place.gather(1, above), chosen < dead, grade)
