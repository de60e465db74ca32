"""When rows catch up: seldom, never too late, and few at once. (`test_scheduler_stateful.py` checks that nobody reads
what is not there yet.)"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG, MAX_TEXT_BACKLOG, DraftChunk, DraftDeferral
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.draft_backlog import MAX_JOINING, RESTED, UNSEEN, DraftExtendPlanner
from draftwing.sched.req import Req

TREE, LOOKUP = TreeShape(3, 2, 6), TreeShape(5, 1, 6)


def req(row: int) -> Req:
    one = Req(GenerationRequest(str(row), [1], SamplingParams()), 0, 100, frozenset())
    one.row, one.bound = row, 10 + row
    return one


def run(catch_ups: DraftExtendPlanner, reqs: list[Req], shapes: list[TreeShape], first: int = 0) -> list[int]:
    """Rows that catch up in each step."""
    found = []
    for step, shape in enumerate(shapes, first):
        catch_ups.plan(step, shape, reqs)
        plan = catch_ups.take()
        found.append(0 if plan is None else len(plan.rows))
        assert plan is None or 0 < plan.behind <= MAX_BACKLOG
        assert all(one.behind <= MAX_BACKLOG for one in reqs)
    return found


@pytest.mark.parametrize("rows", [1, 4, MAX_JOINING])
def test_few_rows_catch_up_together_and_seldom(rows: int) -> None:
    found = run(DraftExtendPlanner([PLAIN]), [req(row) for row in range(rows)], [PLAIN] * 10 * MAX_BACKLOG)
    assert set(found) == {0, rows} and sum(map(bool, found)) == 9


@pytest.mark.parametrize("rows", [2 * MAX_JOINING, 5 * MAX_JOINING, 8 * MAX_JOINING])
def test_many_rows_take_turns(rows: int) -> None:
    found = run(DraftExtendPlanner([PLAIN]), [req(row) for row in range(rows)], [PLAIN] * 10 * MAX_BACKLOG)
    assert max(found) <= MAX_JOINING and sum(found) < 1.4 * rows * 10


def test_before_a_step_that_drafts_everybody_does() -> None:
    reqs, catch_ups = [req(row) for row in range(40)], DraftExtendPlanner([PLAIN])
    assert run(catch_ups, reqs, [TREE, PLAIN, PLAIN, TREE, TREE]) == [0, 0, 0, 40, 0]
    catch_ups.plan(9, PLAIN, reqs[:3])
    catch_ups.plan(10, TREE, reqs)
    plan = catch_ups.take()
    assert plan is not None and plan.rows.tolist() == [0, 1, 2] and (plan.behind, plan.max_kv_len) == (1, 12)


def test_a_result_tells_how_far_it_really_is() -> None:
    one, catch_ups = req(0), DraftExtendPlanner([PLAIN, LOOKUP])
    run(catch_ups, [one], [LOOKUP] * 2)
    assert one.behind == 12
    catch_ups.commit(0, LOOKUP, one, 2)
    assert one.behind == 8
    run(catch_ups, [one], [TREE, LOOKUP], first=2)
    catch_ups.commit(1, LOOKUP, one, 1)  # it has caught up with that
    assert one.behind == 6
    catch_ups.commit(3, LOOKUP, one, 1)
    assert one.behind == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_it_is_shown_what_was_committed_and_what_steps_in_flight_may_commit(lag: int) -> None:
    """Since it caught up last, with the step of that plan as the first: results come so many steps later."""
    random = Random(lag)
    one, catch_ups = req(0), DraftExtendPlanner([PLAIN, LOOKUP])
    shapes = random.choices([PLAIN, LOOKUP], k=300)
    counts = [random.randint(1, shape.max_commit) for shape in shapes]
    caught_up, shown = 0, 0
    for step, shape in enumerate(shapes):
        catch_ups.plan(step, shape, [one])
        plan = catch_ups.take()
        if plan is not None:
            known = max(step - lag, caught_up)
            in_flight = sum(late.max_commit for late in shapes[known:step])
            assert plan.behind == sum(counts[caught_up:known]) + in_flight
            caught_up, shown = step, shown + 1
        if step >= lag:
            catch_ups.commit(step - lag, shapes[step - lag], one, counts[step - lag])
    assert shown > 10


def test_who_is_released_catches_up_for_the_cache_alone() -> None:
    reqs, catch_ups = [req(row) for row in range(3)], DraftExtendPlanner([PLAIN])
    run(catch_ups, reqs, [PLAIN] * 5)
    catch_ups.release(reqs[0], cached=False)
    catch_ups.release(reqs[1], cached=True)
    assert [one.behind for one in reqs] == [0, 0, 5]
    plan: Any = catch_ups.take()
    assert plan.rows.tolist() == [1] and plan.behind == 5
    catch_ups.release(reqs[2], cached=True)
    catch_ups.clear()
    assert catch_ups.take() is None


def test_a_drafter_that_sees_every_step_has_nothing_to_catch_up_with() -> None:
    assert not any(run(DraftExtendPlanner([]), [req(0)], [PLAIN, TREE] * 40))


def prefill(catch_ups: DraftExtendPlanner, one: Req, length: int) -> tuple[int | None, tuple[DraftChunk, ...]]:
    """Where a chunk is kept, and what the plan shows of prompts."""
    kept = catch_ups.prompts.plan(one, length, length == one.unsent)
    one.sent += length
    assert catch_ups.take() is None
    return kept, catch_ups.prompts.take()


def prompt(row: int, length: int, sent: int = 0) -> Req:
    one = Req(GenerationRequest(str(row), [1] * length, SamplingParams()), 0, 100, frozenset())
    one.row, one.sent = row, sent
    return one


def test_a_prompt_is_seen_in_one_pass_before_its_last_chunk() -> None:
    catch_ups, one = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(100, 50)), prompt(3, 30, sent=4)
    assert [prefill(catch_ups, one, 10) for _ in range(2)] == [(0, ()), (10, ())]
    assert prefill(catch_ups, one, 6) == (None, (DraftChunk(3, 4, 20, 0),))


def test_a_longer_one_in_as_few_passes_as_there_is_room_for() -> None:
    catch_ups, one = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(100, 20)), prompt(0, 60)
    found = [prefill(catch_ups, one, length) for length in (8, 8, 8, 21, 15)]
    assert [kept for kept, _ in found] == [0, 8, 0, None, None], "a chunk for which there is no room is seen at once"
    assert [plan for _, plan in found] == [(), (), (DraftChunk(0, 0, 16, 0),), (DraftChunk(0, 16, 8, 0),), ()]


def test_prompts_have_places_of_their_own_and_the_others_wait_for_none() -> None:
    catch_ups = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(50, 20))
    first, second, third = (prompt(row, 40) for row in range(3))
    assert [prefill(catch_ups, one, 5)[0] for one in (first, second, third)] == [0, 20, None]
    assert prefill(catch_ups, first, 35) == (None, (DraftChunk(0, 0, 5, 0),))
    assert [prefill(catch_ups, one, 5)[0] for one in (third, second)] == [0, 25]


def test_who_is_released_in_its_prompt_leaves_nothing_unseen_in_the_cache() -> None:
    catch_ups = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(90, 30))
    reqs = [prompt(row, 40) for row in range(3)]
    for one in reqs:
        assert [prefill(catch_ups, one, 10)[1] for _ in range(2)] == [(), ()]
    for one in reqs:
        one.kv = 10 if one.row else 0  # the result of the second chunk has not come, of the first request none
        catch_ups.release(one, cached=one.row < 2)
    plan: Any = catch_ups.take()
    assert not len(plan.rows) and plan.texts == (DraftChunk(1, 0, 10, 30),)
    assert prefill(catch_ups, prompt(4, 40), 10) == (0, ()), "the places are free"


def closed_loop(catch_ups: DraftExtendPlanner, steps: int, tokens: int) -> list[list[int]]:
    """128 clients with answers of so many tokens, of which nothing is drafted -> positions of the drafter's passes in
    each step."""
    slots = np.arange(128 * 3000).reshape(128, 3000)
    reqs: list[Req] = []
    passes = []
    for step in range(-1, steps):
        for row in range(128):
            if step >= 0 and (step + 7 * row) % tokens:
                continue
            if step >= 0:
                catch_ups.release(reqs[row], cached=True)
            one = prompt(row, 100)
            one.slots = slots[row]
            catch_ups.prompts.plan(one, 100, True)
            one.sent = one.kv = one.bound = 100
            reqs[row:] = [one, *reqs[row + 1 :]]
        catch_ups.plan(step, PLAIN, reqs)
        due, shown = catch_ups.take(), catch_ups.prompts.take()
        passes.append([part.length for part in (*(due.texts if due is not None else ()), *shown)])
        passes[-1] += [] if due is None else [due.behind] * len(due.rows)
        for one in reqs:
            one.kv, one.bound = one.kv + 1, one.bound + 1
    return passes


def text_alone() -> DraftExtendPlanner:
    return DraftExtendPlanner([PLAIN], deferral=DraftDeferral(0, 8192, True), slots=128 * 3000)


@pytest.mark.parametrize("tokens", [100, 256, MAX_TEXT_BACKLOG])
def test_a_drafter_that_needs_tokens_alone_does_not_run_where_nothing_is_drafted(tokens: int) -> None:
    assert not any(closed_loop(text_alone(), 2 * tokens, tokens)), "answers end before"


def beside_slots(most: int = 50, slots: int = 128 * 3000) -> DraftExtendPlanner:
    return DraftExtendPlanner([PLAIN], deferral=DraftDeferral(0, most, by_slot=True), slots=slots)


@pytest.mark.parametrize("tokens", [100, UNSEEN])
def test_nor_does_one_whose_hidden_states_lie_beside_the_slots(tokens: int) -> None:
    assert not any(closed_loop(beside_slots(), 2 * tokens, tokens))


def test_of_long_texts_it_lacks_no_more_than_others_may_wait_for() -> None:
    passes = closed_loop(beside_slots(), 3000, 2000)
    assert any(passes) and max(map(sum, passes)) <= 2 * UNSEEN + 128, "one of 128 rows at a time"
    _, kept = admit(rested(), 0, np.arange(UNSEEN))
    assert kept == 0
    long, kept = admit(rested(), 0, np.arange(UNSEEN + 1))
    assert kept is None and not long.behind


def rested() -> DraftExtendPlanner:
    catch_ups = beside_slots(slots=1000)
    for step in range(RESTED + 1):
        catch_ups.plan(step, PLAIN, [])
    return catch_ups


def admit(catch_ups: DraftExtendPlanner, row: int, slots: np.ndarray, sent: int = 0) -> tuple[Req, int | None]:
    """A request whose prompt is prefilled, `sent` tokens of it from the cache, and whether it is seen at once."""
    one = prompt(row, len(slots), sent)
    one.slots = np.concatenate((slots, np.arange(900, 1000)))
    kept = catch_ups.prompts.plan(one, len(slots) - sent, True)
    one.sent = one.kv = one.bound = len(slots)
    return one, kept


def test_what_lies_beside_the_slots_is_seen_before_a_step_that_drafts() -> None:
    catch_ups = rested()
    first, kept = admit(catch_ups, 0, np.arange(120))
    assert (kept, first.behind, catch_ups.passes([first])) == (0, 120, (4, 120))
    catch_ups.plan(20, PLAIN, [first])
    first.bound += 1  # its result has not come
    catch_ups.plan(21, TREE, [first])
    plan: Any = catch_ups.take()
    assert plan.texts == (DraftChunk(0, 0, 50, 0), DraftChunk(0, 50, 50, 0), DraftChunk(0, 100, 19, 0)) and plan.late
    assert plan.rows.tolist() == [0] and plan.behind == 2 and not first.behind
    assert catch_ups.prompts.take() == ()


@pytest.mark.parametrize("drafting", [False, True])
def test_what_others_left_unseen_in_the_cache_is_seen_first(drafting: bool) -> None:
    catch_ups = rested()
    first, _ = admit(catch_ups, 0, np.arange(60))
    catch_ups.plan(20, PLAIN, [first])
    first.kv = first.bound = 61
    catch_ups.release(first, cached=True)
    assert catch_ups.take() is None, "nor does it see anything for the cache"
    if drafting:
        catch_ups.plan(21, TREE, [])
    second, kept = admit(catch_ups, 1, np.arange(90), sent=40)
    assert kept == (None if drafting else 0) and second.behind == (0 if drafting else 90)
    assert catch_ups.prompts.take() == ((DraftChunk(1, 0, 40, 0),) if drafting else ())
    catch_ups.plan(22, TREE, [second])
    plan: Any = catch_ups.take()
    if drafting:
        assert plan is None
    else:
        assert plan.texts == (DraftChunk(1, 0, 50, 0), DraftChunk(1, 50, 39, 0)) and plan.behind == 1
    _, kept = admit(catch_ups, 2, np.arange(95), sent=90)
    assert kept is None and catch_ups.prompts.take() == (), "all that is seen now"


@settings(max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.sampled_from([20, 46, 120]) | st.integers(2, 400), committed=st.integers(0, 3), in_flight=st.booleans()
)
def test_answers_to_a_prompt_lack_no_more_than_is_planned_for(tokens: int, committed: int, in_flight: bool) -> None:
    """Two share a prompt that was not seen. The first one is shown it; of the other the device still counts the
    prompt's last position, for it was to see that in a pass over the row."""
    catch_ups, slots = rested(), np.arange(tokens)
    reqs = [admit(catch_ups, 0, slots)[0], admit(catch_ups, 1, slots, tokens - 1)[0]]
    for one in reqs:
        catch_ups.prompts.share(one)
    for step in range(committed + in_flight):
        catch_ups.plan(20 + step, PLAIN, reqs)
        for one in reqs:
            one.bound += 1
            one.kv += step < committed
    catch_ups.plan(40, TREE, reqs)
    plan: Any = catch_ups.take()
    for one in reqs:
        shown = max((part.start + part.length for part in plan.texts if part.row == one.row), default=tokens - 1)
        assert one.bound - shown <= plan.behind


@pytest.mark.parametrize("behind", [0, 3, 62])
def test_a_row_that_moves_to_slots_which_are_unseen_is_shown_them_if_it_had_seen_its_own(behind: int) -> None:
    catch_ups = beside_slots(slots=1000)
    one, _ = admit(catch_ups, 0, np.arange(60))
    one.behind, one.bound = behind, 63
    one.slots[20:40] = np.arange(200, 220)  # another's, who was prefilled meanwhile
    catch_ups.prompts.share(one)
    assert one.behind == behind
    assert catch_ups.prompts.take() == (() if behind > 3 else (DraftChunk(0, 20, 40, 0),))


def test_what_is_taken_for_seen_has_been_shown() -> None:
    """The row was drafting when it moved, a step was in flight."""
    catch_ups = beside_slots(slots=1000)
    one, _ = admit(catch_ups, 0, np.arange(60))
    catch_ups.prompts.take()
    catch_ups.plan(1, PLAIN, [one])
    one.bound += 1
    one.slots[20:60] = np.arange(200, 240)
    catch_ups.prompts.share(one)
    assert catch_ups.prompts.take() == (DraftChunk(0, 20, 40, 0),)
    catch_ups.plan(2, TREE, [one])
    plan: Any = catch_ups.take()
    assert plan.behind == 1 and plan.texts == () and admit(catch_ups, 1, one.slots[:60], 40)[1] is None
    assert catch_ups.prompts.take() == (), "all that is seen now"


def test_one_that_needs_more_does_for_the_cache() -> None:
    assert sum(map(bool, closed_loop(DraftExtendPlanner([PLAIN]), 300, 100))) > 250


def test_long_answers_are_seen_late_and_in_one_pass_before_a_step() -> None:
    catch_ups, steps = text_alone(), 1500
    passes = [one for one in closed_loop(catch_ups, steps, 2000) if one]
    assert all(sum(one) <= 8192 for one in passes), "a step waits for one pass at most"
    assert len(passes) <= 1.2 * 128 * steps / 8192 and sum(map(sum, passes)) <= 128 * steps
    assert max(map(max, passes)) < MAX_TEXT_BACKLOG + 10, "nobody is much further behind"


def test_before_a_step_that_drafts_all_is_seen_and_what_is_in_flight_last() -> None:
    catch_ups, reqs = (
        DraftExtendPlanner([PLAIN], deferral=DraftDeferral(0, 90, True), slots=1000),
        [req(row) for row in range(3)],
    )
    run_lag = 40
    for one in reqs[:2]:
        one.sent = one.kv = one.bound
    reqs[2].sent = reqs[2].kv = reqs[2].bound
    for step in range(run_lag):
        catch_ups.plan(step, PLAIN, reqs[: 2 if step < 35 else 3])
        for one in reqs[: 2 if step < 35 else 3]:
            one.bound += 1
            one.kv += step < run_lag - 1  # the last one's result has not come
    assert catch_ups.take() is None and catch_ups.passes(reqs) == (2, 80) and catch_ups.passes(reqs[2:]) == (1, 0)
    catch_ups.plan(run_lag, TREE, reqs)
    plan = catch_ups.take()
    assert plan is not None and plan.texts == (DraftChunk(0, 10, 38, 0), DraftChunk(1, 11, 38, 0)) and plan.passes == 2
    assert plan.rows.tolist() == [0, 1, 2] and plan.behind == 5 and not any(one.behind for one in reqs)


def test_who_goes_on_from_what_was_not_seen_has_it_shown() -> None:
    catch_ups = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(400, 100, True), slots=100)
    first, then = prompt(0, 10), prompt(1, 40, sent=30)
    first.slots = then.slots = np.arange(100)
    catch_ups.prompts.plan(first, 10, True)
    first.sent, first.kv, first.behind = 10, 30, 12
    catch_ups.release(first, cached=True)
    assert catch_ups.take() is None
    assert prefill(catch_ups, then, 10) == (None, (DraftChunk(1, 18, 12, 0),))


def test_an_answer_without_drafts_was_not_seen_though_its_prompt_is_later() -> None:
    catch_ups = DraftExtendPlanner([PLAIN], deferral=DraftDeferral(400, 100, True), slots=100)
    first, again, then = prompt(0, 10), prompt(1, 11, sent=10), prompt(2, 40, sent=30)
    first.slots = again.slots = then.slots = np.arange(100)
    first.skipped = True
    catch_ups.prompts.plan(first, 10, True)
    first.sent, first.kv = 10, 30
    catch_ups.release(first, cached=True)
    assert prefill(catch_ups, again, 1) == (None, (DraftChunk(1, 0, 10, 0),))
    assert prefill(catch_ups, then, 10) == (None, (DraftChunk(2, 11, 19, 0),))
