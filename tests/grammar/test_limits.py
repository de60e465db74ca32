"""Expressions as the grammar library gets them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from draftwing.errors import RequestError
from draftwing.grammar.compiler import Translator
from draftwing.grammar.limits import check_multiples, checked_regex
from draftwing.grammar.schemas import schema_text
from draftwing.grammar.state import GrammarState
from draftwing.requests.grammar_field import Grammar


@pytest.mark.parametrize("pattern", [r"\d", r"\w", r"\s", r"\D", r"[\d\-x]", r"[^\s\d]", r"[^\W]", r"[\w\s]", r"\\|\d"])
def test_short_classes_are_ascii(pattern: str) -> None:
    """What matches then matches the original, too, and of ASCII alone nothing is lost."""
    made, given, ascii_alone = re.compile(checked_regex(pattern)), re.compile(pattern), re.compile(pattern, re.ASCII)
    characters = {*map(chr, range(128)), "\u0663", "\u00e9", "\u2003"} - {*"\x1c\x1d\x1e\x1f"}  # spaces to Python alone
    for char in characters:
        found = made.fullmatch(char) is not None
        assert given.fullmatch(char) if found else char > "\x7f" or not ascii_alone.fullmatch(char)


def test_patterns_of_schemas_are_rewritten_and_values_are_not() -> None:
    schema = {"properties": {"pattern": {"pattern": r"\d"}, "b": {"const": {"pattern": r"\d"}}}}
    written = json.loads(schema_text(schema, {}))["properties"]
    assert written == {"pattern": {"pattern": "[0-9]"}, "b": {"const": {"pattern": r"\d"}}}


@pytest.mark.parametrize("grammar", [Grammar("regex", "a{%s}"), Grammar("regex", "a{1,%s}"),
                                     Grammar("ebnf", 'root ::= "a"{%s}'), Grammar("ebnf", 'root ::= "a"{1,%s}'),
                                     Grammar("json_schema", '{"type": "string", "pattern": "a{%s}"}')])  # fmt: skip
def test_counts_that_python_does_not_read_are_refused(byte_vocab: Any, grammar: Grammar) -> None:
    with pytest.raises(RequestError, match="5000 digits"):
        byte_vocab.compiler.compile(Grammar(grammar.kind, grammar.text % ("9" * 5000)))


@pytest.mark.parametrize("grammar", [
    Grammar("json_schema", '{"type": "integer", "multipleOf": 9999991}'),
    Grammar("json_schema", '{"type": "number", "multipleOf": 0.9999991}'),
    Grammar("json_schema", json.dumps({"prefixItems": [{"type": "integer", "multipleOf": 9001}] * 12})),
    Grammar("structural_tag", json.dumps({"triggers": ["<"], "structures": [
        {"begin": f"<{i}", "schema": {"type": "integer", "multipleOf": 9001}, "end": ">"} for i in range(12)]})),
    Grammar("json_schema", '{"allOf": [{"type": "integer", "multipleOf": 9001}, {"multipleOf": 9007}]}'),
    Grammar("json_schema", json.dumps(
        {"properties": {"a": {"multipleOf": 9001}}, "patternProperties": {"^a": {"multipleOf": 9007}}})),
    Grammar("json_schema", '{"type": "integer", "multipleOf": 7207200}'),
])  # fmt: skip
def test_large_multiples_are_refused(byte_vocab: Any, grammar: Grammar) -> None:
    with pytest.raises(RequestError, match="multipleOf"):
        byte_vocab.compiler.compile(grammar)


@pytest.mark.parametrize("value", ["100", "0.01", "1e-9", "2.50", "1e3", "1000000", "3600000", "86400.0", "1e9999999"])
def test_usual_multiples_are_not(byte_vocab: Any, value: str) -> None:
    check_multiples(f'{{"multipleOf": {value}}}')


MIN = -(2**63)
LOW = [
    {"enum": [MIN]}, {"const": MIN}, {"enum": [1, "x", MIN + 1]}, {"enum": [MIN + 9]}, {"const": {"a": [[MIN]]}},
    {"type": "integer", "enum": [MIN - 1]}, {"type": "integer", "minimum": MIN, "maximum": MIN},
    {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18}, {"properties": {"": {"$ref": "#/$defs/B"}},
    "$defs": {"B": {"enum": [MIN]}}}, {"allOf": [{"type": "integer", "minimum": -1e30}, {"maximum": -1e30}]},
    {"$ref": "#/examples/+0", "examples": [{"const": MIN}]}, {"$ref": "#/default", "default": {"enum": [[MIN]]}},
    {"$id": "http://x/y", "$ref": "http://x/y#/examples/0", "examples": [{"const": MIN}]},
    {"$id": "http://x/y", "$ref": "y#/default", "default": {"maximum": MIN, "minimum": MIN}},
    {"type": "integer", "minimum": MIN, "exclusiveMaximum": MIN + 1}, {"$ref": "#/x-own", "x-own": {"const": MIN}},
]  # fmt: skip


@pytest.mark.parametrize("schema", LOW, ids=json.dumps)
def test_numbers_that_the_library_takes_for_the_lowest_are_refused(byte_vocab: Any, schema: dict[str, Any]) -> None:
    """Without the library, which would end the process."""
    tag = {"triggers": ["<"], "structures": [{"begin": "<a", "schema": schema, "end": ">"}]}
    for grammar in Grammar("json_schema", json.dumps(schema)), Grammar("structural_tag", json.dumps(tag)):
        with pytest.raises(RequestError, match="upper bounds above -9223372036854773760, found -"):
            Translator(byte_vocab.tokenizer).translate(grammar)


@pytest.mark.parametrize("schema", [
    {"enum": [-(2**63) + 4096]}, {"const": 2**63}, {"const": -1e15}, {"type": "integer", "maximum": -(10**17)},
    {"const": 1, "default": MIN}, {"properties": {"maximum": {"type": "integer"}}}, {"enum": [str(MIN)]},
    {"description": "from -9223372036854775808", "type": "integer"},
])  # fmt: skip
def test_other_numbers_are_not(byte_vocab: Any, schema: dict[str, Any]) -> None:
    byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_properties_may_be_called_as_keywords_are(byte_vocab: Any) -> None:
    """Without the library, which refuses this minimum by itself."""
    schema = {"properties": {name: {"type": "integer", "minimum": MIN} for name in ("const", "maximum", "x")}}
    Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps(schema)))


def test_values_in_values_are_looked_at_once(byte_vocab: Any) -> None:
    deep: Any = [1] * 100_000
    for _ in range(200):
        deep = {"const": {"maximum": deep}}
    begin = time.thread_time()
    with pytest.raises(RequestError):
        Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps({"x": deep, "const": MIN})))
    assert time.thread_time() - begin < 5, "each level looked at all below it: 20 s"


def test_a_text_that_says_multiple_of_is_no_multiple(byte_vocab: Any) -> None:
    byte_vocab.compiler.compile(Grammar("regex", 'multipleOf": 1e9999999'))
    byte_vocab.compiler.compile(Grammar("regex", 'multipleOf": 1e9e9'))


@pytest.mark.parametrize("grammar", [
    Grammar("ebnf", 'root ::= ("a"{1000}){1000}'), Grammar("ebnf", 'root ::= x{1000}\nx ::= ("a" "b"){0,500}'),
    Grammar("regex", "(?x) (a{ 1000 }){ 1, 1000 }"), Grammar("regex", "a{1000}{1000}"),
])  # fmt: skip
def test_repetitions_of_repetitions_are_refused(byte_vocab: Any, grammar: Grammar) -> None:
    with pytest.raises(RequestError, match="repetitions stand for more"):
        byte_vocab.compiler.compile(grammar)


LETTERS = "abcdefghijklmnopqrst"
STRINGS = [{"type": "string", "pattern": f".*{letter}.*"} for letter in LETTERS]
CHAIN = {f"d{i}": {**one, "$ref": f"#/$defs/d{i + 1}"} for i, one in enumerate(STRINGS)}
TOGETHER: dict[str, Any] = {
    "allOf": {"allOf": STRINGS},
    "without a type": {"allOf": [{"pattern": one["pattern"]} for one in STRINGS]},
    "nested": {"properties": {"x": {"items": {"allOf": [{"allOf": STRINGS[:5]}, {"allOf": STRINGS[4:]}]}}}},
    "references": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d20": True}},
    "properties": {"allOf": [{"properties": {"a": one}} for one in STRINGS]},
    "others": {"allOf": [{"additionalProperties": one} for one in STRINGS]},
    "a name and others": {
        "properties": {"a": STRINGS[0]}, "allOf": [{"additionalProperties": one} for one in STRINGS[1:]],
    },
    "names by pattern": {"allOf": [{"patternProperties": {"^a": one}} for one in STRINGS]},
    "a name by pattern": {
        "properties": {"ab": {"allOf": STRINGS[:5]}}, "patternProperties": {"^a": {"allOf": STRINGS[5:]}},
    },
    "items": {"allOf": [{"items": one} for one in STRINGS]},
    "items by place": {"allOf": [{"prefixItems": [True, one]} for one in STRINGS]},
    "alternatives": {"allOf": [{"anyOf": [one, {"type": "integer"}]} for one in STRINGS]},
    "one alternative": {"anyOf": [{"type": "integer"}, {"allOf": STRINGS[3:]}], "allOf": STRINGS[:3]},
    "an anchor": {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "allOf": STRINGS}}},
    "an address": {"$id": "http://x/y", "$ref": "y#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "a resource": {
        "$ref": "http://x/z", "$defs": {"a": {"$id": "http://x/z", "allOf": [{"$ref": "#/$defs/b"}],
                                              "$defs": {"b": {"allOf": STRINGS}}}},
    },
    "examples": {"$ref": "#/examples/+0", "examples": [{"allOf": STRINGS}]},
    "quoted": {"$ref": "#%2F$defs%2Fa", "$defs": {"a": {"allOf": STRINGS}}},
    "another spelling": {"$ref": "json-schema:///#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "a dot": {"$ref": "./#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "two dots": {"$id": "http://x/", "$ref": "z/..#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "a host in capitals": {"$id": "http://X", "$ref": "http://x#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "a query": {"$id": "http://x/y?q", "$ref": "?q#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "a name": {"$id": "urn:a:b", "$ref": "URN:a:b#/$defs/a", "$defs": {"a": {"allOf": STRINGS}}},
    "an old address": {"id": "http://x/y", "$ref": "y#/definitions/a", "definitions": {"a": {"allOf": STRINGS}}},
    "an old anchor": {"$ref": "#foo", "definitions": {"a": {"id": "#foo", "allOf": STRINGS}}},
    "a decoy": {"$id": "http://x/y/", "$ref": "y/.#/$defs/a", "$defs": {
        "a": {"allOf": STRINGS}, "b": {"$id": "z/.", "$defs": {"a": True}}}},
    "if": {"if": True, "then": {"allOf": STRINGS[:5]}, "allOf": STRINGS[5:]},
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_many_patterns_of_one_text_are_refused(byte_vocab: Any, name: str) -> None:
    """Without the library, which takes a minute and gigabytes."""
    schema = TOGETHER[name]
    tag = {"triggers": ["<"], "structures": [{"begin": "<a", "schema": schema, "end": ">"}]}
    for grammar in Grammar("json_schema", json.dumps(schema)), Grammar("structural_tag", json.dumps(tag)):
        with pytest.raises(RequestError, match=r"match \d+ patterns and formats at once, at most 8 are allowed"):
            Translator(byte_vocab.tokenizer).translate(grammar)


@pytest.mark.parametrize("schema", [
    {"allOf": STRINGS[:8]}, {"anyOf": STRINGS}, {"prefixItems": STRINGS}, {"allOf": [STRINGS[0]] * 20},
    {"properties": dict(zip(LETTERS, STRINGS, strict=True))},
    {"allOf": [{"properties": {letter: one}} for letter, one in zip(LETTERS, STRINGS, strict=True)]},
    {"allOf": [{"anyOf": STRINGS[:10]}, {"anyOf": STRINGS[10:]}]},
    {"patternProperties": {f"^{letter}": one for letter, one in zip(LETTERS, STRINGS, strict=True)}},
    {"properties": {"next": {"$ref": "#"}, **dict(zip(LETTERS, STRINGS, strict=True))}},
    {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(20)], "$defs": {
        str(i): {"properties": {"kind": {"const": i}, "id": one, "inner": {"$ref": "#"}}}
        for i, one in enumerate(STRINGS)}},
])  # fmt: skip
def test_many_patterns_of_several_texts_are_not(byte_vocab: Any, schema: dict[str, Any]) -> None:
    Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("schema", [
    {"type": "integer", "allOf": [{"pattern": one["pattern"]} for one in STRINGS]},
    {"type": ["integer", "null"], "allOf": [{"anyOf": [one, {"type": "integer"}]} for one in STRINGS[:9]]},
    {"$defs": {str(i): {"$id": f"http://x/{i}", "$defs": {"a": one}, "properties": {"b": {"$ref": f"{i}#/$defs/a"}}}
               for i, one in enumerate(STRINGS)}, "anyOf": [{"$ref": f"http://x/{i}"} for i in range(20)]},
])  # fmt: skip
def test_patterns_that_no_text_meets_together_are_not(byte_vocab: Any, schema: dict[str, Any]) -> None:
    Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.slow
@pytest.mark.parametrize("schema", [
    {"properties": {str(i): one for i, one in enumerate(STRINGS)},
     "$defs": {"b": {f"q{i}": {"$ref": "#/b"} for i in range(2000)}, "c": [{"$id": "a"} for _ in range(2000)]}},
    {"properties": {**{str(i): one for i, one in enumerate(STRINGS)}, "q": {"$ref": "#/" + "b/" * 30_000}},
     "$defs": {str(i): {"$id": "a"} for i in range(1000)}},
    {"properties": {f"p{i}": {"anyOf": [{"type": "string", "format": ["date", "time", "email", "uuid", "uri",
     "ipv4", "ipv6", "hostname", "duration", "date-time"][i % 10]}, {"type": "null"}]} for i in range(3000)}},
    {"allOf": [{"properties": {f"{i}.{j}": STRINGS[i % 20] for j in range(60)}} for i in range(120)]},
    {"properties": {f"p{i}": STRINGS[i % 20] for i in range(3000)},
     "patternProperties": {f"^x{i}$": STRINGS[i % 20] for i in range(400)}},
])  # fmt: skip
def test_large_schemas_take_little(byte_vocab: Any, schema: dict[str, Any]) -> None:
    begin = time.thread_time()
    Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps(schema)))
    assert time.thread_time() - begin < 5, "a minute and more"


def test_expressions_that_are_allowed_together_take_little(byte_vocab: Any) -> None:
    begin = time.process_time()
    with pytest.raises(RequestError, match="cannot be used"):
        byte_vocab.compiler.compile(Grammar("json_schema", json.dumps({"allOf": STRINGS[:8]})))
    assert time.process_time() - begin < 5, "20 expressions take a minute"


@pytest.mark.slow
@pytest.mark.parametrize("schema", [
    {"allOf": [{"anyOf": [*STRINGS[i:], {"$ref": "#"}]} for i in range(18)]},
    {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(20)], "$defs": {
        str(i): {**STRINGS[i], "allOf": [{"anyOf": [{"$ref": f"#/$defs/{j}"} for j in range(20)]}]}
        for i in range(20)}},
])  # fmt: skip
def test_looking_for_them_takes_little(byte_vocab: Any, schema: dict[str, Any]) -> None:
    begin = time.thread_time()
    with pytest.raises(RequestError, match="patterns"):
        Translator(byte_vocab.tokenizer).translate(Grammar("json_schema", json.dumps(schema)))
    assert time.thread_time() - begin < 10


class Broken:
    """A matcher of the library after a bug of its own."""

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "panic: assertion failed: !state.is_dead()\n   0: std::backtrace\n at /home/x/parser.rs:12\n<state>..."


def test_bugs_of_the_library_are_for_the_log(
    byte_vocab: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llguidance.LLMatcher", lambda *_, **__: Broken())
    with pytest.raises(RequestError) as refused:
        byte_vocab.compiler.compile(Grammar("regex", "a(b|c)d{1,7}"))
    assert str(refused.value) == "regex: the grammar cannot be used: the grammar library fails on it"
    with pytest.raises(RequestError) as later:
        GrammarState(byte_vocab.compiler._load(), Broken())._raise_if_broken()
    assert str(later.value) == "the grammar became too complex: the grammar library fails on it"
    assert caplog.text.count("parser.rs:12") == 2
