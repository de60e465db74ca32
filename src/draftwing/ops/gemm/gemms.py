"""Products with one packed weight, for any device. Of a list of them the first that takes the rows of a call runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.contract import ANY_ROWS, DenseKernels, Gemm, SideWork
from draftwing.ops.gemm.groups import PackedGroups

# Up to this many rows our own kernel for few beats cuBLAS (docs/dev/gpu_kernels.md); it takes any number. Of a
# vocabulary's GEMM, which is long enough for its start and end not to matter, up to fewer, and of outputs of a router,
# or of a delta net's b and a, up to more: a GEMM that is over when it begins.
_FEW = 16
_LONG, _LONG_FEW = 1 << 16, 8
_TINY, _TINY_FEW = 512, 64
# From so many values of a weight on our kernel for more rows is the fastest above so many rows, and up to so many. From
# so many values on, but not with a vocabulary's, it is so up to all rows that it names. Smaller ones were not timed.
_MEDIUM_FROM, _MEDIUM_ABOVE, _MEDIUM_MOST, _LARGE_FROM = 1 << 24, 8, 64, 1 << 25
# Rows above which a matrix is copied for kernels of many rows with the bits of few, in deterministic mode: 256 rows
# take 0.8 to 1.4 of the time without, 512 rows 0.5 to 0.8 (docs/dev/gpu_kernels.md).
_SHARES_ABOVE = 256

# Of weights in groups: up to this many rows they are dequantised in registers, by kernels that give a row the same bits
# for each number of them; beyond, they are where the device has kernels for it, or a matrix is dequantised first.
GROUP_ROWS = 128
_MANY_ROWS = 2048  # more than kernels are for: all matrices of a layer are dequantised


@dataclass(frozen=True, eq=False)
class KernelGemm:
    """Kernels that read a weight where it lies."""

    kernels: Any  # with `linear` and `gated` of x, the weight, bias and residual
    weight: Any  # as they take it
    max_rows: int = ANY_ROWS

    def linear(
        self, x: Any, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor | None:
        found: Tensor | None = self.kernels.linear(x, self.weight, bias, residual)
        return found

    def gated(self, x: Any, bias: Tensor | None) -> Tensor | None:
        found: Tensor | None = self.kernels.gated(x, self.weight, bias)
        return found


class TorchGemm:
    """Torch's product with a matrix, whose bits may depend on the batch."""

    max_rows = ANY_ROWS

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        if overwrite and residual is not None and bias is None:
            return residual.addmm_(x, self._weight.t())  # saves a pass
        y = F.linear(x, self._weight, bias)
        return y if residual is None else y + residual

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None


class OneDnnGemm:
    """oneDNN's product with a copy of a matrix in its own layout. A row has the same bits in any batch."""

    max_rows = ANY_ROWS

    def __init__(self, weight: Tensor, threads: int) -> None:
        outputs, inputs = weight.shape
        self.alike = onednn.rows_summed_alike(inputs, min(outputs, onednn.MAX_TRIED), weight.dtype, threads)
        self.packed = onednn.pack(weight)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        return onednn.gemm_alike(x, self.packed, bias, residual, self.alike)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None


def dense_gemms(
    weight: Tensor,
    few: DenseKernels,
    medium: DenseKernels | None,
    most: int,
    deterministic: bool,
    many: DenseKernels | None = None,
    whole: int = 0,
) -> list[Gemm]:
    """Returns a GPU's GEMMs of a matrix: our own kernels for few rows and for some more, torch's for many. Where a row
    must have the same bits in any batch, ours take any number. most: rows that `medium` is fast for. many: with the
    bits of `few`. whole: outputs of the matrix of which this is a share, 0: its own."""
    outputs = whole or weight.shape[0]
    values = outputs * weight.shape[1]
    medium = medium if values >= _MEDIUM_FROM else None
    if deterministic and (medium is not None or many is None):
        return [KernelGemm(few if medium is None else medium, weight)]
    if deterministic:
        return [KernelGemm(few, weight, _SHARES_ABOVE), KernelGemm(many, weight)]
    if medium is None:
        up_to = _LONG_FEW if outputs >= _LONG else _TINY_FEW if outputs <= _TINY else _FEW
        return [KernelGemm(few, weight, up_to), TorchGemm(weight)]
    large = values >= _LARGE_FROM and outputs < _LONG
    own = KernelGemm(medium, weight, most if large else _MEDIUM_MOST)
    return [KernelGemm(few, weight, _MEDIUM_ABOVE), own, TorchGemm(weight)]


# -- weights in groups -----------------------------------------------------------------------------------------------


class GroupGemm(KernelGemm):
    """Kernels of a weight in groups, whose columns may lie in another order than those of x."""

    def linear(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor | None:
        return super().linear(in_order(x, self.weight), bias, residual)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None if self.weight.rows % 32 else super().gated(in_order(x, self.weight), bias)


class DequantisedGemm:
    """A GEMM of the matrix, which is dequantised for the time of one call, or while other work runs before it.

    exact: the kernels of the matrix where a row must have the same bits in any batch; else torch's product. in_sets:
    they take columns as `dense` gives them by that name.
    """

    max_rows = ANY_ROWS

    def __init__(
        self,
        kernels: Any,
        weight: PackedGroups,
        exact: DenseKernels | None,
        side: SideWork | None,
        in_sets: bool = False,
    ) -> None:
        """kernels: with `dense`."""
        self._kernels, self._weight, self._exact, self._side = kernels, weight, exact, side
        self._how = {"in_sets": True} if in_sets else {}
        self._later: Sequence[DequantisedGemm] = ()
        self._ahead: tuple[Tensor, Any] | None = None  # the matrix, and what to join before it is there

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        x, matrix = in_order(x, self._weight), self.matrix()
        if self._exact is not None:
            y = self._exact.linear(x, matrix, bias, residual, fresh=True)
        else:
            y = TorchGemm(matrix).linear(x, bias, residual, overwrite)
        if x.shape[0] > _MANY_ROWS:
            for gemm in self._later:
                gemm._begin()
        return y

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._exact is None or self._weight.rows % 32:
            return None
        return self._exact.gated(in_order(x, self._weight), self.matrix(), bias, fresh=True)

    def prefetch_dequant(self, later: Sequence[DequantisedGemm]) -> None:
        """Has these matrices, which the next calls of the same forward pass need, dequantised after a call of many rows
        while what follows runs."""
        self._later = later

    def settle(self) -> None:
        """Lets what was begun end, before the weight changes."""
        if self._ahead is not None:
            self.matrix()

    def matrix(self) -> Tensor:
        """Dequantises the matrix: [outputs, inputs], columns in the order that the product takes."""
        if self._ahead is None or self._side is None:
            out: Tensor = self._kernels.dense(self._weight, **self._how)
            return out
        (matrix, done), self._ahead = self._ahead, None
        self._side.join(done)
        return matrix

    def _begin(self) -> None:
        if self._side is None or self._ahead is not None:  # nobody took it: it is still right
            return
        out = self._weight.scales.new_empty(self._weight.rows, self._weight.columns)
        done = self._side.start(lambda: self._kernels.dense(self._weight, out, leave_room=True, **self._how))
        self._ahead = None if done is None else (out, done)


def in_order(x: Tensor, weight: PackedGroups) -> Tensor:
    """x [M, K] -> the same with columns in the order of the packed weight's."""
    return x if weight.order is None else x.index_select(1, weight.order)
