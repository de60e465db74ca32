"""Gemma 4's text is the same with drafts as without: heads by kind of layer, windows, keys that several layers read,
embeddings by layer, experts beside the MLP; over trees and chains, chunks, cached prefixes and preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_rig import RANKS
from exactness import TOKENS, Exactness
from gemma4_models import KINDS, SIZES

from draftwing.engine.devices import pick_device
from draftwing.models.config import from_hf

CUDA = pytest.param(
    "windows cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("harness", ["windows", "blocks", RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(case="dense"),
    pytest.mark.further(harness="ranks", case="experts"),
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

    model, prompts = make(), harness.prompts_for(8)
    params = [harness.greedy(TOKENS) if i % 2 else harness.seeded(TOKENS, seed=i) for i in range(8)]
    expected = harness.plain_answers(model, prompts, params)
    assert len({token for answer in expected.tokens.values() for token in answer}) > 12, "answers say nothing"
    model.again = make
    return model, prompts, params, expected, harness.make_book(prompts, expected)


@pytest.fixture
def another(case):
    return case[0].again()


class TestGemma4(Exactness):
    slots = 90
