"""Selects the drafted nodes that are worth verifying: what is expected of each, and the best of a whole batch.

A drafter grades its nodes (`level_of`); how often a grade was right at each depth is counted (`Calibration`). The
product of these shares along a node's path is its survival, the expected number of tokens that verifying it gives.
Survival never grows along a path, so the best nodes of a batch are closed under parents.

Nothing here can change a text: what is committed are the target's own draws, whichever nodes it was asked about.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.config.trees import SECOND_MODEL, SOURCES
from draftwing.core import MARK_ONE, MARK_SOURCE, MARK_SURVIVAL, MARK_VERIFIED
from draftwing.ops.attention.batch import Ragged
from draftwing.ops.types import (
    COUNT,
    HEAD,
    Assigned,
    Calibration,
    Draft,
    Queries,
    Ranked,
    RowTensors,
    TargetInputs,
    Tree,
)

LEVELS = 16  # of a grade; also in the kernels
GRADES, DEPTHS = LEVELS * len(SOURCES), 16
SLOPE, MIDDLE = 1.25, 7.0  # of a level: round(SLOPE * logit + MIDDLE)
# In levels: how much less a node is worth, until such nodes are counted, that the second head alone proposed. Read off
# the nodes of 430 steps, and not swept (docs/dev/block_heads.md).
SECOND_HEAD_PENALTY = 2.0
PRIOR_WEIGHT = 4.0  # nodes that the first guess counts for
SURE = 0.995  # no estimate is higher, so that a child is expected less than its parent
MEMORY = 256.0  # nodes of a grade and depth that are remembered


def level_of(logp: Tensor) -> Tensor:
    """Log probabilities of any shape -> the levels of grades, int64: the log odds in steps of 1 / SLOPE."""
    p = logp.float().exp().nan_to_num(0.0).clamp(1e-6, 1 - 1e-6)  # of nothing, if what it follows is impossible
    return level_of_odds(torch.logit(p))


def level_of_odds(odds: Tensor) -> Tensor:
    """Log odds of any shape -> the levels of grades, int64."""
    return (SLOPE * odds + MIDDLE).round().clamp_(0, LEVELS - 1).long()


def new_calibration(device: torch.device, share: float | None = None) -> Calibration:
    """Nothing is known yet but what the grades themselves say: these are the first guesses, counted as nodes. share: of
    nodes that are right at any level, where acceptance is simulated and grades say nothing."""
    level = torch.arange(LEVELS, dtype=torch.float32).repeat(len(SOURCES), 1)
    level[SECOND_MODEL] -= SECOND_HEAD_PENALTY
    guess = torch.sigmoid((level - MIDDLE) / SLOPE).clamp_(0.02, 0.95).flatten()
    guess[0] = 0.5  # a drafter that does not say
    if share is not None:
        guess.fill_(share)
    seen = torch.full((GRADES, DEPTHS), PRIOR_WEIGHT, dtype=torch.float32)
    return Calibration(seen.to(device), (seen * guess[:, None]).to(device))


def forget(calibration: Calibration) -> None:
    """Lets old nodes count for less: to be called every few steps."""
    keep = (MEMORY / calibration.seen).clamp_(max=1.0)
    calibration.seen.mul_(keep)
    calibration.accepted.mul_(keep)


def graded(draft: Draft) -> Draft:
    """Returns the draft with grades; of a drafter that does not say, those of nobody."""
    return draft if draft.grade is not None else draft._replace(grade=torch.zeros_like(draft.parent))


def roots_alone(table: RowTensors, rows: Tensor, nodes: int) -> Draft:
    """Trees of so many nodes, all of them dead but the roots."""
    tokens = table.last.index_select(0, rows).unsqueeze(1).expand(-1, nodes)
    parent = torch.zeros_like(tokens)
    return Draft(tokens, parent, (torch.arange(nodes, device=rows.device) == 0).expand_as(parent))


class AssignOps:
    """The operations that choose what is verified."""

    def rank(self, draft: Draft, tree: Tree, rows: Tensor, dummy: int, calibration: Calibration) -> Ranked:
        """Returns what is expected of trees of rows [B]; nothing of drafts of the dummy row."""
        grade = torch.zeros_like(draft.parent) if draft.grade is None else draft.grade
        seen, accepted = calibration
        estimate = (accepted / seen).clamp_(max=SURE)[grade, tree.depth.clamp(max=DEPTHS - 1)]  # [B, N]
        root = torch.arange(grade.shape[1], device=grade.device) == 0
        estimate = torch.where(root, 1.0, estimate)
        # Past a node's own depth its path repeats the node: these entries must not count again.
        step = torch.arange(tree.path.shape[2], device=grade.device)
        along = estimate.gather(1, tree.path.flatten(1)).view_as(tree.path)
        survival = torch.where(step <= tree.depth[:, :, None], along, 1.0).prod(-1)
        live = draft.alive & (root | (rows != dummy)[:, None])
        survival = torch.where(live, survival, 0.0)
        units = (survival * MARK_ONE).long()
        mark = tree.depth + (grade // LEVELS << MARK_SOURCE) + (units << MARK_SURVIVAL)
        return Ranked(survival, mark + draft.alive * MARK_VERIFIED)

    def assign(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, inputs: TargetInputs, ranked: Ranked,
        total: int,
    ) -> Assigned:  # fmt: skip
        """Returns the `total` nodes of the batch with the highest survival, of equals those of the first rows and the
        first nodes; at least the B roots. Where there are fewer, queries of the dummy row are added."""
        batch, nodes = draft.parent.shape
        assert batch <= total <= batch * nodes
        survival, alive = ranked.survival.flatten(), (draft.alive & (ranked.survival > 0)).flatten()
        order = torch.where(alive, survival, -1.0).sort(descending=True, stable=True).indices
        chosen = torch.zeros_like(alive).index_fill_(0, order[:total], True) & alive  # [B * N]
        number = chosen.long().cumsum(0) - 1
        place = torch.where(chosen, number, 0).view(batch, nodes)
        starts = pad(chosen.view(batch, nodes).sum(1).cumsum(0), (1, 0))
        # Flat numbers of the chosen nodes, ascending; B * N is a query of the dummy row.
        flat = torch.arange(batch * nodes, device=rows.device)
        node = torch.full((total + 1,), batch * nodes, dtype=torch.int64, device=rows.device)
        node = node.scatter(0, torch.where(chosen, number, total), torch.where(chosen, flat, batch * nodes))[:total]

        def pick(of_nodes: Tensor, filler: int) -> Tensor:
            """of_nodes [B * N, ...] -> [R, ...]"""
            return torch.cat((of_nodes, of_nodes.new_full((1, *of_nodes.shape[1:]), filler))).index_select(0, node)

        spare = spare_trees(batch, nodes, total)
        more = starts[-1:] + nodes * torch.arange(1, spare + 1, device=rows.device)
        trees = Ragged(
            rows=pad(rows, (0, spare), value=table.rows),
            prefix_len=pad(inputs.prefix_len, (0, spare)),
            starts=torch.cat((starts, more.clamp_(max=total))),
            cap=nodes,
            mean=-(-total // batch),
        )
        owner = rows.repeat_interleave(nodes)
        queries = Queries(
            ids=pick(draft.tokens.flatten(), 0),
            positions=pick(inputs.positions, 0),
            write_slots=pick(inputs.write_slots, 0),  # the dummy slot
            rows=pick(owner, table.rows),
            prefix_len=pick(inputs.prefix_len.repeat_interleave(nodes), 0),
            path=pick(tree.path.flatten(0, 1), 0).unsqueeze(1),
            path_len=pick(tree.path_len.flatten(), 1).unsqueeze(1),
        )
        chosen = chosen.view(batch, nodes)
        mark = torch.where(chosen, ranked.mark, ranked.mark & ~MARK_VERIFIED)
        return Assigned(chosen, mark, place, trees, queries)


def spare_trees(batch: int, nodes: int, total: int) -> int:
    """Trees of the dummy row that hold as many of `total` queries as B roots may leave over."""
    return -(-(total - batch) // nodes)


def learn(draft: Draft, tree: Tree, packed: Tensor, dummy_row: Tensor, calibration: Calibration) -> None:
    """Counts the verified nodes whose parent was accepted, and which of them were, too. draft: its live nodes are
    those that were verified; packed: the step's result; dummy_row [B] bool: rows that say nothing."""
    width, nodes = tree.path.shape[2], draft.parent.shape[1]
    grade = torch.zeros_like(draft.parent) if draft.grade is None else draft.grade
    order, count = packed[:, HEAD + width : HEAD + width + nodes], packed[:, COUNT, None]
    rank = torch.arange(nodes, device=order.device).expand_as(order)
    taken = torch.zeros_like(order, dtype=torch.bool).scatter(1, order, rank < count)  # the accepted path
    tried = draft.alive & taken.gather(1, draft.parent) & (tree.depth > 0) & ~dummy_row[:, None]
    cell = grade * DEPTHS + tree.depth.clamp(max=DEPTHS - 1)
    for counts, which in ((calibration.seen, tried), (calibration.accepted, tried & taken)):
        counts.view(-1).index_add_(0, cell.flatten(), which.flatten().float())
