"""Recurrent layers whose plain steps write every second state, by torch's operations: the text is that of steps which
write each."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from exactness import CHAIN, TREE, answer, case_of
from layer_kinds import HYBRIDS, config_of
from random_load import AtRandom

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.ops.row_states.cpu import CpuStateOps
from draftwing.ops.row_states.spec import StateOps
from draftwing.sched.state_slots import StateSizes

pytestmark = [
    pytest.mark.slow, pytest.mark.parametrize("harness", ["torch"], indirect=True, scope="session"),
]  # fmt: skip


@pytest.fixture(scope="session")
def case(harness: Any, one_thread: None) -> Any:
    return case_of(harness, partial(harness.model_of, config_of(HYBRIDS[next(iter(HYBRIDS))], harness.CONTEXT)))


@pytest.fixture(autouse=True)
def torch_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuStateOps, "advance_states", StateOps.advance_states)  # C knows no lazy states


@pytest.mark.further(lag=0)
@pytest.mark.further(slots=1000)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("slots", [70, 1000])
def test_with_trees_between(harness: Any, case: Any, lag: int, slots: int) -> None:
    rig = answer(
        harness, case, policy=harness.Cycle(TREE, PLAIN, PLAIN, PLAIN), lag=lag, slots=slots, chunk=8,
        states=StateSizes(16, 8, 4, lazy=True),
    )  # fmt: skip
    assert rig.accept_length > 1.2 and PLAIN in rig.stats.shapes and (rig.sched.retractions > 0 or slots == 1000)


@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_turns_go_on_from_what_was_written_last(harness: Any, case: Any, lag: int) -> None:
    model, prompts, params, expected, _ = case
    more = [prompt + expected.tokens[str(i)] + [7, i] for i, prompt in enumerate(prompts)]
    rig = harness.Rig(model, shapes=(PLAIN,), lag=lag, states=StateSizes(60, 64, 64, lazy=True))
    assert rig.answer(prompts, params).tokens == expected.tokens
    got = rig.answer(more, params)
    assert got.tokens == harness.plain_answers(model, more, params).tokens
    cached = [got.final[str(i)].meta["cached_tokens"] for i in range(len(prompts))]
    ends = [len(prompt) + len(expected.tokens[str(i)]) - 1 for i, prompt in enumerate(prompts)]
    assert all(end - 3 <= found < end + 1 for found, end in zip(cached, ends, strict=True)), (cached, ends)


@pytest.mark.exhaustive  # what it meets has tests of its own here
@pytest.mark.further(seed=[0, 1, *range(3, 8)])
@pytest.mark.parametrize("seed", range(8))
def test_schedules_at_random(harness: Any, case: Any, seed: int) -> None:
    """Prefixes in common, few slots, aborts, and turns that go on from the ends of others."""
    model, rng, vocab = case[0], random.Random(seed), harness.VOCAB
    common = [rng.randrange(vocab) for _ in range(30)]
    prompts = [common[: rng.choice((0, 8, 30))] + rng.choices(range(vocab), k=rng.randint(2, 12)) for _ in range(6)]
    params = [
        harness.seeded(
            rng.randint(1, 24), seed=i, temperature=rng.choice((0.0, 0.8)), stop_token_ids=(rng.randrange(vocab),)
        )
        for i in range(6)
    ]
    expected = harness.plain_answers(model, prompts, params).tokens
    menu = rng.sample((TREE, CHAIN, TreeShape(4, 3, 11, 4)), 2)
    rig = harness.Rig(
        model, policy=AtRandom(rng, *menu, plain=5), drafter="suffix", lag=rng.randint(0, 1),
        slots=rng.choice((140, 1000)),
        rows=rng.choice((2, 6)), chunk=rng.choice((1, 8, 64)), graph_size=rng.choice((0, 4)),
        states=StateSizes(rng.choice((5, 16, 40)), rng.choice((8, 64)), rng.choice((1, 64)), lazy=True),
    )  # fmt: skip
    gone = {rng.randrange(1, 25): str(rng.randrange(6)) for _ in range(4)}
    got = rig.answer(prompts, params, between=lambda turn: rig.sched.abort(gone[turn]) if turn in gone else None)
    assert all(tokens == expected[uid][: len(tokens)] for uid, tokens in got.tokens.items())
    assert rig.answer(prompts, params).tokens == expected
    more = [prompt + expected[str(i)][: rng.randint(1, 24)] for i, prompt in enumerate(prompts)]
    assert rig.answer(more, params).tokens == harness.plain_answers(model, more, params).tokens
    rig.sched.kv.check_idle()
