"""GEMMs of few rows with a large weight on CUDA: the Python side of gemm.cu.

A row's result has the same bits whatever other rows are in the batch, for any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source

_DTYPES = (torch.bfloat16, torch.float16)
SHARES, _CHUNK = 8, 64  # of gemm.cu: K comes in chunks, of which each share has every eighth
_SMALL = (8, 16, 32, 64)  # rows of x that a block takes
_LARGE, _STAGES = 128, 3  # rows of x and features of the largest block, and how many chunks it has in shared memory
PART = 4 * 512  # bytes of weights that a warp has of 16 features and a chunk
LONG = 8192  # K from which on `add` may be cut otherwise
_BLOCKS = 2  # that `gemm` sets shared memory of a multiprocessor aside for; the rest caches weights on their way
CLUSTERS = (9, 0)  # compute capability that has them
WARP_GROUPS = 9  # major compute capability that alone has their instructions
# Kernels that are compiled together. NVRTC takes 0.1 to 0.5 s for one and as long for what they share (an EPYC), and
# programs are compiled at the same time.
_PER_PROGRAM = 6
FILES = ("gemm.cu", "gemm_ring.cu", "gemm_shared.cu", "gemm_wide.cu")
# Features a multiprocessor, up to which a width has this name, and may be cut otherwise.
NARROW = {"tiny": 4, "slim": 16, "narrow": 32, "medium": 64}
# And what gemm.cu calls them.
KINDS = {"plain": "PLAIN", "add": "ADD", "add_long": "ADD", "silu": "SILU_MUL"}
KINDS |= {f"{kind}_{width}": name for kind, name in KINDS.items() for width in (*NARROW, "uneven", "turns")}
# Share of the room in a grid's turns that its blocks take at least: else a matrix is cut as `uneven`, where there is
# such a cut, since a turn for a few blocks takes as long as another. Not swept: with 0.52 the other cut is faster
# (docs/dev/gpu_kernels.md), and what is cut well has 0.8 and more.
_EVEN = 0.6
# Of a `turns` cut: share of the room in its turns that its blocks take at least where it makes all features, and share
# of a turn for which another cut makes the rest. Not swept: of Qwen3.5-27B they are 0.97 and 0.03 to 0.06, and the cuts
# of an 8B model, which are best as they are, would have 0.85 and 0.7.
_FULL, _LITTLE = 0.9, 0.15


@dataclass(frozen=True)
class Shape:
    """How a kernel of gemm.cu cuts its work, which has no influence on the result."""

    tokens: int  # rows of x that a block takes
    features: int  # rows of the weight that a block takes, and with it the others of its cluster
    warps: int
    blocks: int  # of a multiprocessor, for which there are to be registers
    room: int  # blocks of a multiprocessor for which shared memory is set aside
    shared: int  # bytes, without what is in rings
    call: str  # a template of gemm.cu and what it is called with, up to the kind
    cluster: int = 1  # blocks
    tokens_first: bool = False  # blocks side by side have the same weights, not the same rows of x
    parts: int = 0  # of weights in rings: what a warp has of 16 features and a chunk
    sums: int = 0  # bytes of sums where they take the place of all else
    stays: bool = False  # blocks take one tile of features after the other

    def outputs(self, kind: str) -> int:
        """Returns features of a product of this kind that a block makes, or with it the others of its cluster."""
        return self.features // (2 if kind == "silu" else 1)

    def grid(self, kind: str, rows: int, width: int, processors: int) -> tuple[int, int]:
        """Blocks. width: of the result."""
        features, tokens = -(-width // self.outputs(kind)) * self.cluster, -(-rows // self.tokens)
        if self.stays:
            features = min(features, processors * self.blocks)
        return (tokens, features) if self.tokens_first else (features, tokens)

    def shared_bytes(self, part: int) -> int:
        """Returns shared memory of a block. part: bytes of one of `parts`."""
        return max(self.shared + self.parts * part, self.sums)


@dataclass(frozen=True)
class TallShape:
    """How a kernel of gemm_tall.cu cuts its work. Such a one has x in panels, which another kernel writes."""

    tokens: int  # rows of x that a block takes: 32, 64, 128, 192 or 256
    groups: int  # warp groups of a block, which share them
    row_tiles: int  # 64 features each, of a warp group
    stages: int  # chunks of x in shared memory
    ahead: int  # chunks of weights
    cluster: int = 1  # blocks, each for a part of K
    blocks: int = 1  # of a multiprocessor, for which there are to be registers and shared memory
    in_shares: bool = False  # a block sums K in the shares of few-row kernels, one after the other

    @property
    def exact(self) -> bool:
        """Returns whether sums have the bits of few-row kernels."""
        return self.in_shares or self.cluster == SHARES

    @property
    def features(self) -> int:
        """Returns rows of the weight that a block takes."""
        return self.groups * self.row_tiles * 64

    @property
    def warps(self) -> int:
        return self.groups * 4

    @property
    def room(self) -> int:
        return self.blocks

    @property
    def call(self) -> str:
        """Returns the template of gemm_tall.cu and what it is called with, up to the kind."""
        cut = self.tokens // 8, self.groups, self.row_tiles, self.stages, self.ahead, self.cluster, int(self.in_shares)
        return f"tall_gemm, {', '.join(map(str, cut))}"

    def outputs(self, kind: str) -> int:
        """Returns features of a product of this kind that a block makes, or with it the others of its cluster."""
        return self.features // (2 if kind == "silu" else 1)

    def grid(self, kind: str, rows: int, width: int, processors: int = 0) -> tuple[int, int]:
        """Blocks. width: of the result."""
        return -(-rows // self.tokens) * self.cluster, -(-width // self.outputs(kind))

    def shared_bytes(self, part: int) -> int:
        """Returns shared memory of a block. part: what a warp has of 16 features and a chunk, as `Width.part`."""
        pipeline = self.stages * self.tokens * _CHUNK * 2 + self.warps * self.row_tiles * self.ahead * part
        return max(pipeline, self.tokens * (self.features + 4) * 4) + self.stages * 16


S = TypeVar("S", bound=Shape | TallShape)
Shapes = dict[tuple[str, int], Shape]  # by kind and rows of x that a block takes


def few_rows(tokens: int, row_tiles: int, ahead: int, x_ahead: int, blocks: int) -> Shape:
    features = row_tiles * 16
    call = f"gemm, {tokens // 8}, {row_tiles}, {ahead}, {x_ahead}"
    return Shape(tokens, features, SHARES, blocks, _BLOCKS, SHARES * _sums(tokens, features), call)


def shared(
    tokens: int, warps: tuple[int, int], row_tiles: int, ahead: int, stages: int, blocks: int, cluster: int = 1
) -> Shape:
    """warps: by features and by K."""
    by_features, by_k = warps
    features = by_features * row_tiles * 16
    call = f"shared_gemm, {tokens // 8}, {by_features}, {by_k}, {row_tiles}, {ahead}, {stages}, {cluster}"
    shared = by_k * max(stages * tokens * _CHUNK * 2, _sums(tokens, features))
    return Shape(tokens, features, by_features * by_k, blocks, blocks, shared, call, cluster)


def ring(tokens: int, row_tiles: int, ahead: int, blocks: int, room: int | None = None) -> Shape:
    """room: None: for the blocks of the next kernel, too, as far as there is any."""
    features = row_tiles * 16
    call = f"ring_gemm, {tokens}, {row_tiles}, {ahead}"
    shared = 2 * SHARES * _sums(max(tokens, 8), features) + SHARES * ahead * tokens * _CHUNK * 2
    parts = SHARES * ahead * row_tiles
    return Shape(tokens, features, SHARES, blocks, room or 2 * blocks, shared, call, parts=parts, stays=True)


def wide(
    tokens: int, warps: tuple[int, int], row_tiles: int, ahead: int, panel: int, blocks: int, cluster: int = 1
) -> Shape:
    """warps: by features, a multiple of 4, and by K."""
    by_features, by_k = warps
    features, count = by_features * row_tiles * 16, by_features * by_k
    call = f"wide_gemm, {tokens // 8}, {by_features}, {by_k}, {row_tiles}, {ahead}, {panel}, {cluster}"
    x_units = -(-by_k * tokens // 4 // count)  # of 512 bytes, of a warp and a chunk
    shared = 2 * panel * by_k * tokens * _CHUNK * 2 + ahead * count * x_units * 512
    sums = by_k * _sums(tokens, features)
    return Shape(
        tokens, features, count, blocks, blocks, shared, call, cluster, parts=count * row_tiles * ahead, sums=sums
    )


def _tiled_gemm() -> Shape:
    shared = max(_STAGES * 2 * _LARGE * _CHUNK * 2, _sums(_LARGE, _LARGE))
    call = f"tiled_gemm, 2, 4, 4, 4, {_STAGES}"
    # Blocks that run at the same time share weights, since x is the larger part of what they read.
    return Shape(_LARGE, _LARGE, 8, 1, _BLOCKS, shared, call, tokens_first=True)


def _sums(tokens: int, features: int) -> int:
    """Returns bytes, as in gemm.cu. Of 16 features the pitch has some bank conflicts, which saves a block of 16 rows of
    x a kilobyte: three then fit into the 32 KB that are set aside for two."""
    return tokens * (features + (4 if features > 16 else 2)) * 4


# By kind and rows of x that a block takes, as measured best on one H200: what needs no clusters, and what takes the
# place of it, or is there with it, where there are clusters.
_ANYWHERE = {
    ("plain", 8): few_rows(8, row_tiles=2, ahead=2, x_ahead=2, blocks=2),
    ("plain_narrow", 8): few_rows(8, row_tiles=1, ahead=2, x_ahead=2, blocks=3),
    ("add", 8): few_rows(8, row_tiles=1, ahead=2, x_ahead=2, blocks=3),
    ("add_long", 8): few_rows(8, row_tiles=2, ahead=2, x_ahead=2, blocks=2),
    ("add_long_narrow", 8): few_rows(8, row_tiles=1, ahead=2, x_ahead=2, blocks=3),
    ("silu", 8): few_rows(8, row_tiles=2, ahead=2, x_ahead=2, blocks=2),
    ("plain", 16): few_rows(16, row_tiles=1, ahead=2, x_ahead=1, blocks=3),
    ("add", 16): few_rows(16, row_tiles=1, ahead=2, x_ahead=2, blocks=2),
    ("silu", 16): few_rows(16, row_tiles=2, ahead=2, x_ahead=1, blocks=2),
    ("plain", 32): few_rows(32, row_tiles=2, ahead=1, x_ahead=1, blocks=2),
    ("add", 32): few_rows(32, row_tiles=1, ahead=2, x_ahead=1, blocks=2),
    ("silu", 32): shared(32, (8, 1), row_tiles=1, ahead=3, stages=3, blocks=2),
    ("plain", 64): few_rows(64, row_tiles=2, ahead=2, x_ahead=1, blocks=1),
    ("add", 64): few_rows(64, row_tiles=2, ahead=2, x_ahead=1, blocks=1),
    ("silu", 64): shared(64, (4, 1), row_tiles=2, ahead=2, stages=4, blocks=2),
    ("plain", 128): _tiled_gemm(),
    ("add", 128): _tiled_gemm(),
    ("silu", 128): _tiled_gemm(),
}
_WITH_CLUSTERS = _ANYWHERE | {
    ("plain_tiny", 16): shared(16, (1, 4), row_tiles=1, ahead=4, stages=4, blocks=2, cluster=2),
    ("add_long", 16): shared(16, (4, 1), row_tiles=2, ahead=2, stages=4, blocks=2, cluster=8),
    ("add_long_narrow", 16): shared(16, (2, 4), row_tiles=2, ahead=4, stages=4, blocks=1, cluster=2),
    ("silu", 16): shared(16, (2, 2), row_tiles=4, ahead=1, stages=4, blocks=4, cluster=4),
    ("add", 32): shared(32, (4, 1), row_tiles=2, ahead=2, stages=8, blocks=3, cluster=8),
    ("plain", 64): shared(64, (4, 1), row_tiles=2, ahead=3, stages=4, blocks=2, cluster=8),
}
_HOPPER = _WITH_CLUSTERS | {
    ("plain_tiny", 8): few_rows(8, row_tiles=1, ahead=4, x_ahead=4, blocks=2),
    ("plain", 64): wide(64, (8, 1), row_tiles=1, ahead=3, panel=1, blocks=2, cluster=8),
    ("silu", 64): wide(64, (8, 1), row_tiles=2, ahead=3, panel=1, blocks=1),
}


def shapes_for(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Shapes:
    """By kind and tile, for devices of this compute capability. Without an entry, `add_long` is `add`."""
    if capability[0] == WARP_GROUPS and dtype == torch.bfloat16:  # float16 has not been tried
        return _HOPPER
    return _WITH_CLUSTERS if capability >= CLUSTERS else _ANYWHERE


def tile_of(rows: int, features: int, processors: int) -> int:
    """Returns rows of x that a block takes, which has no influence on the result. features: rows of the weight."""
    if rows <= _SMALL[-1]:
        tiles = _SMALL[:2] if features <= NARROW["tiny"] * processors else _SMALL  # else there would be few blocks
        return next((tile for tile in tiles if tile >= rows), tiles[-1])
    # The largest needs a lot of work to be faster: blocks for half of the processors.
    return _LARGE if 2 * -(-rows // _LARGE) * -(-features // _LARGE) >= processors else _SMALL[-1]


def key_of(kernels: Container[tuple[str, int]], kind: str, tile: int, width: int, processors: int) -> tuple[str, int]:
    """Returns which of the kernels takes a product of this kind. width: of the result."""
    names = (f"{kind}_{name}" for name, most in NARROW.items() if width <= most * processors)
    return next(((name, tile) for name in names if (name, tile) in kernels), (kind, tile))


class SmallMGemm:
    """The kernels of one dtype on one device."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, source: str | None = None, shapes: Shapes | None = None
    ) -> None:
        """source, shapes: in place of `read_source` and `shapes_for`, to try others."""
        self.only: tuple[str, int] | None = None  # the kernel to run for anything, to try it
        capability = torch.cuda.get_device_capability(device)
        self._shapes = shapes_for(capability, dtype) if shapes is None else shapes
        self._source, self._place = source, (options_for(dtype), device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    @functools.cached_property
    def _kernels(self) -> dict[tuple[str, int], tuple[Kernel, Shape]]:
        """Not before a product needs them: while weights load, other processes compile them."""
        if self._source is not None:
            return kernels_of([(Module(self._source, *self._place), self._shapes)], PART)
        parts = programs(self._shapes)
        return kernels_of([(Module(read_source(shapes), *self._place), shapes) for shapes in parts], PART)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once.

        fresh: the weight is the result of an earlier kernel, and nothing of it may be read ahead.
        """
        return self._run(kind_of(residual, weight.shape[1]), x, weight, bias, residual, weight.shape[0], fresh)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        return self._run("silu", x, weight, bias, None, weight.shape[0] // 2, fresh)

    def _run(
        self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, width: int,
        fresh: bool,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        rows, depth = x.shape
        assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
        tile = tile_of(rows, weight.shape[0], self._processors)
        kernel, shape = self._kernels[self.only or key_of(self._kernels, kind, tile, width, self._processors)]
        out = x.new_empty(rows, width)
        grid = shape.grid(kind, rows, width, self._processors)
        kernel(grid, x, weight, bias, residual, out, rows, width, depth, overlap=not fresh)
        return out


def compile_ahead(dtype: torch.dtype, capability: tuple[int, int], shapes: Shapes | None = None) -> None:
    """Puts what `SmallMGemm` compiles into the user's cache folder, for devices of this compute capability."""
    if dtype in _DTYPES:
        for part in programs(shapes_for(capability, dtype) if shapes is None else shapes):
            compile_source(read_source(part), options_for(dtype), capability)


def programs(shapes: Mapping[tuple[str, int], S]) -> list[dict[tuple[str, int], S]]:
    """Cuts shapes into those of kernels that are compiled together, so that several processes may compile them."""
    count = -(-len(shapes) // _PER_PROGRAM)
    return [dict([*shapes.items()][first::count]) for first in range(count)]


def options_for(dtype: torch.dtype) -> list[str]:
    """Returns the compiler's definitions for activations of this type."""
    return [f"-DTYPE_BF16={int(dtype == torch.bfloat16)}"]


def read_source(shapes: Shapes) -> str:
    """Returns what is compiled."""
    return "".join([*read_files(FILES), *(f"KERNEL({line})\n" for line in kernel_lines(shapes))])


def read_files(names: Sequence[str]) -> list[str]:
    """Reads sources of this folder."""
    folder = resources.files("draftwing.ops.cuda")
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in names]


def kernel_lines(shapes: Mapping[tuple[str, int], Shape | TallShape]) -> list[str]:
    """Returns what `KERNEL` of gemm.cu is given for each."""
    return [
        f"{kind}_{tile}, {shape.warps * 32}, {shape.blocks}, {shape.cluster}, {shape.call}, {KINDS[kind]}"
        for (kind, tile), shape in shapes.items()
    ]


def kernel_of(module: Module, key: tuple[str, int], shape: Shape | TallShape, part: int) -> Kernel:
    """part: bytes of one of the shape's `parts`."""
    kind, tile = key
    return module.kernel(f"{kind}_{tile}", shape.warps * 32, shape.shared_bytes(part), blocks=shape.room)


def kernels_of(
    modules: Iterable[tuple[Module, Mapping[tuple[str, int], S]]], part: int
) -> dict[tuple[str, int], tuple[Kernel, S]]:
    """Returns the kernels of these shapes, each with the module of its program. Without an entry, `add_long` is
    `add`."""
    found = {key: (kernel_of(module, key, shape, part), shape) for module, its in modules for key, shape in its.items()}
    return {("add_long", tile): kernel for (kind, tile), kernel in found.items() if kind == "add"} | found


def cuts_of(
    kernels: Mapping[tuple[str, int], tuple[Kernel, Shape | TallShape]], key: tuple[str, int], rows: int, width: int,
    processors: int,
) -> list[tuple[tuple[str, int], range]]:  # fmt: skip
    """Returns the kernels that make a product, and which features each: that of the key, or others whose blocks take
    the room in their turns better. A `turns` cut is the fastest one where turns are full: it makes all features, or
    those of whole turns, and a cut with smaller blocks the few that are left. width: of the result."""
    (kind, tile), shape, everything = key, kernels[key][1], range(width)
    turns, uneven = (f"{kind}_turns", tile), (f"{kind}_uneven", tile)
    if turns in kernels:
        whole = kernels[turns][1]
        turn = max(processors * whole.blocks // -(-rows // tile), 1) * whole.outputs(kind)  # features
        if width >= _FULL * -(-width // turn) * turn:
            return [(turns, everything)]
        rest, first = (uneven if uneven in kernels else key), width // turn * turn
        if first > 0 and width - first <= _LITTLE * turn and (width - first) % kernels[rest][1].outputs(kind) == 0:
            return [(turns, range(first)), (rest, range(first, width))]
    x, y = shape.grid(kind, rows, width, processors)
    room = processors * shape.blocks  # of a turn
    count = -(-x * y // room)
    return [(uneven if count > 1 and x * y < _EVEN * count * room and uneven in kernels else key, everything)]


def has_few_left(shape: Shape | TallShape, kind: str, rows: int, width: int, processors: int) -> bool:
    """Returns whether there are whole turns of blocks, and then one of few. width: of the result."""
    x, y = shape.grid(kind, rows, width, processors)
    room = processors * shape.blocks
    return x * y > room and 0 < x * y % room <= _LITTLE * room


def kind_of(residual: Tensor | None, depth: int) -> str:
    """Returns the kind of a product that is not gated."""
    return "plain" if residual is None else "add_long" if depth >= LONG else "add"


@functools.cache
def small_m_gemm(device: torch.device, dtype: torch.dtype) -> SmallMGemm:
    """Its first product compiles. That raises OSError without NVRTC, RuntimeError where the device is too old."""
    return SmallMGemm(device, dtype)


def takes(weight: Tensor) -> bool:
    """Returns whether the kernels multiply with this weight, which they read 16 bytes at a time."""
    fits = weight.dtype in _DTYPES and weight.shape[1] % _CHUNK == 0
    return weight.is_cuda and fits and weight.is_contiguous() and weight.data_ptr() % 16 == 0
