"""An adapter as it lies in a slot of the device, in memory of the host: a slot is filled by a few copies that no step
waits for, where hundreds of small ones would take as long as ten steps."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwing.machine import processors
from draftwing.ops.adapters.spec import AdapterWeights

T = TypeVar("T")
PART_BYTES: Final = 4 << 20  # of memory asked for at once; a GPU's driver does nothing else meanwhile, for about 1 ms
PAUSE: Final = 0.05  # seconds between two parts, for steps that the driver held up
_BITS: Final = {2: np.int16, 4: np.int32, 8: np.int64}  # by bytes
_ALIGNED: Final = 16  # bytes at which tensors begin
_FIELDS: Final = 4  # tensors of `AdapterWeights` that have a place for each slot, its first ones
THREADS: Final = 4  # that write an image, or look at factors; memory is busy with fewer than these


class HostFactors(NamedTuple):
    """Factors of one slot in memory of the host: bits of numbers, as NumPy has them. Loading an adapter has thousands
    of small operations, and with each of torch's a thread lets others of Python go first, such as the one that runs
    steps."""

    down: NDArray[Any]  # [groups, slices, rank, inputs]
    up: NDArray[Any]  # [groups, outputs, rank]
    ranks: NDArray[Any]  # [groups, slices]
    scales: NDArray[Any]  # [groups, slices], bits of float32
    begins: list[int]
    memory: Tensor

    def clear(self) -> None:
        for part in self[:_FIELDS]:
            part[...] = 0

    def write(self, group: int, place: int, outputs: slice, down: Tensor, up: Tensor, scale: float) -> None:
        """Takes factors in the type of the slot's. outputs: of the slice `place`."""
        rank = len(down)
        self.down[group, place, :rank] = bits_of(down)
        self.up[group, outputs, :rank] = bits_of(up)
        self.ranks[group, place], self.scales.view(np.float32)[group, place] = rank, scale

    def views(self, group: int, place: int, outputs: slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors that were written there, [r, inputs] and [outputs, r]. like: the first one."""
        whole, size = self.memory.view(like.dtype), like.itemsize
        _, slices, most, inputs = self.down.shape
        down = self.begins[0] // size + (group * slices + place) * most * inputs
        up = self.begins[1] // size + (group * self.up.shape[1] + outputs.start) * most
        count = outputs.stop - outputs.start
        return whole.as_strided(like.shape, (inputs, 1), down), whole.as_strided((count, len(like)), (most, 1), up)


class SlotLayout:
    """Where the factors of one slot lie in `sizes` bytes each of host memory, and of the device on their way."""

    def __init__(self, weights: Mapping[str, AdapterWeights], groups: Mapping[str, int]) -> None:
        """groups: how many slots of each of the weights are one of an adapter."""
        self._weights, self._groups = weights, groups
        self.sizes: list[int] = []
        self._places: dict[str, tuple[int, list[int]]] = {}  # which memory, and where its tensors begin there
        for name, one in weights.items():
            begins, end = [], 0
            for part in one[:_FIELDS]:
                begins.append(end)
                end += -(-part[: groups[name]].nbytes // _ALIGNED) * _ALIGNED
            if not self.sizes or self.sizes[-1] + end > PART_BYTES:
                self.sizes.append(0)
            self._places[name] = len(self.sizes) - 1, [self.sizes[-1] + begin for begin in begins]
            self.sizes[-1] += end

    def weights_in(self, memory: Sequence[Tensor]) -> dict[str, AdapterWeights]:
        """Returns weights of one slot that lie in memory [size] uint8 each."""
        found = {}
        for name, one in self._weights.items():
            at, begins = self._places[name]
            parts = []
            for part, begin in zip(one[:_FIELDS], begins, strict=True):
                like = part[: self._groups[name]]
                shape = like.mT.shape if part is one.up else like.shape  # as files have it: a device turns it faster
                parts.append(memory[at][begin : begin + like.nbytes].view(part.dtype).view(shape))
            down, up, ranks, scales = parts
            up = up.mT
            found[name] = AdapterWeights(down, up, ranks, scales, one.ends, one.bounds)
        return found

    def numbers_in(self, memory: Sequence[Tensor]) -> dict[str, HostFactors]:
        """Returns where the same lie in memory of the host, for whoever writes them there."""
        every, found = [part.numpy() for part in memory], {}
        for name, one in self._weights.items():
            (at, begins), parts = self._places[name], []
            for part, begin in zip(one[:_FIELDS], begins, strict=True):
                shape = (self._groups[name], *(part.mT.shape if part is one.up else part.shape)[1:])
                size = math.prod(shape) * part.itemsize
                parts.append(every[at][begin : begin + size].view(_BITS[part.itemsize]).reshape(shape))
            down, up, ranks, scales = parts
            found[name] = HostFactors(down, up, ranks, scales, begins, memory[at])
        return found

    def fill(self, slot: int, arrived: Tensor) -> None:
        """Copies what has arrived at the device, all memory in one, into a slot, from 1 on."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, own in self.weights_in(arrived.split(self.sizes)).items():
            first = (slot - 1) * self._groups[name]
            targets += [part[first : first + self._groups[name]] for part in self._weights[name][:_FIELDS]]
            sources += own[:_FIELDS]
        for dtype in {part.dtype for part in targets}:
            same = [i for i, part in enumerate(targets) if part.dtype == dtype]
            torch._foreach_copy_([targets[i] for i in same], [sources[i] for i in same])


class SpareMemory:
    """Memory of the host for the next image. To get page-locked memory takes most of the time that an image does, so it
    is asked for ahead."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._parts = sizes, list[Tensor]()
        self._lock, self._filling = threading.Lock(), threading.Lock()

    def take(self, memory: Callable[[int], Tensor]) -> list[Tensor]:
        """Returns memory for an image, of which what is missing is asked for now. Raises RuntimeError without room."""
        with self._lock:
            parts, self._parts = self._parts, []
        return parts + [memory(size) for size in self._sizes[len(parts) :]]

    def fill(self, memory: Callable[[int], Tensor], pause: float = PAUSE) -> None:
        """Asks for what an image needs, a part at a time, as long as there is room. From any thread."""
        if not self._filling.acquire(blocking=False):
            return  # another thread does
        try:
            while (at := len(self._parts)) < len(self._sizes):
                part = memory(self._sizes[at])
                with self._lock:
                    if len(self._parts) == at:  # else they were taken meanwhile
                        self._parts.append(part)
                time.sleep(pause)
        except RuntimeError:
            pass  # there is no room: the next image asks again
        finally:
            self._filling.release()


def call_for_all(names: Sequence[T], write: Callable[[T], None]) -> None:
    """Calls `write` for each of the names, several at once where there are processors for it."""
    threads = min(THREADS, processors().threads, len(names))
    if threads < 2:
        for name in names:
            write(name)
        return
    with ThreadPoolExecutor(threads, "adapter") as pool:
        for _ in pool.map(write, names):
            pass


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """Returns the bits of a tensor of the host, which hold its memory."""
    whole = tensor.contiguous()
    start, storage = whole.storage_offset(), whole.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = whole  # type: ignore[attr-defined]  # else a copy is gone before it is read
    part = np.ctypeslib.as_array(memory)[start * whole.itemsize : (start + whole.numel()) * whole.itemsize]
    return part.view(_BITS[whole.itemsize]).reshape(whole.shape)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all numbers are finite: by few operations where the tensors, of one type, lie side by side."""
    first = min(tensors, key=Tensor.data_ptr)
    size = sum(one.nbytes for one in tensors)
    end = max(one.data_ptr() + one.nbytes for one in tensors)
    kinds = {(one.dtype, one.untyped_storage().data_ptr(), one.is_contiguous()) for one in tensors}
    together = len(kinds) == 1 and first.is_contiguous() and end - first.data_ptr() == size
    flat = [first.as_strided((size // first.itemsize,), (1,))] if together else [one.flatten() for one in tensors]
    parts = [part for one in flat for part in one.split(PART_BYTES // one.itemsize) if len(part)]
    found = list[bool]()

    def look(at: int) -> None:
        low, high = parts[at].aminmax()
        found.append(math.isfinite(low.item()) and math.isfinite(high.item()))  # NaN comes through

    call_for_all(range(len(parts)), look)
    return all(found)
