"""Prompts by the model itself: as the engine goes on behind the template's opening, each once, without its marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draftwing import LLM
from draftwing.core import Output
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.text.tokenizer import Tokenizer
from draftwing.train import own_prompts
from draftwing.train.data import Skipped, read_prompts
from draftwing.train.own_prompts import write_prompts


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    options = {"max_total_tokens": 3000, "max_running_requests": 4, "speculative_algorithm": "none"}
    with LLM(model, dtype="float32", **options) as loaded:
        yield loaded


class Model:
    """In place of a session: says what it is given, one after the other, a token at a time. None: it did not end."""

    def __init__(self, tokenizer: Tokenizer, says: Sequence[str | None]) -> None:
        self.tokenizer, self.says, self.asked = tokenizer, says, list[GenerationRequest]()

    def __call__(self, engine: Any) -> Model:
        return self

    def run(self, requests: Iterator[GenerationRequest], window: int) -> Iterator[Output]:
        for request, text in zip(requests, self.says, strict=True):
            self.asked.append(request)
            ids = self.tokenizer.encode(text or "goes on and on")
            assert set(request.params.stop_token_ids) == set(self.tokenizer.stop_ids)
            yield Output(request.uid, ids[:2], None)
            if text is None:
                yield Output(request.uid, ids[2:], {"type": "length"})
            else:
                yield Output(request.uid, [*ids[2:], *self.tokenizer.stop_ids], {"type": "stop"})


def test_they_are_what_the_model_says_for_a_user(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = llm.engine.tokenizer
    says = [
        "Why is the sky blue?",
        None,
        "Hm",
        " Why is the sky blue?\n",
        "Say <pad> to me, please.",
        "Über 30 Möwen?",
        "Is it so?\nassistant: It is, as far as I know.",
    ] * 4
    model = Model(tokenizer, says)
    monkeypatch.setattr(own_prompts, "Session", model)
    file = tmp_path / "own.jsonl"
    count = write_prompts(llm.engine, len(says), file, seed=3)
    expected, opening = set[str](), "user: "
    for request, text in zip(model.asked, says, strict=True):
        begun = tokenizer.decode(list(request.prompt_ids))
        assert begun.startswith(opening)
        whole = (begun.removeprefix(opening) + (text or "")).partition("assistant:")[0].strip()
        if text is not None and len(whole) >= 12 and "<pad>" not in whole:
            expected.add(whole)
    found = [prompt.turns for prompt in read_prompts([file], Skipped())]
    assert {turns[0] for turns in found} == expected and len(found) == count == len(expected)
    assert {"Why is the sky blue?", "Über 30 Möwen?"} < expected, "half of them are all the model's own"
    assert {one.params.stop for one in model.asked} == {("assistant:",)}
    for reason in ("4 of 28: did not end", "special tokens", "repeated", "shorter than 12"):
        assert reason in caplog.text


def test_nothing_to_use_is_an_error(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "Session", Model(llm.engine.tokenizer, [None] * 3))
    with pytest.raises(ConfigError, match=r"no prompt is left of 3 read: 3 did not end within 240 tokens"):
        write_prompts(llm.engine, 3, tmp_path / "own.jsonl")
    assert not (tmp_path / "own.jsonl").exists()


def test_a_seed_asks_the_same(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        model = Model(llm.engine.tokenizer, ["Why is the sky blue?"] * 20)
        monkeypatch.setattr(own_prompts, "Session", model)
        write_prompts(llm.engine, 20, tmp_path / name, seed)
        asked.append([(one.prompt_ids, one.params.sampling_seed) for one in model.asked])
    assert asked[0] == asked[1] != asked[2] and len({seed for _, seed in asked[0]}) == 20


@pytest.mark.slow
def test_an_engine_writes_them(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of random weights is mostly no text, so it counts here whatever it is."""
    monkeypatch.setattr(own_prompts, "_text", lambda tokenizer, ids, stops, ended: str(ids))
    count = write_prompts(llm.engine, 12, tmp_path / "own.jsonl")
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == count > 6


def test_a_token_that_ends_a_user_s_turn_ends_a_prompt(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.engine.tokenizer
    (ends,) = tokenizer.encode("<pad>")
    monkeypatch.setattr(tokenizer, "render_chat", lambda messages: f"U {messages[0]['content']}<pad>A ")

    class Marked(Model):
        def run(self, requests: Iterator[GenerationRequest], window: int) -> Iterator[Output]:
            for request in requests:
                assert set(request.params.stop_token_ids) == {*tokenizer.stop_ids, ends}
                yield Output(request.uid, [*tokenizer.encode("Why is the sky blue?"), ends], {"type": "stop"})

    monkeypatch.setattr(own_prompts, "Session", Marked(tokenizer, []))
    assert write_prompts(llm.engine, 8, tmp_path / "own.jsonl") > 0
    found = [prompt.turns[0] for prompt in read_prompts([tmp_path / "own.jsonl"], Skipped())]
    assert all(text.endswith("hy is the sky blue?") for text in found)


def test_a_kill_leaves_no_file(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = ["Why is the sky blue?"] * 8

    class Killed(Model):
        def run(self, requests: Iterator[GenerationRequest], window: int) -> Iterator[Output]:
            yield from islice(super().run(requests, window), 5)
            raise KeyboardInterrupt

    monkeypatch.setattr(own_prompts, "Session", Killed(llm.engine.tokenizer, says))
    with pytest.raises(KeyboardInterrupt):
        write_prompts(llm.engine, 8, tmp_path / "own.jsonl")
    assert not (tmp_path / "own.jsonl").exists()
    monkeypatch.setattr(own_prompts, "Session", Model(llm.engine.tokenizer, says))
    assert write_prompts(llm.engine, 8, tmp_path / "own.jsonl") > 0


def test_what_is_there_is_not_written_over(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"own\.jsonl is there already: name another"):
        write_prompts(llm.engine, 3, tmp_path / "own.jsonl")
    assert (tmp_path / "own.jsonl").read_text() == "mine"


def test_it_needs_a_chat_template(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="chat template"):
        write_prompts(llm.engine, 3, tmp_path / "own.jsonl")
    assert not (tmp_path / "own.jsonl").exists()
