"""Arguments of an application of Ray Serve: texts of a command line, values of a file."""

from __future__ import annotations

from typing import Any

import pytest

from draftwing.errors import ConfigError
from draftwing.serve.settings import DRAIN_SECONDS, Scaling, read_args


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
            "min_replicas": 1,
            "max_replicas": 4,
            "target_ongoing_requests": 12.0,
            "upscale_delay_s": 30.0,
            "downscale_delay_s": 5,
        }
    }


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
