"""Values as programs hold them, as Python's own: numbers and arrays of numpy and torch, paths, torch's types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_OWN = frozenset((str, int, float, bool, type(None), bytes, bytearray, memoryview))
_LEVELS = 3  # of containers: deeper ones are schemas and the like, or hold themselves


def plain(value: Any, levels: int = _LEVELS) -> Any:
    """Returns a value with what is in its lists and mappings, to the given number of levels, as Python's own numbers,
    lists and texts; what is no such thing stays."""
    kind = type(value)
    if kind in _OWN or isinstance(value, type):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # arrays, and numbers like those of them
        return value.tolist()
    if isinstance(value, list | tuple | Mapping):
        return _each(value, levels - 1) if levels else value
    return str(value).removeprefix("torch.") if kind.__module__ == "torch" else value  # a dtype, a device


def _each(values: Any, levels: int) -> Any:
    if isinstance(values, Mapping):
        return {plain(key, levels): plain(one, levels) for key, one in values.items()}
    if _OWN.issuperset(map(type, values)):
        return values
    return (list if isinstance(values, list) else tuple)(plain(one, levels) for one in values)
