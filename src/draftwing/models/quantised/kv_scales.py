"""Scales of a KV pool in 8 bits, as checkpoints store them: a number for the keys and one for the values of a layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

from draftwing.errors import CheckpointError

Value = TypeVar("Value")
# Writers put them next to the attention or next to its projections; one alone is of both.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:(k|v|kv)_scale|attn\.(k|v)_scale|(k|v)_proj\.(?:\4_scale|output_scale))"
)


class KVScales:
    """What keys and values of each layer are divided by before they are rounded to 8 bits; 1 where nobody says."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, float]] = {}
        self._unusable: str | None = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def taken(self, tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
        """Yields all other tensors. Names have the `model.` prefix."""
        for name, value in tensors:
            match = _NAME.fullmatch(name)
            if match is None or not isinstance(value, Tensor):
                yield name, value
                continue
            layer, which = int(match[1]), match[2] or match[3] or match[4]
            scale = float(value.float()) if value.numel() == 1 else math.nan
            if not 0 < scale < math.inf and self._unusable is None:
                found = f"{scale:g}" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
                self._unusable = f"{name}: expected one positive number, found {found}"
            self._found.setdefault(layer, {}).update(dict.fromkeys(which, scale))

    def of(self, layers: Iterable[int]) -> list[tuple[float, float]]:
        """Returns those of these layers of the model. Raises CheckpointError for what is no number."""
        if self._unusable is not None:
            raise CheckpointError(f"{self._unusable}. Leave out --kv-cache-dtype fp8_e4m3")
        known = (self._found.get(layer, {}) for layer in layers)
        return [(one.get("k", 1.0), one.get("v", 1.0)) for one in known]
