"""The only loop. With overlap step N is launched before the result of step N-1 is looked at, so host work
hides under device work. Without it the same lines look at each result at once."""

from __future__ import annotations

from collections.abc import Callable

from draftwing.core import Plan, StepResult
from draftwing.engine.executor import Executor
from draftwing.engine.step_state import InFlight
from draftwing.sched.guidance import Guidance
from draftwing.sched.scheduler import Scheduler


class Loop:
    def __init__(
        self, sched: Scheduler, executor: Executor, overlap: bool, watch: Callable[[Plan, StepResult], None]
    ) -> None:
        """watch: sees every plan with its result before it is committed (log lines, statistics)."""
        self._sched = sched
        self._executor = executor
        self._overlap = overlap
        self._watch = watch
        self._flying: tuple[InFlight, list[Guidance | None]] | None = None

    @property
    def idle(self) -> bool:
        return self._sched.idle and self._flying is None

    def turn(self) -> None:
        """Plans and launches a step, then commits the step before it (overlap) or itself (no overlap)."""
        if self._sched.needs_results:
            self._put_in_flight(None)
        plan = self._sched.plan()
        if plan is None and self._flying is None:
            self._sched.rest()
        flying = None
        if plan is not None:
            guidance = [self._sched.guidance(part) for part in plan.parts]
            flying = self._executor.commit(self._executor.launch(plan, *guidance)), guidance
        self._put_in_flight(flying)
        if not self._overlap:
            self._put_in_flight(None)

    def _put_in_flight(self, flying: tuple[InFlight, list[Guidance | None]] | None) -> None:
        """Commits the step before. What raises meanwhile, such as Ctrl-C, must not have it committed once more."""
        before, self._flying = self._flying, flying
        if before is not None:
            for part, guidance in zip(before[0].parts, before[1], strict=True):
                self._commit(part, guidance)

    def _commit(self, flying: InFlight, guidance: Guidance | None) -> None:
        result = flying.wait()
        self._watch(flying.plan, result)
        self._sched.commit(flying.plan, result, guidance)
        quarantined = self._sched.kv.take_quarantined()
        if quarantined is not None:
            self._executor.run_on_all_ranks(Executor.clear, quarantined)
