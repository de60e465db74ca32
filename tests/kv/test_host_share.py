"""Host memory of a rank that rank 0 decides for: whose copies it has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from distant_device import DistantCpu
from torch import Tensor

from draftwing.kv.host_share import HostShare
from draftwing.kv.prefix_index import BLOCK
from draftwing.kv.slot_bytes import SlotBytes


class Counted(DistantCpu):
    """Counts the bytes on their way to the host."""

    asked = 20
    leaving = most = 0

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        size, there = sum(len(host) for _, host in pairs), False
        arrived, self.leaving = super().copy_out(pairs), self.leaving + size
        self.most = max(self.most, self.leaving)

        def done() -> bool:
            nonlocal there
            if not there and arrived():
                there, self.leaving = True, self.leaving - size
            return there

        return done


def test_copies_that_leave_late_fill_no_memory() -> None:
    """Rank 0 has been rid of its own long ago, and goes on."""
    count, device = 12, Counted()
    pool = torch.arange(count * BLOCK, dtype=torch.int64)[:, None]
    before, block = pool.clone(), BLOCK * 8
    share = HostShare(device, SlotBytes([pool]), SlotBytes([]), count, 1, 3 * block)
    slots = [np.arange(at * BLOCK, (at + 1) * BLOCK) for at in range(count)]
    for at in range(count):
        share.keep(share.slots, slots[at], [[at]])
    assert 2 * block <= device.most <= 3 * block
    pool.zero_()
    for at in reversed(range(count)):
        share.bring(share.slots, slots[at], [[at]], 0)
    share.settle()
    assert device.leaving == 0 and torch.equal(pool, before)
