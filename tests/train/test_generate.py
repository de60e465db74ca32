"""What an engine writes: answers as a server would give them, in any order and after any kill; and prompts, each once,
without the marks of its template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draftwing import LLM
from draftwing.core import Output
from draftwing.engine.engine import Engine
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Prompt, Skipped, held_out, read_prompts
from draftwing.train.dataset import Response, read_responses, responses_files
from draftwing.train.generate import MIN_ANSWER, Sampling, cut_last_line, generate, usable, write_prompts

SAMPLING = Sampling(max_tokens=24, max_length=200, seed=7)
PROMPTS = [Prompt((f"question {i}",), where=f"p:{i}") for i in range(12)]


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    # Also drafts, which may change nothing.
    options = {"max_total_tokens": 3000, "max_running_requests": 4, "speculative_algorithm": "NGRAM"}
    with LLM(model, dtype="float32", **options) as loaded:
        yield loaded


def keys(file: Path) -> set[str]:
    return {response.key for response in read_responses([file] if file.exists() else [], Skipped())}


def run(engine: Engine, prompts: list[Prompt], file: Path, sampling: Sampling = SAMPLING) -> dict[str, Response]:
    skipped = Skipped()
    cut_last_line(file)
    done = keys(file)
    todo = [prompt for prompt in prompts if prompt.key not in done]
    generate(engine, usable(todo, engine.tokenizer, sampling, skipped), file, sampling, skipped)
    found = {response.key: response for response in read_responses([file], skipped)}
    assert not skipped.total, skipped.counts
    return found


@pytest.mark.slow
def test_answers_are_the_server_s(llm: LLM, tmp_path: Path) -> None:
    found = run(llm.engine, PROMPTS, tmp_path / "responses.jsonl")
    assert set(found) == {prompt.key for prompt in PROMPTS}
    for prompt in PROMPTS:
        response = found[prompt.key]
        messages = [{"role": "user", "content": prompt.turns[0]}]
        params = {
            "temperature": response.temperature, "sampling_seed": response.seed, "max_new_tokens": SAMPLING.max_tokens
        }  # fmt: skip
        (expected,) = llm.chat(messages, params)
        ((start, end),) = response.spans
        assert response.ids[:start] == llm.engine.tokenizer.encode_chat(messages)
        assert response.ids[start:end] == expected.token_ids and end == len(response.ids)
        assert response.finish == expected.finish_reason["type"]
        assert response.messages == [*messages, {"role": "assistant", "content": expected.text}]
        assert response.tokens().loss_mask.tolist() == [start <= i < end for i in range(end)]
    temperatures = [response.temperature for response in found.values()]
    assert 0 < temperatures.count(0.0) < len(PROMPTS)
    assert all(t == 0 or 0.6 <= t <= 1.0 for t in temperatures) and len(set(temperatures)) > 3


def test_killed_at_any_byte_it_goes_on(llm: LLM, tmp_path: Path) -> None:
    whole = run(llm.engine, PROMPTS, tmp_path / "whole.jsonl")
    text = (tmp_path / "whole.jsonl").read_bytes()
    for cut in (0, 1, len(text) // 3, len(text) // 2, text.index(b"\n"), text.index(b"\n") + 1, len(text) - 1):
        file = tmp_path / f"cut{cut}.jsonl"
        file.write_bytes(text[:cut])
        kept = text[:cut].count(b"\n")
        # The rest comes in another order and with other prompts.
        assert run(llm.engine, PROMPTS[::-1], file) == whole
        assert file.read_bytes().startswith(b"".join(text.splitlines(True)[:kept]))
        assert file.read_bytes().count(b"\n") == len(PROMPTS)


def test_an_exception_keeps_what_was_finished(llm: LLM, model: str, tmp_path: Path) -> None:
    file, skipped = tmp_path / "responses.jsonl", Skipped()
    with LLM(model, dtype="float32", max_total_tokens=3000, max_running_requests=2) as other:
        engine, steps = other.engine, 0

        class Dies:
            def __getattr__(self, name: str) -> object:
                return getattr(engine, name)

            def step(self) -> object:
                nonlocal steps
                steps += 1
                if steps == 60:
                    raise KeyboardInterrupt
                return engine.step()

        with pytest.raises(KeyboardInterrupt):
            generate(Dies(), usable(PROMPTS, engine.tokenizer, SAMPLING, skipped), file, SAMPLING, skipped)  # type: ignore[arg-type]
    assert 0 < len(keys(file)) < len(PROMPTS)
    assert run(llm.engine, PROMPTS, file) == run(llm.engine, PROMPTS, tmp_path / "whole.jsonl")


def test_turn_after_turn(llm: LLM, tmp_path: Path) -> None:
    """The tiny model's answers never end by themselves, so a bias makes them."""
    prompt = Prompt(("first", "second"), "be brief", "p:1")
    tokenizer = llm.engine.tokenizer
    eos = 256
    long = run(llm.engine, [prompt], tmp_path / "a.jsonl")[prompt.key]
    assert len(long.spans) == 1 and long.finish == "length", "an unfinished answer is the last"

    class Ends:
        """An engine whose answers are 'ok' and the end."""

        def __init__(self) -> None:
            self.asked: list[list[int]] = []
            self.tokenizer, self.info = tokenizer, llm.engine.info
            self.new: list[object] = []

        def submit(self, request: object) -> None:
            self.asked.append(request.prompt_ids)  # type: ignore[attr-defined]
            self.new.append(request.uid)  # type: ignore[attr-defined]

        def step(self) -> list[object]:
            from draftwing.core import Output

            done, self.new = self.new, []
            return [Output(str(uid), [*tokenizer.encode("ok"), eos], {"type": "stop", "matched": eos}) for uid in done]

    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    from draftwing.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(llm.engine.options.model), template)
    ends = Ends()
    (response,) = run(ends, [prompt], tmp_path / "b.jsonl").values()  # type: ignore[arg-type]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in ends.asked] == [
        "system:be brief<eos>user:first<eos>assistant:",
        "system:be brief<eos>user:first<eos>assistant:ok<eos>user:second<eos>assistant:",
    ]
    assert response.ids == [*ends.asked[1], *tokenizer.encode("ok"), eos]
    assert [tokenizer.decode(response.ids[a:b], skip_special_tokens=False) for a, b in response.spans] == [
        "ok<eos>"
    ] * 2
    assert [m["role"] for m in response.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_prompts_without_room_for_an_answer(llm: LLM) -> None:
    skipped, most = Skipped(), SAMPLING.max_length - MIN_ANSWER
    overhead = len(llm.engine.tokenizer.encode_chat([{"role": "user", "content": ""}]))
    fits, not_any_more = (Prompt(("x" * (most - overhead + more),), where=f"p:{more}") for more in (0, 1))
    found = usable([fits, not_any_more], llm.engine.tokenizer, SAMPLING, skipped)
    assert [prompt for prompt, _ in found] == [fits] and len(found[0][1]) == most
    assert skipped.examples == {f"longer than {most} tokens": ["p:1"]}


def test_what_is_drawn_depends_on_seed_and_prompt_alone() -> None:
    keys = [prompt.key for prompt in PROMPTS]
    draws = [Sampling(seed=1).draw(key) for key in keys]
    assert draws == [Sampling(seed=1).draw(key) for key in keys] != [Sampling(seed=2).draw(key) for key in keys]
    assert len({draw.sampling_seed for draw in draws}) == len(keys)
    many = [Sampling(seed=3).draw(str(i)).temperature for i in range(4000)]
    assert abs(many.count(0.0) / 4000 - 0.5) < 0.03
    warm = [t for t in many if t]
    assert abs(sum(warm) / len(warm) - 0.8) < 0.01 and min(warm) < 0.61 and max(warm) > 0.99
    assert all(Sampling(greedy=1.0).draw(key).temperature == 0 for key in keys)


def test_a_share_is_drawn_as_requests_are_that_set_nothing() -> None:
    defaults = {"temperature": 0.7, "min_p": 0.2, "dry_multiplier": 0.8, "max_new_tokens": 999}
    sampling = Sampling(max_tokens=50, greedy=0.2, seed=3, default=0.4, defaults=defaults)
    draws = [sampling.draw(str(i)) for i in range(4000)]
    own = [d for d in draws if d.dry_multiplier]
    assert abs(sum(d.temperature == 0 for d in draws) / 4000 - 0.2) < 0.03 and abs(len(own) / 4000 - 0.32) < 0.03
    assert {(d.temperature, d.min_p, d.dry_multiplier, d.max_new_tokens) for d in own} == {(0.7, 0.2, 0.8, 50)}
    others = [d for d in draws if not d.dry_multiplier and d.temperature]
    assert (
        all(d.min_p == 0 and 0.6 <= d.temperature <= 1.0 for d in others) and len({d.temperature for d in others}) > 100
    )
    # Without the share all is as it was, and a conversation keeps what its first answer had.
    assert all(
        d == Sampling(max_tokens=50, greedy=0.2, seed=3).draw(str(i))
        for i, d in enumerate(draws)
        if not d.dry_multiplier
    )
    again = [sampling.draw(str(i), turn=1) for i in range(200)]
    assert [bool(d.dry_multiplier) for d in again] == [bool(d.dry_multiplier) for d in draws[:200]]


@pytest.mark.slow
def test_answers_by_default_are_those_of_a_request_that_sets_nothing(llm: LLM, tmp_path: Path) -> None:
    defaults = {"temperature": 0.9, "min_p": 0.3, "dry_multiplier": 2.0, "repetition_penalty": 1.3}
    sampling = dataclasses.replace(SAMPLING, greedy=0.0, default=1.0, defaults=defaults)
    found = run(llm.engine, PROMPTS, tmp_path / "responses.jsonl", sampling)
    for prompt in PROMPTS:
        response = found[prompt.key]
        params = {**defaults, "sampling_seed": response.seed, "max_new_tokens": SAMPLING.max_tokens}
        (expected,) = llm.chat([{"role": "user", "content": prompt.turns[0]}], params)
        ((start, end),) = response.spans
        assert response.ids[start:end] == expected.token_ids and response.temperature == 0.9


def test_copies_of_a_prompt_are_other_answers_and_never_greedy() -> None:
    copies = [dataclasses.replace(PROMPTS[0], copy=copy) for copy in range(4)]
    draws = [Sampling(greedy=1.0).draw(prompt.key) for prompt in copies]
    assert [draw.temperature == 0 for draw in draws] == [True, False, False, False]
    assert len({draw.sampling_seed for draw in draws}) == 4
    # They are watched or trained on together: an answer to a prompt tells much about another one.
    keys = [dataclasses.replace(Prompt((str(i),)), copy=copy).key for i in range(200) for copy in range(3)]
    chosen = held_out(keys, 0.3, 0, "watch")
    assert 90 < len(chosen) < 270
    assert all(len({key in chosen for key in keys[i : i + 3]}) == 1 for i in range(0, len(keys), 3))
    assert len(held_out(keys[:15], 1e-9, 0, "watch")) == 3 and not held_out([], 0.5, 0, "watch")


def test_broken_lines_are_made_again(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    whole = run(llm.engine, PROMPTS[:3], file)
    lines = file.read_text().splitlines(True)
    bad = json.loads(lines[0]) | {"spans": [[5, 9999]]}
    file.write_text(json.dumps(bad) + "\n{]\n" + lines[1] + lines[1])
    skipped = Skipped()
    assert keys(file) == {json.loads(lines[1])["key"]}
    todo = usable(PROMPTS[:3], llm.engine.tokenizer, SAMPLING, skipped)
    todo = [(prompt, ids) for prompt, ids in todo if prompt.key not in keys(file)]
    generate(llm.engine, todo, file, SAMPLING, skipped)
    again = Skipped()
    assert {r.key: r for r in read_responses(responses_files(tmp_path), again)} == whole
    assert again.counts == {"no assistant turn": 1, "a broken line": 1, "repeated": 1}


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
    monkeypatch.setattr("draftwing.train.generate.Session", model)
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
    monkeypatch.setattr("draftwing.train.generate.Session", Model(llm.engine.tokenizer, [None] * 3))
    with pytest.raises(ConfigError, match=r"no prompt is left of 3 read: 3 did not end within 240 tokens"):
        write_prompts(llm.engine, 3, tmp_path / "own.jsonl")
    assert not (tmp_path / "own.jsonl").exists()


def test_a_seed_asks_the_same(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        model = Model(llm.engine.tokenizer, ["Why is the sky blue?"] * 20)
        monkeypatch.setattr("draftwing.train.generate.Session", model)
        write_prompts(llm.engine, 20, tmp_path / name, seed)
        asked.append([(one.prompt_ids, one.params.sampling_seed) for one in model.asked])
    assert asked[0] == asked[1] != asked[2] and len({seed for _, seed in asked[0]}) == 20


@pytest.mark.slow
def test_an_engine_writes_them(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of random weights is mostly no text, so it counts here whatever it is."""
    monkeypatch.setattr("draftwing.train.generate._text", lambda tokenizer, ids, stops, ended: str(ids))
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

    monkeypatch.setattr("draftwing.train.generate.Session", Marked(tokenizer, []))
    assert write_prompts(llm.engine, 8, tmp_path / "own.jsonl") > 0
    found = [prompt.turns[0] for prompt in read_prompts([tmp_path / "own.jsonl"], Skipped())]
    assert all(text.endswith("hy is the sky blue?") for text in found)


def test_a_kill_leaves_no_file(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = ["Why is the sky blue?"] * 8

    class Killed(Model):
        def run(self, requests: Iterator[GenerationRequest], window: int) -> Iterator[Output]:
            yield from islice(super().run(requests, window), 5)
            raise KeyboardInterrupt

    monkeypatch.setattr("draftwing.train.generate.Session", Killed(llm.engine.tokenizer, says))
    with pytest.raises(KeyboardInterrupt):
        write_prompts(llm.engine, 8, tmp_path / "own.jsonl")
    assert not (tmp_path / "own.jsonl").exists()
    monkeypatch.setattr("draftwing.train.generate.Session", Model(llm.engine.tokenizer, says))
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
