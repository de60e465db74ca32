"""Operations whose GEMMs dequantise weights that stay quantised: what a GPU has kernels for, anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterOps, AdapterWeights
from draftwing.ops.fp8.spec import Fp8Blocks
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.gemm.gemms import GROUP_ROWS, DequantisedGemm, GroupGemm, dense_gemms
from draftwing.ops.gemm.groups import PackedGroups, unpacked
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.runtime import Runtime
from draftwing.ops.table import TorchOps


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N] float32, of which a row has the same bits among any number: each element is a
    sum by itself."""
    wide = weight.float()
    return torch.cat([(wide * some.unsqueeze(1)).sum(2) for some in x.float().split(16)])


class RowByRow:
    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        y = by_rows(x, weight)
        y = y if bias is None else y + bias.float()
        return (y if residual is None else y + residual.float()).to(x.dtype)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        gate, up = self.linear(x.float(), weight, bias).chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)


class TorchGroupGemm:
    def __init__(self) -> None:
        self.rows: list[int] = []  # of the calls

    def linear(self, x: Tensor, weight: PackedGroups, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        self.rows.append(len(x))
        return RowByRow().linear(x, self.dense(weight), bias, residual)

    def gated(self, x: Tensor, weight: PackedGroups, bias: Tensor | None) -> Tensor:
        self.rows.append(len(x))
        return RowByRow().gated(x, self.dense(weight), bias)

    def dense(self, weight: PackedGroups, out: Tensor | None = None, leave_room: bool = False) -> Tensor:
        matrix = unpacked(weight._replace(order=None))
        return matrix if out is None else out.copy_(matrix)


class LateSideWork:
    """Does what it is given when it is waited for, and not before. busy: cannot now."""

    def __init__(self) -> None:
        self.busy, self.waiting = False, 0

    def start(self, work: Callable[[], object]) -> Callable[[], object] | None:
        self.waiting += not self.busy
        return None if self.busy else work

    def join(self, done: Callable[[], object]) -> None:
        self.waiting -= 1
        done()


class GroupGemmOps(GemmOps):
    keeps_groups = True

    def __init__(self) -> None:
        self.gemm = TorchGroupGemm()
        self.side: LateSideWork | None = None

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False,
        whole: int = 0,
    ) -> list[Gemm]:  # fmt: skip
        if isinstance(weight, Tensor):
            return dense_gemms(weight, RowByRow(), None, 0, deterministic)
        if isinstance(weight, Fp8Blocks):
            return super().gemms(weight, bias, deterministic)
        dequantised = DequantisedGemm(self.gemm, weight, RowByRow() if deterministic else None, self.side)
        return [GroupGemm(self.gemm, weight, GROUP_ROWS), dequantised]


class AdaptersByRow(AdapterOps):
    """A row has the same bits among any number."""

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> Tensor:
        each = [super(AdaptersByRow, self).adapter_down(x[i : i + 1], weights, slots[i : i + 1]) for i in range(len(x))]
        return torch.cat(each) if each else super().adapter_down(x, weights, slots)

    def adapter_up(
        self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None
    ) -> None:
        for row in (slice(i, i + 1) for i in range(len(y))):
            super().adapter_up(y[row], made[row], weights, slots[row])


class HalfRuntime(Runtime):
    def exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class GroupTorchOps(TorchOps):
    def __init__(self, device: torch.device) -> None:
        self.made = self.make_gemms()
        super().__init__(device, runtime=HalfRuntime(device), gemms=self.made, adapters=AdaptersByRow())

    def make_gemms(self) -> GroupGemmOps:
        return GroupGemmOps()


class Fp8TorchOps(GroupTorchOps):
    """As those of a GPU that multiplies activations in fp8, with weights of any size."""

    def make_gemms(self) -> GroupGemmOps:
        gemms = GroupGemmOps()
        gemms.fp8_from = 0
        return gemms
