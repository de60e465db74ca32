"""Arguments of an application of Ray Serve: texts of a command line, values of a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwing.errors import ConfigError
from draftwing.serve.settings import DRAIN_SECONDS, Scaling, beginning, read_args


def test_texts_and_values_are_the_same() -> None:
    typed = read_args(
        {"model": "a/b", "num-threads": "2", "mem_fraction_static": "0.5", "disable_ui": "true", "num_replicas": "3"}
    )
    given = read_args(
        {"model": "a/b", "num_threads": 2, "mem_fraction_static": 0.5, "disable_ui": True, "num_replicas": 3}
    )
    assert typed == given
    options, scaling = typed
    assert (options.num_threads, options.mem_fraction_static, options.disable_ui) == (2, 0.5, True)
    assert scaling == Scaling(num_replicas=3) and scaling.count == {"num_replicas": 3}


def test_replicas_that_follow_the_requests() -> None:
    _, scaling = read_args({"max_replicas": "4", "target_ongoing_requests": "12", "downscale_delay_s": 5})
    assert scaling.count == {
        "autoscaling_config": {
            "min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 12.0, "upscale_delay_s": 30.0,
            "downscale_delay_s": 5,
        }
    }  # fmt: skip


def test_a_replica_has_long_to_drain() -> None:
    assert read_args({})[0].drain_timeout == DRAIN_SECONDS
    assert read_args({"drain_timeout": "20"})[0].drain_timeout == 20


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modell": "a/b"}, "unknown option 'modell'; the nearest option is 'model'"),
        ({"num_replicas": "many"}, "num_replicas must be an int; found 'many'"),
        ({"num_replicas": 0}, "num_replicas must be at least 1; found 0"),
        ({"disable_ui": "maybe"}, "disable_ui must be true or false; found 'maybe'"),
        ({"port": "80"}, "port is Ray Serve's own: serve start --http-port, or http_options of a configuration file"),
        ({"model": "a", "model_path": "b"}, "option 'model' is given twice"),
    ],
)
def test_what_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_args(args)


def test_fewer_than_fewest() -> None:
    with pytest.raises(ConfigError, match="max_replicas must be at least min_replicas, 3; found 2"):
        _ = read_args({"min_replicas": 3, "max_replicas": 2})[1].count


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}], "model": "m"}, "AB"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "B"}]}], "system": "A"}, "AB"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "B"}]}], "instructions": "A"}, "AB"),
        ({"prompt": "A"}, "A"), ({"prompt": ["A", "B"]}, "AB"), ({"prompt": [1, 22]}, "1 22 "),
        ({"text": "A", "cache_salt": "S"}, "SA"), ({"input_ids": [[1, 2], [3]]}, "1 2 3 "),
        ({"model": "m", "max_tokens": 3}, ""), (["A"], ""), (3, ""),
    ],
)  # fmt: skip
def test_texts(body: Any, text: str) -> None:
    assert beginning(json.dumps(body).encode()) == text


def test_bodies_that_are_cut() -> None:
    whole = json.dumps({"messages": [{"role": "user", "content": "é" * 100}]}, ensure_ascii=False).encode()
    assert beginning(whole[:101])[:40] == beginning(whole[:150])[:40] != ""
    assert beginning(b"") == ""


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_bodies_that_are_nested_too_deeply(depth: int) -> None:
    whole = b'{"prompt": ' + b"[" * depth + b'"A"' + b"]" * depth + b"}"
    assert beginning(whole) == whole.decode()
