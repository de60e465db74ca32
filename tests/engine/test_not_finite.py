"""Models whose logits are NaN or infinite: found at the start, and in operation, where nobody else suffers from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.engine import Engine
from draftwing.errors import CheckpointError
from draftwing.requests.request import LogprobParams, ThinkingBudget
from draftwing.sched.results import NOT_FINITE_MESSAGE

CHAIN = TreeShape(3, 1, 4)
END = tuple(range(20, 36))  # a marker that takes many steps


@pytest.mark.slow
@pytest.mark.further(name="model.norm.weight", algorithm="NGRAM")
@pytest.mark.further(name="model.norm.weight", value=math.inf)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", ["none", "NGRAM"])
def test_damaged_weights_are_found_at_the_start(tmp_path: Path, name: str, value: float, algorithm: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights[name].flatten()[3] = value
    save_file(weights, folder / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        options = Options(model=str(folder), device="cpu", dtype=dtype, speculative_algorithm=algorithm, num_threads=1)
        with pytest.raises(CheckpointError, match="found in the first steps: the model's logits are not finite"):
            Engine(options)


def quarantine(rig: Any, req: Any) -> None:
    """Some of the KV of a running request."""
    for layer in rig.pool.kv:
        layer[torch.from_numpy(req.slots[: req.covered].copy())] = math.nan


@pytest.fixture(scope="module")
def texts() -> dict[tuple[Any, ...], Any]:
    """What the four requests are answered alone, by device, type and temperature."""
    return {}


@pytest.mark.slow
@pytest.mark.further(dtype=torch.float32, temperature=0.8)
@pytest.mark.further(dtype=torch.bfloat16, temperature=0.0)
@pytest.mark.further(lag=0, shape=CHAIN)
@pytest.mark.further(lag=1, shape=PLAIN)
@pytest.mark.parametrize("shape", [PLAIN, CHAIN])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_spoilt_ends_and_others_go_on(
    harness: Any, shape: TreeShape, lag: int, temperature: float, dtype: torch.dtype, texts: dict[tuple[Any, ...], Any]
) -> None:
    h = harness
    model = h.tiny_model(seed=3, dtype=dtype)
    prompts = h.prompts_for(4)
    params = [h.seeded(40, seed=i, temperature=temperature) for i in range(4)]
    same = h.device, dtype, temperature
    own = {} if h.device == "cuda" else {"attn": pick_device("cpu").ops.attention}
    alone = texts[same] = texts.get(same) or h.plain_answers(model, prompts, params, **own)
    rig = h.Rig(model, shapes=(shape,), lag=lag, drafter="ngram" if shape is CHAIN else None, **own)
    reqs = [rig.submit(str(i), prompt, params[i]) for i, prompt in enumerate(prompts)]

    def between(turn: int) -> None:
        if turn == 8:
            quarantine(rig, reqs[2])

    got = rig.run(between=between)
    assert got.final["2"].finish_reason == {"type": "abort", "message": NOT_FINITE_MESSAGE, "status_code": 500}
    assert got.tokens["2"] == alone.tokens["2"][: len(got.tokens["2"])] and len(got.tokens["2"]) < 40
    for uid in "013":
        assert got.tokens[uid] == alone.tokens[uid]
    rig.submit("again", prompts[2], params[2])  # in slots that held NaN, and with nothing of them in the cache
    for i in (0, 1):
        rig.submit(f"with {i}", prompts[i], params[i])
    later = rig.run()
    assert later.tokens["again"] == alone.tokens["2"] and later.tokens["with 1"] == alone.tokens["1"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a stop id", "its length"])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_ends_before_what_would_spoil_it(harness: Any, lag: int, by: str) -> None:
    """Drafts past the end of an answer are verified, too: what they make of the logits is no fault of the answer."""
    h = harness
    model, prompts = h.tiny_model(seed=3), h.prompts_for(4)
    expected = h.plain_answers(model, prompts, [h.greedy(30)] * 4)
    new = {  # of each answer where a token comes that has not been before
        i: next((at for at in range(9, 28) if text[at] not in {*text[:at], *prompts[i]}), 0)
        for i, text in enumerate(expected.tokens[str(i)] for i in range(4))
    }
    own = {"attn": pick_device(h.device).ops.attention}
    met = 0
    for i, at in ((i, at) for i, at in new.items() if at):
        text = expected.tokens[str(i)]
        model = h.tiny_model(seed=3)
        with torch.no_grad():
            model.embed.weight[text[at]] = math.nan
        ends = {"stop_ids": [text[at]]} if by == "a stop id" else {}
        params = h.greedy(30 if ends else at + 1)
        book = h.make_book(prompts, expected)
        rig = h.Rig(model, shapes=(CHAIN,), drafter="oracle", book=book, lag=lag, **own)
        rig.submit("x", prompts[i], params, **ends)
        rig.drafter._check_kv = lambda *args: None  # of NaN
        got = rig.run()
        assert got.tokens["x"] == text[: at + 1]
        assert got.final["x"].finish_reason["type"] == ("stop" if ends else "length")
        rig.submit("on", prompts[i], h.greedy(at + 9))
        assert rig.run().final["on"].finish_reason["message"] == NOT_FINITE_MESSAGE
        met += 1
    assert met > 1


def test_rows_that_ask_for_more(harness: Any) -> None:
    """Edited logits and log probabilities of a spoilt row; and what edits alone have made infinite is no fault of the
    model's."""
    h = harness
    model = h.tiny_model(seed=3)
    rig = h.Rig(model)
    edited = rig.submit("edited", [1, 2, 3], h.greedy(40, frequency_penalty=0.5))
    quarantined = rig.submit("quarantined", [4, 5, 6], h.greedy(40), logprobs=LogprobParams(top=2))
    rig.submit("allowed", [7, 8, 9], h.greedy(20, allowed_token_ids=(5, 6)))
    budget = ThinkingBudget(2, (2, 3), END, open=True)
    told = rig.submit("told to end", [10, 11, 12], h.greedy(40), thinking=budget)

    def between(turn: int) -> None:
        if turn == 8:
            for one in (edited, quarantined, told):
                quarantine(rig, one)

    got = rig.run(between=between)
    for uid in ("edited", "quarantined", "told to end"):
        assert got.final[uid].finish_reason["message"] == NOT_FINITE_MESSAGE
    assert 3 < len(got.tokens["told to end"]) < 2 + len(END), "not only behind the marker"
    assert got.final["allowed"].finish_reason["type"] == "length" and set(got.tokens["allowed"]) <= {5, 6}
