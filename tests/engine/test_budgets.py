"""Thinking budgets: the text with drafts is that of decoding token by token and forcing by hand, in float32."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from engine_rig import BLOCKS, CUDA, RANKS
from reference.budgets import machine
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.requests.request import ThinkingBudget
from draftwing.spec.model_drafter import ModelDrafter

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("harness", ["cpu", BLOCKS, RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness=["blocks", "ranks"], lag=0),
    pytest.mark.further(harness="cpu", shape=TREE, lag=0),
    pytest.mark.further(harness="cpu", shape=CHAIN, lag=1),
]
TOKENS = 26
ENDS = (7,), (7, 7, 8), (9, 10)


def budget_of(draw: random.Random) -> ThinkingBudget | None:
    """Of one of the requests: small ones, those that end nothing, and none."""
    if draw.random() < 0.15:
        return None
    free = draw.random() < 0.4
    tokens = draw.choice((0, 1, 3, 8, 15, 25, 60))
    return ThinkingBudget(tokens, (draw.randrange(48),) if free else (), draw.choice(ENDS), not free, free)


def ask(h, rig, requests):
    for i, (prompt, params, budget) in enumerate(requests):
        rig.submit(str(i), prompt, params, thinking=budget)
    return rig.run()


@pytest.fixture(scope="module")
def case(harness):
    """Model, requests with budgets, and answers of which each token is asked for by itself."""
    h, draw = harness, random.Random(3)
    model = h.tiny_model()
    prompts = h.prompts_for(12)
    params = [h.greedy(TOKENS) if i % 2 else h.seeded(TOKENS, seed=i) for i in range(12)]
    requests = [(prompt, one, budget_of(draw)) for prompt, one in zip(prompts, params, strict=True)]
    (whole,) = getattr(model, "whole", (model,))
    alone = h.one_rank if hasattr(model, "whole") else h.Rig
    rig = alone(whole, rows=12)
    texts, forced = [[] for _ in requests], 0
    for step in range(TOKENS):
        must = [-1 if b is None else machine(text, b) for text, (_, _, b) in zip(texts, requests, strict=True)]
        for i, (prompt, one, _) in enumerate(requests):
            if must[i] < 0:
                rig.submit(f"{step} {i}", [*prompt, *texts[i]], one.replace(max_new_tokens=1))
        got = rig.run().tokens
        for i, text in enumerate(texts):
            text += got[f"{step} {i}"] if must[i] < 0 else [must[i]]
        forced += sum(token >= 0 for token in must)
    expected = {str(i): text for i, text in enumerate(texts)}
    free = h.plain_answers(model, prompts, params).tokens
    assert forced > 8 and sum(free[uid] != text for uid, text in expected.items()) > 5
    return model, requests, expected


def book_of(h, requests, expected):
    return h.make_book([prompt for prompt, *_ in requests], SimpleNamespace(tokens=expected))


@pytest.mark.further(harness=["blocks", "ranks"])
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_without_drafts(harness, case, lag):
    model, requests, expected = case
    assert ask(harness, harness.Rig(model, lag=lag, radix=False, chunk=3), requests).tokens == expected


@pytest.mark.further(harness=["blocks", "ranks"], drafter=["ngram", "suffix"])
@pytest.mark.further(harness=["blocks", "ranks"], shape=CHAIN)
@pytest.mark.further(lag=0, drafter=["ngram", "suffix"])
@pytest.mark.further(shape=CHAIN, drafter=["ngram", "suffix"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["oracle", "ngram", "suffix"])
def test_with_drafts(harness, case, drafter, shape, lag):
    model, requests, expected = case
    book = book_of(harness, requests, expected)
    rig = harness.Rig(model, shapes=(shape,), drafter=drafter, book=book, miss=2, lag=lag)
    assert ask(harness, rig, requests).tokens == expected
    assert rig.accept_length > (1.8 if drafter == "oracle" else 1.0)


@pytest.mark.further(lag=0)
@pytest.mark.further(harness="blocks")
@pytest.mark.parametrize("lag", [0, 1])
def test_with_a_draft_model(harness, case, lag):
    """Its drafts go on where the budget is spent: they are right but for what is forced."""
    model, requests, expected = case
    ops, draft = make_ops(torch.device(harness.device)), harness.tiny_model()
    (draft,) = getattr(draft, "whole", (draft,))

    def make(share=None):
        return ModelDrafter(DraftLM(draft, harness.VOCAB), 7, TREE.topk, torch.float32, ops)

    drafter = make if hasattr(model, "whole") else make()
    rig = harness.Rig(model, shapes=(TREE,), drafter=drafter, lag=lag)
    assert ask(harness, rig, requests).tokens == expected
    assert rig.accept_length > 1.8


@pytest.mark.further(harness=["blocks", "ranks"])
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_small_chunks_and_changing_shapes(harness, case, lag):
    model, requests, expected = case
    rig = harness.Rig(
        model, drafter="oracle", policy=harness.Cycle(TREE, CHAIN), book=book_of(harness, requests, expected), miss=1,
        lag=lag, slots=110, chunk=7,
    )  # fmt: skip
    got = ask(harness, rig, requests)
    assert got.tokens == expected
    assert rig.sched.retractions >= 2 and rig.accept_length > 1.5


@pytest.mark.further(harness=["blocks", "ranks"])
def test_beside_edits_filters_grammars_and_processors(harness, case):
    """What else a request asks for holds where the model decides, and forbids the marker nowhere."""
    h, (model, requests, _) = harness, case
    markers = sorted({token for end in ENDS for token in end})

    class Lenient(ToyGrammar):
        def _allowed(self):
            return super()._allowed() | set(markers)

    def against(tokens, logits):
        logits[markers] = -torch.inf
        logits[len(tokens) % len(logits)] += 3.0
        return logits

    edits = {"repetition_penalty": 1.3, "logit_bias": ((3, 2.0), (7, -50.0)), "frequency_penalty": 0.4}
    every = []
    for i, (prompt, params, budget) in enumerate(requests):
        if i % 3:
            params = params.replace(**edits)
        if i % 4 == 2:
            params = params.replace(top_k=5)
        more = {3: {"processor": against}}.get(i % 5, {})
        every.append((prompt, params, more | {"thinking": budget and budget._replace(tokens=min(budget.tokens, 12))}))

    def submit(rig):
        for i, (prompt, params, more) in enumerate(every):
            grammar = Lenient(i, h.VOCAB) if i % 5 == 4 else None
            rig.submit(str(i), prompt, params, grammar=grammar, **more)
        return rig.run()

    whole = getattr(model, "whole", None)  # of a model that is spread over ranks
    expected = submit(h.one_rank(*whole, rows=1, radix=False) if whole else h.Rig(model, rows=1, radix=False))
    forced = 0
    for i, (_, _, more) in enumerate(every):
        text = expected.tokens[str(i)]
        assert len(text) == TOKENS
        must = [machine(text[:n], more["thinking"]) for n in range(TOKENS)] if more["thinking"] else []
        assert all(token in (-1, text[n]) for n, token in enumerate(must))
        forced += sum(token >= 0 for token in must)
    assert forced > 8
    book = h.make_book([prompt for prompt, *_ in every], expected)
    for shape, lag in ((TREE, 1), (CHAIN, 0)):
        rig = h.Rig(model, shapes=(shape,), drafter="oracle", book=book, miss=2, lag=lag)
        assert submit(rig).tokens == expected.tokens


@pytest.mark.further(harness=["blocks", "ranks"])
@pytest.mark.parametrize("lag", [0, 1])
def test_how_answers_end(harness, lag):
    """Stop ids end an answer inside of its reasoning; the marker does where it is one, also below min_new_tokens."""
    h, model = harness, harness.tiny_model()
    prompts = h.prompts_for(6)
    free = h.plain_answers(model, prompts, [h.greedy(20)] * 6).tokens
    requests, want = [], {}
    for i, prompt in enumerate(prompts):
        text, marker = free[str(i)], next(token for token in range(h.VOCAB) if token not in free[str(i)])
        budget = ThinkingBudget(8, (), (marker,), True)
        if i % 3 == 0:
            requests.append((prompt, h.greedy(20, stop_token_ids=(text[4],)), budget))
            want[str(i)] = text[: text.index(text[4]) + 1]
        else:
            least = {"min_new_tokens": 15} if i % 3 == 1 else {}
            requests.append((prompt, h.greedy(20, stop_token_ids=(marker,), **least), budget))
            want[str(i)] = [*text[:8], marker]
    book = book_of(h, requests, free)  # which has other tokens where the marker is
    for shape in (PLAIN, TREE):
        got = ask(h, h.Rig(model, shapes=(shape,), drafter="oracle", book=book, lag=lag), requests)
        assert got.tokens == want
        assert all(out.finish_reason == {"type": "stop", "matched": want[uid][-1]} for uid, out in got.final.items())
