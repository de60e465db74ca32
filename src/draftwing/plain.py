"""Values as programs hold them, as Python's own: numbers and arrays of numpy and torch, paths, torch's types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_OWN = frozenset((str, int, float, bool, type(None), bytes))


def plain(value: Any) -> Any:
    """Returns a value with what is in its lists and mappings as Python's own numbers, lists and texts; what is no such
    thing stays."""
    kind = type(value)
    if kind in _OWN or isinstance(value, type):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # arrays, and numbers like those of them
        return value.tolist()
    if isinstance(value, list | tuple):
        own = _OWN.issuperset(map(type, value))
        return value if own else (list if isinstance(value, list) else tuple)(map(plain, value))
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    return str(value).removeprefix("torch.") if kind.__module__ == "torch" else value  # a dtype, a device
