"""draftwing: serves large language models with exact tree-based speculative decoding.

from draftwing import LLM, SamplingParams

with LLM(model="smollm2") as llm:
    print(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from draftwing.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Device",
    "Draft",
    "DraftContext",
    "DraftStep",
    "Drafter",
    "Piece",
    "RequestError",
    "SamplingParams",
    "SeenTokens",
    "__version__",
]

if TYPE_CHECKING:
    from draftwing.async_llm import AsyncLLM
    from draftwing.engine.devices.base import Device
    from draftwing.errors import CheckpointError, ConfigError, RequestError
    from draftwing.llm import LLM, Completion, Piece
    from draftwing.requests.sampling_params import SamplingParams
    from draftwing.spec.drafter import Draft, DraftContext, Drafter, DraftStep, SeenTokens

# Loaded when first asked for: importing torch takes seconds, and `draftwing --help` does without.
_HOMES = {
    "async_llm": ("AsyncLLM",),
    "engine.devices.base": ("Device",),
    "errors": ("CheckpointError", "ConfigError", "RequestError"),
    "llm": ("LLM", "Completion", "Piece"),
    "requests.sampling_params": ("SamplingParams",),
    "spec.drafter": ("Draft", "DraftContext", "DraftStep", "Drafter", "SeenTokens"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"draftwing.{home}"), name)
    raise AttributeError(f"module 'draftwing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
