"""Hashes of kernels that do not depend on which one is launched first.

Triton's hash of a function has the constants of those that it calls, but of each only if that was hashed before. A
process that compiles a kernel for another one, which launches in another order, would keep it under another hash.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction


def hash_all() -> None:
    """Hashes all functions of the modules of kernels that are imported, and before each those that it calls."""
    done = set[int]()
    for name, module in sorted(sys.modules.items()):
        if name.startswith("draftwing.ops."):
            for value in [*vars(module).values()]:
                if isinstance(value, JITFunction):
                    _hash(value, done)


def _hash(function: JITFunction[Any], done: set[int]) -> None:
    if id(function) in done:
        return
    done.add(id(function))
    for called in _called(function.fn):
        _hash(called, done)
    _ = function.cache_key  # keeps it


def _called(fn: Any) -> Iterator[JITFunction[Any]]:
    names = fn.__code__.co_names  # of globals, and of what is taken from modules among them
    known = [fn.__globals__[name] for name in names if name in fn.__globals__]
    known += [cell.cell_contents for cell in fn.__closure__ or ()]
    for value in known:
        if isinstance(value, ModuleType):
            yield from (found for name in names if isinstance(found := getattr(value, name, None), JITFunction))
        elif isinstance(value, JITFunction):
            yield value
