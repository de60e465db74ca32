"""GEMMs in bfloat16 of up to 256 rows: the Python side of gemm_dense.cu, for compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda import wgmma
from draftwing.ops.cuda.gemm import options_for
from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source, tensor_map

PANEL = 64  # columns
PANELS = 1  # of a stage
EIGHT = 8
TOKENS = 64  # rows of x that a warp group takes
SHARED = 225 << 10  # bytes of a block; what is left is room for a small kernel's
_MOST_ROWS = {1: 256, 2: 256, 3: 240, 4: 160}  # of a weight that a block takes, by warp groups: registers hold the sums
_BLOCKS = 128
_RANGES = (4, 2, 1)
_CLUSTERS = (1, 2, 4, 8)
_LEAST = 4  # stages of a range
_FEW_ROWS = 192


class Size(NamedTuple):
    """Of a kernel."""

    groups: int  # of 64 rows of x in a block
    features: int  # of an instruction

    @property
    def threads(self) -> int:
        return max(self.groups, 2) * 128 + (128 if self.groups > 2 else 32)

    @property
    def name(self) -> str:
        return f"dense_{self.groups}_{self.features}"


class Cut(NamedTuple):
    """How a product is shared out."""

    size: Size
    rows: int  # of a weight that a block takes
    stages: int
    ranges: int  # of K
    sharers: int  # blocks of a cluster that copy x for each other
    grid: tuple[int, int]


def ranges_of(rows: int, columns: int) -> int:
    return next(
        ranges
        for ranges in _RANGES
        if ranges == 1 or (rows * ranges <= _BLOCKS * _FEW_ROWS and columns >= ranges * _LEAST * PANEL)
    )


def make_cut(
    rows: int, features: int, gated: bool, columns: int, ranges: int, sharers: int, at_once: int, taken: int | None = None,
    panels: int = PANELS, stages: int | None = None, groups: int | None = None, shared: int = SHARED,
) -> Cut:  # fmt: skip
    """at_once: clusters."""
    groups = groups or min(4, -(-rows // TOKENS))
    token_blocks = -(-rows // (groups * TOKENS))
    step = 2 * EIGHT

    def tiles(taken: int) -> int:
        return -(-features // (taken // 2 if gated else taken) // sharers)

    def cost(taken: int) -> tuple[int, int]:
        if groups * TOKENS * (taken + 32) * 4 > shared - 2048 or 2 * (taken + groups * TOKENS) * PANEL * 2 > shared - 2048:
            return 1 << 30, taken
        return -(-token_blocks * tiles(taken) // at_once) * (taken + 32), taken

    taken = taken or min(range(step, _MOST_ROWS[groups] + 1, step), key=cost)
    stage = (taken + groups * TOKENS) * panels * PANEL * 2
    blocks = -(-columns // (panels * PANEL) // ranges)
    most = min(blocks, (shared - 1536) // stage)
    return Cut(
        Size(groups, taken // 2), taken, min(most, stages or 99), ranges, sharers,
        (token_blocks * ranges * sharers, tiles(taken)),
    )  # fmt: skip


def cut_of(rows: int, features: int, gated: bool, columns: int, clusters: tuple[int, ...]) -> Cut:
    ranges = ranges_of(features * (2 if gated else 1), columns)
    sharers = 1
    return make_cut(rows, features, gated, columns, ranges, sharers, clusters[_CLUSTERS.index(ranges * sharers)])


class DenseGemm:
    """The kernels of one device. A row of a result has the same bits whatever other rows are there."""

    def __init__(self, device: torch.device, sizes: list[Size], panels: int = PANELS) -> None:
        self._device, self._sizes, self.panels = device, sizes, panels
        self.cut = cut_of

    @functools.cached_property
    def kernels(self) -> dict[Size, Kernel]:
        found = {}
        for size in self._sizes:
            module = Module(read_source([size]), options(self.panels), self._device)
            found[size] = module.kernel(size.name, size.threads, SHARED)
        return found

    @functools.cached_property
    def clusters(self) -> tuple[int, ...]:
        return tuple(next(iter(self.kernels.values())).clusters_at_once(c) for c in _CLUSTERS)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        return self._run(x, weight, bias, residual, False)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._run(x, weight, bias, None, True)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape
        features = weight.shape[0] // 2 if gated else weight.shape[0]
        cut = self.cut(rows, features, gated, columns, self.clusters)
        out = x.new_empty(rows, features)
        parts = 2 if gated else 1
        w_map = tensor_map(weight.data_ptr(), (columns, features, parts), (PANEL, cut.rows // parts, parts))
        x_map = tensor_map(x.data_ptr(), (columns, rows, 1), (PANEL, cut.size.groups * TOKENS // cut.sharers, 1))
        self.kernels[cut.size](
            cut.grid, x_map, w_map, bias, residual, out, rows, features, columns, cut.rows, cut.stages, cut.ranges,
            int(gated), cluster=cut.ranges * cut.sharers,
        )  # fmt: skip
        return out


def options(panels: int) -> list[str]:
    return [*options_for(torch.bfloat16), f"-DPANELS={panels}"]


def read_source(sizes: list[Size]) -> str:
    features = sorted({size.features for size in sizes})
    return wgmma.read_source("gemm_dense.cu", "k16.f32.bf16.bf16", features, kernel_lines(sizes))


def kernel_lines(sizes: list[Size]) -> list[str]:
    return [f"DENSE_KERNEL({size.name}, {size.groups}, {size.features}, {size.threads})\n" for size in sizes]


def compile_ahead(sizes: list[Size], capability: tuple[int, int] = (9, 0), panels: int = PANELS) -> None:
    for size in sizes:
        compile_source(read_source([size]), options(panels), capability)
