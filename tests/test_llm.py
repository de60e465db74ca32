"""The Python API, around the server tests' stand-in for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import CONTEXT, EOS, FakeEngine, local
from scripted import ScriptedEngine

import draftwing
from draftwing import LLM, AsyncLLM, Completion, ConfigError, RequestError, SamplingParams
from draftwing.config.options import Options
from draftwing.requests.request import SpecLimits, ThinkingBudget


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def llm(engine: FakeEngine) -> LLM:
    return LLM.from_engine(engine)  # type: ignore[arg-type]


def texts(completions: list[Completion]) -> list[str]:
    return [completion.text for completion in completions]


def test_all_forms_of_prompts(llm: LLM, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("abc")
    for prompts, expected in (
        ("abc", ["abc"]),
        (ids, ["abc"]),
        (["abc", "dé"], ["abc", "dé"]),
        ([ids, ids[:1]], ["abc", "a"]),
        (["dé", ids, "abc"], ["dé", "abc", "abc"]),
        ([], []),
        (np.array(ids), ["abc"]),
        (torch.tensor([ids, ids]), ["abc", "abc"]),
        ([np.array(ids), "dé", tuple(ids)], ["abc", "dé", "abc"]),
    ):
        assert texts(llm.generate(prompts)) == expected  # type: ignore[arg-type]


def test_a_completion_says_all(llm: LLM, engine: FakeEngine) -> None:
    (done,) = llm.generate("abc", SamplingParams(max_new_tokens=10))
    assert done.token_ids == [*engine.tokenizer.encode("abc"), EOS]
    assert done.finish_reason == {"type": "stop", "matched": EOS}
    assert done.meta_info["prompt_tokens"] == 3 and done.meta_info["completion_tokens"] == 4
    assert "spec_verify_ct" in done.meta_info


def test_params_for_each_and_n(llm: LLM, engine: FakeEngine) -> None:
    params = [SamplingParams(n=2, max_new_tokens=2, seed=4), {"max_new_tokens": 1, "seed": 9}]
    assert texts(llm.generate(["abc", "xyz"], params)) == ["ab", "ab", "x"]  # type: ignore[arg-type]
    first, second, third = (r.params.sampling_seed for r in engine.requests)
    assert (first, third) == (4, 9) and second not in (4, 5, None)
    assert all(r.params.n == 1 for r in engine.requests)


def test_chat_one_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(one)) == ["user:hi\n"]
    assert texts(llm.chat([one, [*one, {"role": "assistant", "content": "yo"}]])) == [
        "user:hi\n",
        "user:hi\nassistant:yo\n",
    ]


def test_stop_strings_and_unlimited_length(llm: LLM) -> None:
    (done,) = llm.generate("one two three", SamplingParams(stop="two"))
    assert done.text == "one " and done.finish_reason == {"type": "stop", "matched": "two"}
    (done,) = llm.generate("abc", SamplingParams(max_new_tokens=None, ignore_eos=True))
    assert len(done.token_ids) == CONTEXT - 3


def test_unseeded_answers_repeat_with_the_engines_seed() -> None:
    def seeds(random_seed: int) -> list[int | None]:
        engine = FakeEngine(draftwing.config.options.Options(random_seed=random_seed))
        LLM.from_engine(engine).generate(["a", "b"])  # type: ignore[arg-type]
        return [r.params.sampling_seed for r in engine.requests]

    assert seeds(1) == seeds(1) != seeds(2) and len(set(seeds(1))) == 2


def test_log_probabilities(llm: LLM, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("ab")
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    (done,) = llm.generate("ab", **asked)  # type: ignore[arg-type]
    info = done.meta_info
    assert info["input_token_logprobs"] == [[None, ids[0], "a"], [-ids[1] / 100, ids[1], "b"]]
    assert [entry[1:] for entry in info["output_token_logprobs"]] == [[ids[0], "a"], [ids[1], "b"], [EOS, "<eos>"]]
    assert len(info["output_top_logprobs"]) == 3
    (plain,) = llm.generate("ab")
    assert "output_token_logprobs" not in plain.meta_info
    with pytest.raises(RequestError, match="return_logprob"):
        llm.generate("ab", top_logprobs_num=1)
    with pytest.raises(TypeError, match="bogus"):
        llm.generate("ab", bogus=1)  # type: ignore[call-arg]


def test_speculation_and_prediction() -> None:
    options = draftwing.config.options.Options(
        speculative_algorithm="EAGLE", speculative_num_steps=5, speculative_eagle_topk=4, speculative_num_draft_tokens=8
    )
    engine = FakeEngine(options)
    llm = LLM.from_engine(engine)  # type: ignore[arg-type]
    (off,) = llm.generate("ab", speculative="off")
    assert off.meta_info["speculative"]["algorithm"] == "none" and off.meta_info["spec_num_proposed_drafts"] == 0
    (small,) = llm.generate("ab", speculative={"num_steps": 2}, prediction="xyz")
    assert small.meta_info["speculative"]["num_steps"] == 2
    (whole,) = llm.generate("ab")
    assert whole.meta_info["speculative"] == {"algorithm": "EAGLE", "num_steps": 5, "topk": 4, "num_draft_tokens": 8}
    limits = [request.limits for request in engine.requests]
    assert limits == [SpecLimits(0, 1, 1), SpecLimits(2, 4, 8), None]
    assert engine.requests[1].prediction == tuple(engine.tokenizer.encode("xyz"))
    for wishes in ({"speculative": {"num_steps": 9}}, {"speculative": "off", "prediction": "a"}, {"prediction": 5}):
        with pytest.raises(RequestError, match=r"speculative|prediction"):
            llm.generate("ab", **wishes)  # type: ignore[arg-type]


def test_chats_go_on(llm: LLM) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one "}]
    assert texts(llm.chat(messages, continue_final_message=True)) == ["user:count\nassistant:one "]
    assert texts(llm.chat(messages, chat_template_kwargs={"shout": "HEY"})) == ["user:count\nassistant:one \nHEY"]
    with pytest.raises(RequestError, match="last message"):
        llm.chat(messages[:1], continue_final_message=True)


def test_defaults_of_the_model() -> None:
    engine = FakeEngine(defaults={"top_k": 20, "temperature": 0.6, "max_new_tokens": 300})
    llm = LLM.from_engine(engine)  # type: ignore[arg-type]
    for params in (None, {"top_k": 5}, SamplingParams(top_k=5), SamplingParams(temperature=1.0, max_new_tokens=None)):
        llm.generate("a", params)
    found = [(r.params.top_k, r.params.temperature, r.params.max_new_tokens) for r in engine.requests]
    assert found == [(20, 0.6, 128), (5, 0.6, 128), (5, 0.6, 128), (20, 1.0, None)]


def test_greedy_has_no_penalty_of_the_model() -> None:
    engine = FakeEngine(defaults={"repetition_penalty": 1.2, "temperature": 0.6})
    llm = LLM.from_engine(engine)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0, repetition_penalty=1.1)
    for params in (None, {"temperature": 0}, SamplingParams(temperature=0.0), SamplingParams(temperature=1e-9), greedy):
        llm.generate("a", params)
    found = [(r.params.temperature, r.params.repetition_penalty) for r in engine.requests]
    assert found == [(0.6, 1.2), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.1)]


def holding_itself() -> list[Any]:
    prompts: list[Any] = []
    prompts.append(prompts)
    return prompts


@pytest.mark.parametrize(
    "prompts",
    [
        5, None, [None], [["a"]], ["a", ""], [[]], "\ud800", [True], ["a", 1], [1, "a"], b"abc", [b"abc", "a"],
        bytearray(b"a"), [[b"a"]], np.array([0.5]), np.zeros((1, 1, 1), int), torch.tensor(1),
        memoryview(b"abc"), [memoryview(b"abc")], ("a", memoryview(b"a")), holding_itself(),
    ],
)  # fmt: skip
def test_bad_prompts(llm: LLM, engine: FakeEngine, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts)
    assert not engine.requests


@pytest.mark.parametrize(
    "conversation", [[], "hi", [5], [{"content": "a"}], [["a"]], [{"role": "user", "content": "bad"}]]
)
def test_bad_conversations(llm: LLM, conversation: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(conversation)


def test_a_refused_prompt_leaves_nothing_running(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(RequestError):
        llm.generate(["a" * 50, [257]])  # type: ignore[list-item]
    assert engine.idle() and not engine.requests
    with pytest.raises(RequestError, match="one per prompt"):
        llm.generate("a", [SamplingParams(), SamplingParams()])
    assert texts(llm.generate("abc")) == ["abc"]


def test_options_are_checked_before_the_engine_is_made() -> None:
    with pytest.raises(ConfigError, match="nearest option is 'dtype'"):
        LLM(dtpye="float32")
    with pytest.raises(ConfigError, match="needs speculative_draft_model_path"):
        LLM("x", speculative_algorithm="EAGLE3")


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.engine.engine.Engine", FakeEngine)
    with LLM(model_path="x", speculative_algorithm="NGRAM", random_seed=3) as llm:
        options = llm.engine.options
        assert (options.model, options.speculative_num_draft_tokens, options.random_seed) == ("x", 12, 3)
        engine = llm.engine
    assert engine.closed  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_thinking_budgets() -> None:
    """Prompts tell where their answers begin; so do messages that answers go on with."""
    engine = FakeEngine(Options(random_seed=7, reasoning_parser="qwen3"))
    llm, ask = LLM.from_engine(engine), {"thinking_budget": 4, "max_new_tokens": 1}  # type: ignore[arg-type]
    begin, end = (tuple(engine.tokenizer.encode(marker)) for marker in ("<think>", "</think>"))
    llm.generate(["a<think>\n", "a", "a</think>"], ask)
    llm.generate("a", {**ask, "thinking_budget": -1})
    budgets = [request.thinking for request in engine.requests]
    assert budgets == [ThinkingBudget(4, (), end, True), ThinkingBudget(4, begin, end, False), None, None]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>so"}]
    llm.chat([said, said[:1]], SamplingParams(**ask))
    llm.chat(said, ask, continue_final_message=True)
    assert [request.thinking.open for request in engine.requests[4:] if request.thinking] == [False, False, True]
    with pytest.raises(RequestError, match="grammar"):
        llm.generate("a", {**ask, "regex": "a"})


def test_a_budget_needs_markers(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(RequestError, match="--reasoning-parser") as refused:
        llm.generate("a", {"thinking_budget": 4})
    assert refused.value.param == "thinking_budget" and not engine.requests


def test_stream_is_generate_in_pieces(llm: LLM, engine: FakeEngine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    ids, salted = engine.tokenizer.encode("abc"), {"priority": 2, "return_logprob": True}
    for prompt, params in (("one two three", {"stop": "two"}), (ids, {"seed": 3}), ("dé", None), (chat, None)):
        (whole,) = llm.chat(chat, **salted) if prompt is chat else llm.generate(prompt, params, **salted)  # type: ignore
        pieces = list(llm.stream(prompt, params, **salted))  # type: ignore[arg-type]
        done = pieces[-1].completion
        assert done is not None and [piece.completion for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert (done.text, done.token_ids, done.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
        assert done.meta_info["output_token_logprobs"] == whole.meta_info["output_token_logprobs"]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    first, second = (request._replace(uid="", terms=None) for request in engine.requests[2:4])
    assert first == second and first.params.sampling_seed == 3


def test_a_closed_stream_is_aborted(llm: LLM, engine: FakeEngine) -> None:
    pieces = llm.stream("abc", {"ignore_eos": True, "max_new_tokens": None})
    assert next(pieces).text == "abc"
    with pytest.raises(RuntimeError, match="another answer"):
        llm.generate("x")
    assert len(engine.requests) == 1 and next(pieces).token_ids
    pieces.close()
    assert engine.idle() and engine.aborted == [engine.requests[0].uid]
    assert [llm.generate("x")[0].text for piece in llm.stream("abc") if piece.completion] == ["x"]
    ids = np.array(engine.tokenizer.encode("abc"))
    assert "".join(piece.text for piece in llm.stream(ids, {"temperature": np.float32(0)})) == "abc"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [5, [], "", b"a", memoryview(b"a"), holding_itself(), ["a"], [[1]], [[{"role": "user", "content": "a"}]], [5, "a"]],
)
def test_bad_prompts_of_streams(llm: LLM, engine: FakeEngine, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.stream(prompt)
    with pytest.raises(RequestError, match="n must be 1"):
        llm.stream("a", {"n": 2})
    assert not engine.requests


@pytest.mark.parametrize(
    ("use_tqdm", "prompts", "shown"),
    [(None, ["a"], False), (None, ["a", "b"], True), (False, ["a", "b"], False), (True, "a", True)],
)
def test_progress_bar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, use_tqdm: bool | None, prompts: list[str], shown: bool
) -> None:
    updates: list[int] = []

    class Bar:
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, count: int) -> None:
            updates.append(count)

    settings: dict[str, Any] = {}
    monkeypatch.setattr("draftwing.llm.progress_bar", lambda **given: settings.update(given) or Bar())
    llm.generate(prompts, use_tqdm=use_tqdm)
    assert settings["disable"] is not shown and settings["total"] == sum(updates) == len(prompts)


def test_lists_of_text_parts(llm: LLM) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert texts(llm.chat([{"role": "user", "content": parts}])) == ["user:hi\n"]
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[2\]: this model reads no images"):
        llm.chat([{"role": "user", "content": [*parts, picture]}])
    for part in ("hi", {"type": "text"}, {"text": "a"}, {"type": "text", "text": 5}):
        with pytest.raises(RequestError, match="must be"):
            llm.chat([{"role": "user", "content": [part]}])


# -- tools, and names of others ----------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("script", "parsers", "content", "reasoning", "calls"),
    [
        (HERMES, (None, "hermes"), None, None, 1),
        (f"Let me see. {HERMES}\n{HERMES}", (None, "hermes"), "Let me see.", None, 2),
        (f"<think>\nOslo\n</think>\n\n{HERMES}", ("qwen3", "hermes"), None, "Oslo", 1),
        (f"[TOOL_CALLS] [{CALL}]", (None, "mistral"), None, None, 1),
        ("It rains.", (None, "hermes"), "It rains.", None, 0),
    ],
)
def test_calls_of_tools(script: str, parsers: Any, content: str | None, reasoning: str | None, calls: int) -> None:
    """As the server gives them, and back into the history."""
    engine = ScriptedEngine(script, *parsers)
    llm = LLM.from_engine(engine)  # type: ignore[arg-type]
    (done,) = llm.chat(HI, {"max_tokens": 200}, tools=TOOLS)
    assert done.message is not None and len(done.tool_calls) == calls
    assert ((done.message["content"] or "").strip() or None, done.message.get("reasoning_content")) == (
        content,
        reasoning,
    )
    for call in done.tool_calls:
        assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert "weather" in engine.tokenizer.decode(done.prompt_token_ids)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in done.tool_calls]
    (again,) = llm.chat([*HI, done.message, *results], {"max_tokens": 1}, tools=TOOLS)
    said = engine.tokenizer.decode(again.prompt_token_ids)
    assert said.count('weather {"city": "Oslo"}') == calls and said.count("by weather for") == calls
    (*_, last) = llm.stream(HI, {"max_tokens": 200}, tools=TOOLS)
    assert last.completion is not None and len(last.completion.tool_calls) == calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_has_a_grammar(choice: Any) -> None:
    engine = ScriptedEngine(HERMES, None, "hermes")
    LLM.from_engine(engine).chat(HI, tools=TOOLS, tool_choice=choice)  # type: ignore[arg-type]
    assert engine.requests[-1].params.grammar is not None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": TOOLS * 2}, "two functions"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "no function 'f'"),
        ({"tools": TOOLS, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_wrong_tools(options: Any, expected: str) -> None:
    engine = ScriptedEngine(HERMES, None, "hermes")
    with pytest.raises(RequestError, match=expected):
        LLM.from_engine(engine).chat(HI, **options)  # type: ignore[arg-type]
    assert not engine.requests


def test_tools_are_for_conversations(llm: LLM) -> None:
    with pytest.raises(RequestError, match="tools are for conversations"):
        llm.generate("abc", tools=TOOLS)
    with pytest.raises(RequestError, match="knows no tools"):
        llm.chat(HI, tools=TOOLS)


def test_names_of_others(llm: LLM, engine: FakeEngine) -> None:
    """A program that was written for vLLM."""
    outputs = llm.generate(["abc", "xyz"], sampling_params=SamplingParams(n=2, max_tokens=2, seed=4))
    assert [one.text for output in outputs for one in output.outputs] == ["ab", "ab", "xy", "xy"]
    assert outputs[-1].prompt_token_ids == llm.get_tokenizer().encode("xyz") == llm.tokenizer.encode("xyz")
    with pytest.raises(RequestError, match="one argument"):
        llm.generate("abc", {}, sampling_params={})
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=rf"{name} is asked for.*return_logprob"):
            SamplingParams(**{name: 1})


def test_what_things_look_like(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    assert repr(params) == str(params) and eval(repr(params)) == params and "top_k" not in repr(params)
    (done,) = llm.generate("abc", params)
    assert "'abc'" in repr(done) and len(repr(done)) < 200
    assert "none" in repr(llm)
    llm.close()
    assert "closed" in repr(llm)


ENDLESS = {"ignore_eos": True, "max_new_tokens": None}


@pytest.fixture
def opened_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Of every AsyncLLM."""
    opened_engine = FakeEngine()
    opened = contextlib.nullcontext((local(opened_engine), opened_engine.tokenizer))
    monkeypatch.setattr("draftwing.server.run.opened", lambda options: opened)
    return opened_engine


def test_generate_and_stream(opened_engine: FakeEngine) -> None:
    chat = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with AsyncLLM() as llm:
            assert (await llm.generate(chat)).text == "user:hi\n"
            done = await llm.generate("one two three", {"stop": "two"}, return_logprob=True, priority=3)
            assert (done.text, done.finish_reason) == ("one ", {"type": "stop", "matched": "two"})
            assert len(done.meta_info["output_token_logprobs"]) == len(done.token_ids)
            assert opened_engine.requests[-1].priority == 3
            pieces = [piece async for piece in llm.stream("one two three", {"stop": "two"})]
            assert "".join(piece.text for piece in pieces) == done.text
            assert [token for piece in pieces for token in piece.token_ids] == done.token_ids
            assert pieces[-1].completion is not None and not any(piece.completion for piece in pieces[:-1])
            for prompt, params in (("", {}), (["a"], {}), ("a", {"n": 2}), ("a", {"regex": "("})):
                with pytest.raises(RequestError):
                    await llm.generate(prompt, params)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="async with"):
            await llm.generate("a")
        await llm.close()

    asyncio.run(main())
    with pytest.raises(ConfigError):
        AsyncLLM(dtpye="float32")


def test_what_is_given_up_is_aborted(opened_engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncLLM() as llm:
            pieces = llm.stream("abc", ENDLESS)
            assert (await anext(pieces)).text
            task = asyncio.create_task(llm.generate("xyz", ENDLESS))
            while len(opened_engine.running) < 2:  # both at a time
                await asyncio.sleep(0.001)
            await pieces.aclose()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not opened_engine.idle():
                await asyncio.sleep(0.001)
            assert set(opened_engine.aborted) == {request.uid for request in opened_engine.requests}
            assert (await llm.generate("abc")).text == "abc"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_start_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def opened(options: object) -> Iterator[None]:
        began.set()
        assert go_on.wait(30)
        yield
        ended.set()

    monkeypatch.setattr("draftwing.server.run.opened", opened)

    async def main() -> None:
        task = asyncio.create_task(AsyncLLM().__aenter__())
        assert await asyncio.to_thread(began.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.is_set()


@pytest.mark.slow
def test_same_answers_as_llm(model: str) -> None:
    """With the engine that a server has, requests at the same time."""
    options: dict[str, Any] = {"max_total_tokens": 2048, "speculative_algorithm": "NGRAM", "num_threads": 1}
    asked = [("abcabc", {"temperature": 0}), ("hello", {"temperature": 1, "seed": 5}), ("a", {"regex": "[ab]{8}"})]

    async def answers() -> list[Completion]:
        async with AsyncLLM(model, **options) as llm:
            every = [llm.generate(prompt, params) for prompt, params in asked]  # type: ignore[arg-type]
            found, _ = await asyncio.gather(asyncio.gather(*every), llm.sleep())
            with pytest.raises(RequestError, match="level"):
                await llm.sleep(level=2)
            await llm.wake_up()
            return found

    found = asyncio.run(answers())
    with LLM(model, **options) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt, params in asked]  # type: ignore[arg-type]
        streamed = [list(llm.stream(prompt, params))[-1].completion for prompt, params in asked[:2]]  # type: ignore[arg-type]
        free = llm.engine.stats()["free_tokens"] + llm.engine.stats()["cached_tokens"]
        pieces = llm.stream("abcabc", ENDLESS)
        assert next(pieces) and not llm.engine.idle()
        pieces.close()
        stats = llm.engine.stats()
        assert llm.engine.idle() and stats["free_tokens"] + stats["cached_tokens"] == free
    assert [one and (one.text, one.token_ids) for one in streamed] == [
        (one.text, one.token_ids) for one in expected[:2]
    ]
    assert [(one.text, one.token_ids) for one in found[:2]] == [(one.text, one.token_ids) for one in expected[:2]]
    assert len(found[2].text) == 8 and set(found[2].text) <= {*"ab"}
