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
        assert had[: decided + 1].count(False) >= ENOUGH and decided < 149 and known[decided] is (own > model)
        assert set(had[decided + 1 :]) == {own > model} and known.count(None) == len(known) - 1
        turns = [had[i : i + TURNS] for i in range(0, decided + 1 - TURNS, TURNS)]
        assert all(turn.count(False) == 1 for turn in turns) and len({*map(tuple, turns)}) == TURNS


@pytest.mark.parametrize("kinds", range(2, 9))
@pytest.mark.parametrize("seed", range(4))
def test_kinds_of_requests_that_take_turns_are_judged_alike(kinds: int, seed: int) -> None:
    """One kind, whichever it is, drafts much better than the others, and the own head better for all of them."""
    for easy in range(kinds):
        judged, draw, known = OwnHeads(), random.Random(seed), None
        for i in range(3000):
            own, steps = judged.next("adapter/head"), draw.randint(20, 40)
            chance = (0.8 if i % kinds == easy else 0.2) + (0.15 if own else 0.0)
            known = judged.ended("adapter/head", own, sum(draw.random() < chance for _ in range(3 * steps)), steps)
            if known is not None:
                break
        assert known, (easy, i)


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
    assert [judged.next("adapter/other") for _ in range(TURNS)].count(False) == 1
