"""Speculation on equals speculation off where layers have sliding windows and sinks, and where they are Gemma's:
windows shorter than the text and about as long as a tree is deep, chunks, cached prefixes, preemption, and a draft
model with windows of its own."""

import pytest
import torch
from engine_rig import RANKS
from exactness import TOKENS, Exactness

from draftwing.engine.devices import pick_device
from draftwing.layers.config import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.ops.contracts import Routing

CUDA = pytest.param(
    "windows cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
EXPERTS = ExpertConfig(4, Routing(2), 32, router_bias=True, bias=True, limit=7.0)

pytestmark = [
    pytest.mark.parametrize("harness", ["windows", RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness="ranks", case=["sinks", "gemma"]),
]


SWITCHES = {
    "sinks": dict(windows=(6, 0), sinks=True),
    "gpt-oss": dict(windows=(6, 0), sinks=True, wide_norms=True, qkv_bias=True, experts=EXPERTS),
    "gemma": dict(windows=(6, 0), qk_norm=True, scalar=24, local_rope=RopeConfig(100.0), wide_norms=True, gemma=True),
}


@pytest.fixture(
    scope="session",
    params=["sinks", *(pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES if name != "sinks")],
)
def case(request, harness, one_thread):
    switches = SWITCHES[request.param]

    def tiny_model():
        model = harness.tiny_model(**switches)
        if harness.device == "cuda" and "experts" in switches:  # torch's own GEMMs of experts wait for the device
            model.pack(pick_device("cuda").ops)
        return model

    model, prompts = tiny_model(), harness.prompts_for(8)
    params = [harness.greedy(TOKENS) if i % 2 else harness.seeded(TOKENS, seed=i) for i in range(8)]
    expected = harness.plain_answers(model, prompts, params)
    (whole,) = getattr(other := tiny_model(), "whole", (other,))
    for layer in whole.layers:  # the same weights, all of which see everything
        layer.mixer._window = 0
    assert harness.plain_answers(whole, prompts, params).tokens != expected.tokens, "windows change nothing here"
    model.again = tiny_model
    return model, prompts, params, expected, harness.make_book(prompts, expected)


@pytest.fixture
def another(case):
    return case[0].again()


class TestWindows(Exactness):
    pass
