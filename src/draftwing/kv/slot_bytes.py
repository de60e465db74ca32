"""The bytes of slots, out of the pool and back: of whatever tensors have slots as their first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotBytes:
    """each: bytes of one slot in all tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: [slots, ...], of any types. Those without elements are left out."""
        self._rows = [_wide(kept.view(len(kept), -1)) for kept in tensors if kept.numel()]
        self.each = sum(rows.shape[1] * rows.itemsize for rows in self._rows)

    def read(self, slots: Tensor) -> memoryview:
        """Returns the bytes of slots [n] int64: of all slots of the first tensor, then of the second. Waits for the
        device."""
        found = torch.cat([rows.index_select(0, slots).flatten().view(torch.uint8) for rows in self._rows])
        return found.cpu().numpy().data

    def write(self, slots: Tensor, data: memoryview, first: int = 0) -> None:
        """Writes slots [n] with what `read` has returned of them, and of others before and behind: theirs begin with
        the `first` one."""
        count = len(data) // self.each
        assert len(data) == self.each * count and first + len(slots) <= count, "the bytes are of other slots"
        stored, at = torch.frombuffer(data, dtype=torch.uint8).to(self._rows[0].device), 0
        for rows in self._rows:
            size = count * rows.shape[1] * rows.itemsize
            part = stored[at : at + size] if at % rows.itemsize == 0 else stored[at : at + size].clone()
            rows.index_copy_(0, slots, part.view(count, -1)[first : first + len(slots)].view(rows.dtype))
            at += size


def _wide(rows: Tensor) -> Tensor:
    """rows [slots, n] -> the same bytes as the largest integers that a row is made of: they are copied one by one."""
    size = rows.shape[1] * rows.itemsize
    kind = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % kind.itemsize == 0)
    return rows.view(torch.uint8).view(kind)
