"""What passes from whoever asks to the engine: one prompt and all that is asked for its answer."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from draftwing.requests.options import LogprobParams, SpecLimits
from draftwing.requests.sampling_params import SamplingParams


class Terms(NamedTuple):
    """On what an engine takes a request: its most new tokens, and the token ids that end it."""

    new_tokens: int
    stop_ids: frozenset[int]


class GenerationRequest(NamedTuple):
    """One prompt, one answer. `cache_salt` isolates the prefix cache and the n-gram memory.

    limits: None drafts as the engine does.  prediction: token ids that the answer is expected to resemble.
    name: by which the client may abort it, together with others.  terms: None until `EngineInfo.admit` let it in.
    """

    uid: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    logprobs: LogprobParams | None = None
    limits: SpecLimits | None = None
    prediction: tuple[int, ...] = ()
    name: str = ""
    terms: Terms | None = None

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        return self._replace(**changes)
