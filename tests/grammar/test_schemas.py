"""Schemas whose keywords the grammar library does not build: against `jsonschema`, over all small documents."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.schemas import MAX_NAMES, rewritten
from draftwing.requests.grammar_field import Grammar

OBJECT = {"type": "object"}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
OLD = "http://json-schema.org/draft-07/schema#"
LEAVES = [0, "a", None]
NAMES = ["a", "b", "cc"]


def documents() -> list[Any]:
    """Leaves, and all arrays and objects of up to three of them, of three of two kinds."""
    arrays = [list(items) for n in range(4) for items in itertools.product(LEAVES[: 5 - n], repeat=n)]
    objects = [
        dict(zip(names, values, strict=True))
        for n in range(4)
        for names in itertools.combinations(NAMES, n)
        for values in itertools.product(LEAVES[: 5 - n], repeat=n)
    ]
    return [*LEAVES, *arrays, *objects]


DOCUMENTS = documents()


def written(document: Any) -> list[str]:
    """The document with its properties in any order."""
    if not isinstance(document, dict):
        return [json.dumps(document)]
    return [json.dumps(dict(order)) for order in itertools.permutations(document.items())]


def same_language(vocab: Any, schema: Any, inside: str | None = None) -> None:
    """inside: a property whose value the schema is for."""
    whole = schema if inside is None else {"type": "object", "properties": {inside: schema}, "required": [inside],
                                           "additionalProperties": False}  # fmt: skip
    state = vocab.compiler.compile(Grammar("json_schema", json.dumps(whole)))
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    found = set()
    for document in DOCUMENTS:
        texts = written(document)
        texts = texts if inside is None else [f'{{"{inside}": {text}}}' for text in texts]
        taken = any(vocab.accepts_bytes(state, text) for text in texts)
        assert taken == validator.is_valid(document), document
        found.add(taken)
    assert True in found


NOTHING = [
    {"propertyNames": {"type": "string"}}, {"propertyNames": True}, {"propertyNames": {}},
    {"propertyNames": {"type": ["string", "null"], "description": "of what", "minLength": 0}},
    {"propertyNames": {"$ref": "#/$defs/key"}, "$defs": {"key": {"type": "string", "title": "Key"}}},
    {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1},
    {"unevaluatedProperties": True}, {"unevaluatedProperties": {}}, {"unevaluatedItems": {"title": "any"}},
    {"additionalProperties": {"type": "integer"}, "unevaluatedProperties": False},
    {"items": {"type": "integer"}, "unevaluatedItems": False},
    {"dependentRequired": {}}, {"dependentRequired": {"a": []}}, {"dependentSchemas": {}},
    {"dependentSchemas": {"a": True, "b": {"$comment": "later"}}}, {"dependencies": {}}, {"dependencies": {"a": []}},
    {"contains": {"type": "string"}, "minContains": 0}, {"minContains": 2}, {"maxContains": 0},
    {"if": {"type": "string"}}, {"then": False}, {"else": False}, {"if": {"type": "string"}, "then": True, "else": {}},
    {"not": False}, {"allOf": []}, {"allOf": [True, {}]}, {"$dynamicAnchor": "here"}, {"$recursiveAnchor": True},
    {"$schema": "https://example.com/ours"}, {"$vocabulary": {}},
    {"$comment": "x", "readOnly": True, "deprecated": True},
    {"type": "string", "format": "int64"}, {"type": ["string", "array"], "format": "our-own"},
    {"type": "string", "uniqueItems": True, "contains": {"const": 1}, "propertyNames": {"maxLength": 1}},
    {"type": "integer", "format": "uri-reference", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": True}, "additionalProperties": False, "maxProperties": 4},
    {"contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {"uniqueItems": True}},
]  # fmt: skip
SAID_OTHERWISE = [
    {"propertyNames": {"enum": ["a", "cc"]}}, {"propertyNames": {"const": "b"}}, {"propertyNames": False},
    {"propertyNames": {"type": "string", "pattern": "^[ab]$"}}, {"propertyNames": {"pattern": "c"}},
    {"propertyNames": {"minLength": 2}}, {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"type": "string", "minLength": 1, "maxLength": 1}},
    {"$defs": {"K": {"enum": ["a", "b"], "title": "K"}, "L": {"$ref": "#/$defs/K"}}, "type": "object",
     "additionalProperties": {"type": "integer"}, "propertyNames": {"$ref": "#/$defs/L"}},
    {**AB, "propertyNames": {"enum": ["b", "a"]}}, {**AB, "propertyNames": {"pattern": "^[a-b]$"}},
    {**AB, "propertyNames": {"pattern": "^[ac]"}, "additionalProperties": {"type": "string"}},
    {"properties": {"b": {"type": "string"}}, "propertyNames": {"pattern": "^a"}},
    {"patternProperties": {"^[ab]": {"type": "integer"}}, "propertyNames": {"pattern": "^[ab]"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a", "b"]},
    {"dependentRequired": {"a": ["b"]}}, {**AB, "dependentRequired": {"a": ["b"]}},
    {"dependentRequired": {"a": ["b"], "b": ["cc"]}}, {**AB, "dependentRequired": {"a": ["b"], "b": ["cc"]}},
    {**AB, "dependentRequired": {"b": ["cc"]}, "additionalProperties": False},
    {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}, "cc": False}},
    {"$schema": OLD, "dependencies": {"a": ["b"], "b": {"required": ["cc"]}}},
    {"contains": True}, {"contains": {}, "minContains": 2}, {"contains": True, "maxContains": 1},
    {"items": {"type": "integer"}, "contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
    {"contains": {}, "minItems": 2, "maxItems": 2, "maxContains": 3},
    {"if": True, "then": {"type": "string"}}, {"if": False, "then": False, "else": {"type": "array"}},
    {**AB, "unevaluatedProperties": False}, {**AB, "unevaluatedProperties": {"type": "integer"}},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", [*SAID_OTHERWISE[::2], NOTHING[5]], ids=json.dumps)
def test_the_language_is_that_of_jsonschema(byte_vocab: Any, schema: dict[str, Any]) -> None:
    same_language(byte_vocab, schema)


@pytest.mark.slow
def test_and_that_of_all_others(byte_vocab: Any) -> None:
    for schema in [*SAID_OTHERWISE[1::2], *NOTHING]:
        same_language(byte_vocab, schema)


@pytest.mark.slow
@pytest.mark.parametrize("schema", [NOTHING[0], NOTHING[5], SAID_OTHERWISE[0], SAID_OTHERWISE[16]], ids=json.dumps)
def test_inside_of_other_schemas(byte_vocab: Any, schema: dict[str, Any]) -> None:
    same_language(byte_vocab, schema, inside="within")
    for outer in ({"allOf": [schema]}, {"anyOf": [schema, {"type": "null"}]}, {"prefixItems": [schema]},
                  {"$ref": "#/$defs/x", "$defs": {"x": schema}},
                  {"$ref": "#/own/contains", "own": {"contains": schema}},
                  {"additionalProperties": schema}, {"patternProperties": {"^a": schema}}):  # fmt: skip
        same_language(byte_vocab, outer)


def test_names_that_look_like_keywords_and_data_stay() -> None:
    """As properties, as definitions, below keywords that nobody knows, and in data."""
    names = {"uniqueItems": {"type": "string"}, "propertyNames": {"type": "string"}, "format": {"type": "string"},
             "if": {"type": "null"}, "contains": {"type": "integer"}, "$schema": {"const": {"if": {}}}}  # fmt: skip
    schema = {
        "properties": names, "$defs": names, "x-ours": names,
        "default": {"uniqueItems": False}, "examples": [{"format": "own", "if": {}}],
        "enum": [{"propertyNames": {"type": "string"}}],
    }  # fmt: skip
    assert rewritten(schema) == schema


OTHER_NAMES = [
    "订单", "😀", "Partial<Foo>", "Map[string]*T", "A b", "A|B", "a%b", "50%", "a~b", "~1", "{x}", "a^b", "`a`", "a\\b",
    "a#b", "a?b", " ", "a\nb", "ns:A+B", "IEnumerable`1[System.Int32]",
]  # fmt: skip


@pytest.mark.parametrize("name", ["Größe", "List[int]", "a%20b", "a/b", 'q"q', "", *(
    pytest.param(name, marks=pytest.mark.slow) for name in OTHER_NAMES)])  # fmt: skip
def test_definitions_have_any_name(byte_vocab: Any, name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    for written in {pointer, quote(pointer, safe="~"), quote(pointer, safe="~<>[]|")}:
        tree = {"type": "object", "additionalProperties": False, "required": ["v"],
                "properties": {"v": {"type": "integer"}, "next": {"$ref": f"#/$defs/{written}"}}}  # fmt: skip
        for schema in (
            {"$ref": f"#/$defs/{written}", "$defs": {name: tree}},
            {"$ref": f"#/own/$defs/{written}", "own": {"$defs": {name: tree}}, "$defs": {name: tree}},
            {"allOf": [{"$ref": f"http://a/b#/$defs/{written}"}], "$id": "http://a/b", "$defs": {name: tree}},
        ):  # fmt: skip
            state = byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))
            assert byte_vocab.accepts_bytes(state, '{"v":1,"next":{"v":2}}')
            assert not byte_vocab.accepts_bytes(state, '{"v":1,"next":{"v":"2"}}'), schema


@pytest.mark.parametrize("name", ["My Schema", "Größe", "List[int]", "a|b"])
def test_schemas_and_anchors_have_any_name(byte_vocab: Any, name: str) -> None:
    for schema in (
        {"$id": name, "$ref": f"{name}#/$defs/a", "$defs": {"a": {"const": 1}}},
        {"$ref": name, "$defs": {"a": {"$id": name, "const": 1}}},
        {"$ref": f"#{name}", "$defs": {"a": {"$anchor": name, "const": 1}}},
    ):
        state = byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))
        assert byte_vocab.accepts_bytes(state, "1") and not byte_vocab.accepts_bytes(state, "2")


def test_what_cannot_be_built_is_left_for_the_library_to_refuse(byte_vocab: Any) -> None:
    for schema in [
        {"propertyNames": {"format": "date"}}, {"propertyNames": {"enum": ["a"], "maxLength": 2}},
        {"propertyNames": {"$ref": "#"}},
        {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"contains": {"type": "string"}}, {"contains": {"type": "string"}, "minContains": 0, "maxContains": 1},
        {"uniqueItems": True}, {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"not": {}},
        {"dependentRequired": {name: ["e"] for name in "abcd"}}, {"dependentRequired": []}, {"format": "uri-reference"},
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False}, {"not": {"type": "string"}},
        {"$schema": OLD, "contains": {"type": "string"}, "minContains": 0},
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=r"not (supported|be used)|cannot be used"):
            byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_names_are_counted_however_often_they_are_referred_to() -> None:
    key = {"enum": [f"k{i}" for i in range(MAX_NAMES // 4)]}
    maps = {str(i): {"propertyNames": {"$ref": "#/$defs/key"}} for i in range(5)}
    rewritten({"$defs": {"key": key}, "properties": dict(list(maps.items())[:4])})
    with pytest.raises(GrammarError, match=str(MAX_NAMES)):
        rewritten({"$defs": {"key": key}, "properties": maps})


def test_expressions_are_checked_wherever_a_reference_may_find_them() -> None:
    """In data, in what nobody knows, where another kind of value should stand."""
    huge = {"pattern": "a{100000}" * 3}
    for schema in [
        {"$ref": "#/default/x", "default": {"x": huge}}, {"$ref": "#/examples/0", "examples": [huge]},
        {"$ref": "#/own/0", "allOf": [{"$ref": "#/own"}], "own": [huge]}, {"$ref": "#/not/0", "not": [huge]},
        {"$ref": "#/$defs/a/propertyNames", "$defs": {"a": {"propertyNames": huge}}}, {"properties": [huge]},
        {"own": {"patternProperties": {huge["pattern"]: True}}}, {"items": {"own": [[huge]]}}, {"allOf": {"x": huge}},
    ]:  # fmt: skip
        with pytest.raises(GrammarError, match="repetitions"):
            rewritten(schema)
    assert rewritten({"const": huge, "enum": [huge]}) == {"const": huge, "enum": [huge]}


def test_texts_for_readers_may_hold_anything(byte_vocab: Any) -> None:
    """Half of an emoji, say, as a client cuts them; in a value it can never come."""
    half = json.loads('"\\ud83d"')
    for schema in [{"title": half, "description": half, "properties": {"a": {"$comment": half}}}]:
        byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))
    for schema in [{"const": half}, {"properties": {half: {}}}, {"enum": ["a", half]}, {"pattern": half}]:
        with pytest.raises(RequestError, match="lone surrogate"):
            byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_stands_in_a_schema_is_no_fault_of_ours(byte_vocab: Any, seed: int) -> None:
    """Odd values of all keywords: taken or refused, and the refusal does not show the grammar."""
    draw = random.Random(seed)
    known = [*NOTHING, *SAID_OTHERWISE]
    keywords = sorted(
        {key for schema in known for key in schema} | {"required", "type", "pattern", "maxLength", "anyOf"}
    )
    odd = [None, True, False, -1, 2, 1.5, "x", "", "#/x", [], {}, [1], ["a", None], {"a": []}, {"": None}, [{}], 10**30]

    def value(depth: int = 0) -> Any:
        kind = draw.choice(("odd", "list", "map", "schema")) if depth < 3 else "odd"
        if kind == "odd":
            return draw.choice(odd)
        if kind == "list":
            return [value(depth + 1) for _ in range(draw.randint(0, 3))]
        names = ["a", "b", "$ref"] if kind == "map" else keywords
        return {draw.choice(names): value(depth + 1) for _ in range(draw.randint(0, 3))}

    refused = 0
    for _ in range(150):
        schema = dict(draw.choice(known)) | {draw.choice(keywords): value() for _ in range(draw.randint(1, 3))}
        try:
            byte_vocab.compiler.compile(Grammar("json_schema", json.dumps(schema)))
        except RequestError as error:
            refused += 1
            assert not any(word in str(error) for word in ("x-guidance", "$defs/s", "Unimplemented")), schema
    assert 20 < refused < 150
