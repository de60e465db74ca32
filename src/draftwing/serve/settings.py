"""What an application of Ray Serve is built from: the options of `draftwing serve` and how many replicas there are; and
the text by which requests with the same cached prefix are known, whatever dialect they are in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draftwing.config.fields import check_fields, from_text, kinds, names_of, option
from draftwing.config.foreign_names import FOREIGN
from draftwing.config.options import Options
from draftwing.errors import ConfigError

# In the order in which prompts have them. A salt keeps caches apart.
_FIELDS = ("cache_salt", "system", "instructions", "messages", "prompt", "text", "input", "input_ids")
_INNER = ("content", "text")


def beginning(body: bytes) -> str:
    """Returns the texts of a request's prompt; empty for a body without any. One that is no whole JSON is its own text:
    where it was cut, its beginning is the same as that of others. So is one that is nested too deeply to be read."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return ""
        return "".join(text for name in _FIELDS for text in _texts(request.get(name)))
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):  # an id of a token
        yield f"{value} "
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for name in _INNER:
            yield from _texts(value.get(name))


REPLICAS = "replicas"
DRAIN_SECONDS = 600.0  # `drain_timeout` where none is given: nobody waits for a replica that Ray takes away
_LISTENING = ("host", "port")


@dataclass(frozen=True)
class Scaling:
    """How many replicas there are and what each of them gets, in Ray Serve's words."""

    num_replicas: int = option(1, REPLICAS, "replicas, where max_replicas does not say otherwise", minimum=1)
    max_replicas: int | None = option(None, REPLICAS, "most replicas; how many run follows the requests", minimum=1)
    min_replicas: int = option(1, REPLICAS, "fewest replicas, with max_replicas", minimum=1)
    target_ongoing_requests: float = option(
        32.0, REPLICAS, "running and waiting requests of a replica that autoscaling aims at", minimum=1
    )
    upscale_delay_s: float = option(
        30.0, REPLICAS, "seconds of more requests before there are more replicas", minimum=0
    )
    downscale_delay_s: float = option(
        600.0, REPLICAS, "seconds of fewer requests before there are fewer replicas", minimum=0
    )
    num_cpus: float | None = option(
        None, REPLICAS, "CPUs of a replica, which are the threads of its forward too (default: num_threads, or 1)",
        minimum=0.1,
    )  # fmt: skip
    imbalanced_threshold: int = option(
        16, REPLICAS, "requests that a replica may have more than another one and still get those of its prefixes",
        minimum=1,
    )  # fmt: skip

    @property
    def count(self) -> dict[str, Any]:
        """Returns a deployment's settings for the number of replicas. Raises ConfigError."""
        if self.max_replicas is None:
            return {"num_replicas": self.num_replicas}
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas must be at least min_replicas, {self.min_replicas}; found {self.max_replicas}"
            )
        asked = ("min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s")
        return {"autoscaling_config": {name: getattr(self, name) for name in asked}}


def read_args(args: Mapping[str, Any]) -> tuple[Options, Scaling]:
    """Returns the options of an engine and the scaling, checked, from an application's arguments.

    args: by name, as `draftwing serve` and `Scaling` call them; values as a file of Ray Serve has them, or the texts of
    `serve run ... name=value`. Raises ConfigError.
    """
    given = {name.replace("-", "_"): value for name, value in args.items()}
    for name in _LISTENING:
        if name in given:
            raise ConfigError(
                f"{name} is Ray Serve's own: serve start --http-{name}, or http_options of a configuration file"
            )
    own = {name: _typed(Scaling, name, given.pop(name)) for name in kinds(Scaling) if name in given}
    scaling = Scaling(**own)
    check_fields(scaling)
    given.setdefault("drain_timeout", DRAIN_SECONDS)
    options = Options.from_kwargs(**{name: _typed(Options, name, value) for name, value in given.items()})
    options.resolve()  # only to check: each replica draws a seed of its own
    return options, scaling


def _typed(cls: type[Any], name: str, value: Any) -> Any:
    """Returns a value of the field's type. A list of a file becomes the tuple that fields have."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    if name in FOREIGN:
        kind = FOREIGN[name].kind
        return value.lower() == "true" if kind is bool else kind(value)
    field = names_of(cls).get(name)
    return value if field is None else from_text(name, kinds(cls)[field], value)
