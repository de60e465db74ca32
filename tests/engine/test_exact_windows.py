"""Speculation on equals speculation off where layers have sliding windows and sinks, and where they are Gemma's:
windows shorter than the text and about as long as a tree is deep, chunks, cached prefixes, preemption, and a draft
model with windows of its own."""

import pytest
import torch

from draftwing.core import TreeShape
from draftwing.engine.devices import pick_device
from draftwing.layers.config import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.ops import make_ops
from draftwing.spec.heads import DraftLM
from draftwing.spec.model_drafter import ModelDrafter

CUDA = pytest.param(
    "windows cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
RANKS = pytest.param("ranks", marks=pytest.mark.slow)
EXPERTS = ExpertConfig(4, 2, 32, router_bias=True, bias=True, limit=7.0)
TOKENS = 24  # of an answer: four windows
CHAIN, TREE, DEEP = TreeShape(4, 1, 5), TreeShape(4, 3, 11), TreeShape(8, 2, 16)

pytestmark = [
    pytest.mark.parametrize("harness", ["windows", RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness="ranks", case=["sinks", "gemma"]),
]


SWITCHES = {
    "sinks": dict(windows=(6, 0), sinks=True),
    "gpt-oss": dict(windows=(6, 0), sinks=True, wide_norms=True, qkv_bias=True, experts=EXPERTS),
    "gemma": dict(
        windows=(6, 0),
        qk_norm=True,
        scalar=24,
        local_rope=RopeConfig(100.0),
        wide_norms=True,
        gemma=True,
    ),
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


def answer(h, case, **kw):
    model, prompts, params, expected, book = case
    rig = h.Rig(model, book=book, **kw)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param)
    assert rig.run().tokens == expected.tokens
    return rig


@pytest.mark.further(harness="ranks", shape=[CHAIN, TREE])
@pytest.mark.parametrize("shape", [CHAIN, TREE, DEEP], ids=["chain", "tree", "deeper than the window"])
def test_disturbed_drafts(harness, case, shape):
    rig = answer(harness, case, shapes=(shape,), drafter="oracle", miss=2, lag=1)
    assert rig.accept_length > 1.5
    assert shape == CHAIN or rig.stats.moved > 18, "no later child was accepted"


@pytest.mark.further(harness="ranks", chunk=1)
@pytest.mark.further(case=["gpt-oss", "gemma"], chunk=1)
@pytest.mark.parametrize("chunk", [1, 5])
def test_prefill_chunks_and_the_best_nodes_of_a_batch(harness, case, chunk):
    policy = harness.Cycle(TreeShape(4, 3, 11, 4), TREE)
    rig = answer(harness, case, policy=policy, drafter="oracle", chunk=chunk)
    assert rig.stats.prefills > 6 and rig.accept_length > 1.2


def test_preemption(harness, case):
    rig = answer(harness, case, shapes=(TREE,), drafter="oracle", lag=1, slots=120, chunk=8)
    assert rig.sched.retractions >= 2 and rig.accept_length > 1.5


def test_prefix_hits(harness, case):
    """What a request that is gone has left is seen through the same windows."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1)
    for round_ in range(2):
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(f"{round_}/{i}", prompt, param)
        got = rig.run()
        assert {uid.split("/")[1]: tokens for uid, tokens in got.tokens.items()} == expected.tokens
    assert sum(out.meta["cached_tokens"] for out in got.final.values()) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.further(harness="ranks")
def test_a_draft_model_with_windows(harness, case):
    """The target as its own draft: what it proposes greedily is what it draws, if both see the same."""
    model, prompts, _, _, _ = case
    params = [harness.greedy(TOKENS)] * len(prompts)
    expected = harness.plain_answers(model, prompts, params)
    ops = make_ops(torch.device(harness.device))
    (draft,) = getattr(other := model.again(), "whole", (other,))

    def make(share=None):
        return ModelDrafter(DraftLM(draft, harness.VOCAB), 7, TREE.topk, torch.float32, ops)

    drafter = make if hasattr(model, "whole") else make()
    rig = answer(harness, (model, prompts, params, expected, None), shapes=(TREE,), drafter=drafter, lag=1)
    assert rig.accept_length > 4, "a draft of 4 tokens is nearly always right"
