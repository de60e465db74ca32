"""GEMMs of few rows with the weights of experts on CUDA: the Python side of gemm_experts.cu and gemm_stream.cu.

A pair's result has the same bits whatever other pairs are in the batch, for any number of them, as long as tiles have
no more than `MAX_PAIRS` pairs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.experts.routing import Routed
from draftwing.ops.experts.rows import FP8, INT4, MX, ExpertRows
from draftwing.ops.gemm.cuda import options_for, read_files
from draftwing.ops.gemm.shapes import SHARES

FILES, STREAM_FILES = ("gemm.cu", "gemm_groups.cu", "gemm_experts.cu"), ("gemm_bulk.cu", "gemm_stream.cu")
DENSE = 0  # a kind of codes besides those of `expert_rows`
MAX_PAIRS = 16  # pairs of a tile
SQUARES = -1.0  # the limit at which results without gates are squares of what is above 0
_TILES = (8, MAX_PAIRS)  # that there are kernels for; and for a single token, where others are faster
OTHERS = ("_second", "_third", "_fourth")  # end the kinds of other cuts for the same
KINDS = {"plain": "PLAIN", "silu": "SILU_MUL", "clamped": "CLAMPED"}  # what gemm_experts.cu calls them
_CHUNK = 64  # columns
# Of gemm_stream.cu:
_LONGEST = 64  # chunks, of which x is in registers
_MUCH_X = 64  # of these
_SHORT = 8  # chunks, of which a warp has x of all features in registers
_SHARED = 227 << 10  # bytes that a block can have
_MAX_STAGES = 16


class Layout(NamedTuple):
    """What a module of kernels is compiled for."""

    kind: int = DENSE
    groups: int = 0  # as `ExpertRows` has them
    zeros: bool = False
    chunks: int = 0  # of a row, where gemm_stream.cu takes it

    def on(self, capability: tuple[int, int]) -> Layout:
        """Returns the layout on such a device."""
        return self if capability[0] == 9 else self._replace(chunks=0)


class Cut(NamedTuple):
    """How a kernel of gemm_experts.cu cuts its work, which has no influence on the result."""

    row_tiles: int  # 16 rows of the weight each, of a block
    ahead: int  # chunks of weights in flight
    x_ahead: int  # and of x
    blocks: int  # of a multiprocessor, for which there are to be registers and shared memory

    @property
    def threads(self) -> int:
        return SHARES * 32

    def shared_bytes(self, tokens: int) -> int:
        """Returns shared memory of a block: sums as in gemm.cu, and the pairs of its tile."""
        places = -(-tokens // 8) * 8
        return SHARES * places * _pitch(self.row_tiles) * 4 + places * 4

    def line(self, name: str, kind: str, tokens: int) -> str:
        """Returns the line of source."""
        template = f"{-(-tokens // 8)}, {self.row_tiles}, {self.ahead}, {self.x_ahead}, {KINDS[kind]}"
        return f"EXPERT_KERNEL({name}, {self.threads}, {self.blocks}, expert_gemm, {template})\n"


class Stream(NamedTuple):
    """The layout of a kernel of gemm_stream.cu."""

    row_tiles: int
    stages: int
    layout: Layout
    blocks: int = 1
    by_rows: bool = False  # warps have features, not shares of K

    @property
    def threads(self) -> int:
        return (SHARES + 1) * 32

    @classmethod
    def of(cls, layout: Layout, row_tiles: int, tokens: int, by_rows: bool = False) -> Stream:
        """Makes one with as many stages as there is room for."""
        none = cls(row_tiles, 0, layout, by_rows=by_rows)
        room = _SHARED - none.shared_bytes(tokens)
        return none._replace(stages=min(room // (none.stage_bytes() + 16), _MAX_STAGES))

    @classmethod
    def best(cls, layout: Layout, tokens: int) -> Stream:
        """Returns the best of those tried on an H200: three row tiles that leave two stages, four that leave three, or
        fewer; no more than two with much of x."""
        x_registers = -(-layout.chunks // SHARES) * tokens
        tried = [cls.of(layout, row_tiles, tokens) for row_tiles in range(1, 3 if x_registers > _MUCH_X else 5)]
        return max((cut for cut in tried if cut.stages > 1 + cut.row_tiles // 4), default=tried[0])

    def stage_bytes(self) -> int:
        """Returns the bytes of `Stage` in gemm_stream.cu."""
        kind, groups, zeros, chunks = self.layout
        words = chunks * (32 if kind == DENSE else 8 if kind in (INT4, MX) else 16)
        scales = 0 if kind == DENSE else 1 if groups == 0 else (chunks + 1) // 2 * (1 if kind == MX else groups)
        return self.row_tiles * 16 * (words + scales * (2 if zeros else 1)) * 4

    def shared_bytes(self, tokens: int) -> int:
        """Returns shared memory of a block: sums and pairs by turns, with a barrier each, and stages with two."""
        if self.by_rows:
            return self.stages * (self.stage_bytes() + 16)
        sums = SHARES * tokens * _pitch(self.row_tiles) * 4
        return 2 * (sums + tokens * 4 + 8) + self.stages * (self.stage_bytes() + 16)

    def line(self, name: str, kind: str, tokens: int) -> str:
        if self.by_rows:
            call = f"row_stream_gemm, {tokens // 8}, {self.stages}, {self.layout.chunks}"
        else:
            tiles = f"{tokens // 8}, {self.row_tiles}"
            call = f"stream_gemm, {tiles}, {self.stages}, {self.layout.chunks}, {KINDS[kind]}"
        return f"EXPERT_KERNEL({name}, {self.threads}, {self.blocks}, {call})\n"


def _pitch(row_tiles: int) -> int:
    return row_tiles * 16 + (4 if row_tiles > 1 else 2)


def grid(cut: Cut | Stream, kind: str, tiles: int, width: int, multiprocessors: int) -> int:
    """Blocks: no more than run at once. width: of the result."""
    parts = -(-width // (cut.row_tiles * (16 if kind == "plain" else 8)))
    return min(parts * tiles, cut.blocks * multiprocessors)


def best_of(cuts: Sequence[Cut | Stream], kind: str, tiles: int, width: int, multiprocessors: int) -> int:
    """Returns which of these cuts has blocks do the fewest features one after the other; of equal ones that with the
    most at a time. width: of the result."""

    def features(cut: Cut | Stream) -> int:
        parts = -(-width // (cut.row_tiles * (16 if kind == "plain" else 8)))
        return -(-parts * tiles // grid(cut, kind, tiles, width, multiprocessors)) * cut.row_tiles

    return min(range(len(cuts)), key=lambda at: (features(cuts[at]), -cuts[at].row_tiles))


def by_rows(layout: Layout, tokens: int) -> Stream | None:
    """Returns the stream whose warps have features, where K is short and there is room."""
    cut = Stream.of(layout, SHARES, tokens, by_rows=True)
    # A warp of MXFP4 has either even chunks or odd ones.
    return cut if layout.kind != MX and layout.chunks <= _SHORT and cut.stages > 1 else None


Cuts = dict[tuple[str, int], Cut | Stream]  # by kind and pairs that a tile has at most

# Of those tried on an H200 the fastest for 1, 4, 16 and 64 tokens together: for most, and by kind of codes what else.
_CUT, _LESS = Cut(row_tiles=4, ahead=1, x_ahead=1, blocks=2), Cut(row_tiles=3, ahead=1, x_ahead=1, blocks=2)
_GATED = tuple(kind for kind in KINDS if kind != "plain")
_OWN_CUTS: dict[int, Cuts] = {
    DENSE: dict.fromkeys((*itertools.product(_GATED, _TILES), ("plain", MAX_PAIRS)), _LESS),
    FP8: dict.fromkeys(itertools.product(_GATED, (8,)), _LESS),
    MX: {
        **dict.fromkeys(itertools.product(_GATED, (8,)), _CUT._replace(blocks=3)),
        ("plain", 8): _LESS,
        ("plain", MAX_PAIRS): Cut(row_tiles=2, ahead=1, x_ahead=1, blocks=3),
    },
}
# Row tiles for one token. With more of 16 bits some would not stay in registers.
_TRIED = {FP8: (3, 4, 5, 6), DENSE: (2, 3, 4)}


def cuts_for(layout: Layout) -> Cuts:
    kept = dict.fromkeys(itertools.product(KINDS, _TILES), _CUT) | _OWN_CUTS.get(layout.kind, {})
    if not layout.chunks:
        return kept
    cuts: Cuts = {(kind, tile): Stream.best(layout, tile) for kind in KINDS for tile in _TILES}
    cuts |= {("plain", tile): cut for tile in _TILES if (cut := by_rows(layout, tile)) is not None}
    if layout.kind in (DENSE, FP8):
        # Alone a stream is as fast, but leaves the next kernel no shared memory to begin early in, which is a larger
        # part of the little that there is to read: a step of Qwen3-30B-A3B in fp8 took 2.05 ms with it, not 1.94.
        cuts |= {(kind, 1): kept[kind, _TILES[0]] for kind in KINDS}
    if layout.kind in _TRIED:
        # A second round of blocks takes as long as the first, however few there are, and 2 us more to begin. Measured
        # on an H100 and an H200 with FP8.
        tried = [_CUT._replace(row_tiles=row_tiles) for row_tiles in _TRIED[layout.kind]]
        for kind in ("plain", "silu"):
            others = [cut for cut in tried if cut != cuts[kind, 1]]
            cuts |= {(kind + other, 1): cut for other, cut in zip(OTHERS, others, strict=False)}
    return cuts


class FewPairs:
    """The kernels of one type of activations and one layout on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, layout: Layout, cuts: Cuts | None = None) -> None:
        """cuts: in place of the engine's, to try others."""
        layout = layout.on(torch.cuda.get_device_capability(device))
        cuts = cuts_for(layout) if cuts is None else cuts
        module = Module(read_source(layout, cuts), options_for(dtype), device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[tuple[str, int], tuple[Kernel, Cut | Stream]] = {
            (kind, tile): (
                module.kernel(f"{kind}_{tile}", cut.threads, cut.shared_bytes(tile), blocks=cut.blocks),
                cut,
            )
            for (kind, tile), cut in cuts.items()
        }
        self._tiles = {kind: sorted(tile for other, tile in cuts if other == kind) for kind, _ in cuts}

    def _pick(self, kind: str, tokens: int, tiles: int, width: int) -> tuple[Kernel, Cut | Stream]:
        # A token chooses no expert twice.
        tile = next(n for n in self._tiles[kind] if tokens <= n or n == MAX_PAIRS)
        names = (kind, *(kind + other for other in OTHERS))
        found = [self._kernels[name, tile] for name in names if (name, tile) in self._kernels]
        return found[best_of([cut for _, cut in found], kind, tiles, width, self._multiprocessors)]

    def __call__(
        self, kind: str, x: Tensor, weight: Tensor | ExpertRows, bias: Tensor | None, routed: Routed, width: int,
        limit: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `multiply`."""
        tiles, x = routed.tiles, x.contiguous()
        assert tiles is not None and tiles.rows <= MAX_PAIRS and tiles.tiles.is_contiguous()
        tokens, depth = routed.experts.shape[0], x.shape[1]
        count, choices = tiles.tiles.shape[1], routed.choices(x)
        kernel, cut = self._pick(kind, tokens, count, width)
        codes, scales, zeros = (
            (weight, None, None) if isinstance(weight, Tensor) else (weight.words, weight.scales, weight.zeros)
        )
        out = x.new_empty(routed.pairs, width)
        kernel(
            (grid(cut, kind, count, width, self._multiprocessors),), x, codes, scales, zeros, len(codes), bias,
            tiles.order, tiles.tiles, out, count, choices, int(routes_known(routed, choices)), width, depth, limit,
        )  # fmt: skip
        return out


def routes_known(routed: Routed, choices: int) -> bool:
    """Returns whether a kernel may read the routes before it waits for the one before it. That one is of these routes,
    too, where it gave x a row for each pair: such kernels wait before they let the next one come. Not where each row
    goes to all experts, heads: attention gave x its rows then."""
    of_heads = routed.experts.shape[1] == routed.count and not routed.partial
    return choices == 1 < routed.experts.shape[1] and not of_heads


def layout_of(weight: Tensor | ExpertRows, width: int = 16) -> Layout:
    """width: of an expert's result. Where four of its features have no scales side by side, there is no stream."""
    if isinstance(weight, Tensor):
        layout, columns = Layout(), weight.shape[1]
    else:
        layout, columns = Layout(weight.kind, weight.groups, weight.zeros is not None), weight.columns
    stream = layout._replace(chunks=columns // _CHUNK)
    fits = width % 4 == 0 and stream.chunks <= _LONGEST and Stream.of(stream, 1, MAX_PAIRS).stages > 1
    return stream if fits else layout


def takes(weight: Tensor | ExpertRows, dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply activations of `dtype` with this weight, of which they read up to 16 bytes
    at a time."""
    if isinstance(weight, Tensor):
        columns, codes, fits = weight.shape[1], weight, dtype in (torch.bfloat16, torch.float16)
        fits = fits and weight.dtype == dtype
    else:
        columns, codes, fits = weight.columns, weight.words, dtype == torch.bfloat16
    parts = [
        part
        for part in (codes, *(() if isinstance(weight, Tensor) else (weight.scales, weight.zeros)))
        if part is not None
    ]
    fits = fits and columns % _CHUNK == 0 and all(part.is_contiguous() for part in parts)
    return fits and all(part.is_meta or (part.is_cuda and part.data_ptr() % 16 == 0) for part in parts)


def multiply(
    kind: str, x: Tensor, weight: Tensor | ExpertRows, bias: Tensor | None, routed: Routed, width: int, limit: float
) -> Tensor:
    """x [M or pairs, K], weight [count * N, K], bias [count * N] -> [pairs, width], where width is N or, of gates and
    ups, N / 2. kind: one of `KINDS`; limit: of `clamped`, and of `plain` 0 or `SQUARES`. On the meta device nothing
    runs."""
    if x.is_meta or not routed.pairs:
        return x.new_empty(routed.pairs, width)
    kernels = few_pairs(x.device, x.dtype, layout_of(weight, width))
    return kernels(kind, x, weight, bias, routed, width, limit)


@functools.cache
def few_pairs(device: torch.device, dtype: torch.dtype, layout: Layout) -> FewPairs:
    """Compiles on first use. Raises OSError without NVRTC, RuntimeError where the device is too old."""
    return FewPairs(device, dtype, layout)


def compile_ahead(dtype: torch.dtype, layout: Layout, capability: tuple[int, int], cuts: Cuts | None = None) -> bytes:
    """Puts what `FewPairs` compiles into the user's cache folder, for devices of this compute capability."""
    layout = layout.on(capability)
    cuts = cuts_for(layout) if cuts is None else cuts
    return compile_source(read_source(layout, cuts), options_for(dtype), capability)


def read_source(layout: Layout, cuts: Cuts) -> str:
    """Returns what is compiled."""
    kind, groups, zeros, chunks = layout
    weights = "StoredExperts" if kind == DENSE else f"Words<{kind}, {groups}, {str(zeros).lower()}>"
    files = (*FILES, *(STREAM_FILES if chunks else ()))
    lines = (cut.line(f"{kind}_{tile}", kind.partition("_")[0], tile) for (kind, tile), cut in cuts.items())
    return "".join([*read_files(files), f"using Weights = {weights};\n", *lines])
