"""Whether a draft model sees a prompt: where its drafts of the answer are known not to be worth it, it does not."""

from __future__ import annotations

import pytest
from worlds import World

from draftwing.core import MAX_CONFIDENCE, PLAIN, Chunk, DraftDeferral, TreeShape
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.config import SchedulerConfig
from draftwing.sched.policy.cost import RECENT
from draftwing.sched.policy.draft_prefill import DraftPrefill
from draftwing.sched.policy.shape_policy import FixedShape, StepContext
from draftwing.sched.policy.tree_policy import TreePolicy
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler

TREE = TreeShape(3, 1, 4)
A_PASS = 0.02


class Budget:
    """What exploring may cost: so many seconds, and no more."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def spend(self, seconds: float) -> bool:
        if seconds > self.seconds:
            return False
        self.seconds -= seconds
        return True


def known(answer: int = 128) -> DraftPrefill:
    worth = DraftPrefill(8192)
    worth.record(2 * A_PASS, 1, 8000)
    worth.ended(answer, 1000)
    worth.ended(answer, 64)
    return worth


def seen(
    worth: DraftPrefill, tokens: list[int], limits: list[int], saving: float | None, best: float | None = None,
    budget: Budget | None = None,
) -> bool:  # fmt: skip
    prompts = [(length, length > 1024) for length in tokens]
    return worth.should_prefill(prompts, limits, saving, best, (budget or Budget()).spend)


def test_what_is_not_known_is_found_out() -> None:
    worth = DraftPrefill(8192)
    assert seen(worth, [7500], [128], 0.0), "what a pass takes"
    worth.record(A_PASS, 1, 0)
    assert seen(worth, [7500], [128], 0.0), "how long answers are"
    worth.ended(128, 128)
    assert seen(worth, [7500], [128], None), "what drafts save"
    assert not seen(worth, [7500], [128], 0.0)


@pytest.mark.parametrize(("tokens", "passes"), [(7500, 2), (100, 1), (20_000, 4)])
def test_an_answer_brings_back_what_the_prompt_took(tokens: int, passes: int) -> None:
    least = passes * A_PASS / 128  # seconds that a token has to save
    assert seen(known(), [tokens], [1000], 1.01 * least) and not seen(known(), [tokens], [1000], 0.99 * least)
    assert not seen(known(), [tokens], [64], 1.9 * least), "a limited answer is no longer"
    assert seen(known(64), [tokens], [1000], 2.1 * least) and not seen(known(64), [tokens], [1000], 1.9 * least)


def test_prompts_that_are_prefilled_together_share_a_pass() -> None:
    saving = A_PASS / 800
    assert seen(known(), [100] * 8, [1000] * 8, saving) and not seen(known(), [100], [1000], saving)
    assert not seen(known(), [7500] * 8, [1000] * 8, saving), "of a long one its end alone"


def test_exploring_pays_for_what_does_not_seem_worth_it() -> None:
    worth, budget = known(), Budget(10.5 * A_PASS)
    assert sum(seen(worth, [100], [1000], 0.0, None, budget) for _ in range(100)) == 10
    assert budget.seconds == pytest.approx(0.5 * A_PASS)
    assert seen(worth, [100], [1000], 1.01 * A_PASS / 128, None, budget) and budget.seconds > 0.4 * A_PASS


def test_nothing_is_found_out_where_not_even_the_best_drafts_would_bring_it_back() -> None:
    for best, tried in ((A_PASS / 130, False), (A_PASS / 126, True)):
        assert seen(known(), [100], [1000], 0.0, best, Budget(1.0)) is tried
    assert seen(known(), [100] * 8, [1000] * 8, A_PASS / 800, A_PASS / 130), "together they share a pass"


def test_long_answers_beside_many_short_ones_are_known_for_long() -> None:
    worth = known()
    for _ in range(16):
        worth.ended(5, 8)
    saving = A_PASS / 100
    assert not seen(worth, [100], [8], saving)
    assert seen(worth, [100], [4000], saving), "nothing is known of such a limit"
    worth.ended(5, 4000)
    assert not seen(worth, [100], [4000], saving)
    worth.ended(3000, 4000)
    assert seen(worth, [100], [4000], saving) and not seen(worth, [100], [8], saving)


@pytest.mark.parametrize("hit", [0.02, 0.9])
def test_a_policy_tells_what_drafts_save(hit: float) -> None:
    world = World((TREE, PLAIN), 4.0, 0.02, 0.1)
    policy = TreePolicy(world.menu, world.cost((4,)))
    hits, load = [hit] * 4, StepContext([MAX_CONFIDENCE] * 4)
    assert policy.saving(load) is None, "nothing has run"
    world.run(policy, hits, 300)
    expected = 1 / world.rate(PLAIN, hits) - 1 / max(world.rate(shape, hits) for shape in world.menu)
    assert policy.saving(load) == pytest.approx(expected, abs=0.1e-3), "0 where nothing is worth drafting"
    best = 1 / world.rate(PLAIN, hits) - world.seconds(TREE, 4) / 16
    assert policy.saving(load, at_best=True) == pytest.approx(best, abs=0.1e-3)


def test_drafts_save_nothing_in_steps_that_have_no_time_for_them() -> None:
    world = World((TREE, PLAIN), 4.0, 0.02, 0.1)
    policy = TreePolicy(world.menu, world.cost((4,)))
    world.run(policy, [0.9] * 4, 100)
    load = StepContext([MAX_CONFIDENCE] * 4)
    before = policy.saving(load)
    for number in range(200):
        policy.choose(load._replace(latency_slack=0.0 if number % 4 else float("inf")))
    after = policy.saving(load)
    assert before is not None and after is not None and 0.15 * before < after < 0.4 * before


class Saving(FixedShape):
    adapts = True
    worth: float | None = 0.0

    def saving(self, context: StepContext, at_best: bool = False) -> float | None:
        assert context.confidences == [7] * 2
        return self.worth


@pytest.mark.parametrize("from_tokens", [True, False])
def test_who_is_admitted_may_not_be_seen(from_tokens: bool) -> None:
    policy = Saving(TREE)
    config = SchedulerConfig(
        4000,
        2,
        4,
        512,
        initial_confidence=7,
        skips_extend=frozenset([PLAIN]),
        deferral=DraftDeferral(100, 50, from_tokens),
    )
    sched = Scheduler(config, policy, {shape: shape.nodes for shape in policy.menu})
    if from_tokens:
        sched.choice._draft_prefill = known()
    for worth in (0.0, 1.0):
        policy.worth = worth
        reqs = [
            Req(GenerationRequest(f"{i} {worth}", [i] * 30, SamplingParams(max_new_tokens=9)), 0, 39, frozenset())
            for i in range(2)
        ]
        for req in reqs:
            sched.submit(req)
        plan = sched.plan()
        assert plan is not None and [chunk.kept is not None for chunk in plan.chunks] == [from_tokens and not worth] * 2
        for req in reqs:
            sched.abort(req.uid)


def test_who_comes_when_nobody_runs_is_seen() -> None:
    """Prompts waited all the time until everything was aborted: nothing has run since that would tell of an end."""
    policy = Saving(TREE)
    config = SchedulerConfig(
        4000, 3, 4, 512, initial_confidence=7, skips_extend=frozenset([PLAIN]), deferral=DraftDeferral(100, 50, True)
    )
    sched = Scheduler(config, policy, {shape: shape.nodes for shape in policy.menu})
    policy.worth = None
    for _ in range(RECENT):
        sched._prefills.plan_step([Chunk(0, 0, 100, False)], waiting=True)
    assert sched._prefills.crowded_out
    reqs = [
        Req(GenerationRequest(str(i), [i] * 30, SamplingParams(max_new_tokens=9)), 0, 39, frozenset()) for i in range(2)
    ]
    for req in reqs:
        sched.submit(req)
    sched.plan()
    assert [req.skipped for req in reqs] == [False] * 2
