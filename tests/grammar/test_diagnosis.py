"""Why a schema is refused, and where in it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftwing.errors import RequestError
from draftwing.grammar import diagnosis
from draftwing.grammar.diagnosis import SECONDS, explained, in_words
from draftwing.requests.grammar_field import Grammar

WRONG = [
    ({"uniqueItems": True}, "uniqueItems"), ({"type": "strin"}, "strin"), ({"format": "iri"}, "iri"), (3, "expected a"),
    ({"pattern": "(?<=a)b"}, "look-around"), ({"minLength": "x"}, "minLength"), ({"$ref": "http://a/b"}, "http://a/b"),
    ({"oneOf": [{"minLength": 1}, {"maxLength": 2}]}, "oneOf"), ({"$ref": "#/$defs/no"}, "/$defs/no"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 0}, "maxProperties"),
    ({"patternProperties": {"a": True, "b": True}}, "/a/ and /b/"), ({"$ref": "#/$defs/Größe"}, "/$defs/Größe"),
    ({"$ref": "Partial<Größe>"}, "Partial<Größe>"),
]  # fmt: skip
PLACES = [
    (lambda one: {"properties": {"a": {}, "b": one, "c": {}}}, "properties.b"),
    (lambda one: {"allOf": [{"title": "x"}, {"items": one}]}, "allOf.1.items"),
    (lambda one: {"properties": {f"p{i}": {"type": "null"} for i in range(100)} | {"p77": one}}, "properties.p77"),
    (lambda one: {"prefixItems": [True, {"additionalProperties": one}]}, "prefixItems.1.additionalProperties"),
    (lambda one: {"properties": {"x/y~z %": {"type": "object", "properties": {"é": one}}}},
     "properties.x/y~z %.properties.é"),
    (lambda one: {"items": {"$ref": "#/$defs/T"},
                  "$defs": {"U": {"type": "no"}, "T": {"anyOf": [{"const": 1}, {"items": one}]}}},
     "$defs.T.anyOf.1.items"),
    (lambda one: {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}, "u": one}}}},
     "$defs.T.properties.u"),
    (lambda one: {"properties": {"properties": {"patternProperties": {"^x": one}}}, "dependentRequired": {"a": ["b"]}},
     "properties.properties.patternProperties.^x"),
]  # fmt: skip


def why(vocab: Any, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as refused:
        vocab.compiler.compile(grammar, "f")
    return str(refused.value).removeprefix("f: the grammar cannot be used: ")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "where"), PLACES, ids=[where for _, where in PLACES])
def test_the_place_in_the_schema_is_named(byte_vocab: Any, place: Any, where: str) -> None:
    for wrong, word in WRONG:
        seen = why(byte_vocab, Grammar("json_schema", json.dumps(place(wrong))))
        assert seen.startswith(f"{where}: ") and word in seen, seen
        first, content = ({"type": "json_schema", "json_schema": one} for one in ({"type": "null"}, place(wrong)))
        second = {"type": "tag", "begin": "<", "content": content, "end": ">"}
        tag = {"format": {"type": "or", "elements": [first, second]}}
        seen = why(byte_vocab, Grammar("structural_tag", json.dumps(tag)))
        assert seen.startswith(f"format.elements.1.content.json_schema.{where}: ") and word in seen, seen


def test_at_the_top_there_is_no_place(byte_vocab: Any) -> None:
    for wrong, word in WRONG[:3]:
        seen = why(byte_vocab, Grammar("json_schema", json.dumps(wrong)))
        assert (word in seen and seen.startswith("'")) or seen.startswith("the format")


@pytest.mark.parametrize("kind", ["regex", "structural_tag"])
def test_the_grammars_inside_is_not_shown(byte_vocab: Any, kind: Any) -> None:
    expression = "a(b"
    tag = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": expression}] * 3}}
    seen = why(byte_vocab, Grammar(kind, expression if kind == "regex" else json.dumps(tag)))
    assert "unclosed group" in seen and not any(word in seen for word in ("start:", "llguidance", " | ", "lark"))


@pytest.mark.parametrize(
    ("expression", "place"),
    [("a(b", "(b"), ("x/y\n(b|[c", "[c"), ("é/é(b", "(b"), ("a)b", ")b"), ("(a(b)(c", "(c"), ("*a", "*a"),
     ("a{3,1}b", "{3,1}b"), ("a(?<=a)b", "(?<=a)b")],
)  # fmt: skip
def test_the_place_in_an_expression_is_shown(byte_vocab: Any, expression: str, place: str) -> None:
    """In a schema, where lines are not written in one, it is not always known."""
    tag = {"format": {"type": "regex", "pattern": expression}}
    schema = {"properties": {"a": {"type": "string", "pattern": expression}}}
    for grammar in (Grammar("regex", expression), Grammar("structural_tag", json.dumps(tag)),
                    Grammar("json_schema", json.dumps(schema))):  # fmt: skip
        seen = why(byte_vocab, grammar)
        assert seen.endswith(f", at {place!r}") or (grammar.kind == "json_schema" and "\n" in expression), seen


@pytest.mark.parametrize("expression", ["\\", "a\\", "a\\\\\\", "[a]\\"])
def test_a_backslash_at_the_end_is_refused_in_words(byte_vocab: Any, expression: str) -> None:
    tag = {"format": {"type": "regex", "pattern": expression}}
    schema = json.dumps({"type": "string", "pattern": expression})
    kinds = {"regex": expression, "structural_tag": json.dumps(tag), "json_schema": schema}
    for grammar in (Grammar(kind, text) for kind, text in kinds.items()):
        assert "backslash at its end" in why(byte_vocab, grammar)
    byte_vocab.compiler.compile(Grammar("regex", expression + "\\"), "f")


def test_of_what_nobody_knows_the_first_lines_are_told() -> None:
    assert in_words("at 3(5): something else\n 1 | %llguidance {}\n 2 | start: s1") == "something else"
    assert in_words('Unimplemented keys: ["if", "not"]') == "'if' is not supported; 'not' is not supported"


def test_the_place_is_looked_for_within_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is of it then is reported. A clock that goes on with each question counts them."""
    asked: list[Any] = []

    def fails(schema: dict[str, Any]) -> str | None:
        asked.append(schema)
        return None if schema.get("required") == [] or schema.get("const") == "right" else "Unknown format: x"

    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(thread_time=lambda: len(asked) * SECONDS / 10))
    nested: Any = {"format": "x"}
    for _ in range(50):
        nested = {"properties": {"a": nested}}
    seen = explained("all", [((), nested)], fails)
    assert seen.startswith("properties.a.properties.a") and seen.endswith("the format 'x' is not supported")
    assert 5 < len(asked) < 13
    asked.clear()
    assert explained("all", [((str(i),), {"const": "right"}) for i in range(50)], fails) == "all"
    assert 5 < len(asked) < 13


def test_the_place_is_found_in_a_large_schema(byte_vocab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "SECONDS", 60.0)  # on a busy machine, too

    def nested(depth: int) -> Any:
        if depth == 0:
            return {"type": "string"}
        return {"properties": {f"p{i}": nested(depth - 1) for i in range(6)}}

    schema = nested(4)
    schema["properties"]["p5"]["properties"]["p5"]["properties"]["p5"]["properties"]["p5"] = {"uniqueItems": True}
    seen = why(byte_vocab, Grammar("json_schema", json.dumps(schema)))
    assert seen.startswith("properties.p5") and "uniqueItems" in seen
