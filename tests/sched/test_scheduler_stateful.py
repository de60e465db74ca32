"""Scheduler and radix cache under random sequences of whatever may happen to them, on a device of plain Python.

After every rule each slot has one owner and each row one holder. Whatever happened on the way, a request's text is that
of plain decoding, and everything that was submitted ends. The last test breaks one rule at a time and must find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from toy_device import VOCAB, ToyDevice, next_token, span

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NO_DEFERRAL, DraftDeferral, Plan, StepResult
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.draft_backlog import DraftExtendPlanner, HiddenStateBuffer, HiddenStatePool, RecomputeFromTokens
from draftwing.sched.kv_manager import KVManager, SlotAllocator
from draftwing.sched.policy.shape_policy import ShapePolicy, StepContext
from draftwing.sched.radix import RadixCache
from draftwing.sched.req import Req, ReqState
from draftwing.sched.results import Results
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.sched.state_slots import StateSizes, StateSlots

CONTEXT = 36
CHAINS = (TreeShape(5, 1, 6), TreeShape(3, 1, 4), PLAIN)
TREES = (TreeShape(4, 4, 12), TreeShape(3, 3, 8), TreeShape(1, 4, 5), *CHAINS)
LAGGING = ((PLAIN,), (), (PLAIN, TreeShape(3, 1, 4), TreeShape(3, 3, 8)))
DEFERRALS = (
    NO_DEFERRAL, DraftDeferral(8, 8), DraftDeferral(40, 20), DraftDeferral(60, 9), DraftDeferral(0, 9, True, 12),
    DraftDeferral(0, 9, by_slot=True),
)  # fmt: skip
STATES = (None, StateSizes(12, 4, 3), StateSizes(4, 8, 2), StateSizes(40, 5, 1))
MIXES = (lambda shape, rows: True, None, lambda shape, rows: shape == PLAIN or rows > 1)
MENUS = {"plain": (PLAIN,), "chains": CHAINS, "trees": TREES}
PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 7, 7, 7, 7, 7, 7, 7], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]]


class AnyShape(ShapePolicy):
    """The policy: whatever shape the test says."""

    sees_predictions = adapts = True

    def __init__(self, menu: tuple[TreeShape, ...]) -> None:
        self.menu = menu
        self.next = 0

    def choose(self, context: StepContext) -> TreeShape:
        return self.menu[self.next % len(self.menu)]

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, priced: bool = True) -> None:
        assert len(context.confidences) == len(result.count) and (result.count - 1 <= shape.depth).all()

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        return []


class Asked:
    """A request as the test knows it."""

    def __init__(self, prompt: list[int], seed: int, limit: int, stop: frozenset[int]) -> None:
        self.prompt, self.seed = prompt, seed
        self.answer: list[int] = []  # as plain decoding gives it
        while len(prompt) + len(self.answer) < limit and not stop & set(self.answer[-1:]):
            self.answer.append(next_token(prompt + self.answer, seed))
        self.got: list[int] = []
        self.ended: str | None = None


class Wish(NamedTuple):
    prefix: int  # of PREFIXES
    length: int  # of it
    more: list[int]
    after: int  # an earlier request whose text comes first; 0: none
    new: int
    seed: int
    stops: bool
    priority: int
    salt: int
    tell: int | None  # `LogprobParams.start`


WISHES = st.builds(
    Wish,
    prefix=st.integers(0, len(PREFIXES) - 1),
    length=st.integers(1, 12),
    more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    after=st.integers(0, 8),
    new=st.sampled_from([CONTEXT, 9, 3, 1]),
    seed=st.integers(0, 2),
    stops=st.booleans(),
    priority=st.sampled_from([0, 0, 0, 1]),
    salt=st.sampled_from([0, 0, 0, 7]),
    tell=st.sampled_from([None, None, -1, 0, 2]),
)


class Serving(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()  # over all examples
    deferral = NO_DEFERRAL

    @initialize(
        menu=st.sampled_from(sorted(MENUS)),
        rows=st.sampled_from([4, 2, 5, 1]),
        lookahead=st.integers(0, 2),
        spare=st.sampled_from([10, 0, 20, 5, 30, 0, 200]),
        tail=st.sampled_from([0, 3]),
        ahead=st.sampled_from([0, 6]),
        chunk=st.sampled_from([5, 16, 64]),
        radix=st.sampled_from([True, True, True, False]),
        skips_extend=st.sampled_from(LAGGING),
        max_backlog=st.sampled_from([5, 9, 32]),
    )
    def start(
        self, menu: str, rows: int, lookahead: int, spare: int, tail: int, ahead: int, chunk: int, radix: bool,
        skips_extend: tuple[TreeShape, ...], max_backlog: int,
    ) -> None:  # fmt: skip
        shapes, deferral = MENUS[menu], self.deferral
        spans = {shape: max(span(shape), tail) for shape in shapes}
        room = max(spans.values()) + max(shape.max_commit for shape in shapes)
        slots = CONTEXT + room + spare  # at the least, one request fits
        behind = frozenset(skips_extend)
        if deferral.from_tokens:
            lookahead = 0
        if deferral.by_slot:
            lookahead = min(lookahead, 1)
        config = SchedulerConfig(
            slots,
            rows,
            max(spans.values()),
            chunk,
            lookahead,
            tail,
            radix,
            ahead=ahead,
            skips_extend=behind,
            max_backlog=max_backlog,
            deferral=deferral,
            states=(states := STATES[(rows + spare // 5 + chunk) % len(STATES)]),
            mixes=MIXES[(rows + spare // 3) % len(MIXES)],
        )
        self.policy = AnyShape(shapes)
        self.sched = Scheduler(config, self.policy, spans)
        self.device = ToyDevice(
            rows, CONTEXT + room, lookahead, tail, behind, max_backlog, deferral, states is not None
        )
        self.flying: list[Plan] = []
        self.asked: dict[str, Asked] = {}

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=6))
    def submit(self, wishes: list[Wish]) -> None:
        client = str(len(wishes) % 3)
        for wish in wishes:
            prompt = PREFIXES[wish.prefix][: wish.length] + wish.more
            ended = [one for one in self.asked.values() if one.ended is not None]
            if wish.after and ended:  # the next turn of a chat
                one = ended[wish.after % len(ended)]
                prompt = (one.prompt + one.got + wish.more)[: CONTEXT - 2]
            limit, uid = min(len(prompt) + wish.new, CONTEXT), str(len(self.asked))
            stop = frozenset([0] if wish.stops else [])
            self.asked[uid] = Asked(prompt, wish.seed, limit, stop)
            params = SamplingParams(max_new_tokens=wish.new, temperature=0)
            logprobs = None if wish.tell is None else LogprobParams(start=min(wish.tell, len(prompt) - 1))
            request = GenerationRequest(uid, list(prompt), params, wish.priority, logprobs=logprobs, client=client)
            self.sched.submit(Req(request, wish.seed, limit, stop, wish.salt))

    @precondition(lambda self: not self.sched.idle)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        going = [uid for uid, one in self.asked.items() if one.ended is None]
        self.sched.abort(going[which % len(going)])
        self.hear()

    @precondition(lambda self: self.sched.running)
    @rule(which=st.integers(0, 20))
    def preempt(self, which: int) -> None:
        """As when the pool is empty, but at any time."""
        self.retract(self.sched.running[which % len(self.sched.running)])

    @precondition(lambda self: self.prefilled())
    @rule(which=st.integers(0, 20))
    def preempt_in_prefill(self, which: int) -> None:
        """The same of those who are rarely met in time."""
        some = self.prefilled()
        self.retract(some[which % len(some)])

    def prefilled(self) -> list[Req]:
        return [req for req in self.sched.running if req.state is ReqState.PREFILL]

    def retract(self, req: Req) -> None:
        self.seen["preempted in prefill"] += req.state is ReqState.PREFILL
        self.seen["preempted in flight"] += req.inflight > 0
        self.sched._retract(req)

    @rule(shape=st.integers(0, 9))
    def plan(self, shape: int) -> None:
        """One step ahead of the results at most: then the oldest is waited for first."""
        if len(self.flying) == 2:
            self.commit()
        self.policy.next = shape
        self.sched._prefills._waited = 100 * (shape % 2 == 1)
        if self.sched.config.deferral.by_slot and self.sched.config.skips_extend:
            self.sched.catch_ups.prompts._rested = 100 * (shape % 3 > 0)
        before, reserve, evictable = self.sched.retractions, self.sched._reserve, self.sched.kv.radix.size
        plan = self.sched.plan()
        self.hear()
        if self.sched.retractions > before:
            self.seen["pool exhausted" if self.sched._reserve > reserve else "rows for another client"] += 1
        if plan is None:
            assert self.flying or not self.sched.running, "nothing runs, and nothing is on its way"
            return
        self.seen["begun with a snapshot"] += any(read > 0 for _, read, *_ in plan.states.tolist())
        self.seen["evicted"] += self.sched.kv.radix.size < evictable
        self.seen["prefix hits"] += any(len(admission.slots) for admission in plan.admits)
        self.seen["resumed"] += any(len(admission.tokens) > admission.prompt_len for admission in plan.admits)
        if plan.catch_up is not None:
            self.seen["caught up"] += 1
            self.seen["caught up after release"] += bool(set(plan.catch_up.rows) - set(plan.rows))
        self.seen["chunks of several"] += any(len(part.chunks) > 1 for part in plan.parts)
        self.device.launch(plan)
        self.flying.append(plan)

    @precondition(lambda self: self.flying)
    @rule()
    def commit(self) -> None:
        for plan in self.flying.pop(0).parts:
            stale = self.sched.results.stale
            places = zip(plan.rows.tolist(), plan.admission.tolist(), strict=True)
            reused = [
                r for r, number in places if r in self.sched.kv.by_row and self.sched.kv.by_row[r].admission != number
            ]
            self.sched.commit(plan, self.device.wait())
            self.seen["stale"] += self.sched.results.stale > stale
            self.seen["stale, row reused"] += bool(reused)
            self.hear()

    @rule(turns=st.integers(1, 12), shape=st.integers(0, 9), lag=st.booleans())
    def run(self, turns: int, shape: int, lag: bool) -> None:
        for turn in range(turns):
            self.plan(shape + turn)
            while len(self.flying) > lag:
                self.commit()
            self.integrity()

    @rule()
    def flush(self) -> None:
        assert self.sched.flush_cache() == self.sched.idle
        if self.sched.idle:
            assert self.sched.kv.pool.available == self.sched.config.slots

    def hear(self) -> None:
        """Takes the news; a text is that of plain decoding as far as it goes, and whole where it was not aborted."""
        for output in self.sched.take_outputs():
            one = self.asked[output.uid]
            assert one.ended is None, "news of a request that has ended"
            if not one.got and output.prompt_logprobs:
                told = [None if known is None else known.value for known in output.prompt_logprobs]
                assert told == [None, *one.prompt[1:]][-len(told) :], "a prompt's tokens, each told once"
            one.got += output.token_ids
            assert one.got == one.answer[: len(one.got)], "not the text of plain decoding"
            if output.finish_reason is not None:
                one.ended = output.finish_reason["type"]
                assert one.ended == "abort" or one.got == one.answer
                self.seen[f"ended: {one.ended}"] += 1

    @invariant()
    def integrity(self) -> None:
        self.sched.check_integrity()

    def teardown(self) -> None:
        """Everything that was submitted ends, and nothing is left over."""
        if not hasattr(self, "sched"):  # an example without a step
            return
        for turn in range(3000):
            if self.sched.idle and not self.flying:
                break
            self.plan(turn)
            while len(self.flying) > turn % 2:
                self.commit()
            self.sched.check_integrity()
        assert all(one.ended for one in self.asked.values()), "no progress"
        self.sched.kv.check_idle()
        self.flush()
        self.seen.update(self.device.seen)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
RANDOM = settings(
    stateful_step_count=30,
    deadline=None,
    derandomize=False,  # the default is another one where the variable CI is set
    database=None,
    suppress_health_check=CHECKS,
)
EXAMPLES = 14  # of each way; 12 are enough to see each of `MUST` three times
MUST = {
    *("ended: stop", "ended: length", "ended: abort"),
    *("pool exhausted", "rows for another client", "preempted in prefill", "preempted in flight"),
    *("resumed", "stale", "stale, row reused", "prefix hits", "evicted", "chunks of several", "plans of several rows"),
    *("permuted", "caught up", "caught up after release", "far behind", "deferred", "deferred chunks", "skipped"),
    *("mixed", "answer shown", "prompts at rest", "replayed", "snapshots", "begun with a snapshot"),
}


def serve(examples: int, drawn_anew: bool = False, **how: Any) -> None:
    """Runs so many examples with each way in which a drafter sees prompts later: the same ones each time, or others."""
    for number, deferral in enumerate(DEFERRALS):
        machine = type("Serving", (Serving,), {"deferral": deferral})
        machine = machine if drawn_anew else seed(number)(machine)
        run_state_machine_as_test(machine, settings=settings(RANDOM, max_examples=examples, **how))


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis draws numbers that it finds in the source of whatever is imported: what it draws would depend on the
    tests that ran before."""
    provider = "hypothesis.internal.conjecture.providers.HypothesisProvider"
    monkeypatch.setattr(f"{provider}._maybe_draw_constant", lambda *args, **kw: None)  # fails where it is renamed


@pytest.mark.slow
def test_random_requests_aborts_steps_and_preemptions() -> None:
    Serving.seen.clear()
    serve(EXAMPLES)
    assert not {what for what in MUST if Serving.seen[what] < 3}, Serving.seen


@pytest.mark.slow
@pytest.mark.exhaustive
def test_others_each_time() -> None:
    """Of a failure the steps are printed that lead to it."""
    serve(200, drawn_anew=True)


def test_random_requests_of_a_few_examples() -> None:
    serve(2)


Patch = Callable[[pytest.MonkeyPatch], None]


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method by `around(method, self, ...)`."""
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: around(method, self, *args))


def any_admission(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Results, "_live", lambda method, self, row, number: self._kv.by_row.get(row))


def match_everything(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, KVManager, "may_reuse", lambda method, self, req: len(req.tokens))


def narrow_windows(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, RadixCache, "__init__", lambda method, self, lookahead, enabled=True: method(self, 0, enabled))


def no_permutation(patch: pytest.MonkeyPatch) -> None:
    def around(method: Any, self: Scheduler, plan: Plan, result: StepResult) -> None:
        method(self, plan, replace(result, order=np.sort(result.order, axis=1)))

    wrap(patch, Scheduler, "commit", around)


def cache_too_early(patch: pytest.MonkeyPatch) -> None:
    """The newest token's KV is computed by the step after."""

    def around(method: Any, self: KVManager, req: Req) -> None:
        req.kv = min(len(req.tokens), req.covered)
        method(self, req)

    wrap(patch, KVManager, "release", around)


def moves_untold(patch: pytest.MonkeyPatch) -> None:
    def around(method: Any, self: KVManager, req: Req) -> None:
        before = list(self._new_slots.get(req.row, []))
        method(self, req)
        self._new_slots[req.row] = before

    wrap(patch, KVManager, "share", around)


def one_slot_forgotten(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, SlotAllocator, "free", lambda method, self, slots: method(self, slots[: max(len(slots) - 1, 1)]))


def locks_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixCache, "unlock", lambda self, node: None)


def slots_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A duplicate's slots are freed, and the row goes on with them."""

    def around(method: Any, self: KVManager, req: Req) -> None:
        slots = req.slots.copy()
        method(self, req)
        self._new_slots.pop(req.row, None)
        req.slots = slots

    wrap(patch, KVManager, "share", around)


def nobody_retracted(patch: pytest.MonkeyPatch) -> None:
    """Who finds no room waits for ever."""

    def around(method: Any, self: Scheduler, req: Req, upto: int, retracts: bool = True) -> bool:
        short = upto - req.covered > self.kv.obtainable
        return not short and bool(method(self, req, upto, retracts))

    wrap(patch, Scheduler, "_cover", around)


def never_caught_up(patch: pytest.MonkeyPatch) -> None:
    """Unless a step drafts."""
    wrap(patch, DraftExtendPlanner, "_due", lambda method, self, reqs, commit: [])


def drafting_behind(patch: pytest.MonkeyPatch) -> None:
    def around(method: Any, self: DraftExtendPlanner, step: int, shape: TreeShape, reqs: list[Req]) -> None:
        if shape in self._skips_extend:
            method(self, step, shape, reqs)

    wrap(patch, DraftExtendPlanner, "plan", around)


def released_behind(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, DraftExtendPlanner, "release", lambda method, self, req, cached: method(self, req, False))


def caught_up_late(patch: pytest.MonkeyPatch) -> None:
    """One plan after the one that needs it."""

    def around(method: Any, self: DraftExtendPlanner) -> Any:
        before, self.waits = getattr(self, "waits", None), method(self)
        return before

    wrap(patch, DraftExtendPlanner, "take", around)


def prompts_never_seen(patch: pytest.MonkeyPatch) -> None:
    """Of chunks that are not the last, where these were deferred."""
    wrap(patch, HiddenStateBuffer, "take", lambda method, self: (method(self), ())[1])


def released_unseen(patch: pytest.MonkeyPatch) -> None:
    """In the middle of its prompt."""
    wrap(patch, HiddenStateBuffer, "release", lambda method, self, req, cached: method(self, req, False))


def places_given_twice(patch: pytest.MonkeyPatch) -> None:
    def around(method: Any, self: HiddenStateBuffer, req: Req) -> Any:
        kept, places = method(self, req)
        return kept._replace(at=0), places

    wrap(patch, HiddenStateBuffer, "_new", around)


def parts_as_seen(patch: pytest.MonkeyPatch, cls: type[RecomputeFromTokens] | type[HiddenStatePool]) -> None:
    def around(method: Any, self: Any, req: Req, length: int, final: bool) -> Any:
        kept = method(self, req, length, final)
        self._seen[req.slots[: req.sent + length]] = True
        return kept

    wrap(patch, cls, "plan", around)


def skipped_as_seen(patch: pytest.MonkeyPatch) -> None:
    parts_as_seen(patch, RecomputeFromTokens)


def rested_as_seen(patch: pytest.MonkeyPatch) -> None:
    parts_as_seen(patch, HiddenStatePool)


def answers_as_seen(patch: pytest.MonkeyPatch) -> None:
    """Further than the host knows them."""

    def around(method: Any, self: RecomputeFromTokens, req: Req) -> None:
        method(self, req)
        req.behind = 0

    wrap(patch, RecomputeFromTokens, "show", around)


def stale_counts(patch: pytest.MonkeyPatch) -> None:
    """Of steps before a catch-up, which it has seen."""

    def around(method: Any, self: DraftExtendPlanner, step: int, shape: TreeShape, req: Req, count: int) -> None:
        method(self, req.caught_up, shape, req, count)

    wrap(patch, DraftExtendPlanner, "commit", around)


def states_too_long(patch: pytest.MonkeyPatch) -> None:
    """A step's state is said to be that of all it may commit."""
    wrap(patch, StateSlots, "committed", lambda method, self, req, length: method(self, req, length + 1))


def state_in_flight_kept(patch: pytest.MonkeyPatch) -> None:
    """A row that is released leaves a state that a step in flight overwrites."""

    def around(method: Any, self: StateSlots, req: Req) -> Any:
        held = req.states
        assert held is not None
        held.writes.clear()
        return method(self, req)

    wrap(patch, StateSlots, "release", around)


def snapshots_overwritten(patch: pytest.MonkeyPatch) -> None:
    """By the row that began with one: it is given no second slot."""

    def around(method: Any, self: StateSlots, reqs: list[Req], nodes: int) -> None:
        method(self, reqs, nodes)
        self._entries = {row: entry for row, entry in self._entries.items() if entry[0] >= 0}

    wrap(patch, StateSlots, "planned", around)


def snapshots_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """A snapshot may be evicted before the row that begins with it has read it."""

    def around(method: Any, self: StateSlots, req: Req, *args: Any) -> None:
        method(self, req, *args)
        assert req.states is not None
        self._unpin(req.states)

    wrap(patch, StateSlots, "admit", around)


def states_of_kv_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    """An end that is evicted in part leaves its snapshot, at another position."""

    def around(method: Any, self: RadixCache, wanted: int) -> Any:
        drop, self.drop_state = self.drop_state, None
        found = method(self, wanted)
        self.drop_state = drop
        return found

    wrap(patch, RadixCache, "evict", around)


BROKEN: list[Patch] = [
    *(any_admission, narrow_windows, moves_untold),
    *(one_slot_forgotten, locks_kept, slots_given_twice, nobody_retracted),
    *(snapshots_overwritten, states_of_kv_that_is_gone),
]
# Which need much to come together: it is a matter of luck how many examples that takes.
LATE: list[Patch] = [
    *(no_permutation, never_caught_up, drafting_behind, released_behind, caught_up_late, stale_counts),
    *(released_unseen, places_given_twice, skipped_as_seen, rested_as_seen, answers_as_seen, cache_too_early),
    *(state_in_flight_kept, snapshots_not_pinned, match_everything, prompts_never_seen, states_too_long),
]


@pytest.mark.slow
@pytest.mark.further(broken=LATE)
@pytest.mark.parametrize("broken", [*BROKEN, *LATE])
def test_a_broken_rule_is_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        serve(300, phases=(Phase.generate,), report_multiple_bugs=False)
