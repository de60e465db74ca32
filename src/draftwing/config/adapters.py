"""Names and places of adapters (LoRA), as options have them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwing.config.aliases import ALIASES
from draftwing.errors import ConfigError
from draftwing.requests.refusals import show

DEFAULT_SLOTS = 8
DEFAULT_RANK = 16  # that slots have room for at least; vLLM's
DEFAULT_HEAD_RANK = 32  # of draft heads of adapters' own, where these learn from traffic
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_HUB_ID = re.compile(  # or a folder in the hub's cache
    r"(?:(?:hf|huggingface)\.co/)?[\w-][\w.-]*/([\w.-]+)(?::.*)?|.*/models--.+?--([^/]+)/snapshots/.*"
)
_LONGEST = 300  # of what is read of a name
_SIZE = re.compile(r"(?<![a-z0-9.])\d+(?:\.\d+)?[bm](?![a-z0-9])")
_FORM = re.compile(
    r"[-_. ](?:gguf|i?q\d(?:_[a-z0-9]+)*|bnb|\d+bits?|awq|gptq|mlx|hf|unsloth|dynamic|quantized|int\d|b?f(?:p|loat)?\d+"
    r"|w\d+a\d+|nf4|[mn][xv]fp4)(?=[-_. ]|$)"
)  # what is added to the name of a model in another type
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


def may_be_one(base: str, model: str) -> bool:
    """Returns whether two names may be of one model, each an alias, a hub id, or a folder or file. A name without a
    size (7B) says nothing; one of a folder is its owner's, so a word in common is enough."""
    (first, on_hub), (other, also) = _plain_name(base), _plain_name(model)
    if first == other or not (_SIZE.search(first) and _SIZE.search(other)):
        return True
    if not (on_hub and also):
        words, more = ({*re.findall("[a-z]{3,}", one)} - {"instruct", "chat", "base"} for one in (first, other))
        return bool(words & more)
    first, other = (re.sub("[^a-z0-9]", "", one) for one in (first, other))
    return first.endswith(other) or other.endswith(first)  # Meta-Llama became Llama


def _plain_name(name: str) -> tuple[str, bool]:
    """Returns the last part of a name, without what says a type, and whether it is the hub's."""
    alias = ALIASES.get(name)
    name = name if alias is None or alias.hub is None else alias.hub.repo
    name = name[-_LONGEST:].replace("\\", "/").rstrip("/")
    found = None if os.path.exists(name) else _HUB_ID.fullmatch(name)
    last = name.rpartition("/")[2] if found is None else found[1] or found[2]
    return _FORM.sub("", last.lower()), found is not None
