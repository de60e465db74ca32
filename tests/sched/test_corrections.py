"""Corrections against machines that are made up: what a step costs is a speed that drifts, times a factor of each
shape, times noise."""

from __future__ import annotations

import math
import random

import pytest

from draftwing.core import PLAIN, TreeShape
from draftwing.sched.corrections import MAX_SHARED, MOST, Corrections

TREE, CHAIN = TreeShape(5, 4, 16), TreeShape(4, 1, 5)


class Machine:
    """Samples of steps, of which a price of 1 was expected."""

    def __init__(self, seed: int = 0, drift: float = 0.003, noise: float = 0.04) -> None:
        self.rng, self.drift, self.noise = random.Random(seed), drift, noise
        self.speed = 1.0
        self.own = {PLAIN: 1.0, TREE: 1.0, CHAIN: 1.0}
        self.corrections = Corrections()

    def run(self, shape: TreeShape, steps: int = 1) -> None:
        for _ in range(steps):
            self.speed *= math.exp(self.rng.gauss(0.0, self.drift))
            took = self.speed * self.own[shape] * math.exp(self.rng.gauss(0.0, self.noise))
            self.corrections.learn(shape, 3, took / self.corrections.factor(shape, 3))

    def off(self, shape: TreeShape, beside: TreeShape) -> float:
        """How far the price of one beside that of the other is from the truth, as a factor."""
        found = self.corrections.factor(shape, 3) / self.corrections.factor(beside, 3)
        return abs(math.log(found / (self.own[shape] / self.own[beside])))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [1.3, 0.75])
def test_what_runs_rarely_is_corrected_within_a_few_of_its_steps(seed: int, change: float) -> None:
    machine = Machine(seed)
    for _ in range(20):
        machine.run(PLAIN, 60)
        machine.run(TREE)
    machine.own[TREE] = change
    for _ in range(6):
        machine.run(PLAIN, 60)
        machine.run(TREE)
    assert machine.off(TREE, PLAIN) < 0.16
    machine.run(TREE, 20)
    machine.run(PLAIN, 5)
    assert machine.off(TREE, PLAIN) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_stalls_make_nothing_look_dear(seed: int) -> None:
    """One step in eight takes half as long again: what runs rarely is not dearer for that than what runs often."""
    machine, stalls = Machine(seed), random.Random(seed)
    for turn in range(3000):
        shape = TREE if turn % 40 == 0 else PLAIN
        before = machine.speed
        machine.speed *= 1.5 if stalls.random() < 1 / 8 else 1.0
        machine.run(shape)
        machine.speed = before
        if turn > 1000:
            assert machine.off(TREE, PLAIN) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_becomes_slower_changes_no_relation(seed: int) -> None:
    """It slows down while one shape runs alone, which says nothing of the others."""
    machine = Machine(seed)
    for _ in range(100):
        for shape in (PLAIN, TREE, CHAIN):
            machine.run(shape)
    machine.speed *= 1.5
    machine.run(PLAIN, 300)
    assert machine.corrections.factor(PLAIN, 3) == pytest.approx(machine.speed, rel=0.1)
    assert machine.off(TREE, PLAIN) < 0.2 and machine.off(CHAIN, PLAIN) < 0.2
    for shape in (TREE, CHAIN) * 3:
        machine.run(shape)
    assert machine.off(TREE, PLAIN) < 0.1 and machine.off(CHAIN, PLAIN) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_a_measurement_that_was_wrong(seed: int) -> None:
    """That of what runs most: others are first taken to be as wrong."""
    machine = Machine(seed)
    machine.own[PLAIN] = 1.4
    for _ in range(10):
        machine.run(PLAIN, 30)
        machine.run(TREE)
        machine.run(CHAIN)
    assert machine.off(TREE, PLAIN) < 0.1 and machine.off(CHAIN, PLAIN) < 0.1 and machine.off(TREE, CHAIN) < 0.1


def test_other_numbers_of_requests_have_their_own() -> None:
    corrections = Corrections()
    for _ in range(50):
        corrections.learn(TREE, 3, 1.2)
    assert corrections.factor(TREE, 4) == 1.0 and corrections.shared(3) > 1.2


def test_they_have_limits() -> None:
    corrections = Corrections()
    for _ in range(2000):
        corrections.learn(TREE, 3, 1e6)
    assert corrections.factor(TREE, 3) == pytest.approx(MOST * MAX_SHARED)
    for _ in range(4000):
        corrections.learn(TREE, 3, 1e-6)
    assert corrections.factor(TREE, 3) == pytest.approx(1 / MOST / MAX_SHARED)


def test_they_are_restored() -> None:
    corrections, again = Corrections(), Corrections()
    for shape, ratio in ((TREE, 1.1), (PLAIN, 0.9), (CHAIN, 1.3)):
        corrections.learn(shape, 3, ratio)
    for one in corrections.items():
        again.restore(*one)
    assert [again.factor(shape, 3) for shape in (TREE, PLAIN, CHAIN)] == [
        corrections.factor(shape, 3) for shape in (TREE, PLAIN, CHAIN)
    ]
    again.clear()
    assert again.factor(TREE, 3) == 1.0
