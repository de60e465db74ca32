"""Grammars of tool calls and of reasoning, through the library: what is allowed, and that the parsers read it."""

from __future__ import annotations

import json
import random

import pytest
from guided import takes, written

from draftwing.errors import RequestError
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.grammar_field import Grammar
from draftwing.server.parsers.call import InputReader
from draftwing.server.parsers.grammars import (
    Function,
    ToolChoice,
    after_reasoning,
    custom_function,
    grammar_for,
    harmony_grammar,
)
from draftwing.server.parsers.reasoning import REASONING_STYLES
from draftwing.server.parsers.tools import TOOL_STYLES, CallPiece, ToolParser

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
F, G = Function("f", None, SCHEMA, strict=True), Function("g")
TREE = Function(
    "tree",
    None,
    {
        "properties": {"left": {"$ref": "#/$defs/node"}, "default": {"$ref": "#/$defs/node"}},
        "required": ["left"],
        "additionalProperties": False,
        "$defs": {"node": {"type": ["integer", "object"], "properties": {"n": {"$ref": "#"}}}},
    },
    strict=True,
)
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")


STYLES = ["hermes", "mistral", "llama3", "json"]


@pytest.mark.parametrize("style", STYLES)
def test_required_allows_calls_and_nothing_else(compiler: GrammarCompiler, style: str) -> None:
    grammar = grammar_for([F, G, TREE], REQUIRED, TOOL_STYLES[style])
    for calls in ([("f", {"x": 1})], [("g", {"any": [1]})], [("tree", {"left": {"n": {"left": 3}}, "default": 4})]):
        text = written(style, calls)
        assert takes(compiler, grammar, text), text
        parts = ToolParser(TOOL_STYLES[style], ["f", "g", "tree"]).push(text, final=True)
        assert [(p.name, json.loads(p.arguments)) for p in parts if not isinstance(p, str)] == calls
        assert not takes(compiler, grammar, f"Well {text}") and not takes(compiler, grammar, f"{text} and text")
    several = written(style, [("f", {"x": 1}), ("g", {})])
    assert takes(compiler, grammar, several) == (style != "llama3")
    assert not takes(compiler, grammar_for([F, G], REQUIRED, TOOL_STYLES[style], parallel=False), several)
    for calls in (
        [("h", {})],
        [("f", {})],
        [("f", {"x": "1"})],
        [("g", [])],
        [("tree", {"left": {"n": {"left": "3"}}})],
    ):
        assert not takes(compiler, grammar, written(style, calls)), calls
    assert not takes(compiler, grammar, "")


@pytest.mark.parametrize("style", STYLES)
def test_a_named_function_is_called_once(compiler: GrammarCompiler, style: str) -> None:
    grammar = grammar_for([F, G], ToolChoice("named", "g"), TOOL_STYLES[style])
    one = written(style, [("g", {"a": 1})])
    one = one if style != "json" else one[1:-1]
    assert takes(compiler, grammar, one)
    assert not takes(compiler, grammar, written(style, [("f", {"x": 1})]))
    assert not takes(compiler, grammar, written(style, [("g", {}), ("g", {})]))


@pytest.mark.parametrize("style", STYLES)
def test_auto_holds_strict_functions_to_their_schema(compiler: GrammarCompiler, style: str) -> None:
    assert grammar_for([G], AUTO, TOOL_STYLES[style]) is None
    grammar = grammar_for([F, G], AUTO, TOOL_STYLES[style])
    for text in ("Just { text [ é", "", written(style, [("f", {"x": 1})]), written(style, [("g", {"y": 1})])):
        assert takes(compiler, grammar, text), text
    for wrong in (("f", {"x": "1"}), ("f", {}), ("h", {})):
        assert not takes(compiler, grammar, written(style, [wrong])), wrong
    if style in ("hermes", "mistral"):
        assert takes(compiler, grammar, "Let me see. " + written(style, [("f", {"x": 1})]))
        assert not takes(compiler, grammar, "Let me see. " + written(style, [("f", {})]))
    if style != "llama3":
        assert takes(compiler, grammar, written(style, [("f", {"x": 1}), ("f", {"x": 2})]))
    single = grammar_for([F, G], AUTO, TOOL_STYLES[style], parallel=False)
    assert not takes(compiler, single, written(style, [("f", {"x": 1}), ("f", {"x": 2})]))


def test_an_answer_is_calls_or_what_it_must_be_otherwise(compiler: GrammarCompiler) -> None:
    number = Grammar("regex", "[0-9]+")
    for style in STYLES:
        grammar = grammar_for([F, G], AUTO, TOOL_STYLES[style], otherwise=number)
        for good in ("17", written(style, [("g", {"a": 1})])):
            assert takes(compiler, grammar, good)
        for bad in ("text", written(style, [("f", {})]), ""):
            assert not takes(compiler, grammar, bad)
        assert grammar_for([F], ToolChoice("none"), TOOL_STYLES[style], otherwise=number) == number
        calls = grammar_for([F], REQUIRED, TOOL_STYLES[style], otherwise=number)
        assert not takes(compiler, calls, "17") and takes(compiler, calls, written(style, [("f", {"x": 1})]))


TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
OTHERS = [
    (Grammar("json_object", ""), '{"y": 1}', "[1]"),
    (Grammar("json_schema", json.dumps(SCHEMA)), '{"x": 1}', '{"x": ""}'),
    (Grammar("regex", "[ab]+"), "abba", "abc"),
    (Grammar("ebnf", 'root ::= "a" root "b" | "c"'), "aacbb", "aacb"),
    (Grammar("structural_tag", json.dumps(TAG)), 'text <a>{"x": 1}</a>', "text <a>{}</a>"),
    (Grammar("structural_tag", json.dumps({"format": {"type": "const_string", "value": "hi"}})), "hi", "ho"),
]


@pytest.mark.parametrize("grammar, good, bad", OTHERS, ids=lambda v: getattr(v, "kind", None))
@pytest.mark.parametrize("name", ["qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_grammar_holds_after_the_reasoning(
    compiler: GrammarCompiler, name: str, grammar: Grammar, good: str, bad: str
) -> None:
    style = REASONING_STYLES[name]
    assert after_reasoning(grammar, style, "closed") == grammar
    free, inside = after_reasoning(grammar, style, "free"), after_reasoning(grammar, style, "open")
    block = f"why {{ not?\n{style.end}"
    for text, expected in ((good, True), (bad, False)):
        assert takes(compiler, free, f"{style.begin}{block}\n\n{text}") == expected
        assert takes(compiler, free, text) == expected
        assert takes(compiler, inside, f"{block}\n\n{text}") == takes(compiler, inside, block + text) == expected
    assert not takes(compiler, inside, good) and not takes(compiler, inside, "why not")


def test_tool_calls_after_reasoning(compiler: GrammarCompiler) -> None:
    calls = grammar_for([F], REQUIRED, TOOL_STYLES["hermes"])
    assert calls is not None
    grammar = after_reasoning(calls, REASONING_STYLES["qwen3"], "open")
    call = written("hermes", [("f", {"x": 1})])
    assert takes(compiler, grammar, f"hm <tool_call></think>\n\n{call}") and not takes(
        compiler, grammar, f"hm</think>no{call}"
    )


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
