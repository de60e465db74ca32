"""A small model as draft. The target as its own draft must have every draft accepted: any shift of tokens, positions
or KV between the two would show at once. (`tests/spec/test_model_drafter_reference.py` has its KV after prefix hits and
preemption.)"""

import pytest
from toy_grammar import ToyGrammar

from draftwing.config.trees import TreeShape
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.ops.attention.spec import TorchAttention
from draftwing.spec.model_drafter import ModelDrafter

pytestmark = pytest.mark.slow

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 3, 10)


def rig_with_draft(h, model, draft, shape, rows=6, vocab=None, **kw):
    weight = next(draft.parameters())
    head, ops = DraftLM(draft, vocab or h.VOCAB), make_ops(weight.device)
    drafter = ModelDrafter(head, rows + 1, shape.topk, weight.dtype, ops)
    return h.Rig(model, shapes=(shape,), drafter=drafter, rows=rows, **kw)


@pytest.fixture(scope="session")
def case(harness):
    model = harness.tiny_model(seed=1)
    prompts = harness.prompts_for(10, seed=2)
    params = [harness.greedy(40) if i % 2 else harness.seeded(40, seed=i) for i in range(len(prompts))]
    return model, prompts, params, harness.plain_answers(model, prompts, params)


def answer(rig, case):
    _, prompts, params, expected = case
    got = rig.answer(prompts, params)
    assert got.tokens == expected.tokens
    return got


def all_accepted(got, depth):
    """Whether every step of every answer accepted a whole chain, but for the last, which the length may have cut."""
    for final in got.final.values():
        histogram, steps = final.meta["spec_correct_drafts_histogram"], final.meta["spec_verify_ct"]
        if steps < 4 or len(histogram) != depth + 1 or sum(histogram[:depth]) > 1 or sum(histogram) != steps:
            return False
    return True


@pytest.mark.further(chunk=[1, 64], lag=0)
@pytest.mark.further(chunk=3)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_own_draft_is_always_accepted(harness, case, chunk, lag):
    rig = rig_with_draft(harness, case[0], case[0], CHAIN, chunk=chunk, lag=lag)
    got = answer(rig, case)
    assert all_accepted(got, CHAIN.depth), "a draft was rejected"


def test_it_reads_its_newest_token_where_attention_reads_pages_up_to_a_bound(harness, case):
    """The longest row's bound is exact: alone, and without overlap."""
    model, prompts, params, expected = case
    rig = rig_with_draft(harness, model, model, CHAIN, rows=1, attn=TorchAttention)
    got = rig.answer(prompts[:2], params[:2])
    assert got.tokens == {uid: expected.tokens[uid] for uid in ("0", "1")}
    assert all_accepted(got, CHAIN.depth), "a draft was rejected"


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_own_draft_as_a_tree_accepts_its_best_branch(harness, case, lag):
    rig = rig_with_draft(harness, case[0], case[0], TREE, lag=lag)
    answer(rig, case)
    assert rig.accept_length > 3.0


@pytest.mark.further(shape=CHAIN)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_another_model_as_draft_changes_no_token(harness, case, shape):
    """A disturbed copy of the target: some drafts are right, many are not, trees re-parent."""
    draft = harness.tiny_model(seed=1)
    for name, weight in draft.named_parameters():
        if "layers.1.mlp.down" in name:
            weight.data.mul_(0.3)
    rig = rig_with_draft(harness, case[0], draft, shape, lag=1, slots=300, chunk=9)
    answer(rig, case)
    assert 1.5 < rig.accept_length < shape.depth + 1
    assert shape == CHAIN or rig.stats.moved > 10


def test_a_target_that_pads_its_vocabulary_further_than_the_draft(harness, case):
    """Ids that only the target has reach the draft as text; it must survive them, and the answers stay the same."""
    target = case[0]
    small = harness.tiny_model(seed=1, vocab=harness.VOCAB - 8)
    prompts = [[1, harness.VOCAB - 1, 5], [2, 3, harness.VOCAB - 3]]
    params = [harness.seeded(30, seed=i, temperature=2.0) for i in range(2)]
    expected = harness.plain_answers(target, prompts, params)
    assert any(token >= harness.VOCAB - 8 for tokens in expected.tokens.values() for token in tokens)
    rig = rig_with_draft(harness, target, small, TREE, vocab=harness.VOCAB - 8)
    assert rig.answer(prompts, params).tokens == expected.tokens


def test_a_draft_with_a_padded_vocabulary(harness, case):
    rig = rig_with_draft(harness, case[0], case[0], CHAIN, vocab=harness.VOCAB - 5)
    answer(rig, case)
    assert rig.accept_length > 2


@pytest.mark.further(shape=CHAIN)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_begin_with_what_the_grammar_allows(harness, case, shape):
    """The first draft of an own draft is the target's choice, if both choose among the same tokens."""
    model, prompts, params, _ = case

    def submit(rig):
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(str(i), prompt, param, grammar=ToyGrammar(i, harness.VOCAB))
        return rig.run()

    expected = submit(harness.Rig(model, rows=1, radix=False))
    got = submit(rig_with_draft(harness, model, model, shape))
    assert got.tokens == expected.tokens
    for final in got.final.values():
        histogram = final.meta["spec_correct_drafts_histogram"]
        assert histogram[0] <= 1 < sum(histogram), "a first draft was rejected"
