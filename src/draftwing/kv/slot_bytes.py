"""The bytes of slots, out of the pool and back: of whatever tensors have slots as their first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotBytes:
    """each: bytes of one slot in all tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: [slots, ...], of any types. Those without elements are left out."""
        self._rows = [kept.view(len(kept), -1).view(torch.uint8) for kept in tensors if kept.numel()]
        self.each = sum(rows.shape[1] for rows in self._rows)

    def read(self, slots: Tensor) -> memoryview:
        """Returns the bytes of slots [n] int64: of all slots of the first tensor, then of the second. Waits for the
        device."""
        found = torch.cat([rows.index_select(0, slots).flatten() for rows in self._rows])
        return found.cpu().numpy().data

    def write(self, slots: Tensor, data: memoryview, first: int = 0) -> None:
        """Writes slots [n] with what `read` has returned of them, and of others before and behind: theirs begin with
        the `first` one."""
        count = len(data) // self.each
        assert len(data) == self.each * count and first + len(slots) <= count, "the bytes are of other slots"
        stored, at = torch.frombuffer(data, dtype=torch.uint8).to(self._rows[0].device), 0
        for rows in self._rows:
            part = stored[at : at + count * rows.shape[1]].view(count, -1)[first : first + len(slots)]
            rows.index_copy_(0, slots, part)
            at += count * rows.shape[1]
