"""Calls of the C kernels, noted once and made again: what a CUDA graph is on a GPU.

Starting an operation takes Python and torch 10 us where a forward pass has just emptied the caches, and a small step
starts a hundred of them. The kernels get addresses and sizes alone, so work that consists of them is a list of
calls. All memory that was made while they were noted is kept with it, and may be that of other recordings, too; tensors
that were there before must outlive it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class Place(NamedTuple):
    """Where the next tensor of a `StepMemory` lies: a chunk, and a byte of it."""

    chunk: int = 0
    byte: int = 0


class StepMemory:
    """Memory of whatever is recorded. Recordings that are never between the begin and the end of one another have the
    same, from the same place on: all of them together take no more than the largest."""

    CHUNK = 1 << 20  # bytes, at least
    ALIGNED = 64  # a cache line, as torch's own memory

    def __init__(self) -> None:
        self.next = Place()
        self.chunks: list[Any] = []  # uint8 arrays: memory that is asked for here is no tensor of a recording

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def take(self, like: Tensor) -> Tensor:
        """Returns a tensor of this shape and type, dense, from `next` on."""
        size = like.numel() * like.itemsize
        chunk, byte = self.next
        while chunk < len(self.chunks) and byte + size > len(self.chunks[chunk]):
            chunk, byte = chunk + 1, 0
        if chunk == len(self.chunks):
            self.chunks.append(_aligned(max(size, self.CHUNK), self.ALIGNED))
        self.next = Place(chunk, math.ceil((byte + size) / self.ALIGNED) * self.ALIGNED)
        with _disable_current_modes():  # memory is no work of the step
            return torch.from_numpy(self.chunks[chunk][byte : byte + size]).view(like.dtype).view(like.shape)


def _aligned(size: int, alignment: int) -> Any:
    """Returns bytes [size] that begin with a line, and have one behind their end: kernels read whole vectors."""
    memory = np.empty(size + 2 * alignment, np.uint8)
    first = -memory.ctypes.data % alignment
    return memory[first : first + size]


class _Watch(TorchDispatchMode):
    """Says where what is allocated lies, and looks for work that is torch's own."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler to keep it out of here, which takes a second."""
        return False

    def __init__(self, memory: StepMemory) -> None:
        super().__init__()
        self._memory = memory
        self.own: str | None = None  # an operation that computes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return self._memory.take(out) if out.numel() else out
        if not (func.is_view and _storages(out) <= _storages(args)):
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

    def __init__(self, calls: Calls, memory: StepMemory, make: Callable[[Calls], None]) -> None:
        self._calls, self._memory, self._make = calls, memory, make

    def replay(self) -> None:
        self._make(self._calls)


def replay_calls(calls: Calls) -> None:
    for function, numbers in calls:
        function(*numbers)


def record(
    function: Callable[[], T], make: Callable[[Calls], None] = replay_calls, memory: StepMemory | None = None
) -> tuple[Recording | str, T]:
    """Calls it once. The recording does the same again, on what is then in the same places, and writes what the
    function returned anew; the name of an operation where torch computes something itself. What the function does in
    Python alone, such as reading a tensor as a list, goes unnoticed and is not done again: it must be code of which
    that is known. make: see `Recording`. memory: of its own if not given."""
    calls, memory = Calls(), memory or StepMemory()
    token = _noted.set(calls)
    try:
        with _Watch(memory) as watch:
            out = function()
    finally:
        _noted.reset(token)
    return watch.own or Recording(calls, memory, make), out
