"""draftwing: serves large language models with exact tree-based speculative decoding.

from draftwing import LLM, SamplingParams

with LLM(model="smollm2") as llm:
    print(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
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
    "LLM": "draftwing.llm",
    "AsyncLLM": "draftwing.async_llm",
    "Completion": "draftwing.llm",
    "Piece": "draftwing.llm",
    "SamplingParams": "draftwing.requests.sampling_params",
    "CheckpointError": "draftwing.errors",
    "Device": "draftwing.engine.devices.base",
    "Draft": "draftwing.spec.drafter",
    "DraftContext": "draftwing.spec.drafter",
    "DraftStep": "draftwing.spec.drafter",
    "SeenTokens": "draftwing.spec.drafter",
    "Drafter": "draftwing.spec.drafter",
    "ConfigError": "draftwing.errors",
    "RequestError": "draftwing.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
