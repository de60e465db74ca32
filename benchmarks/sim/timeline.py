"""How the policy follows a load that changes, step by step: the share of the best shape's tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PHASES = ((1, 0.95), (64, 0.8), (8, 0.05), (8, 0.95), (1, 0.1), (1, 0.9))  # requests, and how many drafts survive
STEPS = 120  # of a phase
SMOOTHED = 10  # steps of which a point is the mean


def shares(world: Any, policy: Any, possible: Callable[[int], Sequence[Any]]) -> list[float]:
    """Returns, of each step, the tokens per second of its shape over those of the best one of `possible` rows."""
    found: list[float] = []
    for rows, hit in PHASES:
        hits = [hit] * rows
        _, chosen = world.run(policy, hits, STEPS, 1)
        best = max(world.rate(shape, hits) for shape in possible(rows))
        found += [world.rate(shape, hits) / best for shape in chosen]
    return [round(sum(part) / len(part), 4) for end in range(1, len(found) + 1)
            if (part := found[max(end - SMOOTHED, (end - 1) // STEPS * STEPS) : end])]  # fmt: skip
