"""What is learnt of options from trees whose survivals are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds import TREE, World

from draftwing.config.trees import MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import MARK_ONE, MARK_SURVIVAL, StepResult
from draftwing.sched.policy.acceptance import Acceptance, drafts_by_row
from draftwing.spec.drafter import chain_menu, tree_menu


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_parts_of_a_tree_are_read_off_it(rows: int) -> None:
    rng = np.random.default_rng(rows)
    survival = np.sort(rng.random((rows, 16)), axis=1)[:, ::-1]
    depth = np.minimum(np.arange(16), 5) * np.ones((rows, 1), int)
    mark = depth + ((survival * MARK_ONE).astype(np.int64) << MARK_SURVIVAL)
    result = StepResult(mark, np.ones(rows), mark, mark, np.ones(rows))
    survival = result.survival
    for part in tree_menu(TREE)[:-1]:
        found = drafts_by_row(result, [part])[0]
        nodes = sorted(
            ((survival[b, n], b) for b in range(rows) for n in range(1, 16) if depth[b, n] <= part.depth), reverse=True
        )
        expected = [0.0] * rows
        for value, b in nodes[: rows * (part.queries - 1)]:
            expected[b] += value
        assert found == pytest.approx(expected, abs=1e-3)


def test_a_larger_tree_brings_no_less() -> None:
    """Although only a part of it was ever drafted."""
    menu = (TreeShape(4, 2, 8), TreeShape(4, 1, 5), TreeShape(1, 1, 2), PLAIN)
    gains, world, counts = Acceptance(menu), World(menu, 1.0, 0.0, 0.0), {MAX_CONFIDENCE: 2}
    for number in range(200):
        gains.observe(1, [MAX_CONFIDENCE] * 2, world.step(menu[1], [0.99] * 2), number, False)
    found = [gains.expected(i, counts) for i in range(3)]
    assert found[0] >= found[1] > found[2] > 0
    assert found[1] == pytest.approx(world.tokens(menu[1], [0.99] * 2) - 2, rel=0.15)


def test_what_is_drafted_after_a_pause_counts_for_more() -> None:
    """So does a try while nothing is drafted."""
    menu, found = chain_menu(TreeShape(4, 1, 5)), []
    for pause, alone in ((3, False), (40, False), (3, True)):
        acceptance, world = Acceptance(menu), World(menu, 1.0, 0.0, 0.0)
        for number in range(100):
            acceptance.observe(0, [MAX_CONFIDENCE], world.step(menu[0], [0.1]), number, False)
        before = acceptance.expected(0, {MAX_CONFIDENCE: 1})
        acceptance.observe(0, [MAX_CONFIDENCE], world.step(menu[0], [0.99]), 98 + pause, alone)
        found.append(acceptance.expected(0, {MAX_CONFIDENCE: 1}) - before)
    assert found[1] > 1.5 * found[0] > 0 and found[2] == pytest.approx(found[1], rel=0.3)


def test_what_is_well_known_is_looked_at_in_every_second_step() -> None:
    """It costs the host time. A try, and what is not well known yet, is always looked at."""
    menu = chain_menu(TreeShape(4, 1, 5))
    acceptance, world = Acceptance(menu), World(menu, 1.0, 0.0, 0.0)

    def observed(steps: range, alone: bool) -> int:
        for number in steps:
            acceptance.observe(0, [MAX_CONFIDENCE], world.step(menu[0], [0.5]), number, alone)
            numbers.add(acceptance.last_observed(0, {MAX_CONFIDENCE}))
        return len(numbers & {*steps})

    numbers: set[int] = set()
    assert observed(range(2, 32), False) == 30 and observed(range(201, 221), True) == 20
    assert 50 <= observed(range(301, 401), False) <= 51


def test_the_next_engine_begins_with_what_was_learnt() -> None:
    menu = chain_menu(TreeShape(4, 1, 5))
    first, world = Acceptance(menu), World(menu, 1.0, 0.0, 0.0)
    for number in range(100):
        first.observe(0, [MAX_CONFIDENCE, 3], world.step(menu[0], [0.9, 0.1]), number, False)
    kept = json.loads(json.dumps(first.learnt()))
    second, other = Acceptance(menu), Acceptance(chain_menu(TreeShape(6, 1, 7)))
    untouched = [other.expected(0, {confidence: 1}) for confidence in (3, MAX_CONFIDENCE)]
    for acceptance in (second, other):
        acceptance.recall({})
        assert not acceptance.known
        acceptance.recall(kept)
    for index in range(len(menu)):
        for confidence in (3, 4, MAX_CONFIDENCE):
            counts = {confidence: 2}
            assert second.expected(index, counts) == first.expected(index, counts)
    assert second.known and not other.known
    assert [other.expected(0, {confidence: 1}) for confidence in (3, MAX_CONFIDENCE)] == untouched
    second.observe(0, [MAX_CONFIDENCE], world.step(menu[0], [0.1]), 5, False)
    assert second.expected(0, {MAX_CONFIDENCE: 1}) < first.expected(0, {MAX_CONFIDENCE: 1})
