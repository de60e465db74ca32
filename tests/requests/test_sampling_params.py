"""Checked sampling parameters: what a field becomes, and which field an error names."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from draftwing.errors import RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOPS,
    LogitsProcessorSpec,
    SamplingParams,
    field_schemas,
)


def test_fields_become_values() -> None:
    params = SamplingParams.read(
        {
            "logit_bias": {5: 1, "3": -2.5}, "allowed_token_ids": [4, 4, 1], "bad_words": "no", "stop_regex": "a+",
            "repetition_penalty": 2, "frequency_penalty": None, "custom_logit_processor": "p", "min_p": 0,
        }
    )  # fmt: skip
    assert params.logit_bias == ((3, -2.5), (5, 1.0)) and params.allowed_token_ids == (4, 4, 1)
    assert params.bad_words == ("no",) and params.stop_regex == ("a+",) and params.repetition_penalty == 2.0
    assert params.logits_processor == LogitsProcessorSpec("p", "{}") and params.frequency_penalty == 0.0
    assert params.edited and params.guided and not params.filtered
    assert SamplingParams.read({"json_schema": False, "min_new_tokens": 0}).grammar == Grammar("json_schema", "false")
    plain = SamplingParams.read({})
    assert plain == SamplingParams() and not plain.edited and not plain.guided


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"json_schema": {}, "response_format": {"type": "text"}}, "response_format"),
        ({"regex": 5}, "regex"), ({"regex": ""}, "regex"), ({"regex": "\ud800"}, "regex"),
        ({"json_schema": 1}, "json_schema"),
        ({"json_schema": [1]}, "json_schema"), ({"structural_tag": True}, "structural_tag"),
        ({"json_schema": {"a": float("nan")}}, "json_schema"), ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "min_new_tokens": 1}, "min_new_tokens"), ({"custom_params": {"a": 1}}, "custom_params"),
        ({"custom_logit_processor": "p", "custom_params": [1]}, "custom_params"),
        ({"custom_logit_processor": 5}, "custom_logit_processor"), ({"grammar": ("regex", "a")}, "grammar"),
        ({"logits_processor": ("a", "{}")}, "logits_processor"), ({"logit_bias": [[1, 2]]}, "logit_bias"),
        ({"logit_bias": {"1": 1, 1: 2}}, "logit_bias"), ({"logit_bias": {"1": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1)}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"), ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"stop_regex": ["a", "("]}, "stop_regex"), ({"stop_regex": 5}, "stop_regex"),
        ({"presence_penalty": True}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"), ({"beam_width": 2}, "beam_width"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as info:
        SamplingParams.read(fields)
    assert info.value.param == param and param in str(info.value)
    with pytest.raises(RequestError) as info:
        SamplingParams.read(fields, where="sampling_params.")
    assert info.value.param == f"sampling_params.{param}"


def test_names_of_the_api_are_used_in_errors() -> None:
    names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens; found 5 and 4"):
        SamplingParams.read({"min_new_tokens": 5, "max_new_tokens": 4}, names)
    with pytest.raises(RequestError, match="min_tokens cannot be given with a grammar"):
        SamplingParams.read({"regex": "a", "min_new_tokens": 1}, names)


def test_deep_and_large_values_are_refused_not_crashed_on() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RequestError):
        SamplingParams.read({"json_schema": deep})
    with pytest.raises(RequestError):
        SamplingParams.read({"temperature": 10**5000})
    assert json.loads(SamplingParams.read({"json_schema": {"a": 10**300}}).grammar.text)  # type: ignore[union-attr]


def test_temperatures_that_no_difference_of_logits_survives_are_greedy() -> None:
    assert [SamplingParams(temperature=value).temperature for value in (0.0, 9e-7, 1.1e-6)] == [0.0, 0.0, 1.1e-6]


def test_a_default_length_is_cut() -> None:
    assert SamplingParams().fit(10).max_new_tokens == 10
    assert SamplingParams(max_new_tokens=None).fit(10).max_new_tokens is None


def test_the_schema_of_a_field_is_what_is_checked() -> None:
    schemas = field_schemas()
    assert set(SamplingParams.model_fields) - set(schemas) == {"grammar", "logits_processor"}
    checked = 0
    for name, schema in schemas.items():
        kind = next((one for one in schema.get("anyOf", [schema]) if one.get("type") in ("integer", "number")), None)
        if kind is None:
            continue
        high, low = kind["maximum"], kind.get("minimum", kind.get("exclusiveMinimum"))
        SamplingParams(**{name: high, "max_new_tokens": None})
        for outside in (high + 1, low - 1, low if "exclusiveMinimum" in kind else None):
            if outside is not None:
                with pytest.raises(RequestError, match=f"^{name} must be"):
                    SamplingParams(**{name: outside})
        checked += 1
    assert checked > 10 and all(
        "description" in schemas[name] for name in SamplingParams.model_fields if name in schemas
    )


def test_copies_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], regex="a+")

    def checked(*_: Any, **__: Any) -> None:
        raise AssertionError("a second check")

    monkeypatch.setattr(SamplingParams, "_read", checked)
    copied = pickle.loads(pickle.dumps(params))
    assert copied == params and hash(copied) == hash(params) and params.replace(n=2).n == 2


def test_fields_by_their_other_names() -> None:
    assert SamplingParams(max_tokens=8).max_new_tokens == 8 and SamplingParams(max_tokens=None).max_new_tokens is None
    assert SamplingParams(seed=5).sampling_seed == 5 and SamplingParams(seed=None).sampling_seed is None
    assert SamplingParams(min_tokens=3).min_new_tokens == 3 and SamplingParams(min_tokens=None).min_new_tokens == 0
    for given, param in (({"max_tokens": 8, "max_new_tokens": 9}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
                         ({"seed": 1, "sampling_seed": 2}, "seed"), ({"min_tokens": -1}, "min_tokens"),
                         ({"min_tokens": 1, "min_new_tokens": 2}, "min_tokens")):  # fmt: skip
        with pytest.raises(RequestError) as error:
            SamplingParams(**given)
        assert error.value.param == param
