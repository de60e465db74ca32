"""The growth loop of EAGLE-2 (Li et al. 2024, arXiv 2406.16858): a tree from any drafter that scores continuations.

Level by level the best `topk` nodes are expanded by `topk` children each; a node's score is the sum of the log
probabilities along its path. At the end the best nodes of all levels are kept. Scores never grow along a path and ties
go to the earlier candidate, parents being earlier than their children, so what is kept is closed under parents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.sampling.argmax import first_argmax
from draftwing.spec.drafter import Draft

# (level, ids [B, K], parent [B, K]) -> (ids [B, K, K], log probabilities [B, K, K]): runs the K nodes of a level, each
# the child of node `parent` of the level before (level 1: of the root), and gives the best K continuations of each.
Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def capacity(depth: int, topk: int) -> int:
    """Candidates that growth produces, the root not counted."""
    return topk + (depth - 1) * topk * topk


def grow(root: Tensor, first_ids: Tensor, first_logp: Tensor, shape: TreeShape, expand: Expand) -> Draft:
    """root [B]; first_ids, first_logp [B, K]: the root's best K continuations, best first. K = shape.topk."""
    topk, device = shape.topk, root.device
    assert shape.nodes - 1 <= capacity(shape.depth, topk), "more nodes than growth has candidates"
    ids, score = first_ids, first_logp
    flat = torch.arange(topk, device=device).expand_as(ids)  # candidate number of each frontier node
    parent = torch.zeros_like(ids)
    all_ids, all_scores, all_parents = [ids], [score], [torch.full_like(ids, -1)]
    for level in range(1, shape.depth):
        next_ids, logp = expand(level, ids, parent)
        candidates = (score.unsqueeze(2) + logp).flatten(1)  # [B, K * K]
        all_ids.append(next_ids.flatten(1))
        all_scores.append(candidates)
        all_parents.append(flat.repeat_interleave(topk, 1))
        score, best = best_first(candidates, topk)
        ids = next_ids.flatten(1).gather(1, best)
        parent = best.div(topk, rounding_mode="floor")
        flat = topk + (level - 1) * topk * topk + best
    _, chosen = best_first(torch.cat(all_scores, 1), shape.nodes - 1)
    chosen = chosen.sort(1).values  # parents before children
    above = torch.cat(all_parents, 1).gather(1, chosen)  # [B, N - 1] candidate number of the parent, -1 the root
    place = torch.searchsorted(chosen, above) + 1
    column = root.unsqueeze(1)
    return Draft(
        tokens=torch.cat((column, torch.cat(all_ids, 1).gather(1, chosen)), 1),
        parent=torch.cat((torch.zeros_like(column), torch.where(above < 0, 0, place)), 1),
        alive=torch.ones(root.shape[0], shape.nodes, dtype=torch.bool, device=device),
    )


def best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of scores [B, M] and their places, best first; of equals the lower place. For small M."""
    ordered, places = scores.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def top_tokens(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """logits [M, V] float32, overwritten -> (ids, log probabilities) [M, topk], best first, of equals the lower id.

    `torch.topk` breaks ties as it likes, and in bfloat16 ties are common; a few masked argmax passes do not.
    """
    total = logits.logsumexp(-1, keepdim=True)
    ids, values = [], []
    for _ in range(topk):
        best = first_argmax(logits).unsqueeze(1)
        ids.append(best)
        values.append(logits.gather(1, best))
        logits.scatter_(1, best, -torch.inf)
    return torch.cat(ids, 1), torch.cat(values, 1) - total
