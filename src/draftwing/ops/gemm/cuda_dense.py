"""GEMMs in bfloat16: the Python side of gemm_dense.cu and gemm_dense_many.cu, for compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source, tensor_map
from draftwing.ops.gemm import cuda_wgmma
from draftwing.ops.gemm.cuda import options_for

PANEL = 64  # columns, as in gemm_dense.cu: a stage
TOKENS = 64  # rows of x that a warp group takes
# Features of an instruction, by warp groups of a block: of half of its weights, or (two groups) of all.
_HALVES = (32, 48, 56, 64, 72, 88, 112, 128)
PARTS = {1: _HALVES, 2: tuple(2 * half for half in _HALVES), 3: _HALVES[:-1]}  # as many sums as registers hold
GROUPS = tuple(PARTS)
MOST = GROUPS[-1] * TOKENS  # rows of x that one block takes
# Bytes of a block, by how many a multiprocessor has. Of one what is left is room for a small kernel's. Of two the next
# one comes up, and asks for weights, while the other ends.
SHARED = {1: 225 << 10, 2: 113 << 10}
_BEFORE_RINGS = 1536  # bytes of it at most: barriers, and up to what copies are aligned to
_STEP = 16  # features, by which blocks differ
_BLOCKS = 128  # that a weight's rows are shared out among: multiprocessors, but for few that make no whole cluster
_LEAST = 4  # stages of a range
# Stages behind a ring's that come to the L2 cache while earlier kernels end, with so many rows of x: 3 take 0.7% of a
# layer's time with 64 rows and 2.7% with 128, and cost 2% with 32 and fewer; 6 and more cost 3 to 6%.
_AHEAD, _AHEAD_ROWS = 3, range(33, 129)
_MOST_STAGES = 31  # there is room for their barriers
# Rows of a weight, as they are shared out among these, up to which K is cut, and from which on there are two blocks a
# multiprocessor, each with some rows at most where registers of two have to fit.
_FEW_ROWS, _MANY_ROWS, _MOST_OF_TWO = 176, 192, {1: 256, 2: 128}
MANY_FROM = 2 * MOST + 1  # rows of x from which the kernels of many rows multiply, see docs/dev/gpu_kernels.md
# Features of a block: as many as registers hold sums twice. Of gates and ups as many of either.
_MANY_FEATURES, _MANY_GATED = (192, 176, 160, 144, 128), (192, 160, 128)
_MANY_STEPS = 6  # stages of a range at least: results leave with as many
_MANY_SHARED = 227 << 10  # bytes of a block
_BOX = 8 << 10  # bytes of 32 columns of results of 128 rows
_MANY_TOKENS = 128  # rows of x that a block takes
_PAIR = 2  # blocks of a cluster


class Size(NamedTuple):
    """Of a kernel."""

    groups: int  # of warps, each for 64 rows of x
    features: int  # of an instruction

    @property
    def threads(self) -> int:
        """Returns those of a block: one warp more for copies, or four where registers are given out."""
        return 288 if self.groups <= 2 else self.groups * 128 + 128

    @property
    def name(self) -> str:
        return f"dense_{self.groups}_{self.features}"


class ManySize(NamedTuple):
    """Of a kernel for many rows."""

    features: int  # of a tile, and of an instruction
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
        room = _MANY_SHARED - _BEFORE_RINGS - -(-width // 32) * _BOX
        return room // ((_MANY_TOKENS + self.features) * PANEL * 2)


MANY_SIZES = [
    ManySize(features, ranges, gated)
    for ranges in sorted(cuda_wgmma.RANGES)
    for gated, sizes in ((False, _MANY_FEATURES), (True, _MANY_GATED))
    for features in sizes
]


class Cut(NamedTuple):
    """How a product is shared out."""

    size: Size | ManySize
    x_rows: int  # of x that a block has, a multiple of 8
    rows: int  # of a weight that a block takes
    stages: int
    ahead: int  # stages behind these, which come to the L2 cache while earlier kernels end
    cluster: int  # blocks: ranges of K or, with many rows, blocks of rows
    blocks: int  # of a multiprocessor
    grid: tuple[int, int]


def ranges_of(rows: int, columns: int) -> int:
    """Returns into how many ranges the columns of a weight of this shape are cut."""
    return cuda_wgmma.ranges_of(rows, columns, _BLOCKS * _FEW_ROWS, _LEAST * PANEL)


@functools.lru_cache(maxsize=1024)
def cut_of(rows: int, features: int, gated: bool, columns: int, clusters: tuple[int, ...]) -> Cut:
    """rows: of x. features: of the result. clusters: how many run at once of blocks with a multiprocessor each, by
    `wgmma.RANGES`."""
    weights = features * (2 if gated else 1)
    ranges = ranges_of(weights, columns)
    if rows >= MANY_FROM and features % _STEP == 0 and columns >= _MANY_STEPS * ranges * PANEL:
        return cut_of_many(rows, weights, gated, ranges, clusters[cuda_wgmma.RANGES.index(_PAIR)])
    two = ranges == 1 and weights >= _BLOCKS * _MANY_ROWS
    return make_cut(rows, features, gated, columns, ranges, clusters[cuda_wgmma.RANGES.index(ranges)], 2 if two else 1)


def make_cut(
    rows: int, features: int, gated: bool, columns: int, ranges: int, at_once: int, side_by_side: int = 1
) -> Cut:
    """at_once: clusters of blocks with a multiprocessor each. side_by_side: as many blocks of one as there may be."""
    most = -(-rows // TOKENS)  # groups of all blocks, each of which has as many
    groups = -(-most // -(-most // GROUPS[-1]))
    token_blocks, x_rows = -(-rows // (groups * TOKENS)), min(groups * TOKENS, -(-rows // 8) * 8)

    def tiles(taken: int) -> int:
        return -(-features // (taken // 2 if gated else taken))

    def cost(cut: tuple[int, int]) -> tuple[int, int, int]:
        """Of turns of blocks that take so many rows of the weight: what a multiprocessor does, of which other blocks
        hide a part; and the fewer rows the better."""
        blocks, taken = cut
        return -(-token_blocks * tiles(taken) // (at_once * blocks)) * (blocks * taken + 32), -blocks, taken

    def fits(blocks: int, taken: int) -> bool:
        """Returns whether there is room for sums, and for two stages."""
        sums, stages = groups * TOKENS * (taken + 24) * 4, 2 * (taken + x_rows) * PANEL * 2
        return max(sums, stages) <= SHARED[blocks] - _BEFORE_RINGS

    halves = 1 if groups == 2 else 2
    most = {1: halves * PARTS[groups][-1]} | (
        {2: _MOST_OF_TWO[groups]} if side_by_side > 1 and groups in _MOST_OF_TWO else {}
    )
    cuts = (
        (blocks, taken) for blocks in most for taken in range(_STEP, most[blocks] + 1, _STEP) if fits(blocks, taken)
    )
    blocks, taken = min(cuts, key=cost)
    part = next(part for part in PARTS[groups] if halves * part >= taken)
    stage, behind = (taken + x_rows) * PANEL * 2, (part - taken // halves) * PANEL * 2  # the latter is read, not used
    stages = min(-(-columns // PANEL // ranges), _MOST_STAGES, (SHARED[blocks] - _BEFORE_RINGS - behind) // stage)
    return Cut(
        Size(groups, part),
        x_rows,
        taken,
        stages,
        _AHEAD if rows in _AHEAD_ROWS else 0,
        ranges,
        blocks,
        (token_blocks * ranges, tiles(taken)),
    )


def cut_of_many(rows: int, weights: int, gated: bool, ranges: int, at_once: int) -> Cut:
    """weights: rows of the weight. at_once: clusters of two blocks."""
    token_blocks = -(-rows // _MANY_TOKENS)

    def tiles(size: ManySize) -> int:
        return token_blocks * -(-weights // (_PAIR * size.features))

    def cost(size: ManySize) -> tuple[int, int]:
        """Of turns of clusters, and the larger tiles the better."""
        return -(-tiles(size) // at_once) * size.features, -size.features

    size = min((size for size in MANY_SIZES if size.ranges == ranges and size.gated == gated), key=cost)
    grid = _PAIR * min(at_once, tiles(size)), 1
    return Cut(size, _MANY_TOKENS, size.features, size.stages, 0, _PAIR, 1, grid)


class DenseGemm:
    """The kernels of one device. A row of a result has the same bits among any number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cache  # noqa: B019 (there is one object for each device, and it stays)
    def _kernel(self, size: Size | ManySize) -> Kernel:
        """Not before a product needs it: while weights load, another process compiles it."""
        if isinstance(size, ManySize):
            return self._module(Program(ranges=size.ranges)).kernel(size.name, size.threads, _MANY_SHARED)
        return self._module(Program(size.groups)).kernel(size.name, size.threads, SHARED[1])

    @functools.cache  # noqa: B019
    def _module(self, program: Program) -> Module:
        return Module(read_source(program), options_for(torch.bfloat16), self._device)

    @functools.cached_property
    def _clusters(self) -> tuple[int, ...]:
        return tuple(self._kernel(Size(1, PARTS[1][-1])).clusters_at_once(ranges) for ranges in cuda_wgmma.RANGES)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once. fresh: as
        `SmallMGemm` has it."""
        return self._run(x, weight, bias, residual, False, fresh)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self._run(x, weight, bias, None, True, fresh)

    def _run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, fresh: bool
    ) -> Tensor:
        x, parts = x.contiguous(), 2 if gated else 1
        rows, columns = x.shape
        features = weight.shape[0] // parts
        assert rows > 0 and features % (_STEP // parts) == 0 and columns % PANEL == 0
        assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
        cut = cut_of(rows, features, gated, columns, self._clusters)
        out = x.new_empty(rows, features)
        x_rows = cut.x_rows // (_PAIR if isinstance(cut.size, ManySize) else 1)  # that a block asks for
        x_map = tensor_map(x.data_ptr(), (columns, rows, 1), (PANEL, x_rows, 1))
        w_map = tensor_map(weight.data_ptr(), (columns, features, parts), (PANEL, cut.rows // parts, parts))
        if isinstance(cut.size, ManySize):
            to, more = (
                tensor_map(each.data_ptr(), (features, rows, 1), (32, 64, 1))
                for each in (out, out if residual is None else residual)
            )
            self._kernel(cut.size)(
                cut.grid, x_map, w_map, more, to, bias, residual, out, rows, features, columns, cut.stages,
                overlap=not fresh, cluster=cut.cluster,
            )  # fmt: skip
            return out
        self._kernel(cut.size)(
            cut.grid, x_map, w_map, bias, residual, out, rows, features, columns, cut.x_rows, cut.rows, cut.stages,
            cut.ahead, int(gated), overlap=not fresh, cluster=cut.cluster, shared=SHARED[cut.blocks],
        )  # fmt: skip
        return out


class Program(NamedTuple):
    """Kernels that are compiled together."""

    groups: int = 0  # of 64 rows of x, of the kernels for few rows
    ranges: int = 0  # of K, of those for many


PROGRAMS = [*(Program(groups) for groups in GROUPS), *(Program(ranges=ranges) for ranges in sorted(cuda_wgmma.RANGES))]


def read_source(program: Program) -> str:
    """Returns what is compiled."""
    many = [size for size in MANY_SIZES if size.ranges == program.ranges]
    files = ["gemm_dense.cu", *(("gemm_dense_many.cu",) if many else ())]
    features = {size.features for size in many} or PARTS[program.groups]
    return cuda_wgmma.read_source(files, "k16.f32.bf16.bf16", features, kernel_lines(program))


def kernel_lines(program: Program) -> list[str]:
    """Returns lines of the source: kernels."""
    if program.ranges:
        return [
            f"DENSE_MANY({size.name}, {size.features}, {size.ranges}, {int(size.gated)}, {size.threads})\n"
            for size in MANY_SIZES
            if size.ranges == program.ranges
        ]
    sizes = [Size(program.groups, part) for part in PARTS[program.groups]]
    return [f"DENSE_KERNEL({size.name}, {size.groups}, {size.features}, {size.threads})\n" for size in sizes]


def compile_ahead(program: Program, capability: tuple[int, int]) -> None:
    """Puts what `DenseGemm` compiles into the user's cache folder, for devices of this compute capability."""
    compile_source(read_source(program), options_for(torch.bfloat16), capability)


def takes(weight: Tensor) -> bool:
    """Returns whether the kernels multiply with this weight, which `gemm.takes` has to be true of."""
    fits = weight.dtype == torch.bfloat16 and weight.shape[0] % _STEP == 0
    return fits and cuda_wgmma.runs_on(torch.cuda.get_device_capability(weight.device))


@functools.cache
def dense_gemm(device: torch.device) -> DenseGemm:
    """Its first product compiles. That raises OSError without NVRTC."""
    return DenseGemm(device)
