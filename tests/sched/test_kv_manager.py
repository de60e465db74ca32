"""Slots and rows of requests, vs a count of what is left."""

from __future__ import annotations

import numpy as np
import pytest

from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.inflight_prefixes import MIN_SHARED_TOKENS, InflightPrefixes
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.req import Req, ReqState

SLOTS, ROWS, ROOM = 64, 3, 4


def manager(cache: bool = True) -> KVManager:
    return KVManager(SLOTS, ROWS, lookahead=0, cache=cache, room=ROOM)


def request(uid: str, tokens: list[int]) -> Req:
    return Req(GenerationRequest(uid, tokens, SamplingParams(max_new_tokens=8)), 0, len(tokens) + 8, frozenset())


def admit(kv: KVManager, req: Req, reserve: int = 0) -> bool:
    admitted = kv.admit(req, np.asarray(req.tokens, np.int64), reserve)
    if admitted:
        req.state = ReqState.PREFILL
    return admitted


def prefill(kv: KVManager, req: Req) -> None:
    assert kv.cover(req, len(req.tokens))
    req.kv = req.sent = len(req.tokens)
    kv.share(req)


def test_all_comes_back() -> None:
    kv = manager()
    reqs = [request(name, list(range(10 * i, 10 * i + 10))) for i, name in enumerate("abc")]
    for req in reqs:
        assert kv.free_rows and admit(kv, req)
        prefill(kv, req)
        kv.check_integrity()
    assert not kv.free_rows and kv.obtainable == SLOTS - 30
    for req in reqs:
        kv.release(req)
        kv.check_integrity()
    kv.check_idle()
    assert kv.obtainable == SLOTS and kv.radix.size == 30
    kv.flush()
    assert kv.pool.available == SLOTS


def test_equal_prompts_wait_for_the_first() -> None:
    kv, tokens = manager(), np.arange(10)
    first, second = request("a", tokens.tolist()), request("b", tokens.tolist())
    assert not kv.prefix_being_computed(first, tokens) and admit(kv, first)
    assert kv.prefix_being_computed(second, tokens)
    prefill(kv, first)
    assert not kv.prefix_being_computed(second, tokens) and admit(kv, second)
    assert second.kv == second.cached_tokens == 9 and kv.pool.available == SLOTS - 10
    assert np.array_equal(first.slots[:9], second.slots[:9])
    alone = manager(cache=False)
    assert admit(alone, request("a", tokens.tolist())) and not alone.prefix_being_computed(second, tokens)


def test_an_equal_prompt_is_found_among_many_that_begin_like_it() -> None:
    kv = KVManager(5000, 32, lookahead=0, cache=True, room=ROOM)
    for number in range(20):
        assert admit(kv, request(f"other {number}", [*range(MIN_SHARED_TOKENS), *[3000 + number] * 200]))
    same = [*range(MIN_SHARED_TOKENS), *range(4000, 4200)]
    tokens, first = np.array(same), request("first", same)
    assert not kv.prefix_being_computed(first, tokens) and admit(kv, first)
    assert kv.prefix_being_computed(request("b", same), tokens) and not kv.prefix_being_computed(
        request("b", same), tokens, held={first}
    )
    for change, waits in ({"priority": 1}, False), ({"client": "other"}, False), ({"priority": -1}, True):
        asked = GenerationRequest("c", same, SamplingParams(max_new_tokens=8), **change)
        assert kv.prefix_being_computed(Req(asked, 0, len(same) + 8, frozenset()), tokens) == waits, change
    kv.release(first)
    assert not kv.prefix_being_computed(request("b", same), tokens)


@pytest.mark.parametrize(
    "common, own, waits",
    [
        (MIN_SHARED_TOKENS, 4, True),
        (MIN_SHARED_TOKENS - 1, 4, False),
        (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS, True),
        (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS + 1, False),
        (200, 150, True),
    ],
)
def test_who_begins_like_a_prompt_in_the_making_waits_where_it_is_worth_it(common: int, own: int, waits: bool) -> None:
    """Until all of it is there; not for one of which more than twice as much is left as is saved."""
    kv = KVManager(1000, ROWS, lookahead=0, cache=True, room=ROOM)
    tokens = np.array([*range(common), 2000, 2001])
    first, second = request("a", [*range(common), *range(3000, 3000 + own)]), request("b", tokens.tolist())
    assert admit(kv, first) and kv.prefix_being_computed(second, tokens) == waits
    assert not kv.prefix_being_computed(second, tokens, held={first})
    prefill(kv, first)
    assert not kv.prefix_being_computed(second, tokens) and admit(kv, second) and second.kv == common
    kv.check_integrity()


def test_others_prompts_do_not_hide_one_s_own() -> None:
    """However many clients begin alike."""
    kv = KVManager(50000, 16, lookahead=0, cache=True, room=ROOM)

    def asked(name: str, last: int, client: str) -> Req:
        request = GenerationRequest(name, [*range(400), last], SamplingParams(max_new_tokens=8), client=client)
        return Req(request, 0, 409, frozenset())

    for number in range(9):
        assert admit(kv, asked(f"a{number}", 9000 + number, "a"))
    first, second = asked("b0", 8000, "b"), asked("b1", 8001, "b")
    assert not kv.prefix_being_computed(first, first.array) and admit(kv, first)
    assert kv.prefix_being_computed(second, second.array)


def test_nobody_waits_for_what_is_cached_nor_for_others_who_may_get_less_time() -> None:
    kv, tokens = KVManager(1000, ROWS, lookahead=0, cache=True, room=ROOM), np.arange(100)
    cached = request("cached", list(range(90)))
    assert admit(kv, cached)
    prefill(kv, cached)
    assert admit(kv, request("a", [*range(95), 3000]))  # five tokens more would be saved
    assert not kv.prefix_being_computed(request("b", tokens.tolist()), tokens)
    kv, first = KVManager(1000, ROWS, lookahead=0, cache=True, room=ROOM), request("a", [*range(95), 3000])
    assert admit(kv, first)
    for change, waits in ({}, True), ({"priority": 1}, False), ({"priority": -1}, True), ({"client": "other"}, False):
        asked = GenerationRequest("b", tokens.tolist(), SamplingParams(max_new_tokens=8), **change)
        assert kv.prefix_being_computed(Req(asked, 0, 108, frozenset()), tokens) == waits, change
    kv.release(first)
    assert not kv.prefix_being_computed(request("b", tokens.tolist()), tokens)


def test_who_does_not_fit_changes_nothing() -> None:
    kv = manager()
    assert admit(kv, request("a", list(range(10)))) and kv.cover(kv.by_row[0], 10)
    other = request("b", list(range(100, 140)))
    left = SLOTS - 10
    assert not admit(kv, other, reserve=left - 40 - ROOM + 1)
    assert other.row == -1 and kv.free_rows and len(kv.by_row) == 1 and kv.radix.locked == 0
    assert admit(kv, other, reserve=left - 40 - ROOM)
    assert not kv.cover(other, left + 1) and other.covered == 0
    assert kv.cover(other, left) and kv.obtainable == 0
    kv.check_integrity()


def test_changes_are_told_once() -> None:
    kv, req = manager(), request("a", list(range(10)))
    assert admit(kv, req) and kv.cover(req, 6) and kv.cover(req, 9)
    admits, new = kv.take_changes()
    assert [one.row for one in admits] == [req.row]
    assert [(start, len(slots)) for start, slots in new[req.row]] == [(0, 6), (6, 3)]
    assert kv.take_changes() == ((), {})
    assert kv.cover(req, 10)
    kv.release(req)
    assert kv.take_changes() == ((), {})  # nobody reads the row any more


def test_what_is_spoilt_is_not_cached() -> None:
    kv, req = manager(), request("a", list(range(10)))
    assert admit(kv, req) and kv.cover(req, 10)
    slots = set(req.slots[:10].tolist())
    kv.quarantine(req)
    kv.release(req)
    assert kv.radix.size == 0, "its slots are about to be zeroed"
    kv.quarantine_cache()
    spoilt = kv.take_quarantined()
    assert spoilt is not None and slots <= set(spoilt.tolist()) and kv.take_quarantined() is None
    kv.check_idle()


def test_who_waits_is_not_compared_again_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(4 * MIN_SHARED_TOKENS)
    kv = KVManager(8 * MIN_SHARED_TOKENS, ROWS, lookahead=0, cache=True, room=ROOM)
    compared = []
    own = InflightPrefixes.common_prefixes
    monkeypatch.setattr(InflightPrefixes, "common_prefixes", lambda *args: compared.append(1) or own(*args))
    first, second = request("a", tokens.tolist()), request("b", [*tokens[:-1].tolist(), 0])
    other = np.asarray(second.tokens)
    assert not kv.prefix_being_computed(first, tokens) and admit(kv, first)
    assert kv.prefix_being_computed(second, other, {first}) is False, "whoever does not go on now is not waited for"
    compared.clear()
    stranger = request("c", [7] * 2 * MIN_SHARED_TOKENS)
    for held in ((), (), {stranger}, {stranger}, ()):
        assert kv.prefix_being_computed(second, other, held)
    assert len(compared) == 1, "others that do not go on, as requests with grammars, change nothing"
    assert not kv.prefix_being_computed(second, other, {first})
    prefill(kv, first)
    assert not kv.prefix_being_computed(second, other) and len(compared) == 3, (
        "what it waited for is cached: it is looked at anew"
    )
