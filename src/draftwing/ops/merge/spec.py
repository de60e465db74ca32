"""Two drafters make one draft: their trees become one, and so do their confidences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import DEPTHS, LEVELS, SURE, graded
from draftwing.ops.types import Calibration, Draft


class MergeOps:
    """The operations of a pair of drafters."""

    def merge(self, first: Draft, second: Draft, shape: TreeShape, calibration: Calibration) -> Draft:
        """Returns the best nodes of two trees for each row, [B, shape.nodes]; `first` has N1 nodes, `second` N2.

        Nodes with the same path are one, graded by the better level, with the sources of both. Of all nodes no deeper
        than shape.depth those with the highest survival stay, of equals those of `first`, and the earlier ones. Nodes
        keep this order, dead ones come last. Survival is what `AssignOps.rank` expects.
        """
        first, second = graded(first), graded(second)
        assert first.grade is not None and second.grade is not None
        agree = _agree(first, second, shape.depth)  # [B, N1, N2]
        twin, place = agree.any(1), agree.long().argmax(1)  # of the second's nodes, [B, N2]
        (batch, count), more = first.tokens.shape, second.tokens.shape[1]
        place = torch.where(twin, place, count + torch.arange(more, device=place.device))
        parent = torch.cat((first.parent, place.gather(1, second.parent)), 1)  # [B, N], of the N1 + N2 nodes
        alive = torch.cat((first.alive, second.alive & ~twin), 1)
        tokens = torch.cat((first.tokens, second.tokens), 1)
        grade = torch.cat((_graded(first.grade, second.grade, agree), second.grade), 1)

        depth, survival = _survival(parent, grade, shape.depth, calibration)
        survival = torch.where(alive & (depth <= shape.depth), survival, -1.0)
        best = survival.sort(dim=1, descending=True, stable=True)  # parents come before children
        chosen = best.indices[:, : shape.nodes].masked_fill(best.values[:, : shape.nodes] < 0, count + more)
        chosen = pad(chosen.sort(dim=1).values, (0, shape.nodes - chosen.shape[1]), value=count + more)  # [B, nodes]
        node = torch.arange(shape.nodes, device=chosen.device).expand_as(chosen)
        place = chosen.new_zeros(batch, count + more + 1).scatter_(1, chosen, node)
        above = torch.cat((parent, parent[:, :1]), 1).gather(1, chosen)  # of what is missing the root
        return Draft(
            torch.cat((tokens, tokens[:, :1]), 1).gather(1, chosen),
            place.gather(1, above),
            chosen < count + more,
            torch.cat((grade, grade[:, :1]), 1).gather(1, chosen),
        )

    def raise_confidence(self, confidence: Tensor) -> Tensor:
        """confidence [B] int64 of any stride, in place: one more, for there is another drafter."""
        return confidence.add_(1).clamp_(max=MAX_CONFIDENCE)


def _agree(first: Draft, second: Draft, depth: int) -> Tensor:
    """[B, N1, N2]: whether two live nodes no deeper than `depth` have the same path."""
    same = first.tokens[:, :, None] == second.tokens[:, None]
    same &= first.alive[:, :, None] & second.alive[:, None]
    same[:, 0].fill_(False)
    same[:, :, 0].fill_(False)
    same[:, 0, 0].fill_(True)
    above, other = first.parent[:, :, None].expand_as(same), second.parent[:, None].expand_as(same)
    agree = same
    for _ in range(depth):
        agree = same & agree.gather(1, above).gather(2, other)
    return agree


def _graded(first: Tensor, second: Tensor, agree: Tensor) -> Tensor:
    """first [B, N1] with what the second's grades [B, N2] add where the nodes agree."""
    other = (agree * second[:, None]).amax(2)
    level = torch.maximum(first % LEVELS, other % LEVELS)
    return ((first // LEVELS) | (other // LEVELS)) * LEVELS + level


def _survival(parent: Tensor, grade: Tensor, max_depth: int, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Returns depths of nodes [B, N], `max_depth` + 1 for deeper ones; and what is expected of the others."""
    up = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    depth = torch.zeros_like(parent)
    for _ in range(max_depth + 1):
        depth += up != 0
        up = parent.gather(1, up)
    estimate = (calibration.accepted / calibration.seen).clamp_(max=SURE)[grade, depth.clamp(max=DEPTHS - 1)]
    survival = torch.ones_like(estimate)
    for level in range(1, max_depth + 1):
        survival = torch.where(depth == level, survival.gather(1, parent) * estimate, survival)
    return depth, survival
