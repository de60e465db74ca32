"""Grammars whose masks take long, with results made up by the test."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from test_scheduler import make, req, result

from draftwing.errors import RequestError
from draftwing.sched import guidance
from draftwing.sched.guidance import AsyncMask, Workers, await_any


class Grammar:
    """Everything may follow; a mask takes `cost` seconds and, while `gate` is closed, for ever."""

    complete = done = False
    ends_by_stop_id = True

    def __init__(self, clock, cost=0.0):
        self.clock, self.cost = clock, cost
        self.taken = []
        self.gate = threading.Event()
        self.gate.set()

    def mask(self, out=None):
        self.gate.wait(10)
        self.clock[0] += self.cost
        return np.full(4, 0xFFFFFFFF, np.uint32)

    def advance(self, token):
        self.taken.append(token)
        return True

    def run(self, tokens):
        self.taken += tokens
        return len(tokens)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(guidance, "time", SimpleNamespace(thread_time=lambda: now[0]))
    return now


def until_ready(one):
    while not one.ready():
        await_any([one.pending()], 1)


def test_quick_grammars_stay_in_the_steps(clock):
    grammar = Grammar(clock, 0.0001)
    one = AsyncMask(grammar, Workers())
    until_ready(one)
    assert one.mask is not None, "the first mask is always worked out while steps run"
    for token in range(100):
        assert one.follow(token) and not one.slow and one.ready() and one.mask is None
        one.charge(0.0015)  # as the guidance of a step does
    assert grammar.taken == list(range(100))


def test_slow_grammars_are_worked_out_beside_the_steps_until_they_are_quick(clock):
    grammar = Grammar(clock, 0.03)
    one = AsyncMask(grammar, Workers())
    until_ready(one)
    for token in range(5):
        assert one.slow and one.mask is not None and one.follow(token)
        assert len(grammar.taken) == token, "the newest token is taken during the steps, too"
        until_ready(one)
        assert len(grammar.taken) == token + 1
    grammar.cost = 0.0
    for token in range(5, 80):
        one.follow(token)
        until_ready(one)
    assert not one.slow and grammar.taken == list(range(80))


def test_an_illegal_token_is_found_by_the_mask(clock):
    one = AsyncMask(Grammar(clock, 0.03), Workers())
    until_ready(one)
    one.mask[1] = 1 << 3
    assert not one.follow(40)
    one = AsyncMask(Grammar(clock, 0.03), Workers())
    until_ready(one)
    one.mask[1] = 1 << 3
    assert one.follow(35)


def test_a_grammar_has_a_limit_in_the_long_run(clock):
    one = AsyncMask(Grammar(clock, 2 * guidance.ALLOWANCE), Workers())
    with pytest.raises(RequestError, match="takes too long"):
        for token in range(200):
            until_ready(one)
            one.follow(token)
    assert 0.5 * guidance.LIMIT / guidance.ALLOWANCE < token < 2 * guidance.LIMIT / guidance.ALLOWANCE


def test_others_do_not_wait_for_a_slow_grammar(clock):
    grammar = Grammar(clock, 0.03)
    sched = make(slots=400)
    sched.submit(req("slow", grammar=grammar, new=20))
    sched.submit(req("quick", first=50, new=100))
    slow = sched._by_uid["slow"]
    plans = []

    def turn():
        plan = sched.plan()
        if plan is not None:
            plans.append({sched.kv.by_row[row].uid for row in plan.rows.tolist()})
            sched.commit(plan, result(plan))
            sched.check_integrity()

    while len(slow.tokens) < 7:
        turn()
        sched.rest()
    grammar.gate.clear()
    done, before = len(slow.tokens), len(plans)
    for _ in range(5):
        turn()
    assert len(plans) == before + 5 and all("quick" in uids for uids in plans[before:])
    assert len(slow.tokens) <= done + 1, "one mask may have been under way"
    grammar.gate.set()
    while not sched.idle:
        turn()
        sched.rest()
    assert {out.uid: len(out.token_ids) for out in sched.take_outputs()} and len(slow.tokens) == 25


def test_a_request_that_waits_for_its_mask_can_be_aborted(clock):
    grammar = Grammar(clock)
    grammar.gate.clear()
    sched = make()
    sched.submit(req("slow", grammar=grammar))
    assert sched.plan() is None
    sched.abort("slow")
    assert sched.idle
    sched.check_integrity()
    grammar.gate.set()
