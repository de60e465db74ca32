"""Logits processors: functions of the server's owner that change the logits of a request that asks for them.

`--logit-processor package.module:attribute` loads one; a request names it as `package.module:attribute`, or as the
last part where that is unique, and gives it parameters.

A processor is called `processor(tokens, logits, params)` for every live node of a draft tree, on the host, and returns
the logits to sample from: float32 [V], the same tensor changed in place or another. `tokens` are the prompt, the answer
so far and the node's own path. The text is the same with speculation on and off if the result depends on the three
arguments only: no state of its own, no count of its calls, no randomness without a seed from `params`. It is called for
nodes whose path is then not accepted, in any order. Minus infinity bans a token; one must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwing.errors import ConfigError, RequestError
from draftwing.plugins import import_attribute

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[[Sequence[int], "Tensor", dict[str, Any]], "Tensor"]
FIELD = "custom_logit_processor"  # of a request, which names one
_OPTION = "--logit-processor"


def load_processors(names: Iterable[str]) -> dict[str, LogitsProcessor]:
    """Returns the processors that `names` say, by what requests may call them. A class is instantiated without
    arguments.

    Modules are looked for in the working folder, too. Raises ConfigError for what cannot be imported or called.
    """
    full = {name: _load(name) for name in dict.fromkeys(names)}
    short: dict[str, list[str]] = {}
    for name in full:
        short.setdefault(name.partition(":")[2], []).append(name)
    return {**{s: full[found[0]] for s, found in short.items() if len(found) == 1}, **full}


def apply(processor: LogitsProcessor, params: Mapping[str, Any], tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Calls a processor and looks at what comes back. Raises RequestError when it fails, returns another shape, or
    leaves nothing to choose from."""
    try:
        result = processor(tokens, logits, dict(params))
    except Exception as error:  # code of the server's owner
        raise RequestError(f"{FIELD}: the logits processor failed: {type(error).__name__}: {error}", FIELD) from error
    found = getattr(result, "shape", None), getattr(result, "dtype", None)
    if found != (logits.shape, logits.dtype):
        raise RequestError(
            f"{FIELD}: the logits processor returned {type(result).__name__} of shape {found[0]} and type {found[1]}, "
            f"expected shape {tuple(logits.shape)} and type {logits.dtype}",
            FIELD,
        )
    if not bool(result.max() > -math.inf):  # the maximum is NaN if any logit is
        raise RequestError(f"{FIELD}: the logits processor left no token that may come next, or gave NaN", FIELD)
    return result


def _load(name: str) -> LogitsProcessor:
    value = import_attribute(name, _OPTION)
    if isinstance(value, type):
        try:
            value = value()
        except Exception as error:  # code of the server's owner
            raise ConfigError(f"{_OPTION} {name}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ConfigError(f"{_OPTION} {name}: expected a function or a class, found {type(value).__name__}")
    processor: LogitsProcessor = value
    return processor
