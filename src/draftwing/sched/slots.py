"""Free KV slots, a stack. Slot 0 is the pool's dummy and is never handed out."""

from __future__ import annotations

import numpy as np

from draftwing.core import IntArray


class SlotAllocator:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._stack = np.arange(slots, 0, -1, dtype=np.int64)
        self.available = slots

    def alloc(self, count: int) -> IntArray:
        assert 0 <= count <= self.available, f"{count} slots wanted, {self.available} free"
        self.available -= count
        return self._stack[self.available : self.available + count].copy()

    def free(self, slots: IntArray) -> None:
        end = self.available + len(slots)
        assert end <= self.slots, "a slot was freed twice"
        self._stack[self.available : end] = slots
        self.available = end

    def free_slots(self) -> IntArray:
        """The slots on the stack, for integrity checks."""
        return self._stack[: self.available].copy()
