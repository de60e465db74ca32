"""The policy of a real engine on a machine whose steps take made-up times: what it chooses is the same in each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftwing.config.trees import LOOKUP_ALONE, TreeShape
from draftwing.core import StepResult
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import StepContext, TreePolicy


class OnMadeUpMachine(TreePolicy):
    """Drafts cost little for few rows and a lot for many, so that few draft and many rest. `chosen` counts steps by
    shape."""

    def __init__(self, menu: Sequence[TreeShape], few: int = 4, query: float = 0.1) -> None:
        """few: rows; query: milliseconds of a draft that is verified, for each of them."""
        self._few, self._query = few, query
        costs = StepCost(menu, False)
        for shape in menu:
            for rows in (1, 2, 3, 4, 6, 8, 16, 32):
                costs.measured(shape, rows, 0, self._takes(shape, rows))
        super().__init__(menu, costs, sees_predictions=True, base=1)
        self.chosen = dict.fromkeys(menu, 0)

    def _takes(self, shape: TreeShape, rows: int) -> float:
        levels = 0 if shape.proposer == LOOKUP_ALONE else shape.depth
        return 1e-3 * (2.0 + 0.2 * levels + (self._query if rows <= self._few else 3.0) * rows * (shape.queries - 1))

    def choose(self, context: StepContext) -> TreeShape:
        shape = super().choose(context)
        self.chosen[shape] += 1
        return shape

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        late = 1e-4 if result.catching_up else 0.0
        seconds = self._takes(shape, len(context.confidences)) + late
        super().record(shape, context, replace(result, seconds=seconds, catching_up=late), is_cost)
