"""GEMMs of few rows with the weights of experts on CUDA: the Python side of gemm_experts.cu.

A pair's result has the same bits whatever other pairs are in the batch, for any number of them, as long as tiles have
no more than `MOST` pairs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.gemm import SHARES, read_files
from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.expert_rows import FP8, INT4, INT8, MX, ExpertRows
from draftwing.ops.torch.experts import Routed

FILES = ("gemm.cu", "gemm_groups.cu", "gemm_experts.cu")
DENSE = 0  # a kind of codes beside those of `expert_rows`
MOST = 16  # pairs of a tile
_TILES = (1, 8, MOST)  # pairs of a tile that there are kernels for
KINDS = {"plain": "PLAIN", "silu": "SILU_MUL", "clamped": "CLAMPED"}  # what gemm_experts.cu calls them
_CHUNK = 64  # columns
_MET = 32  # tiles that a block may meet


class Layout(NamedTuple):
    """What a module of kernels is compiled for."""

    kind: int = DENSE
    groups: int = 0  # as `ExpertRows` has them
    zeros: bool = False

    @property
    def part_bytes(self) -> int:
        """Of 16 rows of a weight and a chunk."""
        if self.kind == DENSE:
            return 2048
        return (512 if self.kind in (INT4, MX) else 1024) + (4 if self.zeros else 2) * 128


class Cut(NamedTuple):
    """How a kernel cuts its work, which has no influence on the result."""

    row_tiles: int  # 16 rows of the weight each, of a unit
    ahead: int  # chunks in flight
    blocks: int  # of a multiprocessor

    def grid(self, kind: str, tiles: int, width: int, processors: int) -> int:
        """Blocks. tiles: as many as there may be; width: of the result."""
        units = tiles * -(-width // (self.row_tiles * (16 if kind == "plain" else 8)))
        return min(units, max(self.blocks * processors, -(-tiles // (_MET - 2))))

    def shared_bytes(self, layout: Layout, tile: int) -> int:
        """Of a block: sums twice, tiles, and rings of x and of the weight."""
        rows, tokens = self.row_tiles * 16, max(tile, 8)
        sums = 2 * SHARES * tokens * (rows + (4 if rows > 16 else 2)) * 4
        ring = self.row_tiles * layout.part_bytes + tile * _CHUNK * 2
        return sums + _MET * (2 + tokens) * 4 + SHARES * self.ahead * ring


Cuts = dict[tuple[str, int], Cut]  # by kind and pairs that a tile may have

# By kind of codes. `clamped` is cut as `silu`.
_CUTS: dict[int, Cuts] = {
    DENSE: {
        ("silu", 1): Cut(row_tiles=1, ahead=5, blocks=2),
        ("plain", 1): Cut(row_tiles=1, ahead=5, blocks=2),
        ("silu", 8): Cut(row_tiles=1, ahead=4, blocks=2),
        ("plain", 8): Cut(row_tiles=1, ahead=4, blocks=2),
        ("silu", 16): Cut(row_tiles=1, ahead=2, blocks=2),
        ("plain", 16): Cut(row_tiles=1, ahead=2, blocks=2),
    },
    FP8: {
        ("silu", 1): Cut(row_tiles=1, ahead=8, blocks=2),
        ("plain", 1): Cut(row_tiles=1, ahead=8, blocks=2),
        ("silu", 8): Cut(row_tiles=1, ahead=5, blocks=2),
        ("plain", 8): Cut(row_tiles=1, ahead=5, blocks=2),
        ("silu", 16): Cut(row_tiles=1, ahead=2, blocks=2),
        ("plain", 16): Cut(row_tiles=1, ahead=2, blocks=2),
    },
    MX: {
        ("silu", 1): Cut(row_tiles=1, ahead=8, blocks=2),
        ("plain", 1): Cut(row_tiles=1, ahead=8, blocks=2),
        ("silu", 8): Cut(row_tiles=1, ahead=6, blocks=2),
        ("plain", 8): Cut(row_tiles=1, ahead=6, blocks=2),
        ("silu", 16): Cut(row_tiles=1, ahead=3, blocks=2),
        ("plain", 16): Cut(row_tiles=1, ahead=3, blocks=2),
    },
}
_CUTS[INT4] = _CUTS[MX]
_CUTS[INT8] = _CUTS[FP8]


def cuts_for(kind: int) -> Cuts:
    """Of a kind of codes."""
    cuts = _CUTS[kind]
    return cuts | {("clamped", tile): cut for (name, tile), cut in cuts.items() if name == "silu"}


class FewPairs:
    """The kernels of one type of activations and one layout on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, layout: Layout, cuts: Cuts | None = None) -> None:
        """cuts: in place of `cuts_for`, to try others."""
        cuts = cuts_for(layout.kind) if cuts is None else cuts
        module = Module(read_source(layout, cuts), _options(dtype), device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[tuple[str, int], tuple[Kernel, Cut]] = {}
        for (kind, tile), cut in cuts.items():
            shared = cut.shared_bytes(layout, tile)
            self._kernels[kind, tile] = module.kernel(f"{kind}_{tile}", SHARES * 32, shared, blocks=cut.blocks), cut

    def __call__(
        self, kind: str, x: Tensor, weight: Tensor | ExpertRows, bias: Tensor | None, routed: Routed, width: int,
        limit: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `multiply`."""
        tiles, x = routed.tiles, x.contiguous()
        assert tiles is not None and tiles.rows <= MOST and tiles.tiles.is_contiguous()
        tokens, depth = routed.experts.shape[0], x.shape[1]  # a token chooses no expert twice
        kernel, cut = self._kernels[kind, next(tile for tile in _TILES if tile >= min(tokens, MOST))]
        codes, scales, zeros = (
            (weight, None, None) if isinstance(weight, Tensor) else (weight.words, weight.scales, weight.zeros)
        )
        out = x.new_empty(routed.pairs, width)
        count = tiles.tiles.shape[1]
        kernel(
            (cut.grid(kind, count, width, self._processors),), x, codes, scales, zeros, len(codes), bias, tiles.order,
            tiles.tiles, out, count, routed.choices(x), width, depth, limit,
        )  # fmt: skip
        return out


def layout_of(weight: Tensor | ExpertRows) -> Layout:
    return Layout() if isinstance(weight, Tensor) else Layout(weight.kind, weight.groups, weight.zeros is not None)


def takes(weight: Tensor | ExpertRows, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply activations of `dtype` with this weight, of which they read up to 16 bytes at a
    time."""
    if isinstance(weight, Tensor):
        columns, codes, fits = weight.shape[1], weight, dtype in (torch.bfloat16, torch.float16)
        fits = fits and weight.dtype == dtype
    else:
        columns, codes, fits = weight.columns, weight.words, dtype == torch.bfloat16
    fits = fits and columns % _CHUNK == 0 and codes.is_contiguous()
    return fits and (codes.is_meta or (codes.is_cuda and codes.data_ptr() % 16 == 0))


def multiply(
    kind: str, x: Tensor, weight: Tensor | ExpertRows, bias: Tensor | None, routed: Routed, width: int, limit: float
) -> Tensor:
    """x [M or pairs, K], weight [count * N, K], bias [count * N] -> [pairs, width], where width is N or, of gates and
    ups, N / 2. kind: one of `KINDS`; limit: of `clamped`. On the meta device nothing runs."""
    if x.is_meta or not routed.pairs:
        return x.new_empty(routed.pairs, width)
    kernels = few_pairs(x.device, x.dtype, layout_of(weight))
    return kernels(kind, x, weight, bias, routed, width, limit)


@functools.cache
def few_pairs(device: torch.device, dtype: torch.dtype, layout: Layout) -> FewPairs:
    """Compiles on first use. Raises OSError without NVRTC, RuntimeError where the device is too old."""
    return FewPairs(device, dtype, layout)


def compile_ahead(dtype: torch.dtype, layout: Layout, capability: tuple[int, int], cuts: Cuts | None = None) -> bytes:
    """Puts what `FewPairs` compiles into the user's cache folder, for devices of this compute capability."""
    cuts = cuts_for(layout.kind) if cuts is None else cuts
    return compile_source(read_source(layout, cuts), _options(dtype), capability)


def read_source(layout: Layout, cuts: Cuts) -> str:
    """What is compiled."""
    kind, groups, zeros = layout
    weights = "StoredExperts" if kind == DENSE else f"Words<{kind}, {groups}, {str(zeros).lower()}>"
    parts = [*read_files(FILES), f"using Weights = {weights};\n"]
    for (name, tile), cut in cuts.items():
        template = f"{tile}, {cut.row_tiles}, {cut.ahead}, {KINDS[name]}"
        parts.append(f"EXPERT_KERNEL({name}_{tile}, {cut.blocks}, {template})\n")
    return "".join(parts)


def _options(dtype: torch.dtype) -> list[str]:
    return [f"-DTYPE_BF16={int(dtype == torch.bfloat16)}"]
