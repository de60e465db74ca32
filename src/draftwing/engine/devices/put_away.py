"""Memory of tensors, given back and had again: meanwhile they are there, with their shapes, and nobody may read them.

The memory is that of storages, so all views of it have it again, at another address: graphs that were captured know the
old one. Contents that are wanted are in host memory meanwhile, in slabs: page-locked memory comes in powers of two, and
each weight would take up to twice its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

SLAB = 256 << 20  # bytes of host memory that are asked for at once


class PutAway(NamedTuple):
    """freed: bytes that were given back.  back: has all as it was, once; raises `Device.out_of_memory`, and may be
    tried again, where there is no room."""

    freed: int
    back: Callable[[], None]


class Copies(Protocol):
    """What a device has of it (`engine.devices.base`)."""

    out_of_memory: type[Exception]

    def host_memory(self, size: int) -> Tensor: ...
    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]: ...
    def synchronize(self) -> None: ...
    def trim(self) -> None: ...


def storages_of(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Returns the storages of tensors whose memory can be given back, each once."""
    strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
    found = {(storage := tensor.untyped_storage())._cdata: storage for tensor in strided}
    return {key: storage for key, storage in found.items() if storage.nbytes() and storage.resizable()}


class _Place(NamedTuple):
    """parts: of host memory, with what the storage has held; of one that is emptied there are none."""

    storage: UntypedStorage
    size: int
    parts: list[Tensor]


def bytes_to_copy(kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> int:
    """Returns how much host memory `put_storages_away` takes."""
    return sum(storage.nbytes() for storage in _wanted(kept, emptied))


def put_storages_away(device: Copies, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> PutAway:
    """Does as `Device.put_away`, of tensors of the device alone."""
    device.synchronize()
    places = [*_copied(device, _wanted(kept, emptied))]
    places += [_Place(one, one.nbytes(), []) for one in storages_of(emptied).values()]
    device.synchronize()
    for place in places:
        place.storage.resize_(0)
    device.trim()

    def back() -> None:
        try:
            for storage, size, _ in places:
                storage.resize_(size)
        except device.out_of_memory:
            for storage, _, _ in places:
                storage.resize_(0)
            device.trim()  # else torch would keep for itself what it has got so far
            raise
        for storage, _, parts in places:
            into = _bytes(storage)
            for place, part in zip(into.split([len(part) for part in parts]) if parts else (), parts, strict=True):
                place.copy_(part, non_blocking=True)
            if not parts:
                into.zero_()
        device.synchronize()
        places.clear()

    return PutAway(sum(place.size for place in places), back)


def _wanted(kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> list[UntypedStorage]:
    """Returns storages of `kept` that none of `emptied` is a view of."""
    gone = storages_of(emptied)
    return [storage for key, storage in storages_of(kept).items() if key not in gone]


def _copied(device: Copies, storages: Sequence[UntypedStorage]) -> Iterator[_Place]:
    """Starts copies of storages to the host."""
    left, needed = torch.empty(0, dtype=torch.uint8), sum(storage.nbytes() for storage in storages)
    for storage in storages:
        parts, size = list[Tensor](), storage.nbytes()
        while size:
            if not len(left):
                left = device.host_memory(min(SLAB, needed))
            part, left = left[:size], left[size:]
            parts.append(part)
            size, needed = size - len(part), needed - len(part)
        device.copy_out(list(zip(_bytes(storage).split([len(part) for part in parts]), parts, strict=True)))
        yield _Place(storage, storage.nbytes(), parts)


def _bytes(storage: UntypedStorage) -> Tensor:
    """Returns all of a storage, [n] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
