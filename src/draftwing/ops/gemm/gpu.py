"""Which GEMMs a GPU has for a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.cuda.side_stream import side_stream
from draftwing.ops.fp8 import spec as fp8_blocks
from draftwing.ops.fp8.spec import FP8_FROM, Fp8Blocks
from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm import cuda_dense, cuda_fp8, cuda_groups, cuda_heads, cuda_many, cuda_wgmma, groups
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.gemm.gemms import GROUP_ROWS, DequantisedGemm, GroupGemm, KernelGemm, TorchGemm, dense_gemms
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.gemm.stored import BlockRows, QuantizedRows
from draftwing.ops.upload import uploaded

_UNIT, _DENSE_UNIT = 32, 16  # rows that kernels multiply of quantised weights, with gates that are fused, and of others


class GpuGemmOps(GemmOps):
    """Chooses among kernels in CUDA and torch's GEMM."""

    merges_matrices = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.keeps_groups = on_gpu
        fast = on_gpu and cuda_wgmma.runs_on(torch.cuda.get_device_capability(device))
        self.fp8_from = FP8_FROM if fast else None

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False,
        whole: int = 0,
    ) -> list[Gemm]:  # fmt: skip
        rows = weight.shape[0] if isinstance(weight, Tensor) else weight.rows
        whole = whole or rows
        must_fit(rows, whole, _DENSE_UNIT if isinstance(weight, Tensor) else _UNIT)
        if isinstance(weight, Fp8Blocks):
            ranges = cuda_fp8.ranges_of(whole, weight.columns)
            return [KernelGemm(cuda_fp8.fp8_gemm(self.device).cut_into(ranges), weight)]
        if isinstance(weight, PackedGroups):
            return self._group_gemms(weight, deterministic)
        if not gemm.takes(weight):
            return [TorchGemm(weight)]
        medium = None
        if cuda_dense.takes(weight) and whole % _DENSE_UNIT == 0:
            medium = cuda_dense.dense_gemm(weight.device).cut_into(cuda_dense.ranges_of(whole, weight.shape[1]))
        few = gemm.small_m_gemm(weight.device, weight.dtype)
        many = None
        if deterministic:
            many = cuda_many.shares_gemm(weight.device, (weight.shape[0], weight.shape[1]), weight.dtype, False)
        return dense_gemms(weight, few, medium, cuda_dense.MOST, deterministic, many, whole)

    def _group_gemms(self, weight: PackedGroups, deterministic: bool) -> list[Gemm]:
        device, dtype, width = weight.codes.device, weight.scales.dtype, cuda_groups.width_of(weight)
        kernels = cuda_groups.group_gemm(device, dtype, width)
        many = cuda_many.shares_gemm(device, (weight.rows, weight.columns), dtype, weights_in_sets=True)
        exact = (many or gemm.small_m_gemm(device, dtype)) if deterministic else None
        side = side_stream(self.device) if self.device.type == "cuda" else None
        in_sets = deterministic and many is not None and many.weights_in_sets
        dequantised = DequantisedGemm(kernels, weight, exact, side, in_sets=in_sets)
        return [GroupGemm(kernels, weight, GROUP_ROWS), dequantised]

    def keeps_bits(self, weight: Tensor) -> bool:
        return gemm.takes(weight) or super().keeps_bits(weight)

    def head_products(
        self, weight: Tensor | Sequence[BlockRows], heads: int, dtype: torch.dtype
    ) -> cuda_heads.HeadGemm | None:
        if not isinstance(weight, Tensor) or not cuda_heads.takes(weight, heads, dtype):
            return None
        return cuda_heads.HeadGemm(weight, heads)

    def pack_fp8(self, rows: QuantizedRows) -> Fp8Blocks:
        return fp8_blocks.pack(rows, self.device)

    def pack_groups(self, rows: QuantizedRows, dtype: torch.dtype) -> PackedGroups:
        return groups.pack(rows, dtype, self.device)

    def quantize_groups(self, weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
        return groups.quantized(uploaded(weight, self.device), scheme, dynamic)


def must_fit(rows: int, whole: int, unit: int) -> None:
    """Raises ConfigError where a share of the rows of a matrix is no multiple of what the whole one is: kernels would
    not take both, or fuse gates of one of them."""
    wanted = math.gcd(whole, unit)
    if rows % wanted:
        raise ConfigError(
            f"--enable-tp-invariance: expected a --tp-size that leaves each rank a multiple of {wanted} of a matrix's "
            f"{whole} rows; found {rows}. Take a smaller one, or leave the option out"
        )
