"""Stages of small tree steps on a CPU: recorded when a batch size is met first, replayed afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from draftwing.core import TreeShape
from draftwing.engine.devices.base import Device
from draftwing.engine.graphs.cuda import GraphCache, Key
from draftwing.ops.contracts import RECORDED_ROWS
from draftwing.ops.cpu.tape import Place, Recording, StepMemory, record
from draftwing.spec.drafter import Drafter

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST, LAST = "draft", "commit"  # stages of a step


def foreign_steps(drafter: Drafter | None) -> Literal["", "drafts", "all"]:
    """Finds the steps in which a user's drafter runs code of its own. That may read tensors in Python, by `tolist` or
    by an array that it keeps, count its calls or throw dice, of which a recording would know nothing: it would do for
    ever what the first call did."""
    kind = type(drafter)
    if drafter is None or kind.__module__.partition(".")[0] == __package__.partition(".")[0]:
        return ""
    idle = all(getattr(kind, name) is getattr(Drafter, name) for name in ("extend", "watch", "confidence"))
    found: Literal["drafts", "all"] = "drafts" if idle else "all"
    logger.debug("steps with %s are not recorded (%s): it is code from outside", kind.__qualname__, found)
    return found


class RecordedStages(GraphCache):
    """A `GraphCache` that captures in passing.

    A step of few rows is recorded if all that its stages do are calls of the C kernels, as with weights in blocks or in
    bfloat16. `refused` has those of which this turned out not to be so, and last stages, where it is they alone; these
    run as they are written. So do steps in which code from outside of this package runs. What the last stage gives
    lasts to the next step, no longer.
    """

    def __init__(self, device: Device, dummy_row: int, drafter: Drafter | None = None) -> None:
        super().__init__(device, dummy_row, 0)
        self._foreign, self._make_calls = foreign_steps(drafter), device.ops.replay_calls
        self.rows = torch.full((RECORDED_ROWS,), dummy_row, dtype=torch.int64, device=device.device)
        self._host_rows = np.full(RECORDED_ROWS, dummy_row, np.int64)
        self.refused: set[Hashable] = set()
        self._met: set[tuple[str, Hashable]] = set()
        # With what each gives, and where the memory of the stage after it begins.
        self._recorded: dict[tuple[str, Hashable], tuple[Recording, Any, Place]] = {}
        self.memory = StepMemory()  # of all of them

    def __len__(self) -> int:
        return len(self._recorded)

    def key(self, shape: TreeShape, size: int) -> Key | None:
        key = Key(shape, size)
        foreign = self._foreign == "all" or (self._foreign == "drafts" and shape.depth > 0)
        return key if size * shape.queries <= RECORDED_ROWS and key not in self.refused and not foreign else None

    def run(self, stage: str, key: Any, fn: Callable[..., T], *inputs: Any, keep: bool = False) -> T:
        if key is None:
            return fn(*inputs)
        known = self._recorded.get((stage, key))
        if known is not None:
            known[0].replay()
            self.replays += 1
            self.memory.next = known[2]
            return known[1]
        step = key if isinstance(key, Key) else key[0]  # a commit's has more
        first = (stage, key) not in self._met  # it may make constants, which are no part of a step
        self._met.add((stage, key))
        if first or step in self.refused or (stage, key) in self.refused:
            return fn(*inputs)
        # The results of the stages before the last have to be where the next ones were recorded to read them.
        unit: Hashable = (stage, key) if stage == LAST else step
        if stage == FIRST:
            self.memory.next = Place()
        recording, out = record(lambda: fn(*inputs), self._make_calls, self.memory)
        if isinstance(recording, Recording):
            self._recorded[stage, key] = recording, out, self.memory.next
        else:
            self.refused.add(unit)
            logger.debug("steps of %s are not recorded: %s of %s is torch's own", step, recording, stage)
        return out
