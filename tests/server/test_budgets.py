"""Fields that bound reasoning, in each dialect: what reaches the engine, what is named as ignored, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted import TEMPLATE, WITHOUT_TOOLS, ScriptedEngine, client_of

from draftwing.requests.request import ThinkingBudget

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]
HARMONY = (  # with all markers, by which it is known
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if documents %}<|channel|>{% endif %}<|start|>assistant"
)
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
# Begins a block itself, unless it is asked not to reason, and says what it was asked.
OPENS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking }} {{ reasoning_effort }}]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
# As DeepSeek's, which rests by default.
SWITCHED_ON = "{% if enable_thinking %}<think>\n{% else %}</think>\n{% endif %}"


class Served:
    def __init__(
        self, reasoning: str | None, template: str, special: tuple[str, ...] = ("<think>", "</think>")
    ) -> None:
        self.engine = ScriptedEngine("x", reasoning, template=template, special=special)
        self.client = client_of(self.engine)
        self.client.__enter__()

    def ask(self, path: str, **fields: Any) -> Any:
        """The response."""
        first = {RESPONSES: {"input": "hi"}, COMPLETIONS: {"prompt": "hi"}, "/generate": {"text": "hi"}}
        whole = first.get(path, {"messages": HI}) | ({"max_tokens": 1500} if path == MESSAGES else {})
        return self.client.post(path, json=whole | ({} if path == "/generate" else {"model": "m"}) | fields)

    def budget(self, path: str, **fields: Any) -> ThinkingBudget | None:
        """What reached the engine; `ignored` is what the response names so."""
        response = self.ask(path, **fields)
        assert response.status_code == 200, response.text
        self.ignored = response.headers.get("draftwing-ignored")
        return self.engine.requests[-1].thinking

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text, add_special_tokens=False))


def serve(*args: Any) -> Iterator[Served]:
    served = Served(*args)
    try:
        yield served
    finally:
        served.client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def opens() -> Iterator[Served]:
    yield from serve("qwen3", OPENS)


@pytest.fixture(scope="module")
def free() -> Iterator[Served]:
    yield from serve("qwen3", TEMPLATE, ())  # markers of eight tokens


@pytest.fixture(scope="module")
def silent() -> Iterator[Served]:
    yield from serve(None, OPENS)


FIELDS: list[tuple[str, dict[str, Any], int]] = [
    *((CHAT, {name: 7}, 7) for name in ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")),
    (CHAT, {"reasoning_budget_tokens": 0}, 0), (CHAT, {"reasoning_effort": 9}, 9),
    (CHAT, {"reasoning_effort": "9"}, 9), (CHAT, {"reasoning_effort": 0}, 0),
    (CHAT, {"reasoning_effort": 9, "thinking_budget": 5}, 5), (CHAT, {"reasoning": {"max_tokens": 11}}, 11),
    (CHAT, {"reasoning": {"effort": "12", "enabled": True}}, 12),
    (CHAT, {"custom_params": {"thinking_budget": 3}}, 3), (RESPONSES, {"thinking_budget": 4}, 4),
    (RESPONSES, {"reasoning": {"effort": 6}}, 6), (RESPONSES, {"reasoning": {"effort": "6"}}, 6),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 8}}, 8),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "tokens"), FIELDS, ids=str)
def test_fields(opens: Served, free: Served, path: str, fields: dict[str, Any], tokens: int) -> None:
    end = opens.ids("</think>")
    assert len(end) == 1 and opens.budget(path, **fields) == ThinkingBudget(tokens, (), end, True)
    assert opens.ignored is None
    begin, end = free.ids("<think>"), free.ids("</think>")
    assert (len(begin), len(end)) == (7, 8)
    assert free.budget(path, **fields) == ThinkingBudget(tokens, begin, end, False)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}), (CHAT, {"thinking_budget": -1}), (CHAT, {"thinking_token_budget": None}), (RESPONSES, {}),
        (CHAT, {"reasoning_effort": "high"}), (CHAT, {"thinking_budget": 5, "reasoning_effort": "none"}),
        (CHAT, {"thinking_budget": 5, "chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {}), (MESSAGES, {"thinking": {"type": "enabled"}}), (MESSAGES, {"thinking": {"type": "adaptive"}}),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 9}}), (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning": {"enabled": False}}), ("/generate", {"sampling_params": {"thinking_budget": -1}}),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_to_be_bounded(opens: Served, path: str, fields: dict[str, Any]) -> None:
    """No budget, or a template that closes the block by itself."""
    assert opens.budget(path, **fields) is None


def test_prompts_tell_where_the_answer_begins(opens: Served) -> None:
    end, asked = opens.ids("</think>"), {"thinking_budget": 5}
    prompt = {"hi<think>\n": True, "hi": False, "hi<think>\n\n</think>\n": None, "a<think>b</think>c<think>": True}
    for text, is_open in prompt.items():
        begin = () if is_open else opens.ids("<think>")
        want = None if is_open is None else ThinkingBudget(5, begin, end, is_open)
        ids = list(opens.ids(text))
        for given in ({"text": text}, {"input_ids": ids, "text": None}):
            assert opens.budget("/generate", sampling_params=asked, **given) == want
        assert opens.budget("/generate", max_thinking_tokens=5, text=text) == want
        assert opens.budget(COMPLETIONS, prompt=text, **asked) == want
        assert opens.budget(COMPLETIONS, prompt=ids, thinking_token_budget=5) == want
    each = [{"thinking_budget": 1}, {"max_new_tokens": 3}]
    assert opens.ask("/generate", text=["a<think>", "b<think>"], sampling_params=each).status_code == 200
    assert sorted(one.thinking.tokens if one.thinking else -1 for one in opens.engine.requests[-2:]) == [-1, 1]


def test_continued_messages(opens: Served) -> None:
    for text, is_open in (("<think>well", True), ("<think>well</think>So", None), ("So", None)):
        messages = [*HI, {"role": "assistant", "content": text}]
        found = opens.budget(CHAT, messages=messages, continue_final_message=True, thinking_budget=5)
        assert found == (ThinkingBudget(5, (), opens.ids("</think>"), True) if is_open else None)


def test_the_template_is_told_to_reason() -> None:
    """A number asks for reasoning as an effort in words does; a bound by itself does not."""
    for served in serve("deepseek-v3", SWITCHED_ON):
        for fields in ({"reasoning_effort": 5}, {"reasoning": {"max_tokens": 5}}):
            assert served.budget(CHAT, **fields) == ThinkingBudget(5, (), served.ids("</think>"), True)
        assert served.budget(MESSAGES, thinking={"type": "enabled", "budget_tokens": 5}) is not None
        assert served.budget(RESPONSES, reasoning={"effort": 5}) is not None
        assert served.budget(CHAT, thinking_budget=5) is None and served.budget(CHAT, reasoning_effort=0) is None


def test_numbers_are_no_words_for_the_template(opens: Served) -> None:
    opens.budget(CHAT, reasoning_effort=5)
    assert "[True ]" in opens.engine.prompt
    opens.budget(CHAT, reasoning_effort="low")
    assert "[True low]" in opens.engine.prompt


def test_what_is_not_to_reason_and_would_is_ended_at_once() -> None:
    """Templates that cannot switch reasoning off: the budget is 0."""
    off = [(CHAT, {"reasoning_effort": "none"}), (CHAT, {"reasoning": {"enabled": False}, "thinking_budget": 50})]
    off += [(MESSAGES, {"thinking": {"type": "disabled"}}), (RESPONSES, {"reasoning": {"effort": "none"}})]
    for reasoning, is_open in (("deepseek-r1", True), ("qwen3", False)):
        for served in serve(reasoning, WITHOUT_TOOLS):
            for path, fields in off:
                begin = () if is_open else served.ids("<think>")
                assert served.budget(path, **fields) == ThinkingBudget(0, begin, served.ids("</think>"), is_open)


def test_harmony() -> None:
    for served in serve(None, HARMONY, CHANNELS):
        begin, end = served.ids("<|channel|>analysis<|message|>"), served.ids("<|end|>")
        assert len(end) == 1 and served.engine.tokenizer.encode("<|channel|>")[0] == begin[0]
        for path, fields, tokens in (
            (CHAT, {"thinking_budget": 5}, 5),
            (CHAT, {"reasoning_effort": "6"}, 6),
            (CHAT, {"reasoning_effort": "none"}, 0),
            (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
            (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ):
            assert served.budget(path, **fields) == ThinkingBudget(tokens, begin, end, False, True)
        for text, is_open in (
            ("<|start|>assistant<|channel|>analysis<|message|>so", True),
            ("<|start|>assistant<|channel|>final<|message|>so", False),
            ("<|start|>assistant<|channel|>analysis<|message|>so<|end|><|start|>assistant", False),
        ):
            found = served.budget("/generate", text=text, sampling_params={"thinking_budget": 5})
            assert found == ThinkingBudget(5, begin, end, is_open, True)


def test_a_model_without_reasoning(silent: Served) -> None:
    """What asks for reasoning is a hint; what bounds it is refused, for nobody knows how it would be ended."""
    for path, fields, named in (
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None),
        (MESSAGES, {"thinking": {"type": "disabled"}}, None),
        (CHAT, {"reasoning_effort": 5}, "reasoning_effort"),
        (CHAT, {"reasoning": {"max_tokens": 5}}, "reasoning"),
        (RESPONSES, {"reasoning": {"effort": "5"}}, "reasoning.effort"),
    ):
        assert silent.budget(path, **fields) is None and silent.ignored == named
    for path, fields, named in (
        (CHAT, {"thinking_budget": 5}, "thinking_budget"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"custom_params": {"thinking_budget": 5}}, "custom_params"),
        (CHAT, {"reasoning_effort": 5, "thinking_budget_tokens": 5}, "thinking_budget_tokens"),
        (RESPONSES, {"thinking_budget": 5}, "thinking_budget"),
        (COMPLETIONS, {"thinking_budget": 5}, "thinking_budget"),
        ("/generate", {"sampling_params": {"thinking_budget": 5}}, "thinking_budget"),
        ("/generate", {"max_thinking_tokens": 5}, "max_thinking_tokens"),
    ):
        response = silent.ask(path, **fields)
        assert response.status_code == 400 and named in response.text and "--reasoning-parser" in response.text
        assert path == "/generate" or response.json()["param"] == named


def test_what_nobody_hears_is_named() -> None:
    for served in serve(None, WITHOUT_TOOLS):
        for fields in ({"enabled": True}, {"effort": "high"}, {"max_tokens": 5}):
            assert served.budget(CHAT, reasoning=fields) is None and served.ignored == "reasoning"
        assert served.budget(CHAT, reasoning={"enabled": False}) is None and served.ignored is None


def test_thinking_that_the_template_does_not_switch_on() -> None:
    for served in serve("qwen3", WITHOUT_TOOLS + "<think>\n\n</think>\n\n"):
        assert served.budget(MESSAGES, thinking={"type": "enabled", "budget_tokens": 5}) is None
        assert served.ignored == "thinking"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"thinking_budget": -2}, "thinking_budget"),
        (CHAT, {"thinking_budget": 1.5}, "thinking_budget"),
        (CHAT, {"reasoning_effort": "1.5"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        (CHAT, {"reasoning": {"exclude": 1}}, "reasoning.exclude"),
        (CHAT, {"thinking_budget": 5, "allowed_token_ids": [5, 6]}, "allowed_token_ids"),
        (CHAT, {"thinking_budget": 5, "bad_words": ["x</think>"]}, "bad_words"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1500}}, "thinking.budget_tokens"),
        (RESPONSES, {"reasoning": {"effort": -1}}, "reasoning.effort"),
        ("/generate", {"sampling_params": {"thinking_budget": "5"}}, "sampling_params.thinking_budget"),
        ("/generate", {"sampling_params": {"thinking_budget": 5, "regex": "a"}}, "thinking_budget"),
        ("/generate", {"max_thinking_tokens": 2**31}, "max_thinking_tokens"),
        ("/generate", {"max_thinking_tokens": 5, "sampling_params": [{"regex": "a"}]}, "max_thinking_tokens"),
        ("/generate", {"max_thinking_tokens": 5, "sampling_params": {"thinking_budget": -2}}, "params.thinking_budget"),
        (
            "/generate",
            {"max_thinking_tokens": 5, "sampling_params": {"allowed_token_ids": [5, 6]}},
            "which max_thinking_tokens writes",
        ),
        (CHAT, {"custom_params": {"thinking_budget": -2}}, "custom_params.thinking_budget"),
        (CHAT, {"custom_params": {"thinking_budget": 5}, "thinking_token_budget": -2}, "thinking_token_budget"),
        (
            "/generate",
            {"sampling_params": {"custom_params": {"thinking_budget": -2}}},
            "sampling_params.custom_params.thinking_budget",
        ),
    ],
    ids=str,
)
def test_refusals(opens: Served, path: str, fields: dict[str, Any], named: str) -> None:
    response = opens.ask(path, **fields)
    assert response.status_code == 400 and named in response.text
    assert "thinking_budget" not in response.text or "thinking_budget" in str(fields), "it was not sent"
    if path in (CHAT, RESPONSES):
        assert response.json()["param"] == named


def test_a_grammar_holds_after_the_reasoning(opens: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert opens.budget(CHAT, thinking_budget=5, response_format=form) is not None
    grammar = opens.engine.requests[-1].params.grammar
    assert grammar is not None and "</think>" in grammar.text
    # A prompt that has the block behind it has nothing to bound, so a grammar of all of the answer does no harm.
    asked = {"thinking_budget": 5, "regex": "a+"}
    assert opens.budget("/generate", text="<think></think>", sampling_params=asked) is None
