"""Prompts in one forward with rows that decode: the text is that of each request alone."""

import pytest
from engine_rig import BLOCKS, CUDA, RANKS
from layer_kinds import HYBRIDS, KINDS, RECURRENT, config_of

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import DraftDeferral
from draftwing.sched.state_slots import StateSizes

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)
NEW = 18  # tokens of an answer

pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", BLOCKS, RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness=["blocks", "ranks"], lag=0),
    pytest.mark.further(harness=["blocks", "ranks"], shape=[PLAIN, CHAIN]),
]


@pytest.fixture(scope="module")
def case(harness, one_thread):
    """Prompts of 3 to 70 tokens, greedy and seeded, and their answers alone."""
    model = harness.tiny_model()
    prompts = harness.prompts_for(9, shortest=3, longest=70)
    params = [harness.greedy(NEW) if i % 2 else harness.seeded(NEW, seed=i) for i in range(len(prompts))]
    expected = harness.plain_answers(model, prompts, params)
    return model, prompts, params, expected, harness.make_book(prompts, expected)


def one_by_one(rig, prompts, params, every=3):
    """Submits a request every few turns, so that prompts come while others decode."""

    def between(turn):
        if turn % every == 0 and turn // every + 1 < len(prompts):
            i = turn // every + 1
            rig.submit(str(i), prompts[i], params[i])

    rig.submit("0", prompts[0], params[0])
    return rig.run(between=between)


@pytest.mark.further(shape=CHAIN)
@pytest.mark.further(lag=0, shape=PLAIN)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_prompts_come_while_others_decode(harness, case, shape, lag):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(shape,), drafter="oracle", book=book, miss=2, lag=lag, chunk=100, mixed=True)
    assert one_by_one(rig, prompts, params).tokens == expected.tokens
    assert rig.stats.mixed >= 5 and rig.accept_length > (1.5 if shape.depth else 0.9)


@pytest.mark.slow
@pytest.mark.further(harness="blocks")
@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_deferred_is_seen_once(harness, case, lag):
    """Parts of prompts beside trees, of which a drafter sees all but the last later, and steps that it does not see."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(
        model, drafter="oracle", policy=harness.Cycle(TREE), book=book, miss=1, lag=lag, chunk=60, mixed=True,
        deferral=DraftDeferral(100, 25), rows=4,
    )  # fmt: skip
    assert one_by_one(rig, prompts, params, every=2).tokens == expected.tokens
    assert rig.stats.mixed >= 5 and rig.stats.shapes == {TREE, PLAIN}


def test_what_is_shown_of_prompts_is_not_the_steps_time(harness, case):
    """It would be taken for a price of the prompts beside it."""
    model, prompts, params, _, book = case
    if hasattr(model, "whole") or harness.device != "cpu":
        pytest.skip("one rank on a CPU shows it")
    rig = harness.Rig(
        model, drafter="oracle", policy=harness.Cycle(TREE), book=book, chunk=30, mixed=True,
        deferral=DraftDeferral(200, 60), rows=4,
    )  # fmt: skip
    now, backlog, commit, shown = [0.0], rig.executor._backlog, rig.sched.commit, []
    see = backlog.see

    def slow(parts):
        now[0] += 1.0
        see(parts)

    def committed(plan, result, guidance):
        if plan.mixed_prefill is not None:
            shown.append(len(plan.mixed_prefill.shown) > 0)
            assert result.seconds == result.catching_up >= shown[-1]
        commit(plan, result, guidance)

    backlog.see, rig.sched.commit = slow, committed
    rig.executor.device.mark = lambda: now[0]
    one_by_one(rig, prompts, params, every=2)
    assert any(shown)


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_preemption(harness, case, lag):
    """A pool for less than two requests: nobody is retracted for prompts in a step with rows that decode."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(
        model, shapes=(CHAIN,), drafter="oracle", book=book, miss=2, lag=lag, chunk=40, slots=140, mixed=True
    )
    got = one_by_one(rig, prompts, params, every=1)
    assert got.tokens == expected.tokens and rig.sched.retractions > 0 and rig.stats.mixed > 0


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_prefix_hits(harness, case, lag):
    """Conversations go on, from what is cached, while others decode."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=2, lag=lag, chunk=100, mixed=True)
    one_by_one(rig, prompts, params)
    mixed, greedy = rig.stats.mixed, range(1, len(prompts), 2)
    longer = [[*prompts[i], *expected.tokens[str(i)][:8], 7, 7, 7] for i in greedy]
    wanted = harness.plain_answers(model, longer, params := [harness.greedy(NEW)] * len(longer))
    got = one_by_one(rig, longer, params)
    assert got.tokens == wanted.tokens and rig.stats.mixed > mixed
    assert all(out.meta["cached_tokens"] > 8 for out in got.final.values())


@pytest.mark.further(harness="blocks")
@pytest.mark.parametrize("kind", ["recurrent", "shared"])
def test_other_layers(harness, case, kind):
    """Those that read others' keys and values are mixed; those that need the host's chunks are not."""
    known, prompts, params, *_ = case
    if hasattr(known, "whole") or harness.device != "cpu":
        pytest.skip("one rank on a CPU shows it")
    model = harness.model_of(config_of(KINDS[kind], harness.CONTEXT))
    expected = harness.plain_answers(model, prompts[:4], params[:4])
    rig = harness.Rig(model, lag=1, mixed=True)
    assert one_by_one(rig, prompts[:4], params[:4]).tokens == expected.tokens
    assert (rig.stats.mixed > 0) == (kind != "recurrent")


@pytest.mark.slow
@pytest.mark.further(harness="blocks")
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(harness, case, kind):
    """With drafts, in parts, from snapshots, and where requests are retracted."""
    known, prompts, params, *_ = case
    if hasattr(known, "whole"):
        pytest.skip("these layers are of one rank")
    model = harness.model_of(config_of(RECURRENT[kind], harness.CONTEXT))
    expected = harness.plain_answers(model, prompts, params)
    more = {"drafter": "oracle", "book": harness.make_book(prompts, expected), "miss": 2, "mixed": True}
    states = StateSizes(30, 8, 4) if kind in HYBRIDS else None
    rig = harness.Rig(model, policy=harness.Cycle(PLAIN, TREE, CHAIN, PLAIN), chunk=30, states=states, **more)
    for _ in range(2):
        got = one_by_one(rig, prompts, params)
        assert got.tokens == expected.tokens
    assert rig.stats.mixed > 5 and rig.accept_length > 1.3
    assert sum(out.meta["cached_tokens"] > 8 for out in got.final.values()) > 4
    states = StateSizes(16, 8, 4) if kind in HYBRIDS else None
    rig = harness.Rig(model, shapes=(CHAIN,), lag=1, chunk=40, slots=140, states=states, **more)
    assert one_by_one(rig, prompts, params, every=1).tokens == expected.tokens
    assert rig.sched.retractions > 0 and rig.stats.mixed > 0
