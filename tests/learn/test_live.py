"""Acceptance over time, and what of it counts as a fall."""

from __future__ import annotations

import random

from draftwing.learn.live import ENOUGH, FEW, POINT_SECONDS, POINTS, LiveAcceptance, Swap


def requests(live: LiveAcceptance, draw: random.Random, count: int, accepted: float, client: str = "") -> None:
    """Of some 40 steps, and so many accepted drafts a step."""
    for _ in range(count):
        steps = draw.randrange(20, 60)
        live.add(0.0, sum(draw.random() < accepted for _ in range(steps)), steps, client)


def test_the_curve_has_a_point_a_minute_and_is_bounded() -> None:
    live = LiveAcceptance()
    live.add(10.0, 0, 0)  # without steps
    for minute in range(POINTS + 10):
        live.add(minute * POINT_SECONDS + 1, 5, 10)
        live.add(minute * POINT_SECONDS + 59, 15, 10)
    assert len(live.points) == POINTS
    assert {(point.tokens, point.steps) for point in live.points} == {(40, 20)}
    assert [point.at for point in live.points] == [POINT_SECONDS * (10 + i) for i in range(POINTS)]
    few = live.curve(100)
    assert 80 < len(few) <= 100 and sum(point.tokens for point in few) == 40 * POINTS
    assert few[0].at == live.points[0].at and LiveAcceptance().curve(100) == []


def test_a_head_that_drafts_worse_is_seen_and_chance_is_not() -> None:
    draw, false = random.Random(1), 0
    for trial in range(40):
        live = LiveAcceptance()
        requests(live, draw, 4 * ENOUGH, 0.5)
        live.swapped(1.0, trial)
        assert not live.fell
        for _ in range(8):  # looked at again and again
            requests(live, draw, ENOUGH, 0.5)
            false += live.fell
    assert false <= 2
    requests(live, draw, ENOUGH, 0.5)
    live.swapped(2.0, None)
    requests(live, draw, ENOUGH - 1, 0.3)
    assert not live.fell, "too few to say"
    requests(live, draw, 1, 0.3)
    assert live.fell and live.swaps[-1] == Swap(2.0, None)
    live.swapped(3.0, 4)
    requests(live, draw, 2 * ENOUGH, 0.7)
    assert not live.fell, "better is not worse"


def test_a_head_that_failed_is_no_measure_for_the_next() -> None:
    draw, live = random.Random(2), LiveAcceptance()
    requests(live, draw, 2 * ENOUGH, 0.5)
    live.swapped(1.0, 1)
    requests(live, draw, 4 * ENOUGH, 0.1)
    assert live.fell
    live.swapped(2.0, None, failed=True)
    live.swapped(3.0, 2)
    requests(live, draw, 2 * ENOUGH, 0.4)
    assert live.fell


def test_who_asks_more_than_before_makes_no_head_look_bad() -> None:
    draw, live = random.Random(3), LiveAcceptance()
    for client, accepted in (("a", 0.7), ("b", 0.2)):
        requests(live, draw, 2 * ENOUGH, accepted, client)
    live.swapped(1.0, 1)
    requests(live, draw, ENOUGH, 0.7, "a")
    requests(live, draw, 5 * ENOUGH, 0.2, "b")
    requests(live, draw, ENOUGH, 0.05, "new")
    assert not live.fell
    requests(live, draw, ENOUGH, 0.5, "a")
    assert live.fell


def test_who_sends_other_requests_than_before_counts_by_what_it_sent_before() -> None:
    draw, live = random.Random(4), LiveAcceptance()
    requests(live, draw, 3 * ENOUGH, 0.5, "a")
    requests(live, draw, ENOUGH, 0.5, "flood")
    live.swapped(1.0, 1)
    requests(live, draw, ENOUGH, 0.6, "a")
    requests(live, draw, 5 * ENOUGH, 0.3, "flood")
    assert not live.fell
    requests(live, draw, 8 * ENOUGH, 0.3, "flood")
    assert not live.fell, "nobody else is left among the newest"


def test_clients_with_few_requests_count_together() -> None:
    draw, live = random.Random(5), LiveAcceptance()
    for accepted in (0.5, 0.3):
        for client in range(2 * ENOUGH):
            requests(live, draw, 1, accepted, str(client))
        live.swapped(1.0, 1)
    assert not live.fell, "nobody has asked since"
    for client in range(2 * ENOUGH):
        requests(live, draw, 1, 0.1, str(client))
    assert live.fell


def test_others_of_those_who_seldom_ask_make_no_head_look_bad() -> None:
    """Clients of two kinds, of whom those whose texts can hardly be drafted ask three times as much as the others."""
    draw, live = random.Random(6), LiveAcceptance()
    kinds = [0.8, 0.2] * 20
    for client, accepted in enumerate(kinds):
        requests(live, draw, FEW - 1, accepted, str(client))
    live.swapped(1.0, 1)
    for client, accepted in enumerate(kinds):
        requests(live, draw, 1 if accepted > 0.5 else FEW - 1, accepted, str(client))
    assert not live.fell
    live.swapped(2.0, 2)
    for client, accepted in enumerate(kinds):
        requests(live, draw, 2, accepted / 4, str(client))
    assert live.fell
