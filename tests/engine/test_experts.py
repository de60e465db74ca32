"""Speculation on equals speculation off for mixtures of experts, by disturbed drafts, in chains and in trees."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
from engine_rig import BLOCKS, CUDA, EXPERT_RANKS, RANKS

from draftwing.config.trees import TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.startup.measure_costs import experts_at_random, measure_steps
from draftwing.layers.part_configs import ExpertConfig
from draftwing.ops.experts.routing import Routing
from draftwing.sched.policy.cost import StepCost

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)
EXPERTS = {
    "softmax": ExpertConfig(6, Routing(2, False), 32),
    "renormalised": ExpertConfig(6, Routing(3), 32),
    "sigmoids": ExpertConfig(12, Routing(3, True, True, 4, 2, 2.5), 32, shared=64, wide_router=True),
    "corrected": ExpertConfig(8, Routing(3, corrected=True), 32, shared=32, wide_router=True),
    "clamped": ExpertConfig(4, Routing(2), 32, router_bias=True, bias=True, limit=1.5),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("harness", ["cpu", BLOCKS, RANKS, EXPERT_RANKS, CUDA], indirect=True, scope="module"),
]


@pytest.fixture(scope="module", params=EXPERTS)
def case(request, harness):
    model, prompts = harness.tiny_model(experts=EXPERTS[request.param]), harness.prompts_for(6)
    if harness.device == "cuda":  # torch's own GEMMs of experts in float32 wait for the device
        model.pack(pick_device("cuda").ops)
    params = [harness.greedy(20) if i % 2 else harness.seeded(20, seed=i) for i in range(len(prompts))]
    expected = harness.plain_answers(model, prompts, params)
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) == len(prompts)
    return model, prompts, params, expected


def test_prices_are_measured_on_tokens_that_have_nothing_in_common(harness, monkeypatch):
    """Rows that are all alike would choose the same experts; and what they choose afterwards is theirs again."""
    model = harness.tiny_model(experts=ExpertConfig(16, Routing(2), 32))
    rig, shape = harness.Rig(model, shapes=(TREE,), drafter="ngram"), TREE
    model.pack(rig.executor.device.ops)
    mlp, seen = model.layers[0].mlp, []
    route, whole = mlp._ops.route, mlp._whole
    monkeypatch.setattr(
        mlp._ops, "route", lambda *args: (seen.append(route(*args[:5])), route(*args))[1]
    )  # of all ranks
    if whole is not None:  # routes in the same call as all the rest

        def routed(x, residual, scatter, by):
            mlp._ops.route(mlp.router(x), Routing(2), None, False, scatter)
            return whole(x, residual, scatter, by)

        monkeypatch.setattr(mlp, "_whole", routed)
    costs = StepCost((shape,), False)
    for random, distinct in ((True, 11), (False, 6)):
        seen.clear()
        with experts_at_random(rig.executor) if random else nullcontext():
            measure_steps(rig.executor, costs, time.monotonic() + 60, ())
        counts = [one.experts.unique().numel() for one in seen if len(one.experts) == shape.nodes]
        assert counts and (min(counts) >= distinct if random else max(counts) <= distinct)


@pytest.mark.further(harness=["blocks", "ranks", "ranks with whole experts"], case=["softmax", "renormalised"])
@pytest.mark.further(harness=["blocks", "ranks", "ranks with whole experts"], lag=0)
@pytest.mark.further(harness=["blocks", "ranks", "ranks with whole experts"], shape=CHAIN)
@pytest.mark.further(lag=0)
@pytest.mark.further(harness="blocks", case="sigmoids")  # as clamped
@pytest.mark.further(harness="ranks")  # experts are whole, or as dense layers are
@pytest.mark.further(case=["softmax", "renormalised"], shape=CHAIN)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_text_is_that_of_plain_decoding(harness, case, shape, lag):
    model, prompts, params, expected = case
    book = harness.make_book(prompts, expected)
    rig = harness.Rig(model, shapes=(shape,), drafter="oracle", book=book, miss=2, lag=lag, chunk=7)
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.accept_length > 1.5
