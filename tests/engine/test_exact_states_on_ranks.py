"""Models with recurrent layers over two ranks: each rank has some heads, or channels, and their states, and their text
is the same with drafts as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from engine_rig import RANKS
from exactness import CHAIN, TREE, answer, case_of
from layer_kinds import ATTENTION, FLOORS, KIMI, MAMBA, MAMBA1, config_of

from draftwing.layers.config import MixerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.sched.state_slots import StateSizes

SPREAD: dict[str, tuple[MixerConfig, ...]] = {
    "delta": (
        DeltaNetConfig(2, 4, 16, 16, 4),
        ATTENTION,
        DeltaNetConfig(2, 2, 16, 32, 3, by_part=True, reach=2, sigmoid=True),
    ),
    "mamba": (MAMBA[0], ATTENTION, replace(MAMBA[2], groups=2), MAMBA[3]),
    "mamba1": MAMBA1,
    "kimi": KIMI,
    "floors": FLOORS,
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("harness", [RANKS], indirect=True, scope="session"),
]


@pytest.fixture(scope="session", params=SPREAD)
def case(request, harness, one_thread):
    return case_of(harness, partial(harness.model_of, config_of(SPREAD[request.param], harness.CONTEXT)))


@pytest.mark.further(shape=CHAIN)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_disturbed_drafts(harness, case, shape):
    rig = answer(harness, case, shapes=(shape,), miss=2)
    assert rig.accept_length > 1.5


def test_preemption_and_chunks(harness, case):
    rig = answer(harness, case, shapes=(TREE,), slots=70, chunk=8, states=StateSizes(16, 8, 4))
    assert rig.sched.retractions >= 1


def test_prefix_hits(harness, case):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1, states=StateSizes(60, 8, 4))
    for _ in range(2):
        assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.sched.kv.states.hits > 4
