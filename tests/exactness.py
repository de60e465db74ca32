"""What holds of any model, for classes of tests to inherit: its text is the same with drafts as without them.

The fixture `case` is a `case_of`: model, prompts, parameters, the answers of plain decoding, and a book of them for the
oracle.
"""

from __future__ import annotations

import pytest
import torch

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.spec.model_drafter import ModelDrafter

TOKENS = 24  # of an answer
CHAIN, TREE, DEEP = TreeShape(4, 1, 5), TreeShape(4, 3, 11), TreeShape(8, 2, 16)


OWN_CUDA = pytest.param(
    "own cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


def case_of(harness, make):
    """make: a model, the same each time."""
    model, prompts = make(), harness.prompts_for(8)
    params = [harness.greedy(TOKENS) if i % 2 else harness.seeded(TOKENS, seed=i) for i in range(8)]
    expected = harness.plain_answers(model, prompts, params)
    assert len({token for answer in expected.tokens.values() for token in answer}) > 12, "answers say nothing"
    model.again = make
    return model, prompts, params, expected, harness.make_book(prompts, expected)


def answer(harness, case, **how):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, book=book, **{"drafter": "oracle", "lag": 1, **how})
    assert rig.answer(prompts, params).tokens == expected.tokens
    return rig


class Exactness:
    slots = 120  # too few for all requests

    @pytest.fixture
    def another(self, case):
        """A model with the same weights."""
        return case[0].again()

    @pytest.mark.further(harness=["ranks", "ranks with whole experts"], shape=[CHAIN, TREE])
    @pytest.mark.further(harness=["torch", "blocks"], shape=[CHAIN, DEEP])
    @pytest.mark.parametrize("shape", [CHAIN, TREE, DEEP], ids=["chain", "tree", "deep"])
    def test_disturbed_drafts(self, harness, case, shape):
        rig = answer(harness, case, shapes=(shape,), miss=2)
        assert rig.accept_length > 1.5
        assert shape == CHAIN or rig.stats.moved > 18, "no later child was accepted"

    @pytest.mark.further(harness=["ranks", "ranks with whole experts", "torch", "blocks"])
    @pytest.mark.further(case=["gpt-oss", "gemma"], chunk=1)
    @pytest.mark.parametrize("chunk", [1, 5])
    def test_prefill_chunks_and_the_best_nodes_of_a_batch(self, harness, case, chunk):
        rig = answer(harness, case, policy=harness.Cycle(TreeShape(4, 3, 11, 4), TREE), chunk=chunk, lag=0)
        assert rig.stats.prefills > 6 and rig.accept_length > 1.2 and PLAIN in rig.stats.shapes

    def test_preemption(self, harness, case):
        rig = answer(harness, case, shapes=(TREE,), slots=self.slots, chunk=8)
        assert rig.sched.retractions >= 2 and rig.accept_length > 1.5

    @pytest.mark.further(harness=["ranks", "ranks with whole experts", "torch", "blocks"])
    def test_prefix_hits(self, harness, case):
        """What a request that is gone has left is seen as its own layers saw it."""
        model, prompts, params, expected, book = case
        rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1)
        for _ in range(2):
            got = rig.answer(prompts, params)
            assert got.tokens == expected.tokens
        cached = sum(out.meta["cached_tokens"] for out in got.final.values())
        assert cached == sum(len(prompt) - 1 for prompt in prompts)

    @pytest.mark.further(harness=["ranks", "torch"])
    def test_as_its_own_draft_model(self, harness, case, another):
        """What it proposes greedily is what it draws, if its layers in the pool are as good as the target's."""
        model, prompts, _, _, _ = case
        params = [harness.greedy(TOKENS)] * len(prompts)
        expected = harness.plain_answers(model, prompts, params)
        ops = make_ops(torch.device(harness.device))
        (draft,) = getattr(another, "whole", (another,))  # of one that is spread over ranks

        def make(share=None):
            return ModelDrafter(DraftLM(draft, harness.VOCAB), 7, TREE.topk, torch.float32, ops)

        drafter = make if hasattr(model, "whole") else make()
        rig = answer(harness, (model, prompts, params, expected, None), shapes=(TREE,), drafter=drafter)
        assert rig.accept_length > 4, "a draft of 4 tokens is nearly always right"
