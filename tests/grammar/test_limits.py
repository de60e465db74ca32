"""Expressions as the grammar library gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwing.errors import RequestError
from draftwing.grammar.limits import checked_regex, schema_text
from draftwing.requests.grammar_field import Grammar


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{4}-\d", r"[0-9]{4}-[0-9]"),
        (r"[\d\-x]+\w*", r"[0-9\-x]+[A-Za-z0-9_]*"),
        (r"\\d\s?", r"\\d[ \t\n\r\f\v]?"),
        (r"[^\s\d]\D", r"[^\s\d]\D"),
    ],
)
def test_short_classes_are_ascii(pattern: str, expected: str) -> None:
    assert checked_regex(pattern) == expected


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
