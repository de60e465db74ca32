"""The only loop. With overlap step N is launched before the result of step N-1 is looked at, so host work
hides under device work. Without it the same lines look at each result at once.

`PageTableCheck` compares the page table on the device with the scheduler's copy of it, a row now and then. The host
permutes `Req.slots` as the device permutes the row, and frees by its copy. A kernel that did otherwise would give a
request's KV to others, and every count of slots would still be right."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

import numpy as np
import torch

from draftwing.core import IntArray, Plan, StepResult
from draftwing.engine.devices.base import Download
from draftwing.engine.executor import Executor
from draftwing.engine.row_table import RowTable
from draftwing.engine.step_state import InFlight
from draftwing.errors import DraftwingError
from draftwing.sched.guidance import Guidance
from draftwing.sched.scheduler import Scheduler

EVERY = 4096  # steps between two comparisons: a copy of one row, of 8 bytes a token
# Share of what a step is expected to take after which the next one is planned, where it can be launched in the rest. A
# smaller share has requests that come meanwhile wait for a step more, a larger one leaves less for wrong expectations.
# Swept in docs/dev/mixed_steps.md.
PLANNED_AT = 0.8
RECENT = 32  # turns, of which the second slowest says how long it takes to plan and launch a step
BLOCKED = 2e-4  # seconds: a result was waited for that takes longer to look at


class _Copy(NamedTuple):
    """What a row was to be, and the device's own on its way to the host."""

    uid: str
    slots: IntArray
    download: Download


class PageTableCheck:
    """Starts a copy of a row's committed entries after a step, and compares it after the next one."""

    def __init__(self, sched: Scheduler, table: RowTable, every: int = EVERY) -> None:
        """every: steps between two comparisons."""
        self._sched, self._table, self._every = sched, table, every
        self._steps = 0
        self._copy: _Copy | None = None

    def look(self) -> None:
        """Takes note of a step that was launched, and whose predecessor was committed. Raises DraftwingError where the
        device has other slots than the scheduler."""
        if self._copy is not None:
            self._compare(self._copy)
            self._copy = None
        self._steps += 1
        if self._steps % self._every == 0:
            self._copy = self._begin()

    @torch.inference_mode()  # as the executor's steps, whose buffers it shares
    def _begin(self) -> _Copy | None:
        kv = self._sched.kv
        # Entries below the committed length are the same in the step in flight; others may be on their way.
        known = [req for row, req in kv.by_row.items() if req.kv > 0 and not kv.changes(row)]
        if not known:
            return None
        req = known[self._steps // self._every % len(known)]
        entries = self._table.page_table[req.row, : req.kv].unsqueeze(0).long()
        return _Copy(req.request.uid, req.slots[: req.kv].copy(), self._table.device.download(entries))

    def _compare(self, copy: _Copy) -> None:
        found = copy.download.wait()[0]
        if not np.array_equal(found, copy.slots):
            at = int(np.argmax(found != copy.slots))
            raise DraftwingError(
                f"the page table of request {copy.uid} differs from the scheduler's: expected slot {copy.slots[at]} at "
                f"position {at}, found {found[at]}"
            )


class Loop:
    def __init__(
        self, sched: Scheduler, executor: Executor, overlap: bool, watch: Callable[[Plan, StepResult], None]
    ) -> None:
        """watch: sees every plan with its result before it is committed (log lines, statistics)."""
        self._sched = sched
        self._executor = executor
        self._overlap = overlap
        self._watch = watch
        sched.tower_schedule.unseen = executor.unseen
        self._flying: tuple[InFlight, list[Guidance | None]] | None = None
        self._began = 0.0  # when the device began the step in flight, at the earliest
        # Seconds that it takes to plan and launch a step, by turn: without parts of prompts, and with them.
        self._margins = deque([math.inf], RECENT), deque([math.inf], RECENT)

    @property
    def idle(self) -> bool:
        return self._sched.idle and self._flying is None

    @property
    def slack(self) -> float:
        """Returns the seconds for which the device is busy with the step in flight before the next one must be planned;
        a request that comes meanwhile can be in it. Not above 0 where there is no time to lose."""
        margin = nlargest(2, self._margins[self._sched.has_prompts])[-1]
        if self._flying is None or margin == math.inf:
            return 0.0
        expected = PLANNED_AT * self._sched.seconds(self._flying[0].plan)
        return self._began + expected - margin - time.perf_counter()

    def turn(self) -> None:
        """Plans and launches a step, then commits the step before it (overlap) or itself (no overlap)."""
        started = time.perf_counter()
        if self._sched.needs_results:
            self._put_in_flight(None)
        plan = self._sched.plan()
        if self._sched.tower_schedule.next is not None:
            self._executor.run_on_all_ranks(Executor.run_tower_piece, self._sched.tower_schedule.next)
        elif plan is None and self._flying is None:
            self._sched.rest()
        flying = None
        if plan is not None:
            guidance = [self._sched.guidance(part) for part in plan.parts]
            flying = self._executor.commit(self._executor.launch(plan, *guidance)), guidance
            self._margins_of(plan).append(time.perf_counter() - started)
        self._put_in_flight(flying, started)
        if not self._overlap:
            self._put_in_flight(None)

    def _put_in_flight(self, flying: tuple[InFlight, list[Guidance | None]] | None, began: float = 0.0) -> None:
        """Commits the step before. What raises meanwhile, such as Ctrl-C, must not have it committed once more. began:
        before which nothing of `flying` was launched."""
        before, self._flying, self._began = self._flying, flying, began
        if before is None:
            return
        asked = time.perf_counter()
        for part, guidance in zip(before[0].parts, before[1], strict=True):
            result = part.wait()
            if part is before[0]:
                self._waited(asked)
            self._commit(part.plan, result, guidance)

    def _waited(self, asked: float) -> None:
        """Notes that the result of the step before is there, after which the device begins the next one. asked: when it
        was waited for."""
        now = time.perf_counter()
        if now - asked > BLOCKED:
            self._began = now
        elif self._flying is not None:  # it was there before, perhaps since long, and the device had nothing to do
            self._margins_of(self._flying[0].plan).extend((math.inf, math.inf))

    def _margins_of(self, plan: Plan) -> deque[float]:
        return self._margins[bool(plan.parts[-1].chunks)]

    def _commit(self, plan: Plan, result: StepResult, guidance: Guidance | None) -> None:
        self._watch(plan, result)
        self._sched.commit(plan, result, guidance)
        quarantined = self._sched.kv.take_quarantined()
        if quarantined is not None:
            self._executor.run_on_all_ranks(Executor.clear, quarantined)
