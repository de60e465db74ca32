"""Options: names, ranges, and what they tell of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from draftwing.config.drafters import NAMES
from draftwing.config.options import Options
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.devices.cuda import defaults_for
from draftwing.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"speculative_algorithm": "magic"},
            f"must be one of {', '.join(NAMES)}, two of them as in EAGLE3+NGRAM, or module:Class of a "
            "drafter of your own; found 'magic'",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "at least 2; found 1"),
        ({"port": 65536}, "port must be at most 65535; found 65536"),
        ({"port": "30000"}, "port must be an int"),
        ({"port": True}, "port must be an int"),
        ({"dtype": "int8"}, "auto, float32, bfloat16, float16; found 'int8'"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"mem_fraction_static": 1.5}, "at most 0.99"),
        ({"mem_fraction_static": float("nan")}, "finite"),
        ({"request_timeout": 0}, "at least 0.001"),
        ({"model": ""}, "must not be empty"),
        ({"disable_radix_cache": 1}, "must be a bool"),
        ({"log_level": "loud"}, "log_level"),
        ({"context_length": 1}, "at least 2"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_rule(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as info:
        Options(**fields).resolve()
    assert rule in str(info.value)


@pytest.mark.parametrize(
    ("enable", "disable"),
    [("enable_overlap", "disable_overlap_schedule"), ("enable_mixed_chunk", "disable_mixed_chunk")],
)
def test_overlap_and_mixed_steps_are_the_default_on_cuda_only(enable: str, disable: str) -> None:
    def is_on(device: str, **fields: Any) -> bool:
        defaults = defaults_for(0) if device == "cuda" else CpuDevice().defaults
        fields.setdefault("speculative_algorithm", "none")
        return getattr(Options(**fields).resolve().for_engine(defaults), enable)  # type: ignore[arg-type, no-any-return]

    assert is_on("cuda") and not is_on("cpu")
    assert is_on("cpu", **{enable: True})
    assert not is_on("cuda", **{disable: True})
    assert is_on("cuda", speculative_algorithm="NGRAM")
    assert is_on("cuda", disable_cuda_graph=True) == (enable == "enable_overlap")


def test_keyword_options() -> None:
    assert Options.from_kwargs(model_path="a", mem_fraction=0.5) == Options(model="a", mem_fraction_static=0.5)
    with pytest.raises(ConfigError, match="'speculative_algoritm'; the nearest option is 'speculative_algorithm'"):
        Options.from_kwargs(speculative_algoritm="NGRAM")
    with pytest.raises(ConfigError, match="given twice"):
        Options.from_kwargs(model="a", model_path="b")
