"""Calls of the C kernels, noted once and made again: what a CUDA graph is on a GPU.

Starting an operation takes Python and torch 10 us where a forward pass has just emptied the caches, and a small step
starts a hundred of them. The kernels get addresses and sizes alone, so work that consists of them is a list of
calls. All memory that was made while they were noted is kept with it; tensors that were there before must outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]

_GIVEN = frozenset({int, bool, float, list})  # a list of calls, to `replay`
_noted: ContextVar[Calls | None] = ContextVar("noted", default=None)
_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}


def is_recording() -> bool:
    """Returns whether calls are noted now: what these read and write must not be used for anything else later."""
    return _noted.get() is not None


class Notable:
    """An extension module whose calls are noted while somebody records. Its functions get the addresses of tensors,
    whose elements must lie as the C files say, and 0 for None."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if callable(value):
            value = _notable(value)
        setattr(self, name, value)
        return value


def _notable(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        # To ask for numbers, and for a list, is faster than for tensors, and one by one: this is before each kernel.
        numbers = tuple([x if type(x) in _GIVEN else 0 if x is None else x.data_ptr() for x in arguments])
        calls = _noted.get()
        if calls is not None:
            calls.append((function, numbers))
        return function(*numbers)

    return call


class _Watch(TorchDispatchMode):
    """Keeps what is allocated, and looks for work that is torch's own."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler to keep it out of here, which takes a second."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.own: str | None = None  # an operation that computes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.held.append(out)
        elif not (func.is_view and _storages(out) <= _storages(args)):
            # `contiguous` and `reshape` call themselves views, and copy where they have to.
            self.own = self.own or str(func)
        return out


def _storages(value: Any) -> set[int]:
    """Returns the addresses of the memory behind a tensor, or behind the tensors of a list."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(_storages, value)) if isinstance(value, (tuple, list)) else set()


class Recording:
    """What a function made the kernels do. make: calls what was noted, one after the other."""

    def __init__(self, calls: Calls, held: list[Any], make: Callable[[Calls], None]) -> None:
        self._calls, self._held, self._make = calls, held, make

    @property
    def nbytes(self) -> int:
        """Returns bytes of what is kept with it."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held)

    def replay(self) -> None:
        self._make(self._calls)


def make_calls(calls: Calls) -> None:
    for function, numbers in calls:
        function(*numbers)


def record(function: Callable[[], T], make: Callable[[Calls], None] = make_calls) -> tuple[Recording | str, T]:
    """Calls it once. The recording does the same again, on what is then in the same places, and writes what the
    function returned anew; the name of an operation where torch computes something itself. What the function does in
    Python alone, such as reading a tensor as a list, goes unnoticed and is not done again: it must be code of which
    that is known. make: see `Recording`."""
    calls: Calls = []
    token = _noted.set(calls)
    try:
        with _Watch() as watch:
            out = function()
    finally:
        _noted.reset(token)
    return watch.own or Recording(calls, watch.held, make), out
