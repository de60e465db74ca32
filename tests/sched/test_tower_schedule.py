"""Whose image a tower reads on, and which prompts wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftwing.core import Chunk
from draftwing.requests.images import RequestImage
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.prefill_budget import UNNOTICED_WAIT, PrefillBudget
from draftwing.sched.req import Req, ReqState
from draftwing.sched.tower_schedule import TowerSchedule

PIXELS = np.zeros((4, 4, 3), np.uint8)
CHUNK = (Chunk(0, 0, 8, False),)


def req(uid: str, state: ReqState, *images: int, arrival: int = 0, sent: int = 0) -> Req:
    """images: where they begin, of ten tokens each."""
    made = tuple(RequestImage(start, (1, 10), PIXELS, start.to_bytes(8, "big")) for start in images)
    request = GenerationRequest(uid, list(range(50)), SamplingParams(max_new_tokens=1), images=made)
    one = Req(request, seed=0, max_total=51, stop_ids=frozenset())
    one.state, one.arrival, one.sent = state, arrival, sent
    return one


class Tower:
    """What it has read, by the first position of an image. asked: tokens that would not be too long."""

    def __init__(self, lookahead: int = 0) -> None:
        self.known: set[int] = set()
        self.asked: list[int] = []
        self.tower_schedule = TowerSchedule(PrefillBudget(), 64, lookahead)
        self.tower_schedule.unseen = self.unseen

    def unseen(self, images: Sequence[RequestImage], salt: int, start: int, tokens: int) -> RequestImage | None:
        self.asked.append(tokens)
        return next((one for one in images if one.end > start and one.start not in self.known), None)

    def turn(self, *running: Req, steps: bool, prefilled: Sequence[Chunk] = ()) -> int | None:
        """Returns which image is read on; parts of prompts wait exactly where somebody decodes meanwhile."""
        wait = self.tower_schedule.plan(running, steps, prefilled)
        found = self.tower_schedule.next
        assert wait == (steps and found is not None)
        assert found is None or found.seconds == UNNOTICED_WAIT, "as long as it is not known how long steps take"
        return None if found is None else found.image.start


TEXT = req("text", ReqState.DECODE)


def test_a_head_reads_an_image_with_the_token_before_it() -> None:
    tower, one = Tower(1), req("a", ReqState.PREFILL, 5, 20)
    assert tower.turn(one, TEXT, steps=True) is None and tower.tower_schedule.room(one) == 4
    one.sent = 4
    assert tower.turn(one, TEXT, steps=True) == 5 and tower.tower_schedule.room(one) == 0
    tower.known.add(5)
    assert tower.turn(one, TEXT, steps=True) is None and tower.tower_schedule.room(one) == 15


def test_a_prompt_goes_on_up_to_its_image() -> None:
    tower, one = Tower(), req("a", ReqState.PREFILL, 5, 20)
    assert tower.turn(one, TEXT, steps=True) is None and tower.tower_schedule.room(one) == 5
    one.sent = 5
    assert tower.turn(one, TEXT, steps=True) == 5 and tower.tower_schedule.room(one) == 0
    tower.known.add(5)
    assert tower.turn(one, TEXT, steps=True) is None and tower.tower_schedule.room(one) == 15
    tower.known.add(20)
    assert tower.turn(one, TEXT, steps=True) is None and tower.tower_schedule.room(one) == 45
    assert set(tower.asked) == {64}, "as long as it is not known how long a token takes"


def test_where_its_features_were_forgotten_it_is_read_again() -> None:
    one = req("a", ReqState.PREFILL, 5, sent=9)
    tower = Tower()
    assert tower.turn(one, steps=False) == 5 and tower.tower_schedule.room(one) == 0


def test_pieces_and_parts_of_prompts_take_turns_between_steps() -> None:
    tower, one, other = Tower(), req("a", ReqState.PREFILL, 0), req("b", ReqState.PREFILL)
    running = one, other, TEXT
    found = [tower.turn(*running, steps=True) for _ in range(4)]
    assert found == [0, None, 0, None]
    assert tower.turn(*running, steps=True, prefilled=CHUNK) is None, "the gap has a part already"
    assert [tower.turn(one, TEXT, steps=True) for _ in range(2)] == [0, 0], "nobody else has a prompt"
    assert [tower.turn(one, other, steps=False) for _ in range(2)] == [0, 0], "nobody waits for a step"


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_by_rank_is_read_first(order: Any) -> None:
    first, second = req("a", ReqState.PREFILL, 0, arrival=1), req("b", ReqState.PREFILL, 0, 30, arrival=2, sent=15)
    assert Tower().turn(*(first, second)[::order], steps=False) == 0
    second.sent = 30
    assert first.rank < second.rank
    assert Tower().turn(*(first, second)[::order], steps=False) == 0


def test_nothing_is_asked_about_prompts_without_images() -> None:
    tower = Tower()
    assert tower.turn(req("a", ReqState.PREFILL), TEXT, req("b", ReqState.DECODE, 5), steps=True) is None
    assert not tower.asked
