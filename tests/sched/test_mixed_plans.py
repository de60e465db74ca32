"""Plans of rows that decode with parts of prompts beside them. The test makes up results in place of a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cells import CELLS
from step_marks import marks_of

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import Plan, StepResult
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.req import Req, ReqState
from draftwing.sched.scheduler import Scheduler, SchedulerConfig


def make(slots: int = 400, rows: int = 6, chunk: int = 16, mixes: Any = lambda shape, rows: True) -> Scheduler:
    return Scheduler(SchedulerConfig(slots, rows, 1, chunk, mixes=mixes), FixedShape(PLAIN), {PLAIN: 1})


def req(uid: str, length: int = 5, new: int = 10, first: int = 0, priority: int = 0) -> Req:
    tokens = [first + i for i in range(length)]
    request = GenerationRequest(uid, tokens, SamplingParams(max_new_tokens=new), priority)
    return Req(request, seed=0, max_total=length + new, stop_ids=frozenset())


def result(plan: Plan, seconds: float = 0.0) -> StepResult:
    rows = len(plan.rows)
    counts = [int(chunk.final) for chunk in plan.chunks] or [1] * rows
    return StepResult(
        tokens=np.full((rows, 1), 7), count=np.asarray(counts), order=np.zeros((rows, 1), np.int64),
        mark=marks_of([[0]] * rows), confidence=np.ones(rows, np.int64), seconds=seconds,
    )  # fmt: skip


def turn(sched: Scheduler, seconds: float = 0.0) -> Plan:
    plan = sched.plan()
    assert plan is not None
    for part in plan.parts:
        sched.commit(part, result(part, seconds))
    sched.check_integrity()
    return plan


def uids(sched: Scheduler, plan: Plan) -> list[str]:
    return [sched.kv.by_row[row].uid for row in plan.rows.tolist()]


def test_parts_of_prompts_come_with_those_who_decode() -> None:
    sched = make()
    sched.submit(req("a"))
    alone = turn(sched)
    assert alone.kind == "prefill" and not alone.mixed and alone.parts == (alone,)
    sched.submit(req("b", length=40, first=100))
    seen = []
    for _ in range(3):
        plan = turn(sched)
        assert plan.kind == "tree" and plan.mixed and plan.mixed_prefill is not None and plan.mixed_prefill.mixed
        assert uids(sched, plan) == ["a"] and uids(sched, plan.mixed_prefill) == ["b"]
        assert (plan.step + 1, PLAIN) == (plan.mixed_prefill.step, plan.mixed_prefill.shape)
        seen += [chunk.length for chunk in plan.mixed_prefill.chunks]
    assert seen == [15, 15, 10], "with one row that decodes 15 of 16 queries are of prompts"
    both = turn(sched)
    assert uids(sched, both) == ["a", "b"] and not both.mixed, "b decodes once its first token was drawn"


def test_first_tokens_come_first() -> None:
    sched = make()
    for uid in "abc":
        sched.submit(req(uid, first=10 * ord(uid)))
    turn(sched)
    sched.take_outputs()
    sched.submit(req("d", first=100))
    plan = turn(sched)
    assert plan.mixed_prefill is not None
    assert [output.uid for output in sched.take_outputs()] == ["d", "a", "b", "c"]


@pytest.mark.parametrize(("seconds", "given"), [(0.006, 300), (0.0112, 511)])
def test_parts_beside_rows_are_cut_to_what_they_are_padded_to_there(
    seconds: float, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of less than 512 are padded to that, the row that decodes among them."""
    config = SchedulerConfig(
        4000, 6, 1, 1000, mixes=lambda shape, rows: 1, prefill_sizes=(64, 256, 512, 768), mixed_sizes=(512, 768)
    )
    sched = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1})
    sched.submit(req("a", new=40))
    turn(sched)
    sched.submit(req("b", length=3000, new=3, first=100))
    monkeypatch.setattr(PrefillBudget, "token_seconds", lambda *_: 2e-5)
    monkeypatch.setattr(PrefillBudget, "max_seconds", lambda *_: seconds)
    monkeypatch.setattr(PrefillBudget, "start", 0.004)
    plan = sched.plan()
    assert plan is not None and plan.mixed_prefill is not None
    assert [chunk.length for chunk in plan.mixed_prefill.chunks] == [given]


def test_who_decodes_fills_the_step() -> None:
    """Then prompts wait for the next plan, which is theirs alone."""
    sched = make(chunk=2)
    for i in range(2):
        sched.submit(req(str(i), length=1, first=100 * i))
        turn(sched)
    while sum(one.state is ReqState.DECODE for one in sched.running) < 2:
        turn(sched)
    sched.submit(req("long", length=6, first=900))
    kinds = [turn(sched) for _ in range(6)]
    assert [plan.kind for plan in kinds] == ["tree", "prefill"] * 3 and not any(plan.mixed for plan in kinds)


@pytest.mark.parametrize(("asked", "queries"), [(None, 2), (LogprobParams(1), 8)])
def test_whole_trees_leave_less_room(asked: LogprobParams | None, queries: int) -> None:
    """Rows that ask for more than drafts have all of their nodes verified."""
    tree = TreeShape(3, 2, 8, 2)
    config = SchedulerConfig(400, 6, 8, 16, initial_confidence=1, mixes=lambda shape, rows: True)
    sched = Scheduler(config, FixedShape(tree), {PLAIN: 1, tree: 8})
    first = req("a").request._replace(logprobs=asked)
    sched.submit(Req(first, seed=0, max_total=15, stop_ids=frozenset()))
    assert sched.plan() is not None
    sched.submit(req("b", length=40, first=100))
    plan = sched.plan()
    assert plan is not None and plan.mixed_prefill is not None
    assert [chunk.length for chunk in plan.mixed_prefill.chunks] == [16 - queries]


def test_nobody_in_the_step_is_retracted_for_it() -> None:
    """Rows take the slots that a prompt of higher priority needs: it gets them back in a plan of its own."""
    sched = make(slots=60, chunk=5)
    for i in range(4):
        sched.submit(req(f"low{i}", length=4, new=26, first=20 * i))
    while sum(one.state is ReqState.DECODE for one in sched.running) < 4:
        turn(sched)
    sched.submit(req("high", length=24, new=2, first=100, priority=1))
    mixed = 0
    while not sched.idle:
        plan = sched.plan()
        assert plan is not None
        places = [place for part in plan.parts for place in zip(part.rows, part.admission, strict=True)]
        assert all(sched.kv.by_row[row].admission == admission for row, admission in places)
        mixed += plan.mixed
        for part in plan.parts:
            sched.commit(part, result(part))
        sched.check_integrity()
    ended = {out.uid: out.meta for out in sched.take_outputs() if out.finish_reason}
    assert len(ended) == 5 and mixed > 2 and ended["high"]["num_retractions"] == 0 < sched.retractions


@pytest.mark.parametrize("lag", [0, 1])
def test_where_one_forward_is_not_worth_it_plans_take_turns(lag: int) -> None:
    sched = make(mixes=lambda shape, rows: rows > 1)
    sched.submit(req("a", new=30))
    turn(sched)
    sched.submit(req("b", length=40, first=100))
    flying: list[Plan] = []
    kinds = []
    for _ in range(6):
        plan = sched.plan()
        assert plan is not None and plan.parts == (plan,) and not plan.mixed
        kinds.append(plan.kind)
        flying.append(plan)
        while len(flying) > lag:
            done = flying.pop(0)
            sched.commit(done, result(done))
    assert kinds == ["tree", "prefill"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "share"),
    [
        pytest.param("beside prompts / plain 8 x 4000", 1.15, marks=pytest.mark.exhaustive),
        ("beside prompts / with drafts 8 x 4000", 1.15),
        ("burst / plain 4 x 16000", 1.5),
    ],
)
def test_simulated_loads_gain_and_gaps_stay(load: str, share: float) -> None:
    figures = CELLS[load]()
    assert figures["share"] > share and figures["gap"] < 1.1


def test_what_a_step_takes_is_expected() -> None:
    """Of a device that takes the same for each token and key, the prompts' and the rows'."""
    sched = make(slots=40_000, rows=16, chunk=512, mixes=lambda shape, rows: rows)
    rng, errors = np.random.default_rng(3), {"prefill": list[float](), "tree": [], "mixed": []}
    for step in range(400):
        if step % 9 == 0 and len(sched.running) < 12 and (step // 40) % 2 == 0:
            sched.submit(req(str(step), int(rng.integers(20, 1500)), int(rng.integers(10, 60)), 2000 * step))
        plan = sched.plan()
        if plan is None:
            continue
        rows = [sched.kv.by_row[row] for row in plan.rows.tolist()] if plan.kind == "tree" else []
        chunks = [chunk for part in plan.parts for chunk in part.chunks]
        keys = sum(one.length * (one.start + one.length / 2) for one in chunks)
        tokens = sum(one.length for one in chunks) + (len(rows) if chunks else 0)
        seconds = 5e-3 + 2e-5 * tokens + 1e-9 * keys + 3e-8 * sum(one.kv for one in rows)
        errors["mixed" if plan.mixed_prefill else plan.kind].append(sched.seconds(plan) / seconds - 1)
        for part in plan.parts:
            sched.commit(part, result(part, seconds))
    for kind, found in errors.items():
        assert len(found) > 10 and abs(np.quantile(found[len(found) // 3 :], (0.1, 0.5, 0.9))).max() < 0.2, kind


def test_its_seconds_are_no_price_of_a_step() -> None:
    sched = make()
    sched.submit(req("a", new=40))
    for _ in range(8):
        turn(sched, 1.0)
    sched.submit(req("b", length=30, first=100, new=3))
    turn(sched, 1.0)
    mixed = turn(sched, 500.0)
    assert mixed.mixed and sched.choice.policy.seconds(1, 0) == 1.0


@pytest.mark.parametrize("provisional", [True, False])
def test_what_was_launched_where_a_graph_will_be_is_no_price(provisional: bool) -> None:
    sched = make()
    sched.submit(req("a", new=40))
    for _ in range(8):
        turn(sched, 1.0)
    sched.submit(req("b", length=90, first=100, new=3))
    turn(sched, 1.0)
    known = sched._prefills.token_seconds(0)
    plan = sched.plan()
    assert known and plan is not None and plan.mixed_prefill is not None
    for part in plan.parts:
        sched.commit(part, replace(result(part, 1.5), provisional=provisional))
    assert (sched._prefills.token_seconds(0) == known) == provisional


def not_as_expected() -> Scheduler:
    """Of a step that turns out not to be mixed: it was expected to have another shape, or a few rows more."""
    asked: list[int] = []

    def mixes(shape: object, rows: int) -> bool:
        asked.append(rows)
        return len(asked) % 2 == 1  # as expected, and not as it came

    sched = make(mixes=mixes)
    sched.submit(req("a", new=30))
    turn(sched)
    return sched


def test_a_step_that_turns_out_not_to_be_mixed_comes_first() -> None:
    sched = not_as_expected()
    sched.submit(req("b", length=40, first=100))
    plans = [turn(sched) for _ in range(6)]
    assert [plan.kind for plan in plans] == ["tree", "prefill"] * 3 and not any(plan.mixed for plan in plans)
    assert [plan.step for plan in plans] == [*range(1, 7)]


def test_after_such_a_step_no_plan_is_of_who_is_gone() -> None:
    sched = not_as_expected()
    sched.submit(req("b", length=10, first=100))
    assert turn(sched).kind == "tree"
    sched.abort("b")
    assert uids(sched, turn(sched)) == ["a"]
    sched.abort("a")
    assert sched.flush_cache() and sched.plan() is None
