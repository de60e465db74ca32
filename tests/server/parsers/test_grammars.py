"""Grammars of tool calls and of reasoning, through the library: what is allowed, and that the parsers read it."""

from __future__ import annotations

import json

import pytest
from guided import takes, written

from draftwing.grammar import GrammarCompiler
from draftwing.requests.grammar_field import Grammar
from draftwing.server.parsers.grammars import Function, ToolChoice, after_reasoning, grammar_for
from draftwing.server.parsers.reasoning import REASONING_STYLES
from draftwing.server.parsers.tools import TOOL_STYLES, ToolParser

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
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
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
