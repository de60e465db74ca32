"""Names and places of adapters (LoRA), as options have them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwing.errors import ConfigError
from draftwing.requests.refusals import show

DEFAULT_SLOTS = 8
DEFAULT_RANK = 16  # that slots have room for at least; vLLM's
DEFAULT_HEAD_RANK = 32  # of draft heads of adapters' own, where these learn from traffic
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_KEYS = (("name", "path"), ("lora_name", "lora_path"))  # vLLM's and SGLang's


class AdapterPath(NamedTuple):
    """An adapter by the name that requests have, and its folder or file."""

    name: str
    path: Path


class AdapterCard(NamedTuple):
    """What clients are told of an adapter that is loaded."""

    name: str
    path: str
    digest: str
    rank: int
    base: str  # what it says it was trained on


def check_name(name: str, taken: Collection[str] = ()) -> str:
    """Returns the name. Raises ConfigError for one that a request cannot have, or that is the model's."""
    if not _NAME.fullmatch(name) or name != name.strip():
        raise ConfigError(f"the name of an adapter: expected 1 to 256 characters that can be seen, found {show(name)}")
    if name in taken:
        raise ConfigError(f"{show(name)} is the name of the model: expected another one for an adapter")
    return name


def adapter_paths(values: Sequence[str], taken: Collection[str] = ()) -> tuple[AdapterPath, ...]:
    """Returns what --lora-modules has: each `name=path`, a path alone, which is the name, too, or a JSON object of
    vLLM's or SGLang's. Raises ConfigError. taken: names of the model."""
    found: dict[str, AdapterPath] = {}
    for value in values:
        name, path = _parsed(value)
        if check_name(name, taken) in found:
            raise ConfigError(f"lora_modules has {show(name)} twice; each adapter needs a name of its own")
        found[name] = AdapterPath(name, Path(path).expanduser())
    return tuple(found.values())


def _parsed(value: str) -> tuple[str, str]:
    if value.lstrip().startswith("{"):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {show(value)} is not valid JSON: {error}") from None
        for name, path in _KEYS:
            if isinstance(given.get(path), str):
                return str(given.get(name, given[path])), given[path]
        raise ConfigError(f"lora_modules: expected an object with name and path, found {show(value)}")
    name, equals, path = value.partition("=")
    if not equals:
        return value, value
    if not path or not name:
        raise ConfigError(f"lora_modules: expected name=path, found {show(value)}")
    return name, path
