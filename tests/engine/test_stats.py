"""Totals of the reporter, against hand counts and against what the requests themselves say."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from step_marks import marks_of

from draftwing.config.drafters import find_drafter
from draftwing.config.trees import LOOKUP, MODEL, PLAIN, TreeShape
from draftwing.core import FEW_MARKS, MARK_SOURCE, Admission, Chunk, Plan, StepResult
from draftwing.engine.stats import Reporter, StepTimes
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(2, 2, 5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduler(*running, shape=CHAIN):
    """As much of one as a reporter sees; running: admission numbers."""
    return SimpleNamespace(
        running=[
            SimpleNamespace(
                admission=number,
                request=SimpleNamespace(prediction=()),
                completion_tokens=100 * number,
                tokens=[0] * (900 * number),
            )
            for number in running
        ],
        waiting=[],
        config=SimpleNamespace(slots=100),
        kv=SimpleNamespace(obtainable=75),
        choice=SimpleNamespace(policy=SimpleNamespace(menu=(shape, PLAIN)), suspended=False),
        retractions=2,
        results=SimpleNamespace(stale=1),
    )


def plan(shape, *admission, kind="tree", admits=(), chunks=()):
    numbers = np.asarray(admission, np.int64)
    return Plan(0, kind, numbers, numbers, shape, 9, tuple(admits), (), tuple(chunks))


def result(count, proposed, seconds=0.0, depth=3, levels=None, sources=LOOKUP):
    """levels [B][D]: how many nodes each depth has, as in a chain where that is left out. sources: who proposed the
    nodes, [B][N] or all of them. The accepted path comes first."""
    rows = len(count)
    if levels is None:
        levels = [[int(d < number) for d in range(depth)] for number in proposed]
    nodes = [[d + 1 for d, number in enumerate(row) for _ in range(number)] for row in levels]
    assert [len(row) for row in nodes] == list(proposed)
    width = 1 + max(proposed)
    return StepResult(
        tokens=np.zeros((rows, depth + 1), np.int64),
        count=np.asarray(count, np.int64),
        order=np.tile(np.arange(width), (rows, 1)),
        mark=marks_of([[0] + row + [0] * (width - 1 - len(row)) for row in nodes])
        + (np.asarray(sources) << MARK_SOURCE),
        confidence=np.zeros(rows, np.int64),
        seconds=seconds,
    )


def test_nothing_is_suspended_while_nobody_runs():
    busy, idle = scheduler(0), scheduler()
    busy.choice.suspended = idle.choice.suspended = True
    assert [Reporter(sched).stats()["drafts_suspended"] for sched in (busy, idle)] == [True, False]


def credited(name):
    return find_drafter(name).credited


def test_a_chain_by_depth():
    reporter = Reporter(scheduler(0, 1, 2), credited=credited("NGRAM"))
    before = reporter.stats()["drafters"]["NGRAM"]
    assert before == {"drafts": 0, "proposed": 0, "accepted": 0, "proposed_at": [0, 0, 0], "accepted_at": [0, 0, 0]}
    reporter.watch(plan(CHAIN, 0, 1, 2), result(count=[4, 1, 1], proposed=[3, 2, 0]))
    reporter.watch(plan(CHAIN, 0), result(count=[2], proposed=[3]))
    reporter.watch(plan(PLAIN, 0, 1), result(count=[1, 1], proposed=[0, 0], depth=0))
    stats = reporter.stats()
    assert stats["drafters"]["NGRAM"] == {
        "drafts": 3,
        "proposed": 8,
        "accepted": 4,
        "proposed_at": [3, 3, 2],
        "accepted_at": [2, 1, 1],
    }
    assert (reporter.total_rows, reporter.total_tokens) == (6, 10) and reporter.accept_length == 10 / 6
    assert stats["steps"] == {"prefill": 0, "plain": 1, "speculative": 2}
    assert (stats["retractions"], stats["stale_rows"]) == (2, 1)


def test_acceptance_by_output_position():
    reporter = Reporter(scheduler(0, 2, 3, 6), credited=credited("NGRAM"))  # 0, 200, 300 and 600 tokens into an answer
    reporter.watch(plan(CHAIN, 0, 2, 3, 6), result(count=[4, 2, 3, 1], proposed=[3, 3, 3, 3]))
    reporter.watch(plan(CHAIN, 3), result(count=[1], proposed=[3]))
    stats = reporter.stats()
    assert stats["output_steps"] == {"0": 2, "256": 2, "512": 1}
    assert stats["output_accepted"] == {"0": 4, "256": 2, "512": 0}


def test_first_drafts_by_tokens_before_them():
    """0, 1,800, 2,700 and 5,400 of them; a row without a draft says nothing, nor does a step without."""
    reporter = Reporter(scheduler(0, 2, 3, 6), credited=credited("NGRAM"))
    reporter.watch(plan(CHAIN, 0, 2, 3, 6), result(count=[4, 2, 1, 1], proposed=[3, 3, 3, 0]))
    reporter.watch(plan(CHAIN, 3, 6), result(count=[3, 1], proposed=[2, 1]))
    reporter.watch(plan(PLAIN, 0, 6), result(count=[1, 1], proposed=[0, 0], depth=0))
    stats = reporter.stats()
    assert stats["context_drafts"] == {"0": 1, "1024": 1, "2048": 2, "4096": 1}
    assert stats["context_first"] == {"0": 1, "1024": 1, "2048": 1, "4096": 0}


def test_a_tree_by_depth():
    reporter = Reporter(scheduler(0, 1, 2, shape=TREE), credited=credited("EAGLE"))
    levels = [[2, 2], [2, 1], [0, 0]]
    reporter.watch(
        plan(TREE, 0, 1, 2), result(count=[3, 1, 1], proposed=[4, 3, 0], depth=2, levels=levels, sources=MODEL)
    )
    counts = reporter.drafters["EAGLE"]
    assert (counts.drafts, counts.proposed, counts.accepted) == (2, 7, 2)
    assert (counts.proposed_at, counts.accepted_at) == ([4, 3], [1, 1])


def test_drafters_are_told_apart():
    """A pair and a predicted output; what two proposed counts for both, and once in all."""
    reporter = Reporter(scheduler(0, 1, 2), credited=credited("EAGLE3+NGRAM"))
    assert list(reporter.drafters) == ["EAGLE3", "NGRAM"]
    sources = [[0, 1, 3, 2], [0, 0, 0, 0], [0, 2, 0, 0]]
    step = result(count=[3, 4, 1], proposed=[3, 3, 1], sources=sources)
    assert [row[:4] for row in step.proposed_by] == [[0, 1, 1, 1], [3, 0, 0, 0], [0, 0, 1, 0]]
    assert step.accepted_source == [[1, 3], [0, 0, 0], []]
    reporter.watch(plan(CHAIN, 0, 1, 2), step)
    eagle, ngram, prediction = (reporter.drafters[name] for name in ("EAGLE3", "NGRAM", "prediction"))
    assert (eagle.drafts, eagle.proposed_at, eagle.accepted_at) == (1, [1, 1, 0], [1, 1, 0])
    assert (ngram.drafts, ngram.proposed_at, ngram.accepted_at) == (2, [1, 1, 1], [0, 1, 0])
    assert (prediction.drafts, prediction.proposed_at, prediction.accepted_at) == (1, [1, 1, 1], [1, 1, 1])
    assert (reporter.drafted.drafts, reporter.drafted.proposed, reporter.drafted.accepted) == (3, 7, 5)
    alone = Reporter(scheduler(1))
    assert not alone.drafters, "nobody drafts for everybody"
    alone.watch(plan(CHAIN, 1), result(count=[4], proposed=[3], sources=0))
    assert list(alone.drafters) == ["prediction"]


def test_a_large_step_is_counted_as_its_rows_are_in_small_ones():
    rng = np.random.default_rng(0)
    rows = 3 * FEW_MARKS // 4  # of a root and up to three drafts
    proposed = rng.integers(0, 4, rows).tolist()
    count = [int(rng.integers(0, n + 1)) + 1 for n in proposed]
    sources = np.hstack((np.zeros((rows, 1), np.int64), rng.integers(0, 8, (rows, 3))))
    whole, parts = (Reporter(scheduler(*range(1, rows)), credited=credited("EAGLE3+NGRAM")) for _ in range(2))
    for reporter, step in ((whole, rows), (parts, 3)):
        for i in range(0, rows, step):
            here, widest = slice(i, i + step), max(proposed[i : i + step])
            one = result(count[here], proposed[here], sources=sources[here, : 1 + widest])
            reporter.watch(plan(CHAIN, *range(rows)[here]), one)
            assert [sum(row) for row in one.proposed_by] == one.proposed.tolist()
    found = whole.stats()
    assert found["drafters"] == parts.stats()["drafters"] and found["drafted"] == parts.stats()["drafted"]
    assert found["drafted"]["accepted"] == sum(count[1:]) - (rows - 1), "the first request has ended"


def test_rows_of_requests_that_have_ended_do_not_count():
    reporter = Reporter(scheduler(1), credited=credited("NGRAM"))
    reporter.watch(plan(CHAIN, 0, 1), result(count=[4, 2], proposed=[3, 3]))
    reporter.watch(plan(CHAIN, 0), result(count=[4], proposed=[3]))
    assert (reporter.total_rows, reporter.total_tokens, reporter.drafters["NGRAM"].proposed) == (1, 2, 3)


def test_the_time_between_steps_is_the_hosts():
    clock = Clock()
    reporter = Reporter(scheduler(0), clock=clock)

    def step(at, seconds, shape=CHAIN):
        clock.now = at
        reporter.watch(plan(shape, 0), result(count=[1], proposed=[0], seconds=seconds, depth=shape.depth))

    step(100.0, 0.5)  # nobody knows what was before
    step(101.0, 0.75)  # a quarter of a second was the host's
    step(101.5, 0.5)  # launched while the step before still ran
    step(101.6, 0.2)  # as measured, longer than possible: not less than nothing
    reporter.pause()
    step(200.0, 0.5, PLAIN)
    stats = reporter.stats()
    assert stats["host_seconds"] == pytest.approx(0.25)
    assert stats["step_seconds"] == pytest.approx({"prefill": 0.0, "plain": 0.5, "speculative": 1.95})


def drafting_step(reporter):
    reporter.watch(plan(CHAIN, 0, 1), result(count=[4, 2], proposed=[3, 3], seconds=0.03))


def plain_step(reporter, seconds, *admission):
    rows = len(admission)
    reporter.watch(plan(PLAIN, *admission), result([1] * rows, [0] * rows, seconds=seconds, depth=0))


def test_the_estimated_speedup():
    """Three tokens a step, which takes 1.5 times as long as a plain one: twice as fast."""
    reporter = Reporter(scheduler(0, 1), interval=4)
    for _ in range(4):
        drafting_step(reporter)
    assert reporter.speedup is None and reporter.stats()["speedup"] is None, "no plain step has been seen"
    for seconds in (5.0, 0.02, 0.02, 0.02):  # the first one is left out
        plain_step(reporter, seconds, 0, 1)
    assert reporter.speedup == pytest.approx(1.0)
    for _ in range(4):
        drafting_step(reporter)
    assert reporter.speedup == pytest.approx(2.0)
    stats = reporter.stats()
    expected = (3 * 0.02 + 4 * 3 * 0.02, 3 * 0.02 + 4 * 0.03)
    assert (stats["plain_seconds"], stats["timed_seconds"]) == pytest.approx(expected)
    for seconds in (10.0, 0.03, 0.03, 0.03):  # held up by something: counts as three times the average at most
        plain_step(reporter, seconds, 0, 1)
    for _ in range(4):
        drafting_step(reporter)
    assert reporter.speedup == pytest.approx(3 * 0.03 / 0.03)
    for _ in range(4):  # of a batch size that was never timed
        reporter.watch(plan(CHAIN, 0), result(count=[4], proposed=[3], seconds=0.03))
    assert reporter.speedup is None


def test_plain_steps_are_timed_in_passing():
    reporter = Reporter(scheduler(0, 1), interval=1)
    for seconds, expected in ((5.0, None), (0.02, 1.0), (0.04, 0.75)):  # the first one is left out
        plain_step(reporter, seconds, 0, 1)
        assert reporter.speedup == (expected and pytest.approx(expected))
    assert reporter.plain_step == 0, "none was of one request"
    for seconds in (5.0, 0.01, 0.03):
        plain_step(reporter, seconds, 0)
    assert reporter.plain_step == reporter.stats()["plain_step"] == pytest.approx(0.02)
    for _ in range(100):
        plain_step(reporter, 0.05, 0, 1, 2)
    reporter.watch(plan(CHAIN, 0, 1), result(count=[1, 1], proposed=[3, 3], seconds=0.1))
    assert reporter.speedup == pytest.approx(0.5, rel=1e-3), "batches of 2 and 3 are of a size"


def test_the_last_interval():
    sched = scheduler(0, 1)
    reporter = Reporter(sched, interval=2)
    for _ in range(3):
        reporter.watch(plan(CHAIN, 0, 1), result(count=[4, 2], proposed=[3, 3], seconds=0.05))
    last = reporter.stats()["last"]
    assert last["accept_length"] == 3.0 and last["accept_rate"] == pytest.approx(2 / 3)
    assert last["gen_throughput"] == pytest.approx(120.0)
    sched.running = []
    assert reporter.stats()["last"]["gen_throughput"] == 0.0


def test_a_line_of_the_log_every_so_many_seconds_of_traffic(caplog):
    clock = Clock()
    reporter = Reporter(scheduler(0, 1), clock=clock, log_seconds=10)

    def lines(step=True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "draftwing"):
            if step:
                reporter.watch(plan(CHAIN, 0, 1), result(count=[4, 2], proposed=[3, 3], seconds=0.05))
            else:
                reporter.pause()
        return [record.getMessage() for record in caplog.records]

    clock.now = 100.0
    assert not lines()
    (line,) = lines(step=False)  # of an answer that was short
    assert line == "2 running, 0 queued: 120.0 tokens/s, acceptance length 3.00, rate 0.67, KV cache 25% used"
    clock.now = 105.0
    assert not lines() and not lines(step=False)
    for clock.now in (300.0, 303.0, 309.8):
        assert not lines()
    clock.now = 310.0
    assert len(lines()) == 1
    for clock.now, count in ((312.0, 0), (319.9, 0), (320.0, 1), (321.0, 0)):
        assert len(lines()) == count
    clock.now = 900.0
    assert len(lines(step=False)) == 1 and not lines(step=False)  # nothing happened since


def test_prompts_and_the_prefix_cache():
    def admit(row, tokens, cached, prompt_len):
        empty = np.empty(0, np.int64)
        slots = np.arange(cached)
        request = GenerationRequest("", [1] * prompt_len, SamplingParams())
        return Admission(row, [1] * tokens, slots if cached else empty, request, seed=0)

    reporter = Reporter(scheduler(0, 1, 2))
    admits = [admit(0, 10, 0, 10), admit(1, 12, 8, 12)]
    chunks = [Chunk(0, 0, 10, True), Chunk(1, 8, 4, True)]
    reporter.watch(plan(PLAIN, 0, 1, kind="prefill", admits=admits, chunks=chunks), result([1, 1], [0, 0], depth=0))
    stats = reporter.stats()
    assert (stats["queried_tokens"], stats["hit_tokens"], stats["prefilled_tokens"]) == (22, 8, 14)
    assert stats["last"]["cache_hit_rate"] == pytest.approx(8 / 22)
    # Back after a retraction with 5 tokens of its answer: its prompt was looked up before.
    again = plan(PLAIN, 2, kind="prefill", admits=[admit(2, 15, 14, 10)], chunks=[Chunk(2, 14, 1, True)])
    reporter.watch(again, result([1], [0], depth=0))
    stats = reporter.stats()
    assert (stats["queried_tokens"], stats["hit_tokens"], stats["prefilled_tokens"]) == (22, 8, 15)


def test_stages_are_measured_now_and_then():
    clock, pending = [0.0], []
    took = {"draft": 0.25, "verify": 1.0, "commit": 0.125}

    def run(stage, *args, keep=False):
        clock[0] += took[stage]
        return stage, args, keep

    def between(begin, end):
        pending.append(begin)
        return end - begin

    times = StepTimes(3, lambda: clock[0], between)
    timed = times.timed(run)
    assert timed("draft", 1) == ("draft", (1,), False) and timed("verify") == ("verify", (), False)
    assert timed("commit", 2, keep=True) == ("commit", (2,), True)
    for _ in range(2):
        for stage in took:
            timed(stage)
    assert times.steps == 0 and not pending, "what a device was asked is not known at once"
    took["verify"] = 2.0
    for _ in range(4):
        for stage in took:
            timed(stage)
    assert times.steps == 2 and times.seconds == {"draft": 0.5, "verify": 3.0, "commit": 0.25}


def test_steps_whose_end_has_not_come_to_pass_wait():
    marks, arrived = iter(range(100)), [-1]
    times = StepTimes(1, lambda: next(marks), arrived=lambda mark: mark <= arrived[0])
    timed = times.timed(lambda stage: None)

    def step() -> None:
        for stage in ("draft", "verify", "commit"):
            timed(stage)

    for _ in range(3):
        step()
    assert times.steps == 0
    arrived[0] = 3  # the end of the first
    step()
    assert times.steps == 1 and times.seconds == dict.fromkeys(("draft", "verify", "commit"), 1)
    arrived[0] = 99
    step()
    assert times.steps == 4


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_is_committed_in_another_way_is_not_measured(every):
    clock = iter(range(100))
    times = StepTimes(every, lambda: next(clock))
    timed = times.timed(lambda stage: None)
    for _ in range(4 * every):
        timed("draft")
        timed("verify")  # and that is all that is seen of it
        for stage in ("draft", "verify", "commit"):
            timed(stage)
    # Every other step is whole; of these all (every 1) or none (every 2: the first of two) was to be measured.
    assert times.steps == (3 if every == 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_totals_are_those_of_the_requests(harness, lag, shape):
    """Proposals and verify steps of an engine are the sums over its requests; so are accepted drafts, but for those
    past the end of an answer."""
    model, prompts = harness.tiny_model(), harness.prompts_for(5)
    params = [harness.greedy(20 + 3 * i) for i in range(5)]
    book = harness.make_book(prompts, harness.plain_answers(model, prompts, params))
    rig = harness.Rig(model, (shape, PLAIN), drafter="oracle", lag=lag, rows=3, book=book, miss=2)
    reporter = Reporter(rig.sched, credited=(("oracle",),) * 4)
    rig.loop._watch = reporter.watch
    metas = [output.meta for output in rig.answer(prompts, params).final.values()]
    counts = reporter.drafters["oracle"]
    assert len(metas) == 5 and counts.drafts > 0
    assert reporter.total_rows == sum(meta["spec_verify_ct"] for meta in metas)
    assert counts.proposed == sum(meta["spec_num_proposed_drafts"] for meta in metas)
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    assert accepted > 20 and accepted <= counts.accepted <= accepted + 5 * shape.depth
    assert sum(counts.accepted_at) == counts.accepted == reporter.total_tokens - reporter.total_rows
    assert sum(counts.proposed_at) == counts.proposed
    assert reporter.queried_tokens == sum(map(len, prompts))
    assert reporter.prefilled_tokens + reporter.hit_tokens == reporter.queried_tokens
