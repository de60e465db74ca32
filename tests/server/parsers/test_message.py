"""A whole message: reasoning first, then text and calls, however the answer is cut into pieces."""

from __future__ import annotations

import dataclasses
import random

import garbled
import pydantic_core
import pytest
from fake_engine import byte_tokenizer

from draftwing.server.parsers.harmony import HarmonyReader
from draftwing.server.parsers.message import MessageReader, MessageStyle, Part, Thought
from draftwing.server.parsers.reasoning import REASONING_STYLES
from draftwing.server.parsers.tools import TOOL_STYLES, CallPiece

TOKENIZER = byte_tokenizer()
STYLE = MessageStyle(REASONING_STYLES["qwen3"], "free", TOOL_STYLES["hermes"], ("f", "g"))
BLOCK = '<think>\nMaybe <tool_call>{"name": "f"}?\n</think>'
CALLS = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
TEXT = f"{BLOCK}\n\nYes.\n{CALLS}"


def read(style: MessageStyle, text: str, sizes: list[int]) -> tuple[MessageReader, list[Part]]:
    reader, parts, ids, at = MessageReader(style, TOKENIZER), list[Part](), list[int](), 0
    for size in [*sizes, len(text)]:
        piece = text[at : at + size]
        at += len(piece)
        ids += TOKENIZER.encode(piece)
        parts += reader.push(piece, at == len(text), ids)
        if at == len(text):
            break
    return reader, parts


def test_every_split_reads_the_same() -> None:
    draw = random.Random(1)
    for sizes in ([], [1] * len(TEXT), *([draw.randrange(1, 20) for _ in range(30)] for _ in range(30))):
        reader, parts = read(STYLE, TEXT, sizes)
        assert reader.reasoning == 'Maybe <tool_call>{"name": "f"}?' and reader.content == "Yes."
        assert [(call.name, call.arguments) for call in reader.calls] == [("f", '{"x": 1}'), ("g", "{}")]
        assert len({call.id for call in reader.calls}) == 2
        assert reader.reasoning_tokens == len(BLOCK)
        kinds = list(dict.fromkeys(type(part) for part in parts))
        assert kinds == [Thought, str, CallPiece]


def test_reasoning_that_is_not_streamed_comes_at_once() -> None:
    style = dataclasses.replace(STYLE, stream_reasoning=False)
    for text in (TEXT, BLOCK[:20]):
        reader, parts = read(style, text, [1] * len(text))
        thoughts = [part for part in parts if isinstance(part, Thought)]
        assert parts[:1] == thoughts and thoughts[0].text == reader.reasoning
    assert reader.reasoning_tokens == 20


STYLES = [
    *(MessageStyle(tools=style, names=garbled.NAMES) for style in dict.fromkeys(TOOL_STYLES.values())),
    *(
        MessageStyle(style, "free", TOOL_STYLES["hermes"], garbled.NAMES)
        for style in dict.fromkeys(REASONING_STYLES.values())
    ),
    MessageStyle(REASONING_STYLES["deepseek_r1"], "open", TOOL_STYLES["mistral"], garbled.NAMES, parallel=False),
    MessageStyle(start="free", names=garbled.NAMES, harmony=True),
    MessageStyle(start="closed", names=garbled.NAMES, harmony=True),
]


@pytest.mark.parametrize("answers", [40, pytest.param(2000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("style", STYLES, ids=range(len(STYLES)))
def test_garbled_answers_are_read_alike_in_any_pieces(style: MessageStyle, answers: int) -> None:
    """What is given out of calls is the beginning of an object that any reader takes, whatever the model wrote."""
    draw, calls = random.Random(answers), 0
    for _ in range(answers):
        text = garbled.answer(draw)
        found = []
        for pieces in ([text], garbled.pieces(draw, text)):
            reader = (HarmonyReader if style.harmony else MessageReader)(style, TOKENIZER)
            for i, piece in enumerate(pieces):
                reader.push(piece, i == len(pieces) - 1, [])
            found.append((reader.reasoning, reader.content, [(call.name, call.arguments) for call in reader.calls]))
        assert found[0] == found[1], pieces
        calls += len(found[0][2])
        for name, arguments in found[0][2]:
            assert name in garbled.NAMES
            if arguments:
                value = pydantic_core.from_json(arguments, allow_partial=True, allow_inf_nan=False)
                assert isinstance(value, dict)
    assert calls or style.start == "closed" or style.reasoning is not None


ONLY_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
    '{"name": "g", "arguments": {"y": [1, {}]}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": [1, {}]}}]',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}',
    "json": '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": [1, {}]}}]',
}


@pytest.mark.parametrize("name", ONLY_CALLS)
@pytest.mark.parametrize("reasons", [False, True])
def test_an_answer_of_calls_alone_has_no_text_wherever_it_is_cut(name: str, reasons: bool) -> None:
    style = MessageStyle(tools=TOOL_STYLES[name], names=("f", "g"), constrained=True, only_calls=True)
    text = ONLY_CALLS[name]
    if reasons:
        style, text = dataclasses.replace(style, reasoning=REASONING_STYLES["qwen3"], start="free"), BLOCK + text
    whole, _ = read(style, text, [])
    expected = [(call.name, call.arguments) for call in whole.calls]
    assert expected[0] == ("f", '{"x": 1}') and not whole.content
    for end in range(len(BLOCK) if reasons else 0, len(text) + 1):
        for sizes in ([], [1] * end, [3] * end):
            reader, parts = read(style, text[:end], sizes)
            assert not reader.content and not any(isinstance(part, str) for part in parts), text[:end]
            found = [(call.name, call.arguments) for call in reader.calls]
            assert len(found) <= len(expected) and found[:-1] == expected[: len(found[:-1])]
            assert not found or expected[len(found) - 1][1].startswith(found[-1][1])
    some, _ = read(dataclasses.replace(style, only_calls=False), text[:-3], [])
    assert [call.name for call in some.calls] == [name for name, _ in expected]
