"""Answers in harmony: however they are cut, what is reasoning, what a call and what text; grammars; and prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from fake_engine import EOS, byte_tokenizer
from guided import takes

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.grammar_field import Grammar
from draftwing.server.parsers.grammars import Function, ToolChoice, harmony_grammar
from draftwing.server.parsers.harmony import HarmonyReader, harmony_messages
from draftwing.server.parsers.message import MessageStyle, Part, Thought
from draftwing.server.parsers.reasoning import is_harmony
from draftwing.text.tokenizer import Tokenizer

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
WHY = "<|channel|>analysis<|message|>why é<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>the answer<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "a\nb"}<|call|>'
STYLE = MessageStyle(start="free", names=("f", "g", "browser.search"), harmony=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens([tokenizers.AddedToken(marker, special=True) for marker in MARKERS])
    return Tokenizer(backend, {"eos_token": "<eos>"})


def read(tokenizer: Tokenizer, text: str, style: MessageStyle = STYLE, size: int = 0) -> HarmonyReader:
    """size: of the pieces in which the text comes, 0: tokens as they are."""
    reader, ids = HarmonyReader(style, tokenizer), tokenizer.encode(text, add_special_tokens=False)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    given: list[Part] = []
    for i, piece in enumerate(pieces):
        given += reader.push(piece, i == len(pieces) - 1, ids if i == len(pieces) - 1 else [])
    assert "".join(part.text for part in given if isinstance(part, Thought)) == reader.reasoning
    assert "".join(part for part in given if isinstance(part, str)) == reader.content
    return reader


CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "an answer": (WHY + FINAL, "why é", "the answer", []),
    "no reasoning": (FINAL.removeprefix("<|start|>assistant"), "", "the answer", []),
    "a call": (WHY + CALL, "why é", "", [("f", '{"x": "a\\nb"}')]),
    "the recipient first": (
        "<|start|>assistant to=functions.g<|channel|>commentary<|constrain|>json<|message|>{}<|call|>", "", "",
        [("g", "{}")],
    ),
    "no namespace": (WHY + CALL.replace("functions.", ""), "why é", "", [("f", '{"x": "a\\nb"}')]),
    "no namespace, in the role, no format": (
        "<|start|>assistant to=g<|channel|>commentary<|message|>{}<|call|>", "", "", [("g", "{}")],
    ),
    "in the channel of reasoning": ('<|channel|>analysis to=g code<|message|>{"y": 1}<|call|>', "", "",
                                    [("g", '{"y": 1}')]),
    "the channel twice": (
        "<|channel|>commentary to=functions.g<|channel|>commentary json<|message|>{}<|call|>", "", "", [("g", "{}")],
    ),
    "a tool that the model knows": (
        '<|channel|>analysis to=browser.search code<|message|>{"q": 1}<|call|>', "", "",
        [("browser.search", '{"q": 1}')],
    ),
    "another of them": ("<|channel|>analysis to=browser.open code<|message|>{}<|call|>" + FINAL, "{}", "the answer",
                        []),
    "half a character": (CALL.replace("a\nb", "\\ud83d"), "", "", [("f", '{"x": "\\ufffd"}')]),
    "no numbers of JSON": (CALL.replace('"a\nb"', "[NaN, 1e999,]"), "", "", [("f", '{"x": [null, null]}')]),
    "a call with what is no object": (
        "<|channel|>commentary to=g code<|message|>f(1)<|call|>" + FINAL, "", "the answer", [("g", "{}")],
    ),
    "an empty call before a stop token, which is not shown": (
        "<|channel|>commentary to=functions.g<|message|>", "", "", [("g", "{}")],
    ),
    "an empty call": (WHY + "<|start|>assistant<|channel|>commentary to=functions.g<|message|><|call|>", "why é", "",
                      [("g", "{}")]),
    "a preamble": (
        WHY + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL, "why é", "I look.",
        [("f", '{"x": "a\\nb"}')],
    ),
    "two thoughts": (WHY + "<|start|>assistant" + WHY + FINAL, "why é\nwhy é", "the answer", []),
    "a tool that is not offered": (
        '<|channel|>analysis to=browser.find<|message|>{"q": 1}<|end|>' + FINAL, '{"q": 1}', "the answer", [],
    ),
    "a function that is not offered": (
        "<|channel|>commentary to=functions.h<|message|>{}<|end|>" + FINAL, "{}", "the answer", [],
    ),
    "cut in a thought": ("<|channel|>analysis<|message|>why <", "why <", "", []),
    "cut in a call": (CALL[: CALL.index('"}')], "", "", [("f", '{"x": "a\\nb')]),
    "cut in a header": (WHY + "<|start|>assistant<|chan", "why é", "", []),
    "no end before the next message": (WHY.removesuffix("<|end|>") + FINAL, "why é", "the answer", []),
    "arguments that stop being JSON": (
        CALL.replace('"a\nb"}', "1} and more"), "", "", [("f", '{"x": 1}')],
    ),
    "no harmony": ("plain text", "", "plain text", []),
    "no harmony, as a header may begin": ("assistance is here", "", "assistance is here", []),
    "cut in the first header": ("<|channel|>anal", "", "", []),
    "no header after the reasoning": (WHY + "plain text after", "why é", "plain text after", []),
    "a header that does not end": (
        WHY + "<|channel|>" + "x" * 2000 + "<|end|>" + FINAL, "why é", "<|channel|>" + "x" * 2000 + "\nthe answer", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str, tokenizer: Tokenizer) -> None:
    text, reasoning, content, calls = CASES[name]
    for size in (0, 1, 3, 7):
        reader = read(tokenizer, text, size=size)
        assert (reader.reasoning, reader.content) == (reasoning, content), size
        assert [(call.name, call.arguments) for call in reader.calls] == calls, size
        assert all(call.id.startswith("call_") for call in reader.calls)


def test_one_call_where_several_are_not_wanted(tokenizer: Tokenizer) -> None:
    style = MessageStyle(start="free", names=("f",), parallel=False, harmony=True)
    assert len(read(tokenizer, CALL + CALL, style).calls) == 1 and len(read(tokenizer, CALL + CALL).calls) == 2


def test_reasoning_that_stays_in_the_text_or_comes_at_once(tokenizer: Tokenizer) -> None:
    style = MessageStyle(start="free", separate=False, harmony=True)
    for size in (0, 1):
        reader = read(tokenizer, WHY + FINAL, style, size)
        assert reader.reasoning == "" and reader.content == WHY + "the answer"
    whole = HarmonyReader(MessageStyle(start="free", stream_reasoning=False, harmony=True), tokenizer)
    parts = [part for char in WHY + FINAL for part in whole.push(char, False, [])]
    assert [part for part in parts if isinstance(part, Thought)] == [Thought("why é")]


def test_an_answer_that_goes_on_with_a_text(tokenizer: Tokenizer) -> None:
    style = MessageStyle(start="closed", harmony=True)
    for text in ("ued<|return|>", "ued<|end|><|start|>assistant<|channel|>anal"):
        for size in (0, 1, 3):
            assert read(tokenizer, text, style, size).content == "ued"


@pytest.mark.parametrize("start", ["plain", "assistant", "<|channel|>", "<|start|>assistant<|channel|>"])
def test_text_without_the_marker_of_messages_is_not_held_back(start: str, tokenizer: Tokenizer) -> None:
    reader, given = HarmonyReader(STYLE, tokenizer), 0
    for i in range(3_000):
        given += len("".join(part for part in reader.push("word " if i else start, False, []) if isinstance(part, str)))
        assert len(start) + 5 * i - given <= 1100  # what is held is what a push looks through


def test_reasoning_tokens(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, WHY + FINAL).reasoning_tokens == len(tokenizer.encode(WHY, add_special_tokens=False))
    assert read(tokenizer, FINAL).reasoning_tokens == 0


SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
F, G = Function("f", None, SCHEMA, strict=True), Function("g")


def test_grammars(tokenizer: Tokenizer) -> None:
    final, call = FINAL.removesuffix("<|return|>"), CALL.removesuffix("<|call|>").replace("\n", " ")
    other = call.replace("functions.f", "functions.g")
    wrong = call.replace('"x"', '"y"')
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS])
    required = harmony_grammar([F, G], ToolChoice("required"))
    named = harmony_grammar([F, G], ToolChoice("named", "g"))
    auto = harmony_grammar([F, G], ToolChoice("auto"))
    answer = harmony_grammar([], ToolChoice("none"), Grammar("json_schema", json.dumps(SCHEMA)))
    for text, wanted in (
        (WHY + call, (True, False, True, False)),
        (call.removeprefix("<|start|>assistant"), (True, False, True, False)),
        (WHY + other, (True, True, True, False)),
        (WHY + wrong, (False, False, False, False)),
        (WHY + final, (False, False, True, False)),
        (WHY + final.replace("the answer", '{"x": "y"}'), (False, False, True, True)),
    ):
        assert tuple(takes(compiler, grammar, text) for grammar in (required, named, auto, answer)) == wanted, text
    assert harmony_grammar([G], ToolChoice("auto")) is None


def test_messages_for_the_template() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "function": {"name": "f", "arguments": {}}}

    given = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "why", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
    ]
    found = harmony_messages(given)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert found[1] == {"role": "assistant", "content": "", "thinking": "why\nI look.", "tool_calls": [call(1)]}
    assert found[3] == {"role": "assistant", "content": "", "tool_calls": [call(2)]}
    assert found[5] == {"role": "assistant", "content": "done", "thinking": "so"}
    assert given[1]["reasoning_content"] == "why", "the request's own messages stay as they are"


def test_templates_are_told_by_their_markers() -> None:
    assert is_harmony("{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert not is_harmony("<|im_start|>") and not is_harmony(None)
