"""Values as programs hold them are those that Python has for them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from draftwing import RequestError, SamplingParams
from draftwing.config.options import Options
from draftwing.plain import plain


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (np.int64(3), 3), (np.float64(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a"), (torch.tensor(2), 2),
        (np.arange(3), [0, 1, 2]), (torch.ones(2, 1), [[1.0], [1.0]]), (array("q", [4, 5]), [4, 5]), (Path("/a"), "/a"),
        ([np.int32(1), "a", None], [1, "a", None]), ((1, 2), (1, 2)), ({np.int64(1): [np.float32(0.5)]}, {1: [0.5]}),
        (MappingProxyType({"a": np.int8(1)}), {"a": 1}), (torch.bfloat16, "bfloat16"), (torch.device("cpu"), "cpu"),
        (b"ab", b"ab"), ([b"a", memoryview(b"a")], [b"a", memoryview(b"a")]), (np.ndarray, np.ndarray), (None, None),
    ],
)  # fmt: skip
def test_what_it_is(given: Any, meant: Any) -> None:
    found = plain(given)
    assert found == meant and type(found) is type(meant)


def test_numbers_of_arrays_are_sampling_parameters() -> None:
    for temperature in np.linspace(0, 1, 3):
        assert SamplingParams(temperature=temperature) == SamplingParams(temperature=float(temperature))
    found = SamplingParams(
        max_new_tokens=np.int64(3), top_k=np.int32(4), min_p=np.float32(0.5), ignore_eos=np.bool_(True),
        stop_token_ids=torch.tensor([5, 6]), logit_bias={np.int64(7): np.float64(-1)}, stop=np.array(["a", "b"]),
        allowed_token_ids=[np.int64(8)],
    )  # fmt: skip
    assert found == SamplingParams(
        max_new_tokens=3, top_k=4, min_p=0.5, ignore_eos=True, stop_token_ids=[5, 6], logit_bias={7: -1},
        stop=["a", "b"], allowed_token_ids=[8],
    )  # fmt: skip
    for name, value in (("top_k", np.float64(1.5)), ("temperature", np.array([1.0])), ("stop", np.array([1]))):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_options_may_be_paths_and_types() -> None:
    given: dict[str, Any] = {
        "model": Path("/m"), "dtype": torch.float16, "device": torch.device("cpu"), "port": np.int64(0),
        "lora_modules": [Path("/a")], "random_seed": np.int64(3),"mem_fraction_static": np.float32(0.5),
    }  # fmt: skip
    meant: dict[str, Any] = {
        "model": "/m", "dtype": "float16", "device": "cpu", "port": 0, "lora_modules": ["/a"], "random_seed": 3,
        "mem_fraction_static": 0.5,
    }  # fmt: skip
    assert Options.from_kwargs(**given).resolve() == Options.from_kwargs(**meant).resolve()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("levels", [1, 240, 260, 400])
def test_schemas_are_taken_as_deep_as_from_text(levels: int) -> None:
    schema = nested(levels)
    found = SamplingParams(json_schema=schema)
    assert found == SamplingParams.read({"json_schema": schema}) and found.grammar is not None
    assert json.loads(found.grammar.text) == schema


def test_what_is_too_deep_or_holds_itself_is_refused() -> None:
    holder: dict[str, Any] = {}
    holder["properties"] = holder
    for schema in (nested(100_000), holder):
        with pytest.raises(RequestError, match="json_schema"):
            SamplingParams(json_schema=schema)
    ids: list[Any] = []
    ids.append(ids)
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)
