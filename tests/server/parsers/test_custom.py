"""Custom tools: what their calls may be in the style of each family, and that the input is read as it grows."""

from __future__ import annotations

import json
import random

import pytest
from guided import takes, written

from draftwing.errors import RequestError
from draftwing.grammar import GrammarCompiler
from draftwing.server.parsers.call import InputReader
from draftwing.server.parsers.custom import custom_function
from draftwing.server.parsers.grammars import Function, ToolChoice, grammar_for, harmony_grammar
from draftwing.server.parsers.tools import TOOL_STYLES, CallPiece, ToolParser

LINES = 'start: line+\nline: ("+" | "-") /.*/ LF\n%import common.LF\n'
GOOD, BAD = '+a "b" \\ é\n-\t😀\n', "+a"
FUNCTIONS = [
    Function("f"),
    custom_function("edit", "Edits.", "lark", LINES, "x"),
    custom_function("say", None, None, None, "x"),
]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("style", ["hermes", "mistral", "json", "llama3"])
def test_calls_are_held_to_the_format(compiler: GrammarCompiler, style: str, mode: str) -> None:
    grammar = grammar_for(FUNCTIONS, ToolChoice(mode), TOOL_STYLES[style])  # type: ignore[arg-type]
    assert grammar is not None

    calls = [("edit", {"input": GOOD}), ("say", {"input": 'any "thing"\n'}), ("f", {"a": 1})]
    several = calls if style != "llama3" else calls[:1]
    text = written(style, several)  # type: ignore[arg-type]
    assert takes(compiler, grammar, text)
    parser = ToolParser(TOOL_STYLES[style], [one.name for one in FUNCTIONS])
    found: dict[int, str] = {}
    for piece in parser.push(text, final=True):
        assert isinstance(piece, CallPiece)
        found[piece.index] = found.get(piece.index, "") + piece.arguments
    assert [json.loads(one) for one in found.values()] == [given for _, given in several]
    for wrong in ({"input": BAD}, {"input": GOOD, "more": 1}, {}, {"input": 7}):
        assert not takes(compiler, grammar, written(style, [("edit", wrong)]))
    for call in (("say", {"text": "x"}), ("none", {})):
        assert not takes(compiler, grammar, written(style, [call]))


def test_calls_in_harmony(compiler: GrammarCompiler) -> None:
    grammar = harmony_grammar(FUNCTIONS, ToolChoice("auto"))
    assert grammar is not None
    for given, right in ((GOOD, True), (BAD, False)):
        arguments = json.dumps({"input": given}, ensure_ascii=False)
        call = f"<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{arguments}"
        assert takes(compiler, grammar, call) is right


def read(arguments: str, cuts: list[int]) -> str:
    reader, out, at = InputReader(), "", 0
    for cut in [*sorted(cuts), len(arguments)]:
        out += reader.push(arguments[at:cut])
        at = cut
    return out + reader.finish()


@pytest.mark.parametrize(
    "text", ["", "plain", 'q"\\/\b\f\n\r\t', "é 😀 \u2028", "\x00\x1f", '{"input": "x"}', "\\u0041", "\\\\\n" * 9]
)
def test_the_input_is_read_however_it_is_cut(text: str) -> None:
    draw = random.Random(text)
    for ascii_only in (False, True):
        for blank in ("", " \n"):
            written = f'{{{blank}"input"{blank}:{blank}{json.dumps(text, ensure_ascii=ascii_only)}{blank}}}'
            assert read(written, list(range(len(written)))) == text
            for _ in range(20):
                assert read(written, draw.sample(range(len(written)), draw.randrange(5))) == text


@pytest.mark.parametrize("written, right", [("a\\ud83d", "a\ufffd"), ("\\ud83d\\ud83d\\ude00\\u0041", "\ufffd😀A")])
def test_half_a_character_is_none(written: str, right: str) -> None:
    arguments = f'{{"input": "{written}"}}'
    assert read(arguments, []) == read(arguments, list(range(len(arguments)))) == right


def test_each_piece_gives_what_is_certain() -> None:
    reader = InputReader()
    pieces = ['{"inp', 'ut": ', '"a\\', "nb\\ud83d", "\\ude00c\\ud83d", "x\\u00e", '9"', "}"]
    assert [reader.push(piece) for piece in pieces] == ["", "", "a", "\nb", "😀c", "\ufffdx", "é", ""]


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', "{}", '{"input": 7}', '["input"]', '{"in', '{"input": "a\\'])
def test_arguments_that_are_no_input_are_given_as_they_are(arguments: str) -> None:
    expected = "a" if arguments.startswith('{"input": "a') else arguments
    assert read(arguments, []) == read(arguments, list(range(len(arguments)))) == expected


@pytest.mark.parametrize(
    "syntax, definition", [("lark", "start: <x>"), ("regex", "(?=a)"), ("regex", ""), ("lark", None)]
)
def test_wrong_grammars_name_their_field(syntax: str, definition: str | None) -> None:
    with pytest.raises(RequestError) as error:
        custom_function("f", None, syntax, definition, "tools.3.format")
    assert error.value.param == "tools.3.format.definition" and "tools.3.format.definition" in str(error.value)
