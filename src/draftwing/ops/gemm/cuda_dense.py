"""GEMMs in bfloat16: the Python side of gemm_dense.cu, for compute capability 9.0. Many rows are cuda_many.py's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source, tensor_map
from draftwing.ops.gemm import cuda_many, cuda_wgmma
from draftwing.ops.gemm.cuda import options_for
from draftwing.ops.gemm.cuda_wgmma import PANEL

TOKENS = 64  # rows of x that a warp group takes
# Features of an instruction, by warp groups of a block: of half of its weights, or (two groups) of all.
_HALVES = (32, 48, 56, 64, 72, 88, 96, 112, 128)
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


class Cut(NamedTuple):
    """How a product is shared out."""

    size: Size
    x_rows: int  # of x that a block has, a multiple of 8
    rows: int  # of a weight that a block takes
    stages: int
    ahead: int  # stages behind these, which come to the L2 cache while earlier kernels end
    ranges: int  # of K
    chain: int  # of these that a block sums one after the other: 1, or 2 where a cluster has fewer blocks
    blocks: int  # of a multiprocessor
    grid: tuple[int, int]


def ranges_of(rows: int, columns: int) -> int:
    """Returns into how many ranges the columns of a weight of this shape are cut."""
    return cuda_wgmma.ranges_of(rows, columns, _BLOCKS * _FEW_ROWS, _LEAST * PANEL)


@functools.lru_cache(maxsize=1024)
def cut_of(
    rows: int, features: int, gated: bool, columns: int, clusters: tuple[int, ...], ranges: int | None = None
) -> Cut:
    """rows: of x. features: of the result. clusters: how many run at once of blocks with a multiprocessor each, by
    `wgmma.RANGES`. ranges: of K, None: by the shape."""
    weights = features * (2 if gated else 1)
    ranges = ranges_of(weights, columns) if ranges is None else ranges
    two = ranges == 1 and weights >= _BLOCKS * _MANY_ROWS
    at_once = dict(zip(cuda_wgmma.RANGES, clusters, strict=True))
    return make_cut(rows, features, gated, columns, ranges, at_once, 2 if two else 1)


def make_cut(
    rows: int, features: int, gated: bool, columns: int, ranges: int, at_once: Mapping[int, int], side_by_side: int = 1
) -> Cut:
    """at_once: clusters of blocks with a multiprocessor each, by blocks of one. side_by_side: as many blocks of a
    multiprocessor as there may be."""
    all_groups = -(-rows // TOKENS)
    groups = -(-all_groups // -(-all_groups // GROUPS[-1]))  # each block has as many
    token_blocks = -(-rows // (groups * TOKENS))
    x_rows = -(-rows // (token_blocks * 8)) * 8  # rows that are not there cost time if they are asked for
    chains = (1, 2) if ranges > 1 and token_blocks > 1 else (1,)

    def tiles(taken: int) -> int:
        return -(-features // (taken // 2 if gated else taken))

    def cost(cut: tuple[int, int, int]) -> tuple[int, int, int]:
        """Of turns of blocks that take so many rows of the weight: what a multiprocessor does, of which other blocks
        hide a part; and the fewer rows the better."""
        blocks, chain, taken = cut
        turns = -(-token_blocks * tiles(taken) // (at_once[ranges // chain] * blocks))
        return turns * chain * (blocks * taken + 32), -blocks, taken

    def room(blocks: int, chain: int, taken: int) -> int:
        """Returns the bytes that there are for rings, and for sums of a block's last range."""
        return SHARED[blocks] - _BEFORE_RINGS - (chain - 1) * sums(taken)

    def sums(taken: int) -> int:
        """Returns the bytes of a range's, whose rows are apart as gemm_dense.cu has them."""
        return groups * TOKENS * (taken + (8 - taken) % 32) * 4

    halves = 1 if groups == 2 else 2
    most = {1: halves * PARTS[groups][-1]} | (
        {2: _MOST_OF_TWO[groups]} if side_by_side > 1 and groups in _MOST_OF_TWO else {}
    )
    cuts = (
        (blocks, chain, taken)
        for blocks in most
        for chain in chains
        for taken in range(_STEP, most[blocks] + 1, _STEP)
        if max(sums(taken), 2 * (taken + x_rows) * PANEL * 2) <= room(blocks, chain, taken)
    )
    blocks, chain, taken = min(cuts, key=cost)
    part = next(part for part in PARTS[groups] if halves * part >= taken)
    stage, behind = (taken + x_rows) * PANEL * 2, (part - taken // halves) * PANEL * 2  # the latter is read, not used
    fit = (room(blocks, chain, taken) - (behind if chain == 1 else 0)) // stage
    return Cut(
        Size(groups, part),
        x_rows,
        taken,
        min(-(-columns // PANEL // ranges) * chain, _MOST_STAGES, fit),
        _AHEAD if rows in _AHEAD_ROWS else 0,
        ranges,
        chain,
        blocks,
        (token_blocks * (ranges // chain), tiles(taken)),
    )


class DenseGemm:
    """The kernels of one device. A row of a result has the same bits among any number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def cut_into(self, ranges: int) -> DenseGemmInRanges:
        """Returns them with K cut into so many ranges, whatever the weight."""
        return DenseGemmInRanges(self, ranges)

    @functools.cache  # noqa: B019 (there is one object for each device, and it stays)
    def _kernel(self, size: Size) -> Kernel:
        """Not before a product needs it: while weights load, another process compiles it."""
        return self._module(size.groups).kernel(size.name, size.threads, SHARED[1])

    @functools.cache  # noqa: B019
    def _module(self, groups: int) -> Module:
        return Module(read_source(groups), options_for(torch.bfloat16), self._device)

    @functools.cached_property
    def _clusters(self) -> tuple[int, ...]:
        return tuple(self._kernel(Size(1, PARTS[1][-1])).clusters_at_once(ranges) for ranges in cuda_wgmma.RANGES)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once. fresh: as
        `SmallMGemm` has it."""
        return self.run(x, weight, bias, residual, False, fresh)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self.run(x, weight, bias, None, True, fresh)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, fresh: bool,
        ranges: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Multiplies as `linear` and `gated` do. ranges: of K, None: by the shape of the weight."""
        x, parts = x.contiguous(), 2 if gated else 1
        rows, columns = x.shape
        features = weight.shape[0] // parts
        assert rows > 0 and features % (_STEP // parts) == 0 and columns % PANEL == 0
        assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
        ranges = ranges_of(weight.shape[0], columns) if ranges is None else ranges
        if rows >= cuda_many.FROM and cuda_many.takes(features, columns, ranges):
            many = cuda_many.many_gemm(self._device, x.dtype, ranges)
            if many.beats_few(x, weight, gated, residual is not None):
                return many.run(x, weight, bias, residual, gated, fresh)
        cut = cut_of(rows, features, gated, columns, self._clusters, ranges)
        out = x.new_empty(rows, features)
        x_map = tensor_map(x.data_ptr(), (columns, rows, 1), (PANEL, cut.x_rows, 1))
        w_map = tensor_map(weight.data_ptr(), (columns, features, parts), (PANEL, cut.rows // parts, parts))
        self._kernel(cut.size)(
            cut.grid, x_map, w_map, bias, residual, out, rows, features, columns, cut.x_rows, cut.rows, cut.stages,
            cut.ahead, cut.chain, int(gated), overlap=not fresh, cluster=cut.ranges // cut.chain,
            shared=SHARED[cut.blocks],
        )  # fmt: skip
        return out


class DenseGemmInRanges:
    """Kernels that cut K into so many ranges: of a share of a matrix as of the whole one, whose bits it has then."""

    def __init__(self, kernels: DenseGemm, ranges: int) -> None:
        self._kernels, self.ranges = kernels, ranges

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        return self._kernels.run(x, weight, bias, residual, False, fresh, self.ranges)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        return self._kernels.run(x, weight, bias, None, True, fresh, self.ranges)


def read_source(groups: int) -> str:
    """Returns what is compiled for so many groups of 64 rows of x."""
    return cuda_wgmma.read_source(["gemm_dense.cu"], "k16.f32.bf16.bf16", PARTS[groups], kernel_lines(groups))


def kernel_lines(groups: int) -> list[str]:
    """Returns lines of the source: kernels."""
    sizes = [Size(groups, part) for part in PARTS[groups]]
    return [f"DENSE_KERNEL({size.name}, {size.groups}, {size.features}, {size.threads})\n" for size in sizes]


def compile_ahead(groups: int, capability: tuple[int, int]) -> None:
    """Puts what `DenseGemm` compiles for so many groups of 64 rows of x into the user's cache folder, for devices of
    this compute capability."""
    compile_source(read_source(groups), options_for(torch.bfloat16), capability)


def takes(weight: Tensor) -> bool:
    """Returns whether the kernels multiply with this weight, which `gemm.takes` has to be true of."""
    fits = weight.dtype == torch.bfloat16 and weight.shape[0] % _STEP == 0
    return fits and cuda_wgmma.runs_on(torch.cuda.get_device_capability(weight.device))


@functools.cache
def dense_gemm(device: torch.device) -> DenseGemm:
    """Its first product compiles. That raises OSError without NVRTC."""
    return DenseGemm(device)
