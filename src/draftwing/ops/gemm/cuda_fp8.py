"""GEMMs in fp8 x fp8 with scales of 128 columns: the Python side of gemm_fp8.cu and gemm_fp8_many.cu, for compute
capability 9.0."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.fp8.spec import EIGHT, TALL, WIDE, Fp8Blocks, Fp8Rows
from draftwing.ops.gemm import cuda_wgmma
from draftwing.ops.gemm.cuda import options_for

# Features of an instruction; a block has two parts of a weight, each at most so many.
_PARTS = (32, 64, 80, 88, 112, 136)
_MOST_ROWS = 2 * _PARTS[-1]  # of a weight that a block takes
_TOKENS = 64  # rows of x that a warp group takes
SHARED = 225 << 10  # bytes of a block; what is left is room for a small kernel's
_BLOCKS = 128  # that a weight's rows are shared out among: multiprocessors, but for few that make no whole cluster
_LEAST = 2  # stages of a range
# Rows of a weight, as they are shared out among these, up to which K is cut: on an H200 16,384 rows, 128 for each, take
# 20.6 and 24.1 us (1 and 64 rows of x) in one range, 21.5 and 26.1 in two; 5,120 rows take the least in four.
_FEW_ROWS = 192
_QUANTISE_THREADS = 256
_QUANTISE_ROWS = 4  # of x that a thread takes, if there are many
# Rows of x from which the kernels of many rows always multiply: on an H200 27B's four matrices take 352 us (384 rows)
# and 464 (448) with the others, 367 and 373 with these. With fewer rows those that cost less do.
MANY_FROM = 385
_MANY_PARTS = {1: (128, 112, 96), 2: (80, 64, 48), 4: (80, 64, 48)}  # by ranges of K, whose sums take registers, too
_MANY_ROWS = 128  # of x that a block takes
_PAIR = 2  # blocks of a cluster
_EPILOGUE = 16  # features whose products take as long as to end a tile
# The same of a block of the kernels for few rows, where they are compared with those for many: of 16, 32, 64 and 96 the
# one by which 13 matrices of 27B, 8B and 70B with 128 to 512 rows take the least, 1.02 of what the better of both does
# (docs/dev/gpu_kernels.md).
_FEW_BESIDE = 64


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


class ManySize(NamedTuple):
    """Of a kernel for many rows."""

    part: int  # features of an instruction; a tile has two such parts of a weight
    ranges: int  # of K

    @property
    def threads(self) -> int:
        return 384

    @property
    def name(self) -> str:
        return f"fp8_many_{self.part}_{self.ranges}"

    @property
    def stages(self) -> int:
        """Returns those of the ring."""
        scales = -(-self.part // TALL // 4) * 4 * 2 * 4
        return (SHARED - 1024) // ((_MANY_ROWS + 2 * self.part) * WIDE + _MANY_ROWS * 4 + scales + 16)


MANY_SIZES = [ManySize(part, ranges) for ranges, parts in _MANY_PARTS.items() for part in parts]


class Cut(NamedTuple):
    """How a product is shared out."""

    size: Size | ManySize
    rows: int  # of a weight that a block takes
    stages: int
    cluster: int  # blocks: ranges of K or, with many rows, blocks of rows
    grid: tuple[int, int]


def ranges_of(rows: int, columns: int) -> int:
    """Returns into how many ranges the columns of a weight of this shape are cut."""
    return cuda_wgmma.ranges_of(rows, columns, _BLOCKS * _FEW_ROWS, _LEAST * WIDE)


@functools.lru_cache(maxsize=1024)
def cut_of(
    rows: int, features: int, gated: bool, columns: int, clusters: tuple[int, ...], many: bool | None = None,
    ranges: int | None = None,
) -> Cut:  # fmt: skip
    """rows: of x. features: of the result. clusters: how many run at once, by `wgmma.RANGES`. many: with the kernels of
    many rows, or not; None: with those that cost less. ranges: of K, None: by the shape."""
    assert rows > 0 and features % (2 * EIGHT) == 0 and columns % WIDE == 0, f"{features} x {columns}"
    weights, groups = features * (2 if gated else 1), 1 if rows <= _TOKENS else 2
    ranges = ranges_of(weights, columns) if ranges is None else ranges
    pairs_at_once = clusters[cuda_wgmma.RANGES.index(_PAIR)]
    if many or (many is None and rows >= MANY_FROM):
        return _cut_of_many(rows, weights, ranges, pairs_at_once)[1]
    at_once, token_blocks = clusters[cuda_wgmma.RANGES.index(ranges)], -(-rows // (groups * _TOKENS))
    step = 2 * EIGHT if gated else EIGHT

    def cost(taken: int) -> tuple[int, int]:
        """Of turns of blocks that take so many rows of the weight: what they do, and the fewer rows the better."""
        turns = -(-token_blocks * -(-weights // taken) // at_once)
        return turns * (taken + 32), taken

    taken = min(range(step, _MOST_ROWS + 1, step), key=cost)  # gates and ups: as many of either, a multiple of 8
    if many is None and token_blocks > 1:  # one block of rows reads weights once
        turns = -(-token_blocks * -(-weights // taken) // at_once)
        other, cut = _cut_of_many(rows, weights, ranges, pairs_at_once)
        if other < turns * (taken / 2 + _FEW_BESIDE) / ranges:
            return cut
    size = Size(groups, next(part for part in _PARTS if part >= _half(taken)))
    x_rows, blocks = min(groups * _TOKENS, -(-rows // EIGHT) * EIGHT), -(-columns // WIDE // ranges)
    scales = blocks * 2 * (-(-size.part // EIGHT // 4) * 4) * 4
    behind = (_half(taken) + size.part - taken) * WIDE  # read, not used
    stage = (taken + x_rows) * WIDE + groups * _TOKENS * 4 + 16
    stages = min(blocks, (SHARED - 1024 - scales - behind) // stage)
    tiles = -(-features // (taken // 2 if gated else taken))
    return Cut(size, taken, stages, ranges, (token_blocks * ranges, tiles))


def _cut_of_many(rows: int, weights: int, ranges: int, at_once: int) -> tuple[int, Cut]:
    """Returns what the product takes, in features of a part with all of K, and how it is shared out."""
    pairs = -(-rows // (_PAIR * _MANY_ROWS))

    def cost(part: int) -> tuple[int, int]:
        """Of turns of clusters, and the larger tiles the better."""
        return -(-pairs * -(-weights // (2 * part)) // at_once) * (part + _EPILOGUE), -part

    part = min(_MANY_PARTS[ranges], key=cost)
    size, tiles = ManySize(part, ranges), pairs * -(-weights // (2 * part))
    return cost(part)[0], Cut(size, 2 * part, size.stages, _PAIR, (_PAIR * min(at_once, tiles), 1))


def _half(rows: int) -> int:
    """Returns the first part of so many rows, a multiple of 8."""
    return (rows // EIGHT + 1) // 2 * EIGHT


class Fp8Gemm:
    """The kernels of one device. A row of a result has the same bits whatever other rows are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def cut_into(self, ranges: int) -> Fp8GemmInRanges:
        """Returns them with K cut into so many ranges, whatever the weight."""
        return Fp8GemmInRanges(self, ranges)

    @functools.cached_property
    def _modules(self) -> list[Module]:
        """Of few and of many rows, not before products need them: while weights load, other processes compile them."""
        return [Module(read_source(many), options_for(torch.bfloat16), self._device) for many in (False, True)]

    @functools.cached_property
    def _kernels(self) -> dict[Size | ManySize, Kernel]:
        few, many = self._modules
        kernels: dict[Size | ManySize, Kernel] = {size: few.kernel(size.name, size.threads, SHARED) for size in SIZES}
        return kernels | {size: many.kernel(size.name, size.threads, SHARED) for size in MANY_SIZES}

    @functools.cached_property
    def _quantise(self) -> dict[int, Kernel]:
        """By rows of x that a thread takes."""
        return {
            rows: self._modules[0].kernel(f"quantise_fp8_{rows}", _QUANTISE_THREADS) for rows in (1, _QUANTISE_ROWS)
        }

    @functools.cached_property
    def _clusters(self) -> tuple[int, ...]:
        return tuple(self._kernels[SIZES[-1]].clusters_at_once(ranges) for ranges in cuda_wgmma.RANGES)

    def quantise(self, x: Tensor) -> Fp8Rows:
        """x [M, K] bfloat16, K a multiple of 128 -> the same as `quantised` makes it."""
        x = x.contiguous()
        rows, columns = x.shape
        padded, blocks = -(-rows // EIGHT) * EIGHT, columns // WIDE
        codes = x.new_empty(blocks, padded, WIDE, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(blocks, padded, dtype=torch.float32)
        taken = _QUANTISE_ROWS if rows >= MANY_FROM else 1
        groups = -(-rows // (2 * taken)) * 2 if taken > 1 else rows  # of 16 threads; two have rows behind each other
        self._quantise[taken]((-(-groups * blocks * 16 // _QUANTISE_THREADS),), x, codes, scales, rows, padded, columns)
        return Fp8Rows(codes, scales, rows)

    def linear(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x [M, K], weight [N, K], bias [N], residual [M, N] -> x @ weight^T + bias + residual [M, N], rounded once."""
        return self.run(x, weight, bias, residual, False)

    def gated(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups, N a multiple of 16 -> [M, N]"""
        return self.run(x, weight, bias, None, True)

    def run(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None, gated: bool,
        ranges: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Multiplies as `linear` and `gated` do. ranges: of K, None: by the shape of the weight."""
        codes, scales, rows, _ = x if isinstance(x, Fp8Rows) else self.quantise(x)
        features = weight.rows // 2 if gated else weight.rows
        assert len(codes) == len(weight.codes) and (residual is None or residual.is_contiguous())
        kernels, cut = self._kernels, cut_of(rows, features, gated, weight.columns, self._clusters, ranges=ranges)
        out = torch.empty(rows, features, dtype=torch.bfloat16, device=codes.device)
        kernels[cut.size](
            cut.grid, codes, scales, weight.codes, weight.scales, bias, residual, out, rows, codes.shape[1], features,
            weight.columns, cut.rows, cut.stages, int(gated), cluster=cut.cluster,
        )  # fmt: skip
        return out


class Fp8GemmInRanges:
    """Kernels that cut K into so many ranges: of a share of a matrix as of the whole one, whose bits it has then."""

    def __init__(self, kernels: Fp8Gemm, ranges: int) -> None:
        self._kernels, self.ranges = kernels, ranges

    def linear(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        return self._kernels.run(x, weight, bias, residual, False, self.ranges)

    def gated(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        return self._kernels.run(x, weight, bias, None, True, self.ranges)


def read_source(many: bool) -> str:
    """Returns what is compiled, for few rows or for many."""
    sizes: Sequence[Size | ManySize] = MANY_SIZES if many else SIZES
    files = ["gemm_fp8.cu", *(["gemm_fp8_many.cu"] if many else [])]
    return cuda_wgmma.read_source(files, "k32.f32.e4m3.e4m3", (size.part for size in sizes), kernel_lines(sizes))


def kernel_lines(sizes: Sequence[Size | ManySize]) -> list[str]:
    """Returns lines of the source: these kernels."""
    return [
        f"FP8_KERNEL({size.name}, {size.threads}, fp8_gemm, {size.groups}, {size.part})\n"
        if isinstance(size, Size)
        else f"FP8_KERNEL({size.name}, {size.threads}, fp8_gemm_many, {size.part}, {size.ranges})\n"
        for size in sizes
    ]


def compile_ahead(capability: tuple[int, int], many: bool) -> None:
    """Puts what `Fp8Gemm` compiles into the user's cache folder, for devices of this compute capability. many: the half
    that is for many rows."""
    compile_source(read_source(many), options_for(torch.bfloat16), capability)


@functools.cache
def fp8_gemm(device: torch.device) -> Fp8Gemm:
    """Its first product compiles. That raises OSError without NVRTC."""
    return Fp8Gemm(device)
