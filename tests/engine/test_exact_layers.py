"""A model's text is the same with drafts as without them, whatever its layers are: attention of several sizes and
rotary embeddings, layers that read another's keys and values, recurrences and convolutions with states in the pool."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layer_kinds import KINDS, config_of, dense_logits

from draftwing.core import PLAIN, TreeShape
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.spec.heads import DraftLM
from draftwing.spec.model_drafter import ModelDrafter

TOKENS = 24
CHAIN, TREE, DEEP = TreeShape(4, 1, 5), TreeShape(4, 3, 11), TreeShape(8, 2, 16)

BLOCKS = pytest.param("blocks", marks=pytest.mark.slow)  # layers in one call each, where they can be
pytestmark = pytest.mark.parametrize("harness", ["cpu", "windows", BLOCKS], indirect=True, scope="session")


@pytest.fixture(scope="session", params=list(KINDS))
def case(request, harness, one_thread):
    """harness "cpu": over torch's attention, "windows": over the device's own."""
    make = partial(harness.model_of, config_of(KINDS[request.param], harness.CONTEXT))
    model, prompts = make(), harness.prompts_for(8)
    params = [harness.greedy(TOKENS) if i % 2 else harness.seeded(TOKENS, seed=i) for i in range(8)]
    expected = harness.plain_answers(model, prompts, params)
    assert len({token for answer in expected.tokens.values() for token in answer}) > 12, "answers say nothing"
    return model, make, prompts, params, expected, harness.make_book(prompts, expected)


def answer(harness, case, **kw):
    model, _, prompts, params, expected, book = case
    rig = harness.Rig(model, book=book, **{"drafter": "oracle", "lag": 1, **kw})
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param)
    assert rig.run().tokens == expected.tokens
    return rig


def test_logits_are_those_of_a_dense_computation(harness, case):
    """In chunks, the second of which reads what the first left."""
    if case[0].config.weight_format != DENSE:
        pytest.skip("its weights are quantised")
    model, ids = case[0], torch.tensor([5, 9, 2, 7, 7, 1, 30, 4, 8, 11, 3])
    rig = harness.Rig(model)
    rows, slots = torch.tensor([0]), torch.tensor([17, 3, 9, 4, 12, 8, 1, 2, 20, 30, 25])
    table = torch.zeros(1, 16, dtype=torch.int64)
    table[0, : len(ids)] = slots
    found = []
    for begin, end in ((0, 4), (4, 11)):
        here, length = slice(begin, end), end - begin
        batch = Batch(
            rows, ids[here], torch.arange(begin, end), slots[here], table, torch.tensor([begin]),
            chunks=(ChunkSpan(0, 0, begin, length),), bound=end,
        )  # fmt: skip
        with torch.inference_mode():
            found.append(model.logits(model(ids[here], batch.positions, rig.executor.attn.bind(batch, 0))[0]))
    torch.testing.assert_close(torch.cat(found).double(), dense_logits(model, ids.tolist()), rtol=0, atol=2e-4)


@pytest.mark.parametrize("shape", [CHAIN, TREE, DEEP], ids=["chain", "tree", "deep"])
def test_disturbed_drafts(harness, case, shape):
    rig = answer(harness, case, shapes=(shape,), miss=2)
    assert rig.accept_length > 1.5
    assert shape == CHAIN or rig.stats.moved > 18, "no later child was accepted"


@pytest.mark.parametrize("chunk", [1, 5])
def test_prefill_chunks_and_the_best_nodes_of_a_batch(harness, case, chunk):
    rig = answer(harness, case, policy=harness.Cycle(TreeShape(4, 3, 11, 4), TREE), chunk=chunk)
    assert rig.stats.prefills > 6 and rig.accept_length > 1.2 and PLAIN in rig.stats.shapes


def test_preemption(harness, case):
    rig = answer(harness, case, shapes=(TREE,), slots=90, chunk=8)
    assert rig.sched.retractions >= 2 and rig.accept_length > 1.5


def test_prefix_hits(harness, case):
    model, _, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1)
    for round_ in range(2):
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(f"{round_}/{i}", prompt, param)
        got = rig.run()
        assert {uid.split("/")[1]: tokens for uid, tokens in got.tokens.items()} == expected.tokens
    assert sum(out.meta["cached_tokens"] for out in got.final.values()) == sum(len(prompt) - 1 for prompt in prompts)


def test_as_its_own_draft_model(harness, case):
    """What it proposes greedily is what it draws, if its layers in the pool are as good as the target's."""
    model, make, prompts, _, _, _ = case
    params = [harness.greedy(TOKENS)] * len(prompts)
    expected = harness.plain_answers(model, prompts, params)
    drafter = ModelDrafter(DraftLM(make(), harness.VOCAB), 7, TREE.topk, torch.float32, make_ops(torch.device("cpu")))
    rig = answer(harness, (model, make, prompts, params, expected, None), shapes=(TREE,), drafter=drafter)
    assert rig.accept_length > 4, "a draft of 4 tokens is nearly always right"
