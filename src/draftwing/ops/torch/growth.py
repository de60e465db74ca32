"""The growth loop of EAGLE-2 (Li et al. 2024, arXiv 2406.16858): a tree from any drafter that scores continuations.

Level by level the best `topk` nodes are expanded by `topk` children each; a node's score is the sum of the log
probabilities along its path. At the end the best nodes of all levels are kept. Scores never grow along a path and ties
go to the earlier candidate, parents being earlier than their children, so what is kept is closed under parents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops.torch.argmax import first_argmax
from draftwing.spec.drafter import Draft

if TYPE_CHECKING:
    from draftwing.engine.row_table import SlotTable

# (level, ids [B, K], parent [B, K]) -> (ids [B, K, K], log probabilities [B, K, K]): runs the K nodes of a level, each
# the child of node `parent` of the level before (level 1: of the root), and gives the best K continuations of each.
Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def capacity(depth: int, topk: int) -> int:
    """Candidates that growth produces, the root not counted."""
    return topk + (depth - 1) * topk * topk


class Level(NamedTuple):
    """The K nodes of a level that are expanded next."""

    ids: Tensor  # [B, K] int64
    parent: Tensor  # [B, K] int64, the node of the level before; of level 1: 0, the root


class LevelRows(NamedTuple):
    """Where a level's nodes stand, one row of the head for each (`ops.attention.Batch`)."""

    positions: Tensor  # [B, K] int64
    write_slots: Tensor  # [B, K] int64
    path: Tensor  # [B, K, D] int64, page-table entries past kv_len
    path_len: Tensor  # [B, K] int64
    feature: Tensor | None  # [B * K, width]: the parents' outputs


class Growth:
    """One tree of candidates per row. `level` gives the nodes to expand, `add` takes what follows them: in turns, for
    the levels 1 .. depth - 1. Then `draft`."""

    def __init__(self, root: Tensor, first_ids: Tensor, first_logp: Tensor, shape: TreeShape) -> None:
        """root [B]; first_ids, first_logp [B, K]: the root's best K continuations, best first. K = shape.topk."""
        assert shape.nodes - 1 <= capacity(shape.depth, shape.topk), "more nodes than growth has candidates"
        self.root, self.shape = root, shape
        self.number = 0  # of the level that was chosen last
        self._last = Level(first_ids, torch.zeros_like(first_ids))
        self._score = first_logp  # [B, K] of the level's nodes
        self._flat = torch.arange(shape.topk, device=root.device).expand_as(first_ids)  # their candidate numbers
        self._ids, self._scores = [first_ids], [first_logp]  # of all candidates
        self._parents = [torch.full_like(first_ids, -1)]  # candidate numbers, -1 the root

    def level(self) -> Level:
        self.number += 1
        if self.number > 1:
            topk = self.shape.topk
            self._score, best = best_first(self._scores[-1], topk)
            ids = self._ids[-1].gather(1, best)
            self._last = Level(ids, best.div(topk, rounding_mode="floor"))
            self._flat = topk + (self.number - 2) * topk * topk + best
        return self._last

    def add(self, ids: Tensor, logp: Tensor) -> None:
        """The best K continuations of each node of the level: [B, K, K]."""
        self._ids.append(ids.flatten(1))
        self._scores.append((self._score.unsqueeze(2) + logp).flatten(1))
        self._parents.append(self._flat.repeat_interleave(self.shape.topk, 1))

    def draft(self) -> Draft:
        root, nodes = self.root, self.shape.nodes
        _, chosen = best_first(torch.cat(self._scores, 1), nodes - 1)
        chosen = chosen.sort(1).values  # parents before children
        above = torch.cat(self._parents, 1).gather(1, chosen)  # [B, N - 1]
        place = torch.searchsorted(chosen, above) + 1
        column = root.unsqueeze(1)
        return Draft(
            tokens=torch.cat((column, torch.cat(self._ids, 1).gather(1, chosen)), 1),
            parent=torch.cat((torch.zeros_like(column), torch.where(above < 0, 0, place)), 1),
            alive=torch.ones(root.shape[0], nodes, dtype=torch.bool, device=root.device),
        )


class First(NamedTuple):
    """What growth starts from, kept with the rows of the slot table: the root's best continuations and its output."""

    ids: Tensor  # [R + 1, topk] int64
    logp: Tensor  # [R + 1, topk] float32
    feature: Tensor  # [R + 1, width]; width 0 where the head needs none


class RowGrowth:
    """`Growth` for rows of the slot table, with the rows that a head of one layer per level runs for each node.

    `ops.triton.grow.RowGrowth` is the same on GPUs.
    """

    def __init__(
        self, slots: SlotTable, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int
    ) -> None:
        """tail: 1 where the root has a row of its own, at page-table entry kv_len, else 0."""
        topk = shape.topk
        self._growth = Growth(slots.last[rows], first.ids[rows, :topk], first.logp[rows, :topk], shape)
        self._slots, self._rows, self._topk, self._tail, self._lookahead = slots, rows, topk, tail, lookahead
        self.root_at = slots.kv_len[rows]  # [B]
        self._hidden = first.feature[rows].unsqueeze(1)  # [B, 1 or K, width] of the nodes above
        self._has_features = first.feature.shape[1] > 0
        # Page-table entries past kv_len that each node's path has: the root's, where it has one, then scratch entries.
        self._path = torch.zeros(rows.shape[0], topk, tail, dtype=torch.int64, device=rows.device)
        self._lane = torch.arange(topk, device=rows.device)

    def level(self) -> Level:
        self._level = self._growth.level()
        return self._level

    def level_rows(self) -> LevelRows:
        """Of the level that was chosen last; to be asked for once."""
        level, parent, size, topk = self._growth.number, self._level.parent, self._rows.shape[0], self._topk
        own = (self._tail + (level - 1) * topk + self._lane).expand(size, topk)
        above = of_parent(self._path, parent)  # the parent's, not the lane's
        self._path = torch.cat((above, own.unsqueeze(2)), 2)  # [B, K, tail + level]
        entries = self.root_at.unsqueeze(1) + own
        return LevelRows(
            # A row that is made of the token after its position stands one earlier than that token.
            positions=(self.root_at + level - self._lookahead).unsqueeze(1).expand(size, topk),
            write_slots=self._slots.table[self._rows.unsqueeze(1), entries],
            path=self._path,
            path_len=torch.full_like(own, self._path.shape[2]),
            feature=self.level_feature() if self._has_features else None,
        )

    def level_feature(self) -> Tensor:
        """The outputs of the parents of the level that was chosen last: [B * K, width]."""
        return of_parent(self._hidden, self._level.parent).flatten(0, 1)

    def add(self, following: tuple[Tensor, Tensor], hidden: Tensor) -> None:
        """following: ids and log probabilities [B, K, K]; hidden [B, K, width]: what the nodes' children are fed."""
        self._growth.add(*following)
        self._hidden = hidden

    def draft(self) -> Draft:
        return self._growth.draft()


def grow(root: Tensor, first_ids: Tensor, first_logp: Tensor, shape: TreeShape, expand: Expand) -> Draft:
    """root [B]; first_ids, first_logp [B, K]: the root's best K continuations, best first. K = shape.topk."""
    growth = Growth(root, first_ids, first_logp, shape)
    for level in range(1, shape.depth):
        growth.add(*expand(level, *growth.level()))
    return growth.draft()


def of_parent(x: Tensor, parent: Tensor) -> Tensor:
    """x [B, K', ...] of the nodes above, parent [B, K] -> [B, K, ...]"""
    return x.gather(1, parent.unsqueeze(2).expand(-1, -1, x.shape[2]))


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
