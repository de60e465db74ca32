"""This machine's CPU as a device that captures graphs, and whose memory is moved to the host while an engine sleeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from engine_rig import record_by_calling
from torch import Tensor

from draftwing.config.devices import Defaults
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.devices.put_away import PutAway, bytes_to_copy, put_storages_away
from draftwing.ops.table import TorchOps


class MovingCpu(CpuDevice):
    """Computes with torch alone, which asks tensors for their addresses: whoever reads one that was put away gets
    nothing, and after it has come back, a stale address is one of freed memory. room: whether there is any for what
    comes back."""

    has_own_memory = True
    room = True

    def make_ops(self) -> TorchOps:
        return TorchOps(self.device)

    @property
    def defaults(self) -> Defaults:
        return Defaults(max_running_requests=4, chunked_prefill_size=128, graph_size=2)

    def peak(self, fn: Callable[[], object]) -> int:
        fn()  # of host memory, which is not counted here
        return 0

    def record(self, fn: Callable[[], Any], pool: str = "steps") -> Any:
        return record_by_calling(fn)

    def put_away(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> PutAway:
        done = put_storages_away(self, kept, emptied)

        def back() -> None:
            if not self.room:
                raise self.out_of_memory("no room")
            done.back()

        return PutAway(done.freed, back)

    def bytes_to_copy(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> int:
        return bytes_to_copy(kept, emptied)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In place of `kv.pool.zeros_as_written`, whose memory is numpy's."""
    return torch.zeros(shape, dtype=dtype, device=device)
