"""The bytes of slots, out of the pool and back: of whatever tensors have slots as their first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotBytes:
    """each: bytes of one slot in all tensors, 0 where none has elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: [slots, ...], of any types. Those without elements are left out."""
        self._rows = [_wide(kept.view(len(kept), -1)) for kept in tensors if kept.numel()]
        self.each = sum(rows.shape[1] * rows.itemsize for rows in self._rows)

    def read(self, slots: Tensor) -> memoryview:
        """Returns the bytes of slots [n] int64: of all slots of the first tensor, then of the second. Waits for the
        device."""
        return self.gather(slots).view(-1).cpu().numpy().data

    def gather(self, slots: Tensor, groups: int = 1) -> Tensor:
        """slots [groups * n] int64 -> [groups, bytes] uint8 on their device: what `read` returns of each group. Nobody
        waits."""
        count, at = len(slots) // groups, 0
        found = torch.empty(groups, count * self.each, dtype=torch.uint8, device=slots.device)
        for rows in self._rows:
            size, taken = count * rows.shape[1] * rows.itemsize, rows.index_select(0, slots).view(groups, -1)
            if _fits(found, at, rows):
                found.view(rows.dtype)[:, at // rows.itemsize : (at + size) // rows.itemsize] = taken
            else:
                found[:, at : at + size] = taken.view(torch.uint8)
            at += size
        return found

    def write(self, slots: Tensor, data: memoryview, first: int = 0) -> None:
        """Writes slots [n] with what `read` has returned of them, and of others before and behind: theirs begin with
        the `first` one."""
        if self.each:
            stored = torch.frombuffer(data, dtype=torch.uint8).to(slots.device)
            self.scatter(slots, stored.view(1, -1), first)

    def scatter(self, slots: Tensor, stored: Tensor, first: int = 0) -> None:
        """Does so with what `gather` has returned [groups, bytes], of which group after group is written. Nobody
        waits."""
        groups, count, at = len(stored), stored.shape[1] // max(self.each, 1), 0
        assert stored.shape[1] == self.each * count, "the bytes are of other slots"
        assert not self.each or first + len(slots) <= groups * count, "the bytes are of other slots"
        for rows in self._rows:
            size = count * rows.shape[1] * rows.itemsize
            if _fits(stored, at, rows):
                part = stored.view(rows.dtype)[:, at // rows.itemsize : (at + size) // rows.itemsize]
            else:
                part = stored[:, at : at + size].clone(memory_format=torch.contiguous_format).view(rows.dtype)
            part = part.reshape(groups * count, -1)
            rows.index_copy_(0, slots, part[first : first + len(slots)])
            at += size


def _fits(data: Tensor, at: int, rows: Tensor) -> bool:
    """Returns whether bytes [groups, n] are numbers of the rows' type, and begin with one at a position."""
    return data.shape[1] % rows.itemsize == 0 and at % rows.itemsize == 0


def _wide(rows: Tensor) -> Tensor:
    """rows [slots, n] -> the same bytes as the largest integers that a row is made of: they are copied one by one."""
    size = rows.shape[1] * rows.itemsize
    kind = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % kind.itemsize == 0)
    return rows.view(torch.uint8).view(kind)
