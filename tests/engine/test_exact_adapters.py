"""Each request's text is that which its adapter gives it alone, without drafts: whoever runs beside it and drafts,
after prefix hits and preemption, from graphs and recordings, on two ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine.tile_attention import TileAttention, paged
from engine_rig import BLOCKS, CUDA, EXPERT_RANKS, RANKS, Answers, adapters_for, greedy
from layer_kinds import HYBRIDS, RECURRENT, config_of

from draftwing.config.adapters import AdapterCard
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine import prefill_graphs
from draftwing.engine.adapters import EngineAdapters
from draftwing.engine.captures import Captures
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import RecordedStages
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.ops.experts.routing import Routing
from draftwing.sched.state_slots import StateSizes

CHAIN, TREE, BUSHY = TreeShape(4, 1, 5), TreeShape(4, 3, 11), TreeShape(2, 4, 9)
PART = TreeShape(4, 3, 11, 4)  # of whose nodes the batch verifies 4 for each row
TOKENS = 16
pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", BLOCKS, RANKS, EXPERT_RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness=["blocks", "ranks", "ranks with whole experts"], lag=0),
]


@pytest.fixture(scope="session")
def case(harness, one_thread):
    return case_of(harness, harness.tiny_model(seed=2))


@pytest.fixture(scope="session")
def grouped(harness, one_thread):
    """Of a model with matrices that are several in one: experts, one of them of all rows, and keys and values of
    latents."""
    return case_of(harness, harness.model_of(grouped_config(), seed=2))


def grouped_config():
    config = config_of(
        [LatentAttentionConfig(4, 16, 8, 16, 32, query_latent=32), LatentAttentionConfig(4, 32, 8, 16, 48)]
    )
    experts = (ExpertConfig(6, Routing(2), 32, shared=64), ExpertConfig(6, Routing(2), 64, bias=True, limit=7.0))
    layers = (replace(one, experts=some) for one, some in zip(config.layers, experts, strict=True))
    return replace(config, layers=tuple(layers))


ALONE = {}  # answers of each kind of weights and model: those of ranks are the whole's


def case_of(harness, model):
    """Model, adapters, prompts, which adapter each has, and each one's answer alone."""
    prompts = harness.prompts_for(9)
    (whole,) = getattr(model, "whole", (model,))
    adapters, which = adapters_for(whole), [0, 1, 2, 3, 1, 0, 2, 3, 1]
    prompts[4] = prompts[1] + [5]  # with the prefix of one with the same adapter
    prompts[5] = prompts[1] + [5]  # and of one with another
    params = [harness.greedy(TOKENS) if i % 2 else harness.seeded(TOKENS, seed=i) for i in range(len(prompts))]
    spread = whole is not model
    key = "cpu" if spread else harness.name, str(model.config)
    if key not in ALONE:
        rig, expected = harness.one_rank if spread else harness.Rig, {}
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            alone = rig(whole, rows=1, radix=False, adapters=adapters)
            expected |= answers(alone, [prompt], [param], which[i : i + 1], i)
        assert len(set(map(tuple, expected.values()))) == len(prompts)
        ALONE[key] = expected
    return model, adapters, prompts, params, which, ALONE[key]


def answers(rig, prompts, params, which, first=0):
    for i, (prompt, param, slot) in enumerate(zip(prompts, params, which, strict=True), first):
        rig.submit(str(i), prompt, param, adapter=slot, salt=slot)
    return rig.run().tokens


def answer(harness, case, **kw):
    model, adapters, prompts, params, which, expected = case
    book = torch.zeros(harness.VOCAB, harness.CONTEXT + 64, dtype=torch.int64)
    for i, prompt in enumerate(prompts):  # of those with equal first tokens the oracle knows one
        text = torch.tensor([*prompt, *expected[str(i)]])
        book[prompt[0], : len(text)] = text
    rig = harness.Rig(model, adapters=adapters, book=book, **kw)
    assert answers(rig, prompts, params, which) == expected
    return rig


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE, BUSHY], ids=["plain", "chain", "tree", "bushy"])
def test_drafts(harness, case, shape, lag):
    drafter = None if shape == PLAIN else "oracle"
    rig = answer(harness, case, shapes=(shape,), drafter=drafter, miss=2, lag=lag, rows=9)
    assert shape == PLAIN or rig.accept_length > 1.3


@pytest.mark.further(harness="cpu", shape=PLAIN)
@pytest.mark.parametrize("shape", [PLAIN, TREE], ids=["plain", "tree"])
def test_experts_and_heads_of_latents(harness, grouped, shape):
    """In prefill, decoding and trees, after prefix hits and preemption."""
    if harness.device == "cuda":
        pytest.skip("torch's own GEMMs of experts wait for the device")
    drafter = None if shape == PLAIN else "oracle"
    rig = answer(harness, grouped, shapes=(shape,), drafter=drafter, miss=2, lag=1, slots=80, rows=6, chunk=5)
    assert rig.sched.retractions > 0 and (shape == PLAIN or rig.accept_length > 1.3)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_lookups(harness, case, drafter):
    answer(harness, case, shapes=(TreeShape(7, 4, 8),), drafter=drafter, lag=1)


@pytest.mark.slow
def test_the_best_nodes_of_a_batch(harness, case):
    """Where trees are of different sizes each query has its row's adapter."""
    model, adapters, prompts, _, which, _ = case
    params = [harness.greedy(TOKENS) for _ in prompts]
    (whole,) = getattr(model, "whole", (model,))
    rig = harness.one_rank if hasattr(model, "whole") else harness.Rig
    expected = answers(rig(whole, radix=False, adapters=adapters), prompts, params, which)
    case = model, adapters, prompts, params, which, expected
    rig = answer(harness, case, drafter="oracle", miss=1, lag=1, policy=harness.Cycle(PART, PART, TREE))
    assert rig.stats.shapes == {PART, TREE, PLAIN} and rig.accept_length > 1.2


@pytest.mark.parametrize("lag", [0, 1])
def test_retracted_and_in_small_chunks(harness, case, lag):
    """A pool for one request, and the prompt of another."""
    rig = answer(harness, case, shapes=(TREE,), drafter="oracle", miss=2, lag=lag, slots=80, rows=6, chunk=5)
    assert rig.sched.retractions > 0


@pytest.mark.further(harness="ranks")
def test_prefixes_are_an_adapters_own(harness, case):
    model, adapters, prompts, params, which, expected = case
    rig = harness.Rig(model, adapters=adapters, rows=2)
    found = {}
    for i, (prompt, param, slot) in enumerate(zip(prompts, params, which, strict=True)):
        rig.submit(str(i), prompt, param, adapter=slot, salt=slot)
        answered = rig.run()
        found |= answered.tokens
        if i in (4, 5):  # of which the first goes on from the other's prompt, and the second from nobody's
            assert (answered.final[str(i)].meta["cached_tokens"] > 0) == (i == 4)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("drafter", [None, "oracle"])
def test_from_graphs(harness, case, drafter, mixed):
    """Those of steps with adapters stand in place of others."""
    if hasattr(case[0], "whole"):
        pytest.skip("ranks of tests have no graphs")
    policy = harness.Cycle(TREE, CHAIN) if drafter else None
    rig = answer(
        harness, case, drafter=drafter, policy=policy, miss=2, lag=1, graph_size=8, ahead=24, rows=8, mixed=mixed
    )
    assert rig.executor.graphs.replays > 30


@pytest.mark.slow
@pytest.mark.further(harness=["blocks"])
@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_from_graphs(harness, case, monkeypatch, mixed):
    """Those with adapters have graphs of their own; beside steps they take turns as long as these are left."""
    if hasattr(case[0], "whole"):
        pytest.skip("ranks of tests have no graphs")
    for name, value in {"SIZES": (16, 24, 32), "MIXED_ROWS": (2, 4), "MIXED_QUERIES": 16}.items():
        monkeypatch.setattr(prefill_graphs, name, value)
    capture = Captures.capture
    monkeypatch.setattr(Captures, "capture", lambda own, menu: capture(own, menu, some=mixed))
    model, adapters, prompts, params, which, _ = case
    how = {
        "adapters": adapters, "radix": False,
        "attn": partial(paged.PagedAttention if harness.device == "cuda" else TileAttention, exact=True),
    }  # fmt: skip
    expected = {}
    for i in range(len(prompts)):
        one, rig = slice(i, i + 1), harness.Rig(model, rows=1, **how)
        expected |= answers(rig, prompts[one], params[one], which[one], i)
    rig = harness.Rig(model, lag=1, chunk=24, graph_size=4, rows=4, mixed=mixed, **how)
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3
    prefills, target, launched = rig.executor.prefills, rig.executor.target, []
    run = target.run

    def counted(batch, *more, **how):
        launched.extend(batch.chunks)
        return run(batch, *more, **how)

    target.run = counted
    assert len(prefills) == 6
    assert answers(rig, prompts, params, which) == expected and not launched
    assert prefills.replays > 3 and prefills.mixed_replays == 0
    if not mixed:
        return
    assert any(prefills.later.values()) and rig.stats.mixed > 3
    while rig.executor.captures.later:
        rig.executor.captures.capture_next()
    before = prefills.replays
    assert answers(rig, prompts, params, which) == expected and not launched
    assert prefills.mixed_replays > 3 and prefills.replays < 2 * before


def test_steps_with_adapters_are_recorded_on_a_cpu(harness, case):
    model, adapters, prompts, params, which, expected = case
    rig = harness.Rig(model, adapters=adapters, rows=4, radix=False)
    graphs = rig.executor.graphs
    if not isinstance(graphs, RecordedStages) or "BlockedGemm" not in str(type(model.lm_head.op.first_gemm)):
        pytest.skip("where steps are calls of C kernels alone")
    found = answers(rig, prompts[:4], params[:4], which[:4])
    assert found == {name: expected[name] for name in found}
    assert graphs.replays > 3 * 12, "of each step"
    before = graphs.replays
    found = answers(rig, [prompts[0], prompts[5]], [params[0], params[5]], [0, 0])
    assert found["0"] == expected["0"] and graphs.replays > before + 3 * 12


def random_engine(harness, seed):
    """Runs requests with adapters in an engine of which all is drawn; some are aborted. Returns how many drafts were
    accepted, and slots filled."""
    draw = random.Random(seed)
    kind, states = draw.random(), None
    if kind < 0.2:
        model = harness.model_of(grouped_config(), seed=seed % 7)
    elif kind < 0.7 or "ranks" in harness.name:  # some layers with states are on one rank alone
        model = harness.tiny_model(seed=seed % 7)
    else:
        name, few = draw.choice([*RECURRENT]), draw.random() < 0.5
        states = StateSizes(16, 8, 4) if few and name in HYBRIDS else None
        model = harness.model_of(config_of(RECURRENT[name], harness.CONTEXT), seed=seed % 7)
    (whole,) = getattr(model, "whole", (model,))
    adapters = adapters_for(whole, [draw.randint(1, 12) for _ in range(draw.randint(1, 4))], seed, draw.random())
    prompts = harness.prompts_for(draw.randint(2, 8), seed=seed)
    which = [draw.randint(0, len(adapters)) for _ in prompts]
    params = [
        harness.seeded(draw.randint(1, 20), seed=i, temperature=draw.choice([0.0, 0.7, 1.5]))
        for i in range(len(prompts))
    ]
    rows, of_one = draw.randint(1, 6), harness.one_rank if whole is not model else harness.Rig
    alone = {}
    for i in range(len(prompts)):
        rig = of_one(whole, rows=1, radix=False, adapters=adapters)
        alone |= answers(rig, prompts[i : i + 1], params[i : i + 1], which[i : i + 1], i)
    book = torch.zeros(harness.VOCAB, harness.CONTEXT + 64, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        text = torch.tensor([*prompt, *alone[str(i)]])
        book[prompt[0], : len(text)] = text
    drafter = draw.choice([None, "oracle", "oracle", "ngram", "suffix"])
    shapes = [TreeShape(6, 3, 8)] if drafter in ("ngram", "suffix") else [CHAIN, TREE, BUSHY]
    graph_size = draw.choice([0, 0, rows]) if whole is model else 0
    slots = draw.randint(1, len(adapters))
    rig = harness.Rig(
        model, adapters=adapters, adapter_slots=slots, rows=rows, drafter=drafter, book=book, miss=draw.randint(0, 4),
        lag=draw.randint(0, 1),
        policy=harness.Cycle(*draw.sample(shapes, draw.randint(1, len(shapes)))) if drafter else None,
        slots=draw.choice([120, 200, 1000]), chunk=draw.choice([3, 8, 64]), radix=draw.random() < 0.8,
        graph_size=graph_size, ahead=draw.choice([0, 24]), mixed=draw.random() < 0.3 and not graph_size, states=states,
    )  # fmt: skip
    todo, aborted, found = list(range(len(prompts))), set(), Answers()
    swapped = Swapped(rig, adapters, slots, draw, random.Random(seed).choice([None, 1, 2]))

    def between(turn):
        swapped.turn(found)
        if todo and draw.random() < 0.5:
            submit(todo.pop())
        if draw.random() < 0.03:
            aborted.add(str(draw.randrange(len(prompts))))
            swapped.abort(max(aborted))

    def submit(i):
        swapped.submit(str(i), prompts[i], params[i], which[i])

    for _ in range(draw.randint(1, len(prompts))):
        submit(todo.pop())
    rig.run(found, between=between)
    while todo or len(swapped.own) or not rig.loop.idle:
        if todo:
            submit(todo.pop())
        rig.run(found, between=between)
        for out in rig.sched.take_outputs():  # of who was aborted last, whose slot others wait for
            found.tokens.setdefault(out.uid, []).extend(out.token_ids)
            found.final[out.uid] = out
        swapped.turn(found)
    for name, text in alone.items():
        got = found.tokens.get(name, [])
        assert got == text or (name in aborted and got == text[: len(got)]), (seed, name)
    swapped.check_idle()
    return rig.stats.tokens - rig.stats.rows, swapped.own.loads


class Swapped:
    """The adapters of a rig as an engine has them: by names that come and go, in slots that others have next, and a few
    in memory."""

    def __init__(self, rig, adapters, slots, draw, most=None):
        targets = rig.executor.adapters.targets
        self.rig, self.draw, self.time, self.slots = rig, draw, 0.0, slots
        self.adapters, self.ended = [targets.fit(one) for one in adapters], set()
        put, rank = partial(rig.executor.run_on_all_ranks, Executor.put_adapter), max(one.rank for one in adapters)
        known = {one.digest: one for one in self.adapters}
        files = SimpleNamespace(again=lambda card: known[card.digest], imaged=lambda adapter: adapter)
        self.own = EngineAdapters(
            slots, rank, put, lambda slot, head: None, lambda asked: 0, lambda: self.time, files, most
        )

    def submit(self, uid, prompt, params, which):
        if which == 0:
            self.rig.submit(uid, prompt, params)
            return
        adapter, name = self.adapters[which - 1], self.draw.choice("abc")
        self.own.add(AdapterCard(name, "", adapter.digest, adapter.rank, ""), adapter, replace=True)
        digest = self.own.hold([(name, 1.0)], uid)
        if self.draw.random() < 0.3:
            self.own.remove(name)
        req = self.rig.request(uid, prompt, params, salt=which, adapter_digest=digest)
        if self.own.enter(req):
            self.rig.sched.submit(req)

    def abort(self, uid):
        waits = self.own.drop(uid)
        if waits is None:
            self.rig.sched.abort(uid)
        else:
            self.rig.sched.refuse(waits)

    def turn(self, found):
        self.time += 0.2
        self.own.ended({uid: found.final[uid].meta for uid in found.final.keys() - self.ended})
        self.ended |= found.final.keys()
        while (req := self.own.next()) is not None:
            self.rig.sched.submit(req)

    def check_idle(self):
        """Each slot can be had once more."""
        self.own.ended({out.uid: out.meta for out in self.rig.sched.take_outputs()})  # of who was aborted last
        assert len(self.own) == 0
        for slot in range(self.slots):
            adapter = replace(self.adapters[0], digest=f"another {slot}")
            self.own.add(AdapterCard("a", "", adapter.digest, adapter.rank, ""), adapter, replace=True)
            digest = self.own.hold([("a", 1.0)], f"another {slot}")
            assert self.own.enter(self.rig.request(f"another {slot}", [1], greedy(), adapter_digest=digest))


@pytest.mark.exhaustive  # what it meets has tests above
@pytest.mark.slow
@pytest.mark.further(harness=["blocks", "ranks", "ranks with whole experts"])
@pytest.mark.parametrize("first", [0, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_random_engines(harness, first, one_thread):
    accepted, loads = zip(*(random_engine(harness, seed) for seed in range(first, first + 6)), strict=True)
    assert sum(count > 0 for count in accepted) >= 2 and sum(loads) > 6
