"""This machine's CPU as a device with memory of its own: copies from and to host memory arrive late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwing.engine.devices.cpu import CpuDevice
from draftwing.ops.table import TorchOps


class DistantCpu(CpuDevice):
    """What is asked so often whether it has arrived has; until then the host's part of it holds anything. Copies of one
    direction arrive in order, as on a stream."""

    has_own_memory = True
    asked: int = 3

    def peak(self, fn: Callable[[], object]) -> int:
        fn()
        return 0

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        for _, host in pairs:
            host.fill_(0xA5)

        def arrive() -> None:
            for source, host in pairs:
                assert bool((host == 0xA5).all()), "the host has written where a copy arrives"
                host.copy_(source)

        return self._late(arrive)

    def copy_in(self, parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[], bool]]:
        found = torch.cat(list(parts))
        sent = found.clone()

        def arrive() -> None:
            assert torch.equal(torch.cat(list(parts)), sent), "the host has written what is being copied"

        return found, self._late(arrive)

    def _late(self, arrive: Callable[[], None]) -> Callable[[], bool]:
        left = [self.asked]

        def done() -> bool:
            left[0] -= 1
            if left[0] == 0:
                arrive()
            return left[0] <= 0

        return done


class LaterRanks(DistantCpu):
    """Of ranks from 1 on copies arrive much later."""

    def __init__(self, rank: int = 0, ops: TorchOps | None = None) -> None:
        super().__init__(rank, ops)
        self.asked = 40 if rank else 3


class LostCpu(DistantCpu):
    """No copy arrives."""

    asked = 1 << 60
