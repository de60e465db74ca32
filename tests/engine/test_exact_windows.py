"""Speculation on equals speculation off where layers have sliding windows and sinks, and where they are Gemma's:
windows shorter than the text and about as long as a tree is deep, chunks, cached prefixes, preemption, and a draft
model with windows of its own."""

import pytest
from engine_rig import RANKS
from exactness import CHAIN, OWN_CUDA, Exactness, case_of

from draftwing.engine.devices import pick_device
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.ops.experts.routing import Routing

EXPERTS = ExpertConfig(4, Routing(2), 32, router_bias=True, bias=True, limit=7.0)

pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", RANKS, OWN_CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness="ranks", case=["sinks", "gemma"]),
    pytest.mark.further(harness="cpu", shape=CHAIN),
    pytest.mark.further(harness="cpu", chunk=1),
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

    found = _, prompts, params, expected, _ = case_of(harness, tiny_model)
    (whole,) = getattr(other := tiny_model(), "whole", (other,))
    for layer in whole.layers:  # the same weights, all of which see everything
        layer.mixer._window = 0
    assert harness.plain_answers(whole, prompts, params).tokens != expected.tokens, "windows change nothing here"
    return found


class TestWindows(Exactness):
    pass
