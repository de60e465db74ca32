"""What adapters add, in C: ops/cpu/csrc/adapters.c. A row has the same bits in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterOps, AdapterWeights
from draftwing.ops.cpu.arguments import addresses, with_rows
from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import CpuRuntime

_DOWN, _UP = 1, 2


class CpuAdapterOps(AdapterOps):
    """Takes real tensors in float32 or bfloat16; others go to torch."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self.raw, self.workers = runtime.raw, runtime.workers

    def row_slots(self, table: Tensor, rows: Tensor, each: int) -> Tensor:
        rows, out = rows.contiguous(), rows.new_empty(len(rows) * each)
        self.raw.row_numbers(out, table, rows, len(rows), each)
        return out

    def adapt(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        if not _takes(y, x, weights):
            super().adapt(y, x, weights, slots)
            return
        self._call(y, x, weights, slots, self._between(x, weights), _DOWN | _UP)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
        if not _takes(x, x, weights):
            return super().adapter_down(x, weights, slots)
        made = torch.zeros(len(x), weights.down.shape[1] * weights.down.shape[2])  # ranks sum all of it
        self._call(None, x, weights, slots, made, _DOWN)
        return made

    def adapter_up(self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        if not _takes(y, y, weights) or made.dtype != torch.float32:
            super().adapter_up(y, made, weights, slots)
            return
        self._call(y, None, weights, slots, made.contiguous(), _UP)

    @staticmethod
    def _between(x: Tensor, weights: AdapterWeights) -> Tensor:
        return x.new_empty(len(x), weights.down.shape[1] * weights.down.shape[2], dtype=torch.float32)

    def _call(
        self, y: Tensor | None, x: Tensor | None, weights: AdapterWeights, slots: Tensor, between: Tensor, parts: int
    ) -> None:
        x = None if x is None else with_rows(x)
        assert y is None or y.stride(1) == 1
        some = y if x is None else x
        assert some is not None and slots.is_contiguous() and len(slots) == len(some)
        self.raw.adapters(
            y, 0 if y is None else y.stride(0), x, 0 if x is None else x.stride(0), slots, len(some),
            some.dtype == torch.bfloat16, between, parts, self.workers.address, *_numbers(weights),
        )  # fmt: skip


def _numbers(weights: AdapterWeights) -> tuple[int, ...]:
    """Returns what C is told of a matrix (`adapted_of`)."""
    _, slices, rank, inputs = weights.down.shape
    small, outputs = weights.down.dtype == torch.bfloat16, weights.up.shape[2]
    return *addresses(weights[:5]), slices, rank, small, inputs, outputs


def numbers_of_adapters(weights: AdapterWeights) -> Tensor:
    """Returns the same where C reads it."""
    return torch.tensor(_numbers(weights))


def takes(dtype: torch.dtype, weights: AdapterWeights) -> bool:
    """Returns whether C does for rows of this type: those in bfloat16 have factors in it, too."""
    known = dtype in DTYPES and weights.down.dtype in DTYPES
    return known and (weights.down.dtype == torch.bfloat16 or dtype == torch.float32)


def _takes(y: Tensor, x: Tensor, weights: AdapterWeights) -> bool:
    return x.dtype == y.dtype and takes(y.dtype, weights)
