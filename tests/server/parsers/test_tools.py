"""The tool call parsers: whole, character by character and in random pieces they find the same calls and text."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import garbled
import pydantic_core
import pytest

from draftwing.config.option_fields import TOOL_CALL_PARSERS
from draftwing.server.parsers.call import JsonScanner
from draftwing.server.parsers.tools import TOOL_STYLES, CallPiece, ToolParser

NAMES = ("get_weather", "f", "ff")
NASTY = (
    '{"a": {"b": [1, -2.5e3, {"}": "]{[\\"\\\\"}], "c": {}}, '
    '"s": "</tool_call> \\u00e9\\ud83d\\ude00 [TOOL_CALLS]", "t": [true, null, []]}'
)
HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "f", "arguments": %s}]'
Call = tuple[str, str]
BROKEN, WRAPPED = [("f", '{"a": ')], [("f", '{"a": 1}')]
HALVES = '{"a": "\\ufffd", "\\ufffd": 1}'
TEXT = [("f", HALVES.replace('"\\ufffd": 1', '"\ufffd": 1'))]
NULLS = '{"a": null, "b": null, "c": [null, null]}'
# parser, text, the parts of it: text or (name, arguments)
CASES: list[tuple[str, str, list[str | Call]]] = [
    ("hermes", HERMES % NASTY, [("f", NASTY)]),
    ("hermes", f"Let me see.\n\n{HERMES % '{}'}\n", ["Let me see.", ("f", "{}")]),
    ("hermes", f"{HERMES % NASTY}\n{HERMES % '{ }'} Done.", [("f", NASTY), ("f", "{ }"), "Done."]),
    ("hermes", f"a {HERMES % '{}'} b {HERMES % NASTY} c ", ["a", ("f", "{}"), " b", ("f", NASTY), " c "]),
    # words before and behind calls stay apart, as the model wrote them
    ("hermes", f"hello {HERMES % '{}'}\nbye", ["hello", ("f", "{}"), "\nbye"]),
    ("hermes", f"hello\n\n{HERMES % '{}'}bye", ["hello", ("f", "{}"), "\n\nbye"]),
    ("hermes", f"hello{HERMES % '{}'} \n bye", ["hello", ("f", "{}"), " \n bye"]),
    ("hermes", f"hello{HERMES % '{}'}bye", ["hello", ("f", "{}"), "bye"]),
    (
        "hermes",
        f"a {HERMES % '{}'}\n{HERMES % '{}'}b {HERMES % '{}'} \n",
        ["a", ("f", "{}"), ("f", "{}"), " b", ("f", "{}")],
    ),
    ("hermes", f"a {HERMES % '{}'} <tool_call>no", ["a", ("f", "{}"), " <tool_call>no"]),
    ("mistral", 'a [TOOL_CALLS][{"name": "f", "arguments": {}}]\n b', ["a", ("f", "{}"), "\n b"]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"1\\"}"}</tool_call>', [("f", '{"x": "1"}')]),
    (
        "hermes",
        '<tool_call>[{"name":"f","arguments":{}},{"name":"ff","arguments":{}}]</tool_call>',
        [("f", "{}"), ("ff", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}\n{"name":"ff","arguments":{}}</tool_call>x',
        [("f", "{}"), ("ff", "{}"), "x"],
    ),
    ("hermes", '<tool_call>{"\\u006eame": "\\u0066", "arguments": {}}', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\nb\tc"}}</tool_call>', [("f", '{"x": "a\\nb\\tc"}')]),
    # cut off
    ("hermes", "Well <tool_", ["Well <tool_"]),
    ("hermes", 'Well <tool_call>\n{"name": "f", "argu', ['Well <tool_call>\n{"name": "f", "argu']),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b\\', [("f", '{"a": "b')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1', [("f", '{"a": ')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d', [("f", '{"a": "')]),
    ("hermes", HERMES[:-4] % "{}", [("f", "{}")]),
    # no calls, or broken ones
    ("hermes", " \n Plain <b>text</b> \n", [" \n Plain <b>text</b> \n"]),
    ("hermes", "", []),
    (
        "hermes",
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "g", "arguments": {}}</tool_call>'],
    ),
    ("hermes", "a <tool_call>not json</tool_call> b", ["a <tool_call>not json</tool_call> b"]),
    (
        "hermes",
        f"<tool_call>{{'name': 1}}</tool_call>\n{HERMES % '{}'}",
        ["<tool_call>{'name': 1}</tool_call>", ("f", "{}")],
    ),
    ("hermes", f"<tool_call><tool_call>{HERMES % '{}'}", ["<tool_call><tool_call>", ("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>'],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>'],
    ),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    # calls that break: what follows up to the next marker is lost
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru!}} x', [("f", '{"a": ')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru!}}</tool_call> x', [("f", '{"a": '), "x"]),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1-2}}}}\n{HERMES % "{}"} x',
        [*BROKEN, ("f", "{}"), "x"],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1 2}[TOOL_CALLS]f[ARGS]{}', [("f", '{"a": 1 '), ("f", "{}")]),
    ("json", '{"name": "f", "arguments": {"a": [}}} x', [("f", '{"a": [')]),
    # what is no part of a call
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x"},"thought":"hm"}</tool_call>', [("f", '{"a":"x"}')]),
    ("hermes", '<tool_call>{"n":{"name":[1]},"thought":2,"name":"f","arguments":{}}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","why":null}</tool_call> y', [("f", "{}"), "y"]),
    ("hermes", '<tool_call>{"name":"f","name":"ff","arguments":{"a":1},"arguments":{"a":2}}', [("f", '{"a":1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}}</tool_call>', [("f", '{"a":1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}}}\n ]</tool_call></tool_call>\nx', [("f", "{}"), "x"]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}} and so on</tool_call> x', [("f", "{}"), "and so on x"]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}} x </tool', [("f", "{}"), "x"]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}\n{"name":"no"} x</tool_call> y', [("f", "{}"), "y"]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":[1,{"b":2,} , ],},}</tool_call>',
        [("f", '{"a":[1,{"b":2}  ]}')],
    ),
    ("hermes", '<tool_call>\n```json\n{"name":"f","arguments":{}}\n```\n</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"type":"function","function":{"name":"f","arguments":{"a": 1}}}</tool_call>', WRAPPED),
    ("hermes", '<tool_call>{"function":{"name":"f","parameters":"{\\"a\\": 1}"},"parameters":{}}</tool_call>', WRAPPED),
    ("hermes", f'{HERMES % "{}"}\n{{"name": "ff", "arguments": {{}}}}', [("f", "{}"), ("ff", "{}")]),
    ("hermes", f'{HERMES % "{}"}\n{{"a": 1}}', [("f", "{}"), '{"a": 1}']),
    ("hermes", f"{HERMES % '{}'}\n```py\n1\n```", [("f", "{}"), "```py\n1\n```"]),
    ("hermes", "<tool_call>\n```json\nno```</tool_call>", ["<tool_call>\n```json\nno```</tool_call>"]),
    ("llama3", '{"name": "f", "thought": [1], "parameters": {}} x', [("f", "{}"), "x"]),
    ("llama3", '{"name": "f", "age": 3}', ['{"name": "f", "age": 3}']),
    ("llama3", '<|python_tag|>{"thought": "hm", "name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}} x', [("f", "{}"), "x"]),
    ("llama3", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', [("f", '{"a": 1}')]),
    ("llama3", '```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
    ("llama3", "```", ["```"]),
    (
        "hermes",
        '{"name": "f", "arguments": {"a": 1}}\n{"name": "ff", "arguments": {}}',
        [("f", '{"a": 1}'), ("ff", "{}")],
    ),
    ("hermes", '```json\n{"name": "f", "arguments": {"a": 1}}\n```', [("f", '{"a": 1}')]),
    ("hermes", '```json\n{"a": 1}\n```\n<tool_call>{"name": "f"}', ['```json\n{"a": 1}\n```', ("f", "{}")]),
    ("hermes", '{"name": "Alice", "arguments": {}}', ['{"name": "Alice", "arguments": {}}']),
    ("mistral", '{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    ("json", '```\n[{"name": "f", "arguments": {}}]\n```\nx', [("f", "{}"), "x"]),
    # arguments that are no JSON, or none that every reader takes
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d", "\\udc00": 1}}', [("f", HALVES)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud83d\\", \\"\\udc00\\": 1}"}', TEXT),
    ("hermes", HERMES % '{"a": NaN, "b": -Infinity, "c": [Infinity, 1e999]}', [("f", NULLS)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN, \\"b\\": 1e999}"}',
        [("f", '{"a": null, "b": null}')],
    ),
    ("hermes", HERMES % '{"a": True, "b": False, "c": None}', [("f", '{"a": true, "b": false, "c": null}')]),
    (
        "hermes",
        HERMES % r'{"a": "\d+\.\$ it\'s \u12"}',
        [("f", r'{"a": "\\d+\\.\\$ it\'s \\u12"}'.replace("\\'", "'"))],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": " null "}</tool_call>', [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {"a": "}"}}', [("f", '{"a": "}"}')]),
    ("llama3", '\n\n{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "ff", "parameters": {}}',
        [("f", "{}"), ("ff", "{}")],
    ),
    ("llama3", 'Sure. <|python_tag|>{"name": "f", "parameters": {}}', ["Sure.", ("f", "{}")]),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', ['<|python_tag|>brave_search.call(query="x")']),
    ("llama3", '{"name": "Alice", "age": 3}\nok', ['{"name": "Alice", "age": 3}\nok']),
    ("llama3", '{"title": "x", "name": "f"}', ['{"title": "x", "name": "f"}']),
    ("llama3", '{"name": "f", "parameters": {}} That was it.', [("f", "{}"), "That was it."]),
    ("llama3", 'The object {"name": "f", "parameters": {}}', ['The object {"name": "f", "parameters": {}}']),
    ("mistral", MISTRAL % NASTY, [("f", NASTY)]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "ff", "arguments": {"x": 1}}]',
        [("f", "{}"), ("ff", '{"x": 1}')],
    ),
    ("mistral", 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {}}] Done', ["Hm.", ("f", "{}"), " Done"]),
    ("mistral", '[TOOL_CALLS]ff[ARGS]{"x": [1]}[TOOL_CALLS]f[ARGS]{}', [("ff", '{"x": [1]}'), ("f", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{"x": 1}[TOOL_CALLS]ff[CALL_ID]9[ARGS]{}',
        [("f", '{"x": 1}'), ("ff", "{}")],
    ),
    ("mistral", 'a [TOOL_CALLS]f[CALL_ID]a[ARGS] {"x": 1} b', ["a", ("f", '{"x": 1}'), " b"]),
    ("mistral", '[TOOL_CALLS]ff{"x": 1}[TOOL_CALLS]f{}', [("ff", '{"x": 1}'), ("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]" + "a" * 99 + "[ARGS]{}", ["[TOOL_CALLS]f[CALL_ID]" + "a" * 99 + "[ARGS]{}"]),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", ["[TOOL_CALLS]f[ARGS][1]"]),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}", ["[TOOL_CALLS]g[ARGS]{}"]),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]a[ARGS]{}", ["[TOOL_CALLS]g[CALL_ID]a[ARGS]{}"]),
    ("mistral", "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ("mistral", "[TOOL_CALLS]f{}\n[TOOL_CALLS] [1, 2] x", [("f", "{}"), "[TOOL_CALLS] [1, 2] x"]),
    ("hermes", '<tool_call>{"name": "f"}\n<tool_call>no</tool_call> x', [("f", "{}"), "<tool_call>no</tool_call> x"]),
    ("mistral", "a list [1] and [TOOL", ["a list [1] and [TOOL"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', [("f", "{}")]),
    (
        "json",
        '[{"name": "f", "arguments": {}}, {"name": "ff", "arguments": {"a": 1}}]',
        [("f", "{}"), ("ff", '{"a": 1}')],
    ),
    ("json", '{"name": "get_weather", "arguments": {"city": "Paris"}}', [("get_weather", '{"city": "Paris"}')]),
    ("json", '[1, 2] {"name": "f"}', ['[1, 2] {"name": "f"}']),
    ("json", '{"name": "f", "arguments": {"a": 1', [("f", '{"a": ')]),
]


def parts_of(parser: str, texts: list[str], **more: Any) -> list[str | Call]:
    """Adjacent text joined, each call with all of its arguments."""
    one = ToolParser(TOOL_STYLES[parser], NAMES, **more)
    found: list[str | Call] = []
    for number in range(len(texts) + 1):
        text, final = (texts[number], False) if number < len(texts) else ("", True)
        for piece in one.push(text, final):
            if isinstance(piece, str):
                assert piece
                if found and isinstance(found[-1], str):
                    found[-1] += piece
                else:
                    found.append(piece)
            elif piece.name is not None:
                assert piece.index == sum(isinstance(part, tuple) for part in found)
                assert piece.id and re.fullmatch(
                    r"[0-9a-f]{9}" if parser == "mistral" else r"call_[0-9a-f]{24}", piece.id
                )
                found.append((piece.name, piece.arguments))
            else:
                assert piece.id is None and isinstance(found[-1], tuple) and piece.arguments
                found[-1] = (found[-1][0], found[-1][1] + piece.arguments)
    return found


def check(cases: list[tuple[str, str, list[str | Call]]], splits: int, cuts: int) -> None:
    """Of each text in pieces, and of its beginnings, for an answer may be cut anywhere. Of text without a call, not a
    character is lost."""
    draw = random.Random(3)
    for parser, text, expected in cases:
        for texts in ([text], list(text), *(garbled.pieces(draw, text) for _ in range(splits))):
            assert parts_of(parser, texts) == expected, texts
        for end in draw.sample(range(len(text)), min(cuts, len(text))):
            whole = parts_of(parser, [text[:end]])
            assert whole == parts_of(parser, garbled.pieces(draw, text[:end])) == parts_of(parser, list(text[:end]))
            assert "".join(map(str, whole)) == text[:end] or any(isinstance(part, tuple) for part in whole)


def test_any_split_gives_the_same() -> None:
    check(CASES, splits=3, cuts=2)


@pytest.mark.slow
def test_any_split_of_any_beginning_gives_the_same() -> None:
    check(CASES, splits=20, cuts=30)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(TOOL_STYLES["qwen25"], NAMES)
    assert parser.push('Hi<tool_call>{"name": "f", "argum') == ["Hi"]
    (first,) = parser.push('ents": {"city": "Pa')
    assert isinstance(first, CallPiece) and (first.index, first.name, first.arguments) == (0, "f", '{"city": "Pa')
    assert parser.push("ris") == [CallPiece(0, "ris")]
    assert parser.push('"}}\n</tool') == [CallPiece(0, '"}')]
    assert parser.push("_call>") == [] and parser.push("", final=True) == [] and parser.calls == 1


def test_text_streams_as_it_comes() -> None:
    parser = ToolParser(TOOL_STYLES["qwen25"], NAMES)
    assert parser.push("a < b and <tool") == ["a < b and"]
    assert parser.push("s> c") == [" <tools> c"]


def test_without_parallel_calls_the_first_one_is_all() -> None:
    text = '[{"name": "f", "arguments": {}}, {"name": "ff", "arguments": {"a": 1}}]'
    for texts in ([text], list(text)):
        assert parts_of("json", texts, parallel=False) == [("f", "{}")]


def test_a_strict_call_has_its_marker() -> None:
    """A grammar holds what comes behind a marker, and nothing else."""
    call = '{"name": "f", "arguments": {}}'
    for text in (call, f"```json\n{call}\n```"):
        assert parts_of("hermes", [text], needs_marker=True) == [text]
        assert parts_of("hermes", [text]) == [("f", "{}")]
    assert parts_of("hermes", [f"{HERMES % '{}'}{call}"], needs_marker=True) == [("f", "{}"), call]
    assert parts_of("llama3", [f"{call}{call}"], needs_marker=True) == [("f", "{}"), ("f", "{}")]


def test_every_name_has_a_style() -> None:
    assert set(TOOL_CALL_PARSERS) == set(TOOL_STYLES)


def check_text(text: str) -> bool:
    """Whether the scanner takes the text. What it gives out has to be JSON, or the beginning of it, in any case."""
    scanner, written = JsonScanner(), ""
    try:
        for char in text:
            written += scanner.push(char)
    except ValueError:
        pass
    assert "\n" not in written or "\n" in text
    if scanner.state == "end":
        pydantic_core.from_json(written, allow_inf_nan=False)  # raises for halves of characters, too
        return True
    if written.strip():
        pydantic_core.from_json(written, allow_inf_nan=False, allow_partial=True)
    return False


def test_scanner_agrees_with_json() -> None:
    """Random JSON: the scanner changes nothing of it. With random damage it takes what json.loads does, and more, and
    gives out JSON all the same."""
    draw = random.Random(11)

    def value(depth: int) -> Any:
        kinds = [lambda: draw.choice([True, False, None, 0, -1, 2.5e-7, 10**20, "", 'a"\\/\b\n\u2028é😀'])] * 2
        if depth < 4:
            kinds += [
                lambda: [value(depth + 1) for _ in range(draw.randrange(4))],
                lambda: {draw.choice(["", "k", '"', "é"]) + str(i): value(depth + 1) for i in range(draw.randrange(4))},
            ]
        return draw.choice(kinds)()

    damage = ['"', ",", "}", "]", "1", ":", "x", "\\", " ", "", "\\ud83d", "\\udc00", "NaN", "\n", "-", "e", "[", "{"]
    accepted = damaged = 0
    for _ in range(1000):
        text = json.dumps(draw.choice([[value(0)], {"k": value(0)}]), ensure_ascii=draw.random() < 0.5)
        assert "".join(map(JsonScanner().push, text)) == text
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(damage) + text[at + 1 :]
        try:
            json.loads(text)
            valid = True
        except ValueError:
            valid, damaged = False, damaged + 1
        taken = check_text(text)
        assert taken or not valid, text
        accepted += taken and valid
    assert accepted > 200 and damaged > 300


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":[1, '])
def test_depth_is_bounded(opening: str) -> None:
    """A client that sends the call back has its body refused where it is deeper than readers go."""
    levels = 1000
    parts = parts_of("hermes", ['<tool_call>{"name": "f", "arguments": {"x": ', opening * levels, "1"])
    (call,) = parts
    assert isinstance(call, tuple) and pydantic_core.from_json(call[1], allow_partial=True)["x"]
    assert len(call[1]) < 128 * len(opening) + 10
