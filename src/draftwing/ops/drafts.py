"""Grades of drafted nodes: what they mean, how often they were right (`Calibration`), and drafts without any."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.core import SOURCES
from draftwing.ops.types import Calibration, Draft, RowTensors

LEVELS = 16  # of a grade; also in the kernels
GRADES, DEPTHS = LEVELS * len(SOURCES), 16
SLOPE, MIDDLE = 1.25, 7.0  # of a level: round(SLOPE * logit + MIDDLE)
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
    level = torch.arange(LEVELS, dtype=torch.float32)
    guess = torch.sigmoid((level - MIDDLE) / SLOPE).clamp_(0.02, 0.95).repeat(len(SOURCES))
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
