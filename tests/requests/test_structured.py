"""vLLM's `structured_outputs` in Python: one of its kinds, as a dict or as vLLM's own object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from draftwing import SamplingParams
from draftwing.errors import RequestError


@dataclass
class StructuredOutputsParams:
    """As vLLM's, with what it holds besides."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    _backend: str | None = "auto"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("field", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("made", [dict, lambda fields: StructuredOutputsParams(**fields)], ids=["dict", "object"])
@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"json": SCHEMA}, {"json_schema": SCHEMA}), ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"choice": ["a.b", "c"]}, {"regex": r"a\.b|c"}), ({"choice": ("a", "b")}, {"regex": "a|b"}),
        ({"json": False}, {"json_schema": False}), ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"json_object": False, "regex": None}, {}),
    ],
)  # fmt: skip
def test_each_kind(field: str, made: Any, given: dict[str, Any], same: dict[str, Any]) -> None:
    assert SamplingParams(**{field: made(given)}).grammar == SamplingParams(**same).grammar


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"regex": "a", "choice": ["b"]}, "structured_outputs.choice"), ("a", "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"), ({"choice": ["a", 1]}, "structured_outputs.choice.1"),
        ({"words": "a"}, "structured_outputs"), ({"grammar": 3}, "structured_outputs.grammar"),
        ({1: "a"}, "structured_outputs"), ({None: "a"}, "structured_outputs"), ({"_regex": "a"}, "structured_outputs"),
        (lambda: 1, "structured_outputs"), (dict, "structured_outputs"), (3, "structured_outputs"),
        ({"json_object": "no"}, "structured_outputs.json_object"),
        ({"json_object": 0}, "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named.split(".")[0]) as error:
        SamplingParams(structured_outputs=given)
    assert error.value.param == named
    with pytest.raises(RequestError, match="together"):
        SamplingParams(structured_outputs={"regex": "a"}, regex="b")
