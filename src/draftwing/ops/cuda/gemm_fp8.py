"""GEMMs in fp8 x fp8 with scales of 128 columns: the Python side of gemm_fp8.cu, for compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda import wgmma
from draftwing.ops.cuda.gemm import options_for
from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.fp8_blocks import EIGHT, WIDE, Fp8Blocks, Fp8Rows

# Features of an instruction; a block has two parts of a weight, each at most so many.
_PARTS = (32, 64, 80, 88, 112, 136)
_MOST_ROWS = 2 * _PARTS[-1]  # of a weight that a block takes
_TOKENS = 64  # rows of x that a warp group takes
SHARED = 225 << 10  # bytes of a block; what is left is room for a small kernel's
_BLOCKS = 128  # that a weight's rows are shared out among: multiprocessors, but for few that make no whole cluster
_RANGES = (4, 2, 1)  # of K, a cluster's blocks
_LEAST = 2  # stages of a range
# Rows of a weight, as they are shared out among these, up to which K is cut: on an H200 16,384 rows, 128 for each, take
# 20.6 and 24.1 us (1 and 64 rows of x) in one range, 21.5 and 26.1 in two; 5,120 rows take the least in four.
_FEW_ROWS = 192
_QUANTISE_THREADS = 256


class Size(NamedTuple):
    """Of a kernel."""

    groups: int  # of 64 rows of x in a block
    part: int  # features of an instruction

    @property
    def threads(self) -> int:
        """Returns those of a block: one warp more for copies, or four where registers are given out."""
        return 288 if self.groups == 1 else 384

    @property
    def name(self) -> str:
        return f"fp8_{self.groups}_{self.part}"


SIZES = [Size(groups, part) for groups in (1, 2) for part in _PARTS]


class Cut(NamedTuple):
    """How a product is shared out."""

    size: Size
    rows: int  # of a weight that a block takes
    stages: int
    ranges: int  # of K
    grid: tuple[int, int]


def ranges_of(rows: int, columns: int) -> int:
    """Returns into how many ranges the columns of a weight of this shape are cut: so many that a block has many rows,
    for each block reads x. The order of sums depends on it."""
    return next(
        ranges
        for ranges in _RANGES
        if ranges == 1 or (rows * ranges <= _BLOCKS * _FEW_ROWS and columns >= ranges * _LEAST * WIDE)
    )


@functools.lru_cache(maxsize=1024)
def cut_of(rows: int, features: int, gated: bool, columns: int, clusters: tuple[int, ...]) -> Cut:
    """rows: of x. features: of the result. clusters: how many run at once, by `_RANGES`."""
    assert rows > 0 and features % (2 * EIGHT) == 0 and columns % WIDE == 0, f"{features} x {columns}"
    weights, groups = features * (2 if gated else 1), 1 if rows <= _TOKENS else 2
    ranges = ranges_of(weights, columns)
    at_once, token_blocks = clusters[_RANGES.index(ranges)], -(-rows // (groups * _TOKENS))
    step = 2 * EIGHT if gated else EIGHT

    def cost(taken: int) -> tuple[int, int]:
        """Of turns of blocks that take so many rows of the weight: what they do, and the fewer rows the better."""
        turns = -(-token_blocks * -(-weights // taken) // at_once)
        return turns * (taken + 32), taken

    taken = min(range(step, _MOST_ROWS + 1, step), key=cost)  # gates and ups: as many of either, a multiple of 8
    size = Size(groups, next(part for part in _PARTS if part >= _half(taken)))
    x_rows, blocks = min(groups * _TOKENS, -(-rows // EIGHT) * EIGHT), -(-columns // WIDE // ranges)
    scales = blocks * 2 * (-(-size.part // EIGHT // 4) * 4) * 4
    behind = (_half(taken) + size.part - taken) * WIDE  # read, not used
    stage = (taken + x_rows) * WIDE + groups * _TOKENS * 4 + 16
    stages = min(blocks, (SHARED - 1024 - scales - behind) // stage)
    tiles = -(-features // (taken // 2 if gated else taken))
    return Cut(size, taken, stages, ranges, (token_blocks * ranges, tiles))


def _half(rows: int) -> int:
    """Returns the first part of so many rows, a multiple of 8."""
    return (rows // EIGHT + 1) // 2 * EIGHT


class Fp8Gemm:
    """The kernels of one device. A row of a result has the same bits whatever other rows are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _module(self) -> Module:
        """Not before a product needs it: while weights load, another process compiles it."""
        return Module(read_source(), options_for(torch.bfloat16), self._device)

    @functools.cached_property
    def _kernels(self) -> dict[Size, Kernel]:
        return {size: self._module.kernel(size.name, size.threads, SHARED) for size in SIZES}

    @functools.cached_property
    def _quantise(self) -> Kernel:
        return self._module.kernel("quantise_fp8", _QUANTISE_THREADS)

    @functools.cached_property
    def _clusters(self) -> tuple[int, ...]:
        return tuple(self._kernels[SIZES[-1]].clusters_at_once(ranges) for ranges in _RANGES)

    def quantise(self, x: Tensor) -> Fp8Rows:
        """x [M, K] bfloat16, K a multiple of 128 -> the same as `quantised` makes it."""
        x = x.contiguous()
        rows, columns = x.shape
        padded, blocks = -(-rows // EIGHT) * EIGHT, columns // WIDE
        codes = x.new_empty(blocks, padded, WIDE, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(blocks, padded, dtype=torch.float32)
        self._quantise((-(-rows * blocks * 16 // _QUANTISE_THREADS),), x, codes, scales, rows, padded, columns)
        return Fp8Rows(codes, scales, rows)

    def linear(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x [M, K], weight [N, K], bias [N], residual [M, N] -> x @ weight^T + bias + residual [M, N], rounded once."""
        return self._run(x, weight, bias, residual, False)

    def gated(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups, N a multiple of 16 -> [M, N]"""
        return self._run(x, weight, bias, None, True)

    def _run(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None, gated: bool
    ) -> Tensor:
        codes, scales, rows, _ = x if isinstance(x, Fp8Rows) else self.quantise(x)
        features = weight.rows // 2 if gated else weight.rows
        assert len(codes) == len(weight.codes) and (residual is None or residual.is_contiguous())
        kernels, cut = self._kernels, cut_of(rows, features, gated, weight.columns, self._clusters)
        out = torch.empty(rows, features, dtype=torch.bfloat16, device=codes.device)
        kernels[cut.size](
            cut.grid, codes, scales, weight.codes, weight.scales, bias, residual, out, rows, codes.shape[1], features,
            weight.columns, cut.rows, cut.stages, int(gated), cluster=cut.ranges,
        )  # fmt: skip
        return out


def read_source() -> str:
    """Returns what is compiled."""
    return wgmma.read_source("gemm_fp8.cu", "k32.f32.e4m3.e4m3", _PARTS, kernel_lines())


def kernel_lines() -> list[str]:
    """Returns lines of the source: all kernels."""
    return [f"FP8_KERNEL({size.name}, {size.groups}, {size.part}, {size.threads})\n" for size in SIZES]


def compile_ahead(capability: tuple[int, int]) -> None:
    """Puts what `Fp8Gemm` compiles into the user's cache folder, for devices of this compute capability."""
    compile_source(read_source(), options_for(torch.bfloat16), capability)


@functools.cache
def fp8_gemm(device: torch.device) -> Fp8Gemm:
    """Its first product compiles. That raises OSError without NVRTC."""
    return Fp8Gemm(device)
