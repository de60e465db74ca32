"""Models with recurrent layers, whose states are kept by row: their text is the same with drafts as without, whatever
happens to their requests on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from exactness import CHAIN, DEEP, OWN_CUDA, TOKENS, TREE, answer, case_of
from layer_kinds import HYBRIDS, MAMBA1, MAMBA1_ALONE, config_of

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.startup.warm_up import keeps_bits
from draftwing.kv.pool import RowStates
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.row_states.cpu import CpuStateOps
from draftwing.ops.row_states.spec import StateOps
from draftwing.sched.state_slots import StateSizes, StateSlots

# Torch's operations each night.
OTHERS = [pytest.param("torch", marks=pytest.mark.exhaustive), pytest.param("blocks", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", *OTHERS, OWN_CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness="blocks", case=["mamba", "kimi"]),
]


MAMBA1S = {"mamba1": MAMBA1, "mamba1 alone": MAMBA1_ALONE}


@pytest.fixture(scope="session", params=[*HYBRIDS, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in MAMBA1S)])
def case(request, harness, one_thread):
    mixers = {**HYBRIDS, **MAMBA1S}[request.param]
    return case_of(harness, partial(harness.model_of, config_of(mixers, harness.CONTEXT)))


@pytest.mark.slow
@pytest.mark.further(harness="blocks", lag=0)
@pytest.mark.further(lag=0, shape=[CHAIN, DEEP])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE, DEEP], ids=["chain", "tree", "deep"])
def test_disturbed_drafts(harness, case, shape, lag):
    rig = answer(harness, case, shapes=(shape,), miss=2, lag=lag)
    assert rig.accept_length > 1.5
    assert shape == CHAIN or rig.stats.moved > 18, "no later child was accepted"


@pytest.mark.slow
@pytest.mark.further(harness="cpu", drafter="ngram")
@pytest.mark.further(harness="blocks", drafter=["suffix", None])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", None])
def test_drafters_and_nobody(harness, case, drafter):
    rig = answer(harness, case, shapes=(PLAIN if drafter is None else TreeShape(4, 2, 8),), drafter=drafter)
    assert drafter is None or rig.stats.tokens > rig.stats.rows
    policy = harness.Cycle(TreeShape(4, 2, 8)) if drafter else None
    answer(harness, case, policy=policy, drafter=drafter, chunk=7, lag=0)


@pytest.mark.slow
@pytest.mark.further(chunk=1)
@pytest.mark.further(harness="blocks", chunk=64)
@pytest.mark.further(lag=0, chunk=[1, 64])
@pytest.mark.further(lag=1, chunk=5)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_the_best_nodes_of_a_batch_and_steps_without_drafts(harness, case, chunk, lag):
    rig = answer(harness, case, policy=harness.Cycle(TreeShape(4, 3, 11, 4), TREE), chunk=chunk, lag=lag)
    assert rig.accept_length > 1.2 and PLAIN in rig.stats.shapes


@pytest.mark.slow
@pytest.mark.further(harness="cpu", lag=0)
@pytest.mark.further(harness="blocks", lag=1)
@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_and_eviction(harness, case, lag):
    rig = answer(harness, case, shapes=(TREE,), slots=70, chunk=8, states=StateSizes(16, 8, 4), lag=lag)
    assert rig.sched.retractions >= 1 and rig.sched.kv.states.hits >= 1


@pytest.mark.slow
@pytest.mark.further(harness="cpu", states=5)
@pytest.mark.further(harness="blocks", states=3)
@pytest.mark.parametrize("states", [3, 5])
def test_more_requests_than_state_slots(harness, case, states):
    rig = answer(harness, case, shapes=(TREE,), states=StateSizes(states, 8, 4))
    assert rig.sched.kv.states.slots == states


@pytest.mark.slow
def test_steps_that_are_replayed(harness, case):
    """As from graphs, which were captured on the dummy row."""
    rig = answer(harness, case, policy=harness.Cycle(TreeShape(4, 3, 11, 4), TREE), graph_size=4)
    assert rig.executor.captures.replays > 20 and rig.accept_length > 1.2


@pytest.mark.further(harness="cpu", lag=0)
@pytest.mark.further(harness="blocks", lag=1)
@pytest.mark.parametrize("lag", [0, 1])
def test_prefix_hits(harness, case, lag):
    """A, B, A: what a request that is gone has left is what its own steps would have made."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=lag, states=StateSizes(60, 8, 4))
    hits = []
    for _ in range(3):
        got = rig.answer(prompts, params)
        assert got.tokens == expected.tokens
        hits.append([out.meta["cached_tokens"] for out in got.final.values()])
    # Of a prompt all but what comes after its last snapshot, which is at a multiple of 4, or where others left it.
    assert all(cached >= (len(prompt) - 2) // 4 * 4 for cached, prompt in zip(hits[1], prompts, strict=True))
    assert rig.sched.kv.states.hits > 8 and sum(hits[0]) < sum(hits[1])


@pytest.fixture(scope="session")
def next_turn(harness, case):
    """Prompts that go on after the answers, and the answers to these."""
    model, prompts, params, expected, _ = case
    more = [prompt + expected.tokens[str(i)] + [7, i] for i, prompt in enumerate(prompts)]
    return more, harness.plain_answers(model, more, params).tokens


@pytest.mark.slow
@pytest.mark.further(harness="cpu", lag=0)
@pytest.mark.further(harness="blocks", lag=1)
@pytest.mark.parametrize("lag", [0, 1])
def test_conversations_go_on_from_the_end_of_the_turn(harness, case, next_turn, lag):
    model, prompts, params, _, book = case
    more, answers = next_turn
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=lag, states=StateSizes(60, 64, 64))
    rig.answer(prompts, params)
    got = rig.answer(more, params)
    assert got.tokens == answers
    ends = [len(prompt) + TOKENS - 1 for prompt in prompts]
    cached = [got.final[str(i)].meta["cached_tokens"] for i in range(len(prompts))]
    # The state of the newest step: what it accepted is computed again.
    assert all(end - TREE.depth <= found <= end for found, end in zip(cached, ends, strict=True))


@pytest.mark.slow
def test_ends_that_are_rewritten(harness, case):
    """They go on from the deepest snapshot, and leave one where they part."""
    model, _, _, _, _ = case
    first, length = [i % 48 for i in range(40)], 27
    prompts = [first, *([*first[:length], 40 + i, *range(i, i + 12)] for i in range(3))]
    params = [harness.greedy(8)] * 4
    expected = harness.plain_answers(model, prompts, params)
    rig = harness.Rig(model, shapes=(CHAIN,), drafter="ngram", lag=1, states=StateSizes(60, 16, 8))
    cached = []
    for i, prompt in enumerate(prompts):
        got = rig.answer([prompt], params[:1])
        assert got.tokens["0"] == expected.tokens[str(i)]
        cached.append(got.final["0"].meta["cached_tokens"])
    assert cached == [0, 16, length, length]


@pytest.mark.slow
def test_a_crowd_behind_one_prompt_waits_for_its_state(harness, case):
    """Whose beginning is computed once, up to where they part."""
    model, _, _, _, _ = case
    system = [i * 7 % 48 for i in range(70)]
    prompts = [[*system, i, i + 1, i + 2] for i in range(4)]
    params = [harness.greedy(8)] * 4
    expected = harness.plain_answers(model, prompts, params)
    rig = harness.Rig(model, shapes=(CHAIN,), drafter="ngram", lag=1, chunk=32, states=StateSizes(60, 64, 64))
    got = rig.answer(prompts, params)
    assert got.tokens == expected.tokens
    assert [got.final[str(i)].meta["cached_tokens"] for i in range(4)] == [0, 70, 70, 70]


@pytest.mark.slow
def test_aborts(harness, case):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=1, chunk=5, states=StateSizes(16, 8, 4))

    def abort(turn: int) -> None:
        if turn % 3 == 2 and turn // 3 < 8:
            rig.sched.abort(str(turn // 3))

    got = rig.answer(prompts, params, between=abort)
    assert all(tokens == expected.tokens[uid][: len(tokens)] for uid, tokens in got.tokens.items())
    assert rig.answer(prompts, params).tokens == expected.tokens
    rig.sched.flush_cache()
    assert rig.sched.kv.states.kept == 0
    rig.sched.kv.check_idle()


@pytest.mark.slow
@pytest.mark.further(case="floors")
def test_a_start_tries_out_whether_bits_are_kept(harness, case, monkeypatch):
    ops = pick_device("cpu").ops
    if harness.device != "cpu":
        pytest.skip("the model is not on the CPU")
    if not ops.exact_by_design or case[0].config.weight_format != DENSE:
        pytest.skip("what torch makes of a row of logits depends on the batch, and what is packed is tried elsewhere")
    model = harness.model_of(case[0].config)
    model.pack(ops, True)
    rig = harness.Rig(model, shapes=(TREE,), drafter="ngram", attn=ops.attention)
    assert keeps_bits(rig.executor)
    advance = RowStates.set
    monkeypatch.setattr(RowStates, "set", lambda self, entries: advance(self, entries[:, [0, 2, 1, 3]]))
    assert not keeps_bits(rig.executor), "with what a part writes and what it reads exchanged"


OPS = CpuStateOps if isinstance(pick_device("cpu").ops, CpuOps) else StateOps
Patch = Callable[[pytest.MonkeyPatch], None]


def not_advanced(patch: pytest.MonkeyPatch) -> None:
    """After steps of trees."""
    patch.setattr(OPS, "advance_states", lambda self, states, rows, prefix_len, nodes=0: None)


def half_advanced(patch: pytest.MonkeyPatch) -> None:
    """The slots are swapped, and the records of the step before are read again."""
    advance = OPS.advance_states

    def around(self: Any, states: RowStates, rows: Any, prefix_len: Any, nodes: int = 0) -> None:
        advance(self, states, rows, prefix_len, nodes)
        states.page[rows] = 1 - states.page[rows]

    patch.setattr(OPS, "advance_states", around)


def wrong_slot(patch: pytest.MonkeyPatch) -> None:
    """A row that ends leaves the slot that it read, in place of the one that it wrote."""
    committed = StateSlots.committed

    def around(self: StateSlots, req: Any, length: int) -> None:
        committed(self, req, length)
        held = req.states
        held.newest = next(slot for slot in held.own if slot != held.newest)

    patch.setattr(StateSlots, "committed", around)


def too_long(patch: pytest.MonkeyPatch) -> None:
    """A step's state is said to be that of all it has committed."""
    committed = StateSlots.committed

    def around(self: StateSlots, req: Any, length: int) -> None:
        committed(self, req, length + 1)

    patch.setattr(StateSlots, "committed", around)


def snapshots_one_late(patch: pytest.MonkeyPatch) -> None:
    saves = StateSlots.saves

    def around(self: StateSlots, req: Any, length: int) -> tuple[tuple[int, int], ...]:
        return tuple((min(at + 1, length), slot) for at, slot in saves(self, req, length))

    patch.setattr(StateSlots, "saves", around)


def spare_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The state of a prefix is overwritten by the row that began with it."""
    planned = StateSlots.planned

    def around(self: StateSlots, reqs: Any, nodes: int = 0) -> None:
        planned(self, reqs, nodes)
        self._entries = {row: entry for row, entry in self._entries.items() if entry[0] >= 0}

    patch.setattr(StateSlots, "planned", around)


BROKEN: list[Patch] = [not_advanced, spare_forgotten]
NIGHTLY: list[Patch] = [half_advanced, wrong_slot, too_long, snapshots_one_late]


@pytest.mark.slow
@pytest.mark.further(broken=NIGHTLY)
@pytest.mark.parametrize("broken", [*BROKEN, *NIGHTLY])
def test_a_broken_rule_is_noticed(harness, case, next_turn, broken, monkeypatch, request):
    if harness.device != "cpu" or request.node.callspec.params["harness"] == "blocks":
        pytest.skip("the rules are those of every device; those of blocks have their operations before one is broken")
    monkeypatch.setattr(CpuStateOps, "advance_states", StateOps.advance_states)  # C asks nobody
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test_prefix_hits(harness, case, 1)
        test_conversations_go_on_from_the_end_of_the_turn(harness, case, next_turn, 0)
