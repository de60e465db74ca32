"""Admission, order of service, time limits and aborts, with results made up by the test in place of a device."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from step_marks import marks_of

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import FORBIDDEN, MARK_SOURCE, NOT_FINITE, Chunk, DraftChunk, DraftDeferral, StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched import planning
from draftwing.sched.planning import divided, fair_decode_batch
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import FixedShape, StepContext
from draftwing.sched.queue import MAX_CANDIDATES
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

TREE = TreeShape(2, 2, 4)


def make(slots=200, rows=4, chunk=16, shape=PLAIN, radix=True, lookahead=0, credited=()):
    policy = FixedShape(shape)
    spans = {s: s.nodes for s in policy.menu}
    config = SchedulerConfig(slots, rows, max(spans.values()), chunk, lookahead, radix=radix, credited=credited)
    return Scheduler(config, policy, spans)


def req(uid, length=5, new=10, first=0, **kw):
    tokens = [first + i for i in range(length)]
    client = kw.pop("client", "")
    request = GenerationRequest(uid, tokens, SamplingParams(max_new_tokens=new), kw.pop("priority", 0), client=client)
    return Req(request, seed=0, max_total=length + new, stop_ids=frozenset(kw.pop("stop_ids", ())), **kw)


def result(plan, tokens=7, count=1):
    rows, shape = len(plan.rows), plan.shape
    counts = np.full(rows, count)
    if plan.kind == "prefill":
        counts = np.asarray([int(chunk.final) for chunk in plan.chunks])
    return StepResult(
        tokens=np.full((rows, shape.max_commit), tokens), count=counts,
        order=np.tile(np.arange(shape.nodes), (rows, 1)), mark=marks_of([range(shape.nodes)] * rows),
        confidence=np.ones(rows, np.int64),
    )  # fmt: skip


def turn(sched, **kw):
    plan = sched.plan()
    if plan is not None:
        sched.commit(plan, result(plan, **kw))
        sched.check_integrity()
    return plan


def test_higher_priority_runs_first_and_equals_in_order_of_arrival():
    sched = make(rows=1)
    for uid, priority in (("a", 0), ("b", 2), ("c", 2), ("d", 1)):
        sched.submit(req(uid, new=1, priority=priority))
    order = []
    while not sched.idle:
        turn(sched)
        order += [out.uid for out in sched.take_outputs() if out.finish_reason]
    assert order == ["b", "c", "d", "a"]


def test_many_short_prompts_of_one_client_are_one_prefill():
    sched = make(slots=3000, rows=100, chunk=400)
    for i in range(90):
        sched.submit(req(str(i), new=1, first=100 * i))
    assert [len(turn(sched).chunks) for _ in range(2)] == [80, 10]
    assert len(sched.take_outputs()) == 90
    sched.submit(req("answer", new=50, first=100_000))
    turn(sched)
    for i in range(90):
        sched.submit(req(str(i), new=1, first=100 * i))
    sched.plan()
    assert len(sched.running) == 1 + MAX_CANDIDATES  # beside one who decodes a few at a time


def test_a_short_prompt_is_not_behind_long_ones():
    sched = make(slots=3000, chunk=100)
    for i in range(3):
        sched.submit(req(f"long{i}", length=600, first=1000 * i))
    turn(sched)
    sched.submit(req("short", length=20, first=5000))
    plan = turn(sched)
    assert [(chunk.length, chunk.final) for chunk in plan.chunks] == [(20, True), (80, False)]  # who draws comes first
    assert {out.uid for out in sched.take_outputs()} == {"short"}


def test_long_prompts_come_to_an_end_beside_any_number_of_short_ones():
    sched = make(slots=3000, chunk=40, radix=False)
    sched.submit(req("long", length=200))
    for plans in range(1, 100):
        sched.submit(req(f"short{plans}", length=40, new=1, first=1000))
        turn(sched)
        if any(out.uid == "long" for out in sched.take_outputs()):
            break
    assert plans <= 200 / 20 + 1, "half of each plan is for it"


def rows_of(sched):
    return Counter(one.request.client for one in sched.running)


def test_who_has_all_rows_makes_room_for_another_client():
    """At once, and no more than for its share. What gives way goes on later; a client alone has all rows."""
    sched = make(slots=2000, rows=8, chunk=100)
    for i in range(20):
        sched.submit(req(f"a{i}", length=5, new=40, first=100 * i, client="a"))
    turn(sched)
    assert rows_of(sched) == {"a": 8}
    sched.submit(req("b", length=3, new=1, first=5000, client="b"))
    turns = 0
    while "b" not in {out.uid for out in sched.take_outputs()}:
        turn(sched)
        turns += 1
    assert turns <= 2 and sched.retractions == 1
    for i in range(20):
        sched.submit(req(f"b{i}", length=5, new=40, first=5000 + 100 * i, client="b"))
    turn(sched)
    assert rows_of(sched) == {"a": 4, "b": 4}
    for i in range(3):
        sched.submit(req(f"c{i}", length=5, new=40, first=9000 + 100 * i, client="c"))
    turn(sched)
    assert rows_of(sched) == {"a": 3, "b": 3, "c": 2}
    ended = set()
    while not sched.idle:
        turn(sched)
        ended |= {out.uid for out in sched.take_outputs() if out.finish_reason}
    assert len(ended) == 20 + 20 + 3


@pytest.mark.slow
def test_rows_are_shared_whoever_asks():
    """Random clients: after every plan nobody has more than its share while another one, with less than its own, waits
    for a row. Where the pool is too small, too, all come to an end."""
    rng, retracted = np.random.default_rng(0), 0
    for trial in range(6):
        rows = int(rng.integers(1, 9))
        slots = int(rng.choice([90, 2000]))
        sched = make(slots=slots, rows=rows, chunk=int(rng.choice([8, 100])))
        asked, ended = 0, 0
        for step in range(400):
            if step < 60 and rng.random() < 0.4:
                client, many = str(rng.integers(3)), int(rng.integers(1, 7))
                for _ in range(many):
                    length, new = int(rng.integers(1, 10)), int(rng.integers(1, 30))
                    sched.submit(req(str(asked), length, new, first=100 * asked, client=client))
                    asked += 1
            plan = sched.plan()
            held, waiting = rows_of(sched), set(sched.waiting.clients)
            share = max(rows // max(len(held.keys() | waiting), 1), 1)
            if slots > 90 and any(held[client] < share for client in waiting):
                assert all(count <= share for count in held.values()), (trial, step, held, waiting)
            if plan is not None:
                sched.commit(plan, result(plan))
                sched.check_integrity()
            ended += sum(out.finish_reason is not None for out in sched.take_outputs())
            if step > 60 and sched.idle:
                break
        retracted += sched.retractions
        while not sched.idle:
            turn(sched)
            ended += sum(out.finish_reason is not None for out in sched.take_outputs())
        assert ended == asked
    assert retracted > 10


@pytest.mark.parametrize(("row", "expected"), [(0.0, 36), (0.01, 36), (0.5, 3), (2.0, 1), (100.0, 1)])
def test_a_step_is_shared_between_clients(row, expected):
    """A client's rows take no more than an equal share of its time, however many it has; all come to an end."""
    sched = make(slots=4000, rows=40, chunk=400)
    sched.choice.policy.seconds = lambda rows, context: 4.0 + row * rows
    for name in "bcde":
        sched.submit(req(name, length=4, new=60, first=10_000 + 100 * ord(name), client=name))
    for i in range(80):
        sched.submit(req(f"a{i}", length=4, new=5, first=100 * i, client="a"))
    ended, most, by_row = [], 0, {}
    while not sched.idle:
        plan = turn(sched)
        by_row |= sched.kv.by_row  # those of its rows may have ended with it
        counts = Counter(by_row[row].request.client for row in plan.rows.tolist())
        if plan.kind == "tree" and not {*"bcde"} & {*ended}:
            assert {name: counts[name] for name in "bcde"} == dict.fromkeys("bcde", 1), "others are in each step"
            assert counts["a"] <= 1 or 5 * row * counts["a"] <= 4.0 + row * sum(counts.values()) + 1e-9
            most = max(most, counts["a"])
        ended += [out.uid for out in sched.take_outputs() if out.finish_reason]
    assert len(ended) == 84 and most == expected


def test_a_client_alone_and_steps_of_unknown_cost_are_not_cut():
    reqs = [req(f"a{i}", client="a") for i in range(30)]
    assert fair_decode_batch(reqs, reqs, lambda rows, context: float(rows)) is reqs
    both = [*reqs, req("b", client="b")]
    assert fair_decode_batch(both, both, lambda rows, context: None) is both
    assert len(fair_decode_batch(both, both, lambda rows, context: float(rows))) == 2
    assert fair_decode_batch(reqs, both, lambda rows, context: float(rows)) is reqs, "nobody else is in this step"
    equal = [req(f"{client}{i}", client=client) for i in range(9) for client in "ab"]
    assert fair_decode_batch(equal, equal, lambda rows, context: float(rows)) is equal
    # Of the other client's rows, which take 1 s each, 5 are half of the 10 s that a step with them takes.
    found = fair_decode_batch(both, both, lambda rows, context: 4.0 + rows)
    assert [one.uid for one in found] == [*(f"a{i}" for i in range(5)), "b"]


def test_nobody_waits_for_who_has_a_lower_priority():
    high = [req(f"a{i}", client="a", priority=10) for i in range(16)]
    low = [req(f"b{i}", client="b") for i in range(8)]

    def taking_part(ready: list[Req]) -> Counter[str]:
        return Counter(one.request.client for one in fair_decode_batch(ready, ready, lambda rows, context: 5.0 + rows))

    assert taking_part([*high, low[0]]) == {"a": 16, "b": 1}
    # 24 rows take 29 s, of which each of two may have a half.
    assert taking_part([*low, *high]) == {"a": 16, "b": 8}
    assert taking_part([*low, *high, req("c", client="c")]) == {"a": 16, "b": 8, "c": 1}
    many = [req(f"d{i}", client="d") for i in range(30)]
    assert taking_part([*high, *many]) == {"a": 16, "d": 21}, "of 42 s a half"
    assert taking_part([*high, *many, low[0]]) == {"a": 16, "d": 11, "b": 1}, "of 33 s a third"


def test_a_fixed_shape_knows_what_steps_take():
    policy = FixedShape(PLAIN)
    plan = SimpleNamespace(seconds=3.0, threads=1.0)
    assert policy.seconds(8, 0) is None
    for _ in range(5):
        policy.record(PLAIN, StepContext([0] * 8), plan)
    assert policy.seconds(8, 0) == 3.0


def test_a_prefill_is_shared_between_clients():
    sched = make(slots=9000, rows=8, chunk=120)
    for i in range(3):
        sched.submit(req(f"a{i}", length=300, first=400 * i, client="a"))
    sched.submit(req("b", length=300, first=2000, client="b"))
    sched.submit(req("c", length=30, first=3000, client="c"))
    plan = sched.plan()
    lengths = {sched.kv.by_row[chunk.row].uid: chunk.length for chunk in plan.chunks}
    assert lengths.pop("c") == 30 and lengths.pop("b") == 45 and sum(lengths.values()) == 45
    sched.submit(req("first", length=500, first=4000, client="a", priority=1))
    assert sched.plan().kind == "tree"  # of c
    plan = sched.plan()
    assert [chunk.length for chunk in plan.chunks] == [120] and plan.rows.tolist() == [sched._by_uid["first"].row]


def test_no_part_of_a_prefill_is_left_over():
    """Whoever asks for what: as many tokens as fit, none twice."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        todo = []
        for i in range(rng.integers(1, 8)):
            one = req(
                str(i), length=int(rng.integers(1, 60)), client=str(rng.integers(3)), priority=int(rng.integers(2))
            )
            one.arrival = i
            todo.append(one)
        todo.sort(key=lambda r: r.rank)
        budget = int(rng.integers(1, 200))
        parts = divided(budget, todo, PrefillBudget(), [])
        assert sum(length for _, length in parts) == min(budget, sum(len(one.tokens) for one in todo))
        assert all(0 < length <= len(one.tokens) for one, length in parts)
        assert [one.uid for one, _ in parts] == [one.uid for one in todo if one in [r for r, _ in parts]]


def test_shares_of_time_are_no_more_tokens_than_a_prefill_may_have():
    budget = PrefillBudget()
    for price in (1.0004e-6, 1.4e-9, 2.3456e-5):
        budget._token = price
        todo = [req("long", length=9000), req("short", length=10, client="b")]
        assert sum(length for _, length in divided(8192, todo, budget, [])) == 8192


@pytest.mark.parametrize("sent", [0, 100])
def test_shares_of_prompts_that_cost_alike_are_found_at_once(sent, monkeypatch):
    """Of hundreds of texts that wait for their vectors, one of which has begun."""
    prefills, calls, once = PrefillBudget(), [], planning._divided
    prefills._token, prefills._key = 3e-6, 1e-10
    todo = [req(str(i), length=10 + i) for i in range(250)]
    todo[0].tokens, todo[0].sent = [0] * (sent + 10), sent
    monkeypatch.setattr(planning, "_divided", lambda *args: calls.append(args) or once(*args))
    assert 8100 <= sum(length for _, length in divided(8192, todo, prefills, [])) <= 8192
    assert len(calls) == 2


@pytest.mark.parametrize("sent", [(0,), (30_000,), (0, 30_000), (30_000, 100, 7)])
def test_tokens_of_long_contexts_fill_a_prefill_too(sent):
    """They take longer, and shares are of time; where there is time, there are as many of them."""
    prefills = PrefillBudget()
    prefills._token, prefills._key = 2e-5, 1.3e-9
    todo = [req(str(i), length=sent + 9000, client=str(i)) for i, sent in enumerate(sent)]
    for one, done in zip(todo, sent, strict=True):
        one.sent = done
    parts = dict(divided(1016, todo, prefills, []))
    assert 1016 * (0.95 if len(sent) > 1 else 1) <= sum(parts.values()) <= 1016
    took = [parts[one] * prefills.token_seconds(one.sent) for one in todo]
    assert max(took) < 1.05 * min(took)


@pytest.mark.parametrize(
    ("most", "prompts"),
    [
        (248, [(5, 0), (1, 120_000), (5, 0), (5, 0), (9000, 120_000)]),
        (8, [(9000, sent) for sent in (0, 0, 0, 30_000, 30_000, 120_000, 120_000, 120_000, 120_000, 120_000)]),
    ],
)
def test_a_prefill_is_filled_by_whoever_has_tokens_left_and_no_further(most, prompts):
    """Short prompts beside a long one; more clients than tokens, of which each would be rounded up to one."""
    prefills = PrefillBudget()
    prefills._token, prefills._key = 2e-5, 1.3e-9
    todo = [req(str(i), length=sent + unsent, client=str(i)) for i, (unsent, sent) in enumerate(prompts)]
    for one, (_, sent) in zip(todo, prompts, strict=True):
        one.sent = sent
    assert 0.9 * most <= sum(length for _, length in divided(most, todo, prefills, [])) <= most


@pytest.mark.parametrize(
    ("prompts", "given"),
    [
        ([2000, 2000], 512),  # what is over is left for later, as there will be more prefills
        ([900, 60], 560),  # nothing would be left that is worth another one
        ([280, 280, 280, 280], 560),  # none is cut off
        ([60, 30], 90),  # all of it
    ],
)
def test_a_prefill_that_is_cut_off_is_as_long_as_what_it_is_padded_to(prompts, given):
    """Of 560 tokens the device would make 768."""
    prefills = PrefillBudget()
    prefills._start, prefills._token = 0.004, 2e-5
    todo = [req(str(i), length=length) for i, length in enumerate(prompts)]
    parts = dict(divided(560, todo, prefills, [], 0.0, (64, 256, 512, 768)))
    assert sum(parts.values()) == given and all(0 < length <= len(one.tokens) for one, length in parts.items())


def test_a_prefill_is_padded_where_that_makes_more_tokens_a_second():
    prefills = PrefillBudget()
    prefills._start, prefills._token = 0.004, 2e-5
    parts = divided(700, [req("long", length=4000)], prefills, [], 0.0, (64, 512, 768))
    assert parts[0][1] == 700
    assert divided(5000, [req("long", length=9000)], prefills, [], 0.0, (64, 512, 768))[0][1] == 5000, "it is launched"


def test_prefill_and_decode_alternate():
    sched = make(chunk=4)
    sched.submit(req("a", length=4))
    assert turn(sched).kind == "prefill"
    sched.submit(req("b", length=16, first=50))
    kinds = [turn(sched).kind for _ in range(8)]
    assert kinds[:7] == ["tree", "prefill", "tree", "prefill", "tree", "prefill", "tree"]


def test_a_prompt_goes_on_where_the_only_request_that_decodes_is_preempted():
    sched = make(slots=30, chunk=2, radix=False)
    sched.submit(req("long", length=20, new=5, first=100))
    sched.submit(req("short", length=3, new=20))
    kinds = []
    while not sched.idle:
        running = bool(sched.running)
        plan = turn(sched)
        assert plan is not None or not running
        kinds.append(plan.kind)
    assert sched.retractions and {"prefill", "tree"} <= set(kinds)


def test_beside_requests_that_decode_prefills_are_short():
    sched = make(slots=9000, chunk=4000)
    for tokens in range(10, 2000, 60):
        sched._prefills.record_step(0.004)
        sched._prefills.record(
            [Chunk(0, 0, tokens, True)], 0.004 + 2e-5 * tokens
        )  # so 400 tokens take 3 times the shortest
    sched.submit(req("a", length=900))
    assert [chunk.length for chunk in turn(sched).chunks] == [900]  # nobody waits for it
    sched.submit(req("b", length=600, first=2000))
    sched.submit(req("c", length=615, first=4000))
    plans = [turn(sched) for _ in range(8)]
    lengths = [[chunk.length for chunk in plan.chunks] for plan in plans if plan.kind == "prefill"]
    assert lengths == [[400], [200, 200], [415]]


def test_timeout_ends_waiting_and_running_requests(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("draftwing.sched.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    sched = make(rows=1)
    sched.submit(req("runs", deadline=101.0))
    sched.submit(req("waits", deadline=101.0))
    turn(sched)
    sched.take_outputs()
    now[0] = 102.0
    assert turn(sched) is None
    ended = {out.uid: out.finish_reason for out in sched.take_outputs()}
    assert set(ended) == {"runs", "waits"}
    assert all(reason["type"] == "abort" and "timeout" in reason["message"] for reason in ended.values())
    assert sched.idle


def test_a_deadline_is_of_one_request_and_forgotten_with_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("draftwing.sched.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    sched = make(rows=1)
    for _ in range(1000):
        sched.submit(req("again", deadline=101.0))
        sched.abort("again")
    assert len(sched._deadlines) < 100
    sched.submit(req("again", deadline=200.0))
    sched.take_outputs()
    now[0] = 102.0
    turn(sched)
    assert not any(out.finish_reason for out in sched.take_outputs())
    now[0] = 201.0
    turn(sched)
    assert [out.finish_reason["type"] for out in sched.take_outputs()] == ["abort"]


def test_a_result_for_a_row_that_was_given_away_is_dropped():
    sched = make(rows=1)
    sched.submit(req("old"))
    turn(sched)
    plan = sched.plan()  # in flight for "old"
    sched.abort("old")
    sched.submit(req("new", first=30))
    following = sched.plan()  # "new" takes the same row
    assert following.rows.tolist() == plan.rows.tolist()
    sched.take_outputs()
    sched.commit(plan, result(plan, tokens=99))
    assert sched.results.stale == 1 and not sched.take_outputs()
    sched.commit(following, result(following, tokens=55))
    assert [out.token_ids for out in sched.take_outputs()] == [[55]]


def test_prompts_with_a_common_beginning_prefilled_at_once_end_up_sharing_one_copy():
    sched = make(chunk=64)
    for uid, last in (("a", 100), ("b", 101)):
        one = req(uid, length=30)
        one.tokens[-1] = last
        sched.submit(one)
    turn(sched)
    owned = [int(r.owned[: r.covered].sum()) for r in sched.running]
    assert owned == [0, 0] and sched.kv.radix.size == 31
    plan = sched.plan()  # b's row gets the slots that it shares now
    b = next(r for r in sched.running if r.uid == "b")
    assert any(row == b.row and start == 0 and len(slots) == 29 for row, start, slots in plan.new_slots)
    assert np.array_equal(sched.running[0].slots[:29], sched.running[1].slots[:29])


def test_of_a_copy_that_is_shared_the_drafter_sees_what_it_has_not_seen():
    """It made its keys of b's prompt in slots that are given away for those of a, of which it saw nothing."""
    config = SchedulerConfig(
        200, 4, TREE.nodes, 30, skips_extend=frozenset([PLAIN]), deferral=DraftDeferral(0, 100, from_tokens=True)
    )
    sched = Scheduler(config, FixedShape(TREE), {shape: shape.nodes for shape in FixedShape(TREE).menu})
    for uid, last in (("a", 100), ("b", 101)):
        one = req(uid, length=30)
        one.tokens[-1], one.skipped = last, uid == "a"
        sched.submit(one)
    plans = [sched.plan() for _ in range(3)]  # no result is known before the last
    assert [plan.kind for plan in plans] == ["prefill", "tree", "prefill"]
    for plan in plans:
        assert plan.shown == ()
        sched.commit(plan, result(plan))
    (row,) = [one.row for one in sched.running if one.uid == "b"]
    plan = sched.plan()
    assert plan.kind == "tree" and plan.shown == (DraftChunk(row, 0, 30, 0),)


def test_equal_prompts_are_prefilled_once():
    sched = make(chunk=64)
    for uid in "abc":
        sched.submit(req(uid, length=30, new=1))
    sched.submit(req("d", length=7, new=1, first=50))
    first = turn(sched)
    assert [chunk.length for chunk in first.chunks] == [30, 7], "others wait for its KV, but nobody else for them"
    second = turn(sched)
    assert [chunk.length for chunk in second.chunks] == [1, 1]
    assert sched.idle
    cached = {out.uid: out.meta["cached_tokens"] for out in sched.take_outputs() if out.finish_reason}
    assert cached == {"a": 0, "b": 29, "c": 29, "d": 0}


def test_who_waits_for_a_prompt_in_the_making_is_not_passed_by_later_ones():
    sched = make(slots=6000, rows=4, chunk=64)
    sched.submit(req("first", 210, 300))
    sched.submit(req("alike", 220, 300))
    for number in range(6):
        sched.submit(req(f"other {number}", 30, 300, first=1000 * (number + 1)))
    begun: dict[str, int] = {}
    for step in range(20):
        turn(sched)
        for one in sched.running:
            begun.setdefault(one.uid, step)
    assert list(begun) == ["first", "other 0", "other 1", "alike"] and begun["alike"] > begun["other 1"]


def test_rows_that_are_kept_for_a_prompt_are_no_clients_share():
    """Beside a crowd behind one prompt whoever has less than its share gets it at once."""
    sched = make(slots=20000, rows=8, chunk=16)
    for number in range(8):
        sched.submit(req(f"a{number}", 5, 400, first=100000 + 100 * number, client="a"))
    turn(sched)
    assert rows_of(sched) == {"a": 8}
    for number in range(3):
        sched.submit(req(f"b{number}", 900, 300, first=0, client="b"))  # equal prompts
    turn(sched)
    for number in range(3):
        sched.submit(req(f"c{number}", 5, 400, first=50000 + 100 * number, client="c"))
    turn(sched)
    assert rows_of(sched)["c"] == 2, "of eight rows for three clients"
    assert rows_of(sched)["b"] == 1, "who waits for its prompt has none"
    assert sched.kv.free_rows == 0, "and they take none from who has more than its share before they need it"


def test_kept_rows_count_as_their_client_s():
    sched = make(slots=40000, rows=8, chunk=16)
    for number in range(8):
        sched.submit(req(f"a{number}", 4000 + number, 5, first=0, client="a"))  # one long document
    for number in range(12):  # the others' turns go on meanwhile
        sched.submit(req(f"t{number}", 5, 1, first=500000 + 1000 * number, client="b"))
    for _ in range(31):
        turn(sched)
    for client, count, first in ("b", 2, 200000), ("d", 1, 300000):
        for number in range(count):
            sched.submit(req(f"{client}{number}", 5, 400, first=first + 1000 * number, client=client))
    turn(sched), turn(sched)
    for number in range(2):
        sched.submit(req(f"c{number}", 5, 400, first=400000 + 1000 * number, client="c"))
    turn(sched), turn(sched)
    assert rows_of(sched) == {"a": 1, "b": 2, "c": 2, "d": 1}


def test_half_of_the_rows_are_not_kept_for_a_prompt_in_the_making():
    sched = make(slots=20000, rows=8, chunk=64)
    for number in range(8):
        sched.submit(req(f"a{number}", 4000 + number, 5, first=0))  # one long document, eight questions
    for number in range(40):
        sched.submit(req(f"short{number}", 20, 5, first=100000 + 1000 * number))
    ended = []
    for _ in range(60):  # the document takes 63 steps of its own
        turn(sched)
        ended += [output.uid for output in sched.take_outputs() if output.finish_reason]
    assert len(ended) > 20 and all(uid.startswith("short") for uid in ended)


def test_what_a_crowd_begins_with_is_prefilled_once():
    """Twelve requests behind three system prompts of 100 tokens, all there at once."""
    sched = make(slots=3000, rows=12, chunk=64)
    for i in range(12):
        first = 1000 * (i % 3)
        prompt = [*range(first, first + 100), 5000 + i]
        request = GenerationRequest(str(i), prompt, SamplingParams(max_new_tokens=3))
        sched.submit(Req(request, 0, len(prompt) + 3, frozenset()))
    prefilled = 0
    while not sched.idle:
        plan = turn(sched)
        prefilled += sum(chunk.length for chunk in plan.chunks)
        sched.check_integrity()
    assert prefilled == 3 * 100 + 12


def test_who_waits_for_a_prefill_that_is_aborted_goes_on_by_itself():
    sched = make(chunk=8)
    for uid in "ab":
        sched.submit(req(uid, length=30, new=1))
    plan = sched.plan()
    assert len(plan.rows) == 1
    sched.abort("a")
    sched.commit(plan, result(plan))
    for _ in range(6):
        turn(sched)
    assert sched.idle and [out.uid for out in sched.take_outputs() if out.finish_reason] == ["a", "b"]


def test_salts_do_not_share_prefixes():
    sched = make()
    for uid, salt in (("a", 0), ("b", 5), ("c", 5)):
        sched.submit(req(uid, length=8, new=1, salt=salt))
        turn(sched)
    cached = {out.uid: out.meta["cached_tokens"] for out in sched.take_outputs()}
    assert cached == {"a": 0, "b": 0, "c": 7}


def test_stop_strings_end_a_request_where_the_scanner_says():
    class Scanner:
        seen = 0
        failed = None

        def push(self, token):
            self.seen += 1
            return "END" if self.seen == 3 else None

    sched = make(shape=TreeShape(3, 1, 4))
    sched.submit(req("a", scanner=Scanner()))
    turn(sched)
    turn(sched, count=4)
    out = sched.take_outputs()
    assert [o.token_ids for o in out] == [[7], [7, 7]]
    assert out[-1].finish_reason == {"type": "stop", "matched": "END"}


def test_spec_counters_count_what_was_really_proposed_and_accepted():
    sched = make(shape=TreeShape(3, 1, 4))
    sched.submit(req("a", new=9))
    turn(sched)
    turn(sched, count=4)
    turn(sched, count=1)
    turn(sched, count=3)
    meta = sched.take_outputs()[-1].meta
    assert (meta["spec_verify_ct"], meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]) == (3, 9, 5)
    assert meta["spec_correct_drafts_histogram"] == [1, 0, 1, 1]
    assert meta["spec_accept_length"] == pytest.approx(8 / 3) and meta["spec_accept_rate"] == pytest.approx(5 / 9)
    assert meta["spec_by_output_position"] == [[0, 3, 5]]


def test_drafts_are_counted_by_where_in_the_answer_they_are():
    """A step counts where its first token is: in the first 256 tokens of the answer, the next 256, the next 512."""
    sched = make(shape=TreeShape(3, 1, 4), slots=2000)
    sched.submit(req("a", new=520))
    turn(sched)
    for _ in range(65):
        turn(sched, count=4)  # from 1, 5, ... 257
    for _ in range(259):
        turn(sched, count=1)  # from 261 on
    meta = sched.take_outputs()[-1].meta
    assert meta["spec_by_output_position"] == [[0, 64, 192], [256, 252, 3], [512, 8, 0]]


def test_drafts_count_for_who_proposed_them():
    """What both of a pair proposed counts for both."""
    shape = TreeShape(3, 1, 4)
    sched = make(shape=shape, credited=(("prediction",), ("A",), ("B",), ("A", "B")))
    sched.submit(req("a", new=8))
    turn(sched)
    for sources, count in (((0, 1, 3, 2), 3), ((0, 2, 2, 2), 1), ((0, 1, 2, 3), 4)):
        plan = sched.plan()
        step = result(plan, count=count)
        sched.commit(plan, replace(step, mark=step.mark + (np.asarray([sources]) << MARK_SOURCE)))
    meta = sched.take_outputs()[-1].meta
    assert meta["spec_drafters"] == {"A": {"proposed": 4, "accepted": 4}, "B": {"proposed": 7, "accepted": 3}}
    assert (meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]) == (9, 5)


def uploads(ahead, slots=400, rows=3, new=60):
    """Steps of requests that accept one draft each, and those of them that hand out slots."""
    policy = FixedShape(TreeShape(2, 1, 3))
    spans = {s: s.nodes for s in policy.menu}
    sched = Scheduler(SchedulerConfig(slots, rows, 3, 16, ahead=ahead), policy, spans)
    for i in range(rows):
        sched.submit(req(str(i), length=5 + i, new=new, first=20 * i))
    steps = handed = 0
    while not sched.idle:
        most = max((r.max_total for r in sched.running), default=0)
        plan = turn(sched, count=2)
        if plan is not None and plan.kind == "tree":
            steps += 1
            handed += bool(plan.new_slots)
            assert all(r.covered <= max(r.bound + 3, most) for r in sched.running)
    sched.kv.check_idle()
    return steps, handed, sched.retractions


def test_slots_in_advance_leave_most_steps_without_uploads():
    steps, handed, _ = uploads(ahead=0)
    assert handed > 0.9 * steps
    steps, handed, _ = uploads(ahead=16)
    assert 1 <= handed <= steps / 4


def test_slots_in_advance_cost_nobody_a_preemption():
    assert uploads(ahead=16, slots=140)[2] <= uploads(ahead=0, slots=140)[2]
    assert uploads(ahead=16, slots=80)[2] > 0, "not so tight that it says anything"


def test_what_is_not_finite_behind_where_guidance_failed_is_not_read_again():
    """The step ends by its first token, which the host refuses; the KV of what it gave after that is spoilt all the
    same."""
    sched = make(shape=TreeShape(2, 1, 3))
    sched.submit(req("x"))
    turn(sched)
    plan = sched.plan()
    spoilt = result(plan, count=2)
    spoilt.tokens[0, 1] |= NOT_FINITE
    guidance = SimpleNamespace(until_failure=lambda i, new: ([], "why"))
    sched.commit(plan, spoilt, guidance)
    assert [out.finish_reason["message"] for out in sched.take_outputs() if out.finish_reason] == ["why"]
    assert sched.kv.take_quarantined() is not None
    sched.check_integrity()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_that_are_not_finite_are_told_so_whatever_was_made_of_them(count):
    """Edits leave nothing of such logits, either: the drafts before are the answer's all the same, and nobody reads its
    KV again."""
    ends = []
    for mark in (NOT_FINITE, NOT_FINITE | FORBIDDEN):
        sched = make(shape=TreeShape(2, 1, 3))
        sched.submit(req("x"))
        turn(sched)
        sched.take_outputs()
        plan = sched.plan()
        spoilt = result(plan, count=count)
        spoilt.tokens[0, count - 1] |= mark
        sched.commit(plan, spoilt)
        news = sched.take_outputs()
        ends.append(([token for out in news for token in out.token_ids], news[-1].finish_reason))
        assert len(ends[-1][0]) == count - 1 and ends[-1][1]["status_code"] == 500
        sched.check_integrity()
    assert ends[0] == ends[1]
