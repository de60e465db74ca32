"""Gemma 4's text is the same with drafts as without: heads by kind of layer, windows, keys that several layers read,
embeddings by layer, experts beside the MLP; over trees and chains, chunks, cached prefixes and preemption."""

from __future__ import annotations

from typing import Any

import pytest
from engine_rig import EXPERT_RANKS, RANKS
from exactness import CHAIN, OWN_CUDA, Exactness, case_of
from gemma4_models import KINDS, SIZES

from draftwing.engine.devices import pick_device
from draftwing.models.config import from_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize(
        "harness", ["cpu", "blocks", RANKS, EXPERT_RANKS, OWN_CUDA], indirect=True, scope="session"
    ),
    pytest.mark.further(case="dense"),
    pytest.mark.further(harness="cpu", shape=CHAIN),
    pytest.mark.further(harness="cpu", chunk=1),
    pytest.mark.further(harness="blocks", case="per-layer"),  # tests/engine/test_gemma4.py has both
    pytest.mark.further(harness="ranks", case="experts"),
    pytest.mark.further(harness="ranks with whole experts", case="per-layer"),
]


def config_of(kind: str, vocab: int, positions: int) -> Any:
    own = {**SIZES, **KINDS[kind], "tie_word_embeddings": False, "sliding_window": 6}
    own |= {
        "final_logit_softcapping": 20.0,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab,
        "max_position_embeddings": positions,
    }
    return from_hf({**own, "architectures": ["Gemma4ForCausalLM"]})


@pytest.fixture(scope="session", params=list(KINDS))
def case(request, harness, one_thread):
    config = config_of(request.param, harness.VOCAB, harness.CONTEXT)

    def make():
        model = harness.model_of(config)
        if harness.device == "cuda":  # torch's own GEMMs of experts wait for the device
            model.pack(pick_device("cuda").ops)
        return model

    return case_of(harness, make)


class TestGemma4(Exactness):
    slots = 90
