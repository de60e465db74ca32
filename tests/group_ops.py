"""Operations whose GEMMs dequantise weights that stay quantised: what a GPU has kernels for, anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.ops.groups import PackedGroups, unpacked
from draftwing.ops.torch.ops import TorchOps


class RowByRow:
    """A row has the same bits among any number, for rows are multiplied one by one."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        y = torch.stack([(weight.float() * row.float()).sum(1) for row in x])
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

    def dense(self, weight: PackedGroups, out: Tensor | None = None, aside: bool = False) -> Tensor:
        matrix = unpacked(weight._replace(order=None))
        return matrix if out is None else out.copy_(matrix)


class TorchTallGemm(TorchGroupGemm):
    """For up to 256 rows."""

    def linear(  # type: ignore[override]
        self, x: Tensor, weight: PackedGroups, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor | None:
        return super().linear(x, weight, bias, residual) if len(x) <= 256 else None

    def gated(self, x: Tensor, weight: PackedGroups, bias: Tensor | None) -> Tensor | None:  # type: ignore[override]
        return super().gated(x, weight, bias) if len(x) <= 256 else None


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


class GroupTorchOps(TorchOps):
    keeps_groups = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gemm = TorchGroupGemm()
        self.tall: TorchTallGemm | None = None
        self.side: LateSideWork | None = None

    def group_gemm(self, weight: PackedGroups) -> TorchGroupGemm:
        return self.gemm

    def tall_gemm(self, weight: PackedGroups) -> TorchTallGemm | None:
        return self.tall

    def side_work(self) -> LateSideWork | None:
        return self.side

    def small_m_gemm(self, weight: Tensor) -> RowByRow:
        return RowByRow()

    def packs_with_onednn(self, weight: Tensor) -> bool:
        return False

    def exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class Fp8TorchOps(GroupTorchOps):
    """As those of a GPU that multiplies activations in fp8, with weights of any size."""

    fp8_from = 0
