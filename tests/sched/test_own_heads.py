"""Which of two draft heads is better, by requests that have them by turns."""

from __future__ import annotations

import random

import pytest

from draftwing.sched.own_heads import ENOUGH, TURNS, OwnHeads


def serve(judged: OwnHeads, requests: int, own: float, model: float, seed: int) -> tuple[list[bool], list[bool | None]]:
    """Of requests of very different lengths, whose drafts are right with these chances: which heads they had, and what
    was known after each."""
    draw, had, known = random.Random(seed), [], []
    for _ in range(requests):
        had.append(judged.next("adapter/head"))
        steps, chance = draw.randint(5, 60), (own if had[-1] else model) + draw.uniform(-0.15, 0.15)
        right = sum(draw.random() < chance for _ in range(3 * steps))
        known.append(judged.ended("adapter/head", had[-1], right, steps))
    return had, known


@pytest.mark.parametrize("seed", range(8))
def test_the_better_one_drafts_in_the_end(seed: int) -> None:
    for own, model in ((0.6, 0.3), (0.3, 0.6)):
        had, known = serve(OwnHeads(), 300, own, model, seed)
        decided = next(i for i, one in enumerate(known) if one is not None)
        assert TURNS * ENOUGH <= decided + 1 < 150 and known[decided] is (own > model)
        assert set(had[decided + 1 :]) == {own > model} and known.count(None) == len(known) - 1
        assert had[:decided].count(False) == sum(not (i + 1) % TURNS for i in range(decided))


def test_of_two_that_are_alike_the_own_one_stays_mostly() -> None:
    last = [serve(OwnHeads(), 600, 0.5, 0.5, seed)[0][-1] for seed in range(40)]
    assert last.count(False) <= 4


def test_requests_without_drafts_say_nothing_and_another_head_is_judged_anew() -> None:
    judged = OwnHeads()
    for _ in range(1000):
        own = judged.next("a/b")
        assert judged.ended("a/b", own, 0, 0) is None
    serve(judged, 300, 0.2, 0.7, 0)
    assert not judged.next("adapter/head")
    assert [judged.next("adapter/other") for _ in range(TURNS)] == [True] * (TURNS - 1) + [False]
