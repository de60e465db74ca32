"""GEMMs of few rows with a large weight on CUDA: the Python side of gemm.cu.

A row's result has the same bits whatever other rows are in the batch, for any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib import resources

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.gemm.shapes import CHUNK, LARGEST_TILE, Shape, Shapes, TallShape, read_shapes

_DTYPES = (torch.bfloat16, torch.float16)
_SMALL = (8, 16, 32, 64)  # rows of x that a block takes
PART = 4 * 512  # bytes of weights that a warp has of 16 features and a chunk
LONG = 8192  # K from which on `add` may be cut otherwise
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


def shapes_for(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Shapes:
    """Returns shapes for devices of this compute capability. Without an entry, `add_long` is `add`."""
    return read_shapes("dense", capability, dtype)


def tile_of(rows: int, features: int, processors: int) -> int:
    """Returns rows of x that a block takes, which has no influence on the result. features: rows of the weight."""
    if rows <= _SMALL[-1]:
        tiles = _SMALL[:2] if features <= NARROW["tiny"] * processors else _SMALL  # else there would be few blocks
        return next((tile for tile in tiles if tile >= rows), tiles[-1])
    # The largest needs a lot of work to be faster: blocks for half of the processors.
    return LARGEST_TILE if 2 * -(-rows // LARGEST_TILE) * -(-features // LARGEST_TILE) >= processors else _SMALL[-1]


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
    def _kernels(self) -> dict[tuple[str, int], tuple[Kernel, Shape | TallShape]]:
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


def programs(shapes: Shapes) -> list[Shapes]:
    """Cuts shapes into those of kernels that are compiled together, so that several processes may compile them."""
    count = -(-len(shapes) // _PER_PROGRAM)
    return [dict([*shapes.items()][first::count]) for first in range(count)]


def options_for(dtype: torch.dtype) -> list[str]:
    """Returns the compiler's definitions for activations of this type."""
    return [f"-DTYPE_BF16={int(dtype == torch.bfloat16)}"]


def read_source(shapes: Shapes) -> str:
    """Returns what is compiled."""
    return "".join([*read_files(FILES), wide_products(), *(f"KERNEL({line})\n" for line in kernel_lines(shapes))])


def wide_products() -> str:
    """Returns `wide_mma` of gemm_wide.cu for numbers of tiles of 8 rows of x."""
    functions = (
        f"template <>\n__device__ __forceinline__ void wide_mma(float (&d)[{tiles}][4], u32 a0, u32 a1, u32 a2, "
        f"u32 a3, const u16* b) {{\n    const unsigned long long at = descriptor<{tiles}>(b);\n    "
        + wgmma(
            f'{8 * tiles}k16.f32" TYPES "', [f"d[{i // 4}][{i % 4}]" for i in range(4 * tiles)],
            "{{{}, {}, {}, {}}}, {}, 1, 1, 1, 0", {**dict.fromkeys(("a0", "a1", "a2", "a3"), "r"), "at": "l"},
        )
        + "}\n"
        for tiles in (2, 4, 8, 16, 24, 32)
    )  # fmt: skip
    return f"#ifndef ON_HOST\n{''.join(functions)}#endif\n"


def wgmma(instruction: str, sums: Sequence[str], operands: str, inputs: Mapping[str, str]) -> str:
    """Returns a statement. instruction: what is behind the 64 rows of one; operands: behind the sums, with places for
    the inputs, whose constraints these are."""
    names, count = [f"%{i}" for i in range(len(sums) + len(inputs))], len(sums)
    results = ", ".join(f'"+f"({name})' for name in sums)
    given = ", ".join(f'"{kind}"({name})' for name, kind in inputs.items())
    listed = f"{{{', '.join(names[:count])}}}, {operands.format(*names[count:])}"
    return f'asm volatile("wgmma.mma_async.sync.aligned.m64n{instruction} {listed};" : {results} : {given});\n'


def read_files(names: Sequence[str]) -> list[str]:
    """Reads sources of this folder."""
    folder = resources.files(__package__)
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
    modules: Iterable[tuple[Module, Shapes]], part: int
) -> dict[tuple[str, int], tuple[Kernel, Shape | TallShape]]:
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


def kind_of(residual: Tensor | None, depth: int) -> str:
    """Returns the kind of a product that is not gated."""
    return "plain" if residual is None else "add_long" if depth >= LONG else "add"


@functools.cache
def small_m_gemm(device: torch.device, dtype: torch.dtype) -> SmallMGemm:
    """Its first product compiles. That raises OSError without NVRTC, RuntimeError where the device is too old."""
    return SmallMGemm(device, dtype)


def takes(weight: Tensor) -> bool:
    """Returns whether the kernels multiply with this weight, which they read 16 bytes at a time."""
    fits = weight.dtype in _DTYPES and weight.shape[1] % CHUNK == 0
    return weight.is_cuda and fits and weight.is_contiguous() and weight.data_ptr() % 16 == 0
