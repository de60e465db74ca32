"""What a policy is asked, and what it answers. `FixedShape` is the policy that does not choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from draftwing.core import PLAIN, StepResult, TreeShape
from draftwing.sched.policy.cost import StepCost


class Beside(NamedTuple):
    """Parts of prompts that will be in the same forward as a step: the device is busy with them, so that every node
    takes time of its own."""

    node_seconds: float  # of each query, a row's newest token or a draft
    nodes: Callable[[TreeShape, int], int]  # queries that so many such trees have in it; 0: they cannot be in it


class StepContext(NamedTuple):
    """What a step is for.

    confidences: of each row, the drafter's; 0 where nothing can be proposed.  kv_tokens: in the KV of all rows.
    latency_slack: seconds that the step may take beyond one without drafts, because of what these rows waited for.
    full_trees_only: trees are verified whole, as those of rows are that ask for more than drafts and sampling.
    last_admission: the newest admission's number among the rows; larger than before where a request is new.
    backlog_passes: passes of the drafter over what it has not seen of these rows, before it can draft.
    backlog_positions: in all of these passes but one; of a step that has ended, 0 where they are too few to show what
    one takes.  remaining_steps: steps that drafts go on for once the backlog is seen; what is seen of a text stays so.
    beside: what shares its forward.
    """

    confidences: Sequence[int]
    kv_tokens: int = 0
    latency_slack: float = math.inf
    full_trees_only: bool = False
    last_admission: int = 0
    backlog_passes: int = 1
    backlog_positions: int = 0
    remaining_steps: float = 1.0
    beside: Beside | None = None


class ShapePolicy(Protocol):
    """menu: all shapes, the largest first.

    sees_predictions: whether a confidence says what a predicted output is worth. If not, it gets the largest shape.
    adapts: whether it drafts where that pays, and not otherwise.
    """

    adapts: bool
    menu: tuple[TreeShape, ...]
    sees_predictions: bool

    def choose(self, context: StepContext) -> TreeShape:
        """Decides on the shape of the next step, which is then planned."""
        ...

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        """Learns what a step of `shape` gave. context: what was known of its rows; confidence 0 where a row says
        nothing. is_cost: whether its seconds are what such a step costs."""
        ...

    def forget(self) -> None:
        """Forgets, as another head drafts from now on, how much of its drafts was accepted. What steps cost stays."""
        return

    def saving(self, context: StepContext, at_best: bool = False) -> float | None:
        """Returns the seconds that drafts save for each token of such rows, all together; None where it is unknown.
        at_best: if all of them were right."""
        return None

    def spend(self, seconds: float) -> bool:
        """Takes so many seconds out of what exploring may cost, or returns False and saves up for them."""
        return False

    def seconds(self, rows: int, kv_tokens: int, shape: TreeShape | None = None) -> float | None:
        """Returns about what a step of so many rows takes; None where it is unknown. shape: None for the usual one."""
        return None

    def learnt(self) -> dict[str, Any]:
        """Returns how much of drafts was accepted, in numbers and lists, for a policy of the next engine."""
        return {}

    def recall(self, learnt: Mapping[str, Any]) -> None:
        """Begins with what a policy before has `learnt`, if that is of use."""
        return

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        """Returns for each option what `choose` would decide by, now: `shape`, `price_ms`, `gain` (expected accepted
        drafts of the batch), `rate` (expected tokens per second), whether it is `chosen`, whether it is only `tried`,
        and whether it is `late`: longer than the latency slack allows."""
        ...


class FixedShape(ShapePolicy):
    """Chooses always the same shape; plain decoding when no row has anything to propose."""

    sees_predictions, adapts = True, False

    def __init__(self, shape: TreeShape) -> None:
        self.menu: tuple[TreeShape, ...] = (shape,) if shape == PLAIN else (shape, PLAIN)
        self.cost = StepCost(self.menu, stepwise=False)

    def choose(self, context: StepContext) -> TreeShape:
        return self.menu[0] if any(context.confidences) else PLAIN

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        self.cost.threads = result.threads
        if is_cost:
            self.cost.record(shape, len(context.confidences), context.kv_tokens, result.seconds)

    def seconds(self, rows: int, kv_tokens: int, shape: TreeShape | None = None) -> float | None:
        return self.cost.seconds(shape or self.menu[0], rows, kv_tokens)

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        chosen = self.choose(context)
        return [{"shape": shape, "price_ms": None, "gain": None, "rate": None, "chosen": shape == chosen,
                 "tried": False, "late": False} for shape in self.menu]  # fmt: skip
