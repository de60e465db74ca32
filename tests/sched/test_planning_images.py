"""Images whose tokens see each other come whole."""

from __future__ import annotations

import numpy as np
import pytest

from draftwing.config.trees import PLAIN
from draftwing.core import Plan, StepResult
from draftwing.requests.images import RequestImage
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.planning import with_whole_images
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

PIXELS = np.zeros((4, 4, 3), np.uint8)


def req(uid: str, length: int, *images: tuple[int, int], mutual: bool = True) -> Req:
    """images: where they begin, and their tokens."""
    made = tuple(RequestImage(start, (1, size), PIXELS, bytes(8), mutual) for start, size in images)
    request = GenerationRequest(uid, list(range(length)), SamplingParams(max_new_tokens=1), images=made)
    return Req(request, seed=0, max_total=length + 1, stop_ids=frozenset())


@pytest.mark.parametrize(
    ("sent", "length", "most", "alone", "expected"),
    [
        (0, 5, 99, True, 5),  # ends before it
        (0, 10, 99, True, 10),  # where it begins
        (0, 15, 99, True, 10),
        (0, 30, 99, True, 30),  # where it ends
        (10, 3, 99, True, 20),
        (10, 3, 8, True, 20),
        (10, 3, 8, False, None),
        (17, 3, 99, False, 13),  # its beginning was cached
        (30, 7, 99, True, 7),
    ],
)
def test_a_chunk_ends_within_no_image(sent: int, length: int, most: int, alone: bool, expected: int | None) -> None:
    one = req("a", 50, (10, 20))
    one.sent = sent
    assert with_whole_images([(one, length)], most, alone) == ([] if expected is None else [(one, expected)])


def test_others_get_what_an_image_leaves() -> None:
    text, image, other = req("a", 50), req("b", 50, (0, 20)), req("c", 50, (3, 20))
    given = [(text, 8), (image, 8), (other, 8)]
    assert with_whole_images(given, 24, False) == [(image, 20), (text, 4)]
    assert with_whole_images(given, 30, False) == [(image, 20), (text, 8), (other, 2)]
    assert with_whole_images(given, 99, True) == [(image, 20), (text, 8), (other, 3)]
    assert with_whole_images(given[:1], 99, True) == given[:1]


def test_images_that_see_what_comes_before_are_cut() -> None:
    one = req("a", 50, (10, 20), mutual=False)
    assert with_whole_images([(one, 15)], 15, False) == [(one, 15)]


def commit(sched: Scheduler, plan: Plan) -> None:
    count = np.asarray([int(each.final) for each in plan.chunks] or [1] * len(plan.rows))
    rows = len(plan.rows)
    sched.commit(plan, StepResult(
        tokens=np.full((rows, 1), 7), count=count, order=np.zeros((rows, 1), np.int64),
        mark=np.zeros((rows, 1), np.int64), confidence=np.ones(rows, np.int64),
    ))  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_all_prompts_come_to_an_end(chunk: int) -> None:
    sched = Scheduler(SchedulerConfig(600, 6, 1, chunk), FixedShape(PLAIN), {PLAIN: 1})
    asked = [req(str(i), 60 + i, (i, 16), (20 + i, 16), (40 + i, 3)) for i in range(3)] + [req("3", 70)]
    for one in asked:
        sched.submit(one)
    cuts: dict[int, set[int]] = {}
    for _ in range(600):
        plan = sched.plan()
        if plan is None:
            break
        for each in plan.chunks:
            cuts.setdefault(each.row, set()).add(each.start + each.length)
        commit(sched, plan)
    assert sched.idle and len(cuts) == 4
    for row, one in enumerate(asked):
        assert not any(image.start < cut < image.end for image in one.request.images for cut in cuts[row])


def test_an_image_with_no_room_beside_a_step_is_not_passed_by_texts_for_ever() -> None:
    """One decodes all the time, and prompts without images keep coming."""
    config = SchedulerConfig(4000, 6, 1, 16, radix=False, mixes=lambda shape, rows: rows)
    sched = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1})
    decodes = GenerationRequest("d", [1, 2, 3], SamplingParams(max_new_tokens=500))
    sched.submit(Req(decodes, seed=0, max_total=503, stop_ids=frozenset()))
    image = req("image", 22, (1, 20))
    for step in range(40):
        sched.submit(req(str(step), 7))
        if step == 5:
            sched.submit(image)
        plan = sched.plan()
        assert plan is not None
        commit(sched, plan)
        if plan.mixed_prefill is not None:
            commit(sched, plan.mixed_prefill)
    assert image.sent == 22
