"""GEMMs of few rows with a quantised weight on CUDA: the Python side of gemm_groups.cu.

The bits of a result are those that `SmallMGemm` gives for the matrix that `dense` gives, whatever the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import ALL_SHARED, Kernel, Module, compile_source
from draftwing.ops.gemm.cuda import (
    FILES,
    cuts_of,
    kernel_lines,
    kernels_of,
    key_of,
    kind_of,
    options_for,
    programs,
    read_files,
    wide_products,
)
from draftwing.ops.gemm.groups import CHUNK, TILE_ROWS, PackedGroups
from draftwing.ops.gemm.shapes import (
    Shape,
    Shapes,
    TallShape,
    read_shapes,
)

TILES = (8, 16, 32, 64)  # rows of x that a block takes, everywhere; there may be others
_UNPACK_RUN, _UNPACK_WARPS = 4, 8  # of `unpack`: chunks that a warp takes at a time, and warps of a block
# Blocks of a multiprocessor that multiply a matrix out: as many as there is room for, or so few that attention has room
# next to them, whose block of a prompt takes two thirds of the registers.
_UNPACK_BLOCKS, _UNPACK_ASIDE = 4, 1

_ORDER_CHUNKS = 4  # that a block of `order_x` takes


class Width(NamedTuple):
    """What a module of kernels is compiled for."""

    bits: int  # of a code, as `PackedGroups` has them
    zeros: bool
    shift: int
    fp8: bool = False

    @property
    def part(self) -> int:
        """Returns bytes in shared memory of what a warp has of 16 features and a chunk."""
        words = (2 if self.shift < 0 else 1) * (2 if self.zeros else 1)
        return self.bits // 4 * 512 + words * 128


def width_of(weight: PackedGroups) -> Width:
    return Width(weight.bits, weight.zeros is not None, weight.shift, weight.fp8)


def shapes_for(bits: int, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Shapes:
    """Returns shapes for devices of this compute capability. Without an entry, `add_long` is `add`."""
    return read_shapes(f"{bits}bit", capability, dtype)


class _Loaded(NamedTuple):
    """The kernels of a `GroupGemm`."""

    kernels: dict[tuple[str, int], tuple[Kernel, Shape | TallShape]]
    tiles: dict[str, list[int]]  # rows of x that a block takes, by kind, ascending
    order: dict[int, Kernel]  # `order_kernels`
    unpack: Kernel


class GroupGemm:
    """The kernels of one type of activations and one width on one device. Columns of x have the order of the packed
    weight."""

    only: tuple[str, int] | None = None  # the kernel to run for anything, to try it

    def __init__(self, device: torch.device, dtype: torch.dtype, width: Width, shapes: Shapes | None = None) -> None:
        """shapes: in place of `shapes_for`, to try others."""
        capability = torch.cuda.get_device_capability(device)
        self._shapes = shapes_for(width.bits, capability, dtype) if shapes is None else shapes
        self._width, self._place = width, (options_for(dtype), device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        """Not before a product needs them: while weights load, other processes compile them."""
        parts = programs(self._shapes)
        modules = [(Module(read_source(self._width, shapes), *self._place), shapes) for shapes in parts]
        kernels = kernels_of(modules, self._width.part)
        tiles = {kind: sorted(tile for name, tile in kernels if name == kind) for kind, _ in kernels}
        # What runs meanwhile may need shared memory, of which a multiprocessor cannot set more aside meanwhile.
        unpack = modules[0][0].kernel("unpack_all", 32 * _UNPACK_WARPS, programmatic=False, blocks=ALL_SHARED)
        return _Loaded(kernels, tiles, order_kernels(modules), unpack)

    def dense(
        self, weight: PackedGroups, out: Tensor | None = None, leave_room: bool = False, in_sets: bool = False
    ) -> Tensor:
        """Returns [N, K], columns in the order of the packed weight, or that of `cuda_many.in_sets`. out: where to.
        leave_room: for other kernels."""
        out = weight.scales.new_empty(weight.rows, weight.columns) if out is None else out
        room = self._processors * (_UNPACK_ASIDE if leave_room else _UNPACK_BLOCKS)
        grid = unpack_blocks(weight.rows, weight.columns, room)
        self._loaded.unpack(
            (grid,), weight.codes, weight.scales, weight.zeros, out, weight.rows, weight.columns,
            int(in_sets),
        )  # fmt: skip
        return out

    def linear(self, x: Tensor, weight: PackedGroups, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """x [M, K], weight [N, K], bias [N], residual [M, N] -> x @ weight^T + bias + residual [M, N], rounded once."""
        return self._run(kind_of(residual, weight.columns), x, weight, bias, residual, weight.rows)

    def gated(self, x: Tensor, weight: PackedGroups, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups, N a multiple of 16 -> [M, N]"""
        return self._run("silu", x, weight, bias, None, weight.rows // 2)

    def _run(
        self, kind: str, x: Tensor, weight: PackedGroups, bias: Tensor | None, residual: Tensor | None, width: int
    ) -> Tensor:
        """width: of the result."""
        x = x.contiguous()
        rows, depth = x.shape
        assert depth == weight.columns and (residual is None or residual.is_contiguous())
        loaded, kernels = self._loaded, self._loaded.kernels
        if self.only is not None:
            cuts = [(self.only, range(width))]
        else:
            key = key_of(kernels, kind, tile_of(rows, loaded.tiles[kind]), width, self._processors)
            cuts = cuts_of(kernels, key, rows, width, self._processors)
        if isinstance(shape := kernels[cuts[0][0]][1], TallShape):  # so are those of others
            x = ordered(loaded.order[shape.tokens], shape.tokens, x)
        out = x.new_empty(rows, width)
        whole = weight.codes, weight.scales, weight.zeros, bias, residual, out
        for key, features in cuts:
            kernel, shape = kernels[key]
            tensors = _from_feature(features.start, *whole) if features.start else whole
            grid = shape.grid(kind, rows, len(features), self._processors)
            kernel(grid, x, *tensors, rows, width, depth)
        return out


def _from_feature(first: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Codes, scales and zeros [tiles, ...], bias [N], residual and result [M, N] -> the same, as a kernel is to have
    them whose first feature is this one: all that it reads and writes lies as far behind what it is given."""
    of_tiles, of_features = tensors[:3], tensors[3:]
    tiles = [None if part is None else part[first // TILE_ROWS :] for part in of_tiles]
    return (*tiles, *(None if part is None else part[..., first:] for part in of_features))


def unpack_blocks(rows: int, columns: int, room: int) -> int:
    """Returns the blocks of a grid of `unpack` for a matrix of this shape, at most `room`."""
    return min(room, -(-rows // TILE_ROWS * -(-columns // (CHUNK * _UNPACK_RUN)) // _UNPACK_WARPS))


def tile_of(rows: int, tiles: Sequence[int]) -> int:
    """Returns rows of x that a block takes, of `tiles`, which are in order."""
    return next((tile for tile in tiles if rows <= tile), tiles[-1])


def order_kernels(modules: Iterable[tuple[Module, Mapping[tuple[str, int], Shape | TallShape]]]) -> dict[int, Kernel]:
    """By the rows of a panel."""
    return {
        tokens: module.kernel(f"order_{tokens}", 256) for module, its in modules for tokens in _panels(its.values())
    }


def ordered(kernel: Kernel, tokens: int, x: Tensor) -> Tensor:
    """x [M, K] in panels of so many rows, as kernels of a `TallShape` have it."""
    rows, depth = x.shape
    blocks = -(-rows // tokens)
    panels = x.new_empty(blocks * tokens, depth)
    kernel((-(-depth // (CHUNK * _ORDER_CHUNKS)), blocks * tokens // 8), x, panels, rows, depth)
    return panels


def order_lines(shapes: Iterable[Shape | TallShape]) -> list[str]:
    """Returns lines of the source: the kernels of `order_kernels`."""
    return [f"ORDER_KERNEL(order_{tokens}, {tokens // 8})\n" for tokens in _panels(shapes)]


def _panels(shapes: Iterable[Shape | TallShape]) -> list[int]:
    return sorted({shape.tokens for shape in shapes if isinstance(shape, TallShape)})


def compile_ahead(dtype: torch.dtype, width: Width, capability: tuple[int, int], shapes: Shapes | None = None) -> None:
    """Puts what `GroupGemm` compiles into the user's cache folder, for devices of this compute capability."""
    for part in programs(shapes_for(width.bits, capability, dtype) if shapes is None else shapes):
        compile_source(read_source(width, part), options_for(dtype), capability)


def read_source(width: Width, shapes: Shapes) -> str:
    """Returns what is compiled."""
    order = order_lines(shapes.values())
    parts = read_files((*FILES, "gemm_groups.cu", *(["gemm_bulk.cu", "gemm_tall.cu"] if order else [])))
    parts += [wide_products(), weights_line(width), *order]
    parts += [f"GROUP_KERNEL({line})\n" for line in kernel_lines(shapes)]
    parts.append("UNPACK_KERNEL(unpack_all)\n")
    return "".join(parts)


def weights_line(width: Width) -> str:
    """Names the weights of a width for the kernels behind it."""
    int8 = str(width.bits == 8 and not width.fp8).lower()
    return f"using Weights = Groups<{width.bits}, {str(width.zeros).lower()}, {width.shift}, {int8}>;\n"


@functools.cache
def group_gemm(device: torch.device, dtype: torch.dtype, width: Width) -> GroupGemm:
    """Its first product compiles. That raises OSError without NVRTC, RuntimeError where the device is too old."""
    return GroupGemm(device, dtype, width)
