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
Program = tuple[int, bool, bool]  # ranges, whether for gates and ups, and whether results are held
_OTHERS = (8, 12)  # compute capabilities, up to the point, where Triton's products are gemm.cu's instruction
_INSTRUCTIONS = {torch.bfloat16: "k16.f32.bf16.bf16", torch.float16: "k16.f32.f16.f16"}
# Features of a block: as many as registers hold sums twice. Of gates and ups as many of either. Of one range those that
# are held, whose sums registers hold once and in 16 bits, and a few for products to which something is added.
_FEATURES, _GATED = (192, 176, 160, 144, 128), (192, 160, 128)
_HELD, _ONE_RANGE = (256, 224, 208, 192), (192, 128)
_TOKENS = 128  # rows of x that a block takes
_PAIR = 2  # blocks of a cluster
_SHARED = 227 << 10  # bytes of a block
_BEFORE_RINGS = 1536  # bytes of it at most: barriers, and up to what copies are aligned to
_BOX = 8 << 10  # bytes of 32 columns of results of 128 rows
_HELD_ROOM = 3  # of these that have room where results are held
_STEP = 16  # features, by which results differ
# Panels that the first range has at least, for a tile's results leave while they are multiplied, and the first share.
_PANELS, _SHARE_PANELS, _HELD_PANELS = -(-_FEATURES[0] // 32), 2, -(-_HELD[0] // 32)
# Features whose time a tile of the most features takes besides its own: 8% of it with K in ranges, by a sweep of
# matrices of 4,096 to 28,672 columns (docs/dev/gpu_kernels.md).
_MOST_TAKE = 16
# Rows of x from which these kernels are as fast as those for few rows with any weight; from which they are with weights
# that leave few multiprocessors without features, and up to which if K has ranges; and how many have features then.
MANY_FROM, FROM, UP_TO, _FULL = 385, 193, 256, 0.9


class Size(NamedTuple):
    """Of a kernel."""

    features: int  # of a block's part of a tile, and of an instruction
    ranges: int  # of K
    gated: bool
    held: bool  # results wait in 16 bits, and nothing is added to them

    @property
    def threads(self) -> int:
        return 384

    @property
    def name(self) -> str:
        return f"dense_many_{self.features}_{self.ranges}_{int(self.gated)}" + "_held" * self.held

    @property
    def stages(self) -> int:
        """Returns those of the ring: all that results leave room for."""
        width = self.features // 2 if self.gated else self.features
        room = _SHARED - _BEFORE_RINGS - (_HELD_ROOM if self.held else -(-width // 32)) * _BOX
        return room // ((_TOKENS + self.features) * PANEL * 2)

    def tiles(self, rows: int, weights: int) -> int:
        """Returns those of clusters, of a product with so many rows of x and of the weight."""
        return -(-rows // _TOKENS) * -(-weights // (_PAIR * self.features))


SIZES = [
    Size(features, ranges, gated, held)
    for ranges in RANGES
    for held in ((False, True) if ranges == 1 else (False,))
    for gated in (False, True)
    for features in (_HELD if held else _ONE_RANGE if ranges == 1 else _GATED if gated else _FEATURES)
]


PROGRAMS: list[Program] = list(dict.fromkeys(size[1:] for size in SIZES))


def takes(features: int, columns: int, ranges: int) -> bool:
    """Returns whether there are kernels for results of so many features, of so many columns of x."""
    least = SHARES * (_SHARE_PANELS - 1) + 1 if ranges == SHARES else _PANELS * ranges
    return features % _STEP == 0 and columns % PANEL == 0 and columns >= least * PANEL


@functools.lru_cache(maxsize=4096)  # the layers of a forward ask for the same few
def cut_of(rows: int, weights: int, columns: int, gated: bool, adds: bool, ranges: int, at_once: int) -> Size:
    """Returns the size of the kernel for so many rows of x, and of a weight with so many columns. adds: something to
    the results. at_once: clusters of two blocks."""
    held = ranges == 1 and not adds and columns >= _HELD_PANELS * PANEL

    def cost(size: Size) -> tuple[int, int]:
        """Of turns of clusters. Of as long ones more features are the better where they are held, else fewer."""
        turns = -(-size.tiles(rows, weights) // at_once)
        more = _MOST_TAKE if size.features == _FEATURES[0] and not held else 0
        return turns * (size.features + more), -size.features if held else size.features

    return min((size for size in SIZES if size[1:] == (ranges, gated, held)), key=cost)


@functools.lru_cache(maxsize=4096)
def beats_few(rows: int, weights: int, columns: int, gated: bool, adds: bool, ranges: int, at_once: int) -> bool:
    """Returns whether the kernels for few rows, which have the same bits, take longer, as `cut_of` has arguments."""
    if rows >= MANY_FROM or rows < FROM:
        return rows >= MANY_FROM
    size = cut_of(rows, weights, columns, gated, adds, ranges, at_once)
    if rows > UP_TO and not size.held:
        return False
    turns, blocks = -(-size.tiles(rows, weights) // at_once), -(-rows // _TOKENS)
    return weights * blocks >= _FULL * turns * at_once * _PAIR * size.features


class ManyGemm:
    """The kernels of one type, device and number of ranges."""

    def __init__(self, device: torch.device, dtype: torch.dtype, ranges: int) -> None:
        self._place, self._ranges = (dtype, device), ranges

    @functools.cache  # noqa: B019 (there is one object for each device, and it stays)
    def _module(self, program: Program) -> Module:
        """Not before a product needs it: while weights load, another process compiles it."""
        dtype, device = self._place
        return Module(read_source(program, dtype), options_for(dtype), device)

    @functools.cache  # noqa: B019
    def _kernel(self, size: Size) -> Kernel:
        return self._module(size[1:]).kernel(size.name, size.threads, _SHARED)

    @functools.cached_property
    def _at_once(self) -> int:
        return self._kernel(Size(_FEATURES[0], self._ranges, False, False)).clusters_at_once(_PAIR)

    def beats_few(self, x: Tensor, weight: Tensor, gated: bool, adds: bool) -> bool:
        """Returns whether the kernels for few rows take longer."""
        return beats_few(len(x), len(weight), x.shape[1], gated, adds, self._ranges, self._at_once)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, fresh: bool
    ) -> Tensor:
        """Multiplies as `linear` and `gated` of `DenseKernels` do, where `takes` says so."""
        parts = 2 if gated else 1
        (rows, columns), features = x.shape, weight.shape[0] // parts
        assert takes(features, columns, self._ranges) and x.is_contiguous() and weight.is_contiguous()
        assert residual is None or residual.is_contiguous()
        at_once = self._at_once
        size = cut_of(rows, len(weight), columns, gated, residual is not None, self._ranges, at_once)
        blocks = _PAIR * min(at_once, size.tiles(rows, len(weight)))
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


def in_sets(x: Tensor) -> Tensor:
    """x [R, K] in 16 bits, K a multiple of 32 -> the same, columns as instructions of gemm.cu take them: of 32 the
    first four of each eight, then the others. The kernels here multiply any 16 columns that lie side by side."""
    rows, columns = x.shape
    fours = x.contiguous().view(torch.int64).view(rows, columns // 32, 4, 2)
    return fours.transpose(2, 3).reshape(rows, columns // 4).view(x.dtype)


def read_source(program: Program, dtype: torch.dtype) -> str:
    """Returns what is compiled."""
    files, features = ["gemm_dense.cu", "gemm_dense_many.cu"], {size.features for size in SIZES if size[1:] == program}
    return cuda_wgmma.read_source(files, _INSTRUCTIONS[dtype], features, kernel_lines(program))


def kernel_lines(program: Program) -> list[str]:
    """Returns lines of the source: kernels."""
    return [
        f"DENSE_MANY({size.name}, {', '.join(str(int(each)) for each in size)}, {size.threads})\n"
        for size in SIZES
        if size[1:] == program
    ]


def compile_ahead(program: Program, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts what `ManyGemm` compiles into the user's cache folder, for devices of this compute capability."""
    compile_source(read_source(program, dtype), options_for(dtype), capability)


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
