"""Short names of models: `draftwing serve qwen3-0.6b`. No torch: options are checked before it is imported."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

DEFAULT_MODEL = "smollm2"


class HubModel(NamedTuple):
    """A repository of the hub. commit: the one that is fetched, None: the newest of its main branch."""

    repo: str
    commit: str | None = None


@dataclass(frozen=True)
class Alias:
    """What a short name stands for.

    hub: where it comes from; None: the default model, which `models.hub` fetches from a package.
    parameters: how many, in words.  licence: SPDX identifier, or what the hub calls it.
    gated: whether the hub asks for consent to the licence, and so for `hf auth login`.
    heads: who can draft for it, by the kind of head, the default first; None: layers of the model's own checkpoint.
    sampling: defaults of requests by the names of `SamplingParams`, before those of generation_config.json. There
    `max_new_tokens` holds where neither the request nor its API limits the answer.
    """

    hub: HubModel | None
    parameters: str
    licence: str
    gated: bool = False
    heads: Mapping[str, HubModel | None] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def _hub_model(text: str) -> HubModel | None:
    repo, _, commit = text.partition("@")
    return HubModel(repo, commit or None) if repo else None


def _alias(hub: str = "", heads: Mapping[str, str] = MappingProxyType({}), **facts: Any) -> Alias:
    return Alias(_hub_model(hub), heads={kind: _hub_model(one) for kind, one in heads.items()}, **facts)


_TABLE = tomllib.loads((Path(__file__).parent / "aliases.toml").read_text(encoding="utf8"))
ALIASES: Mapping[str, Alias] = {name: _alias(**facts) for name, facts in _TABLE.items()}


def nearest(name: str) -> str | None:
    """Returns the alias that a mistyped name may mean."""
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    return close[0] if close else None
