"""GEMMs of many rows in 16 bits: the Python side of gemm_dense_many.cu, for compute capability 9.0.

They have the bits of the kernels for few rows: those of gemm_dense.cu, which cut K into 1, 2 or 4 ranges, and those of
gemm.cu, which cut it into shares.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source, tensor_map
from draftwing.ops.gemm import cuda_wgmma
from draftwing.ops.gemm.cuda import options_for
from draftwing.ops.gemm.cuda_wgmma import PANEL
from draftwing.ops.gemm.shapes import SHARES

if TYPE_CHECKING:
    from draftwing.ops.gemm.triton_shares import TritonSharesGemm

RANGES = (*sorted(cuda_wgmma.RANGES), SHARES)
_OTHERS = (8, 12)  # compute capabilities, up to the point, where Triton's products are gemm.cu's instruction
_INSTRUCTIONS = {torch.bfloat16: "k16.f32.bf16.bf16", torch.float16: "k16.f32.f16.f16"}
# Features of a block: as many as registers hold sums twice. Of gates and ups as many of either.
_FEATURES, _GATED = (192, 176, 160, 144, 128), (192, 160, 128)
_TOKENS = 128  # rows of x that a block takes
_PAIR = 2  # blocks of a cluster
_SHARED = 227 << 10  # bytes of a block
_BEFORE_RINGS = 1536  # bytes of it at most: barriers, and up to what copies are aligned to
_BOX = 8 << 10  # bytes of 32 columns of results of 128 rows
_STEP = 16  # features, by which results differ
# Panels that the first range has at least, for a tile's results leave while they are multiplied, and the first share.
_PANELS, _SHARE_PANELS = -(-_FEATURES[0] // 32), 2


class Size(NamedTuple):
    """Of a kernel."""

    features: int  # of a block's part of a tile, and of an instruction
    ranges: int  # of K
    gated: bool

    @property
    def threads(self) -> int:
        return 384

    @property
    def name(self) -> str:
        return f"dense_many_{self.features}_{self.ranges}_{int(self.gated)}"

    @property
    def stages(self) -> int:
        """Returns those of the ring: all that results leave room for."""
        width = self.features // 2 if self.gated else self.features
        room = _SHARED - _BEFORE_RINGS - -(-width // 32) * _BOX
        return room // ((_TOKENS + self.features) * PANEL * 2)


SIZES = [
    Size(features, ranges, gated)
    for ranges in RANGES
    for gated, sizes in ((False, _FEATURES), (True, _GATED))
    for features in sizes
]


def takes(features: int, columns: int, ranges: int) -> bool:
    """Returns whether there are kernels for results of so many features, of so many columns of x."""
    least = SHARES * (_SHARE_PANELS - 1) + 1 if ranges == SHARES else _PANELS * ranges
    return features % _STEP == 0 and columns % PANEL == 0 and columns >= least * PANEL


@functools.lru_cache(maxsize=4096)  # the layers of a forward ask for the same few
def cut_of(rows: int, weights: int, gated: bool, ranges: int, at_once: int) -> tuple[Size, int]:
    """Returns the size of the kernel for so many rows of x, and its blocks. weights: rows of the weight. at_once:
    clusters of two blocks."""
    token_blocks = -(-rows // _TOKENS)

    def tiles(size: Size) -> int:
        return token_blocks * -(-weights // (_PAIR * size.features))

    def cost(size: Size) -> tuple[int, int]:
        """Of turns of clusters, and the larger tiles the better."""
        return -(-tiles(size) // at_once) * size.features, -size.features

    size = min((size for size in SIZES if size.ranges == ranges and size.gated == gated), key=cost)
    return size, _PAIR * min(at_once, tiles(size))


class ManyGemm:
    """The kernels of one type, device and number of ranges."""

    def __init__(self, device: torch.device, dtype: torch.dtype, ranges: int) -> None:
        self._place, self._ranges = (dtype, device), ranges

    @functools.cached_property
    def _module(self) -> Module:
        """Not before a product needs it: while weights load, another process compiles it."""
        dtype, device = self._place
        return Module(read_source(self._ranges, dtype), options_for(dtype), device)

    @functools.cache  # noqa: B019 (there is one object for each device, and it stays)
    def _kernel(self, size: Size) -> Kernel:
        return self._module.kernel(size.name, size.threads, _SHARED)

    @functools.cached_property
    def _at_once(self) -> int:
        return self._kernel(Size(_FEATURES[0], self._ranges, False)).clusters_at_once(_PAIR)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, fresh: bool
    ) -> Tensor:
        """Multiplies as `linear` and `gated` of `DenseKernels` do, where `takes` says so."""
        parts = 2 if gated else 1
        (rows, columns), features = x.shape, weight.shape[0] // parts
        assert takes(features, columns, self._ranges) and x.is_contiguous() and weight.is_contiguous()
        assert residual is None or residual.is_contiguous()
        size, blocks = cut_of(rows, weight.shape[0], gated, self._ranges, self._at_once)
        out = x.new_empty(rows, features)
        x_map = tensor_map(x.data_ptr(), (columns, rows, 1), (PANEL, _TOKENS // _PAIR, 1))
        w_map = tensor_map(weight.data_ptr(), (columns, features, parts), (PANEL, size.features // parts, parts))
        more, to = (
            tensor_map(each.data_ptr(), (features, rows, 1), (32, 64, 1))
            for each in (out if residual is None else residual, out)
        )
        self._kernel(size)(
            (blocks, 1), x_map, w_map, more, to, bias, residual, out, rows, features, columns, size.stages,
            overlap=not fresh, cluster=_PAIR,
        )  # fmt: skip
        return out


class SharesGemm:
    """Products of many rows with the bits that gemm.cu gives. weights_in_sets: weights come so, else this is done
    here."""

    def __init__(self, device: torch.device, dtype: torch.dtype, weights_in_sets: bool) -> None:
        self._gemm, self.weights_in_sets = many_gemm(device, dtype, SHARES), weights_in_sets

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once. What is multiplied is always
        `fresh`: x, and the weight too, were copied before."""
        return self._gemm.run(in_sets(x), self._ordered(weight), bias, residual, False, True)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self._gemm.run(in_sets(x), self._ordered(weight), bias, None, True, True)

    def _ordered(self, weight: Tensor) -> Tensor:
        return weight if self.weights_in_sets else in_sets(weight)


def in_sets(x: Tensor, spread: int = 32) -> Tensor:
    """x [R, K] in 16 bits, K a multiple of `spread` -> the same, columns as instructions of gemm.cu take them: of 32
    the first four of each eight, then the others; of 64, as gemm_experts.cu has quantised weights, the first four of
    each 16, then the next four, and so on. These take any 16 columns that lie side by side."""
    rows, columns = x.shape
    fours = x.contiguous().view(torch.int64).view(rows, columns // spread, 4, spread // 16)
    return fours.transpose(2, 3).reshape(rows, columns // 4).view(x.dtype)


def read_source(ranges: int, dtype: torch.dtype) -> str:
    """Returns what is compiled."""
    files = ["gemm_dense.cu", "gemm_dense_many.cu"]
    return cuda_wgmma.read_source(files, _INSTRUCTIONS[dtype], {*_FEATURES, *_GATED}, kernel_lines(ranges))


def kernel_lines(ranges: int) -> list[str]:
    """Returns lines of the source: kernels."""
    return [
        f"DENSE_MANY({size.name}, {size.features}, {size.ranges}, {int(size.gated)}, {size.threads})\n"
        for size in SIZES
        if size.ranges == ranges
    ]


def compile_ahead(ranges: int, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts what `ManyGemm` compiles into the user's cache folder, for devices of this compute capability."""
    compile_source(read_source(ranges, dtype), options_for(dtype), capability)


@functools.cache
def many_gemm(device: torch.device, dtype: torch.dtype, ranges: int) -> ManyGemm:
    """Its first product compiles. That raises OSError without NVRTC."""
    return ManyGemm(device, dtype, ranges)


def shares_gemm(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype, weights_in_sets: bool
) -> SharesGemm | TritonSharesGemm | None:
    """Returns kernels for a matrix of this shape, also for its halves as gates and ups, where there are some."""
    rows, columns = shape
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] in _OTHERS:
        from draftwing.ops.gemm.triton_shares import TritonSharesGemm  # of Triton, which other devices go without

        return TritonSharesGemm() if dtype in _INSTRUCTIONS and columns % PANEL == 0 else None
    if not cuda_wgmma.runs_on(capability):
        return None
    fits = dtype in _INSTRUCTIONS and rows % (2 * _STEP) == 0 and takes(rows, columns, SHARES)
    return SharesGemm(device, dtype, weights_in_sets) if fits else None
