"""How kernels cut a GEMM, which has no influence on its bits: forms that there are, and which is best on a card.

What was measured best is data, in `cards/`: a file for a kind of card and a width of weights. `tools/tune_gemms.py`
writes such files for the GPU that it runs on, into the user's cache folder, where they are found before those here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import ConfigError
from draftwing.files import cache_folder

SHARES = 8  # of gemm.cu: K comes in chunks, of which each share has every eighth
CHUNK = 64  # columns
LARGEST_TILE = 128  # rows of x and features of the largest block
_STAGES = 3  # chunks that it has in shared memory
_BLOCKS = 2  # that `gemm` sets shared memory of a multiprocessor aside for; the rest caches weights on their way
CLUSTERS = (9, 0)  # compute capability that has them
WARP_GROUPS = 9  # major compute capability that alone has their instructions


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
    cluster: int = SHARES  # blocks, each for a share of K, or one, which has all shares in turn
    blocks: int = 1  # of a multiprocessor, for which there are to be registers and shared memory

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
        cut = self.tokens // 8, self.groups, self.row_tiles, self.stages, self.ahead, self.cluster
        return f"tall_gemm, {', '.join(map(str, cut))}"

    def outputs(self, kind: str) -> int:
        """Returns features of a product of this kind that a block makes, or with it the others of its cluster."""
        return self.features // (2 if kind == "silu" else 1)

    def grid(self, kind: str, rows: int, width: int, processors: int = 0) -> tuple[int, int]:
        """Blocks. width: of the result."""
        return -(-rows // self.tokens) * self.cluster, -(-width // self.outputs(kind))

    def shared_bytes(self, part: int) -> int:
        """Returns shared memory of a block. part: what a warp has of 16 features and a chunk, as `Width.part`."""
        pipeline = self.stages * self.tokens * CHUNK * 2 + self.warps * self.row_tiles * self.ahead * part
        return max(pipeline, self.tokens * (self.features + 4) * 4) + self.stages * 16


BASE_KINDS = ("plain", "add", "silu")  # of products; names may go on: `plain_narrow`
Shapes = dict[tuple[str, int], Shape | TallShape]  # by kind and rows of x that a block takes


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
    shared = by_k * max(stages * tokens * CHUNK * 2, _sums(tokens, features))
    return Shape(tokens, features, by_features * by_k, blocks, blocks, shared, call, cluster)


def ring(tokens: int, row_tiles: int, ahead: int, blocks: int, room: int | None = None) -> Shape:
    """room: None: for the blocks of the next kernel, too, as far as there is any."""
    features = row_tiles * 16
    call = f"ring_gemm, {tokens}, {row_tiles}, {ahead}"
    shared = 2 * SHARES * _sums(max(tokens, 8), features) + SHARES * ahead * tokens * CHUNK * 2
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
    shared = 2 * panel * by_k * tokens * CHUNK * 2 + ahead * count * x_units * 512
    sums = by_k * _sums(tokens, features)
    return Shape(
        tokens, features, count, blocks, blocks, shared, call, cluster, parts=count * row_tiles * ahead, sums=sums
    )


def tiled() -> Shape:
    shared = max(_STAGES * 2 * LARGEST_TILE * CHUNK * 2, _sums(LARGEST_TILE, LARGEST_TILE))
    call = f"tiled_gemm, 2, 4, 4, 4, {_STAGES}"
    # Blocks that run at the same time share weights, since x is the larger part of what they read.
    return Shape(LARGEST_TILE, LARGEST_TILE, 8, 1, _BLOCKS, shared, call, tokens_first=True)


def _sums(tokens: int, features: int) -> int:
    """Returns bytes, as in gemm.cu. Of 16 features the pitch has some bank conflicts, which saves a block of 16 rows of
    x a kilobyte: three then fit into the 32 KB that are set aside for two."""
    return tokens * (features + (4 if features > 16 else 2)) * 4


FORMS: dict[str, Callable[..., Shape | TallShape]] = {
    "few_rows": few_rows, "shared": shared, "ring": ring, "wide": wide, "tall": TallShape, "tiled": tiled,
}  # fmt: skip


def make_shape(row: Mapping[str, Any], tile: int) -> Shape | TallShape:
    """Returns the shape of a row of a file: a form, and what it is called with. tile: rows of x that a block takes."""
    others = {name: value for name, value in row.items() if name not in ("kind", "rows", "form", "us")}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in others.items()}
    if row["form"] != "tiled":
        given.setdefault("tokens", tile)
    return FORMS[row["form"]](**given)


def user_folder() -> Path:
    """Returns where `tools/tune_gemms.py` writes the shapes of this machine's card."""
    return cache_folder() / "gemm_shapes"


def find_file(width: str, capability: tuple[int, int], dtype: torch.dtype) -> Traversable:
    """Returns the file of shapes for such a device: the user's, its own, that of its kind, or one for any."""
    own = f"sm{capability[0]}{capability[1]}"
    names = ["clusters", "any"] if capability >= CLUSTERS else ["any"]
    files: list[Traversable] = []
    if dtype == torch.bfloat16:  # float16 has not been tried
        files.append(user_folder() / f"{own}-{width}.json")
        names = [own, "sm90", *names] if capability[0] == WARP_GROUPS else [own, *names]
    files += (resources.files(__package__).joinpath("cards", f"{name}-{width}.json") for name in names)
    return next(file for file in files if file.is_file())


@functools.cache
def read_shapes(width: str, capability: tuple[int, int], dtype: torch.dtype) -> Shapes:
    """Returns shapes by kind and tile for devices of this compute capability. Without an entry, `add_long` is `add`.

    width: of weights: dense, 4bit, 8bit. Raises ConfigError for a file that is none, or whose kernels such a device
    cannot run.
    """
    file = find_file(width, capability, dtype)
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["shapes"]
        shapes = {(row["kind"], row["rows"]): make_shape(row, row["rows"]) for row in rows}
        for (kind, tile), shape in shapes.items():
            if kind.partition("_")[0] not in BASE_KINDS or type(tile) is not int:
                raise ValueError(f"kind {kind!r}, rows {tile!r}")
            tall = isinstance(shape, TallShape)
            if (shape.cluster > 1 and capability < CLUSTERS) or (tall and capability[0] != WARP_GROUPS):
                raise ValueError(f"{kind} of {tile} rows for compute capability {capability[0]}.{capability[1]}")
        tiles = (8, 16, 32, 64, *([128] if width == "dense" else []))
        if missing := [f"{kind} of {tile} rows" for kind in BASE_KINDS for tile in tiles if (kind, tile) not in shapes]:
            raise ValueError(f"none for {', '.join(missing)}")
        return shapes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: expected shapes of kernels for this card, as tools/tune_gemms.py writes them; found {error!r}. "
            "Remove the file, or run the tool again"
        ) from error
