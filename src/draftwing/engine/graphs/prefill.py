"""Graphs of the target's forward over prompts. A short one keeps a GPU busy for less time than its launches take; and
while the host launches, the result of the step before waits to be looked at, and with it whoever reads the answer.

A graph is of a number of queries, not of certain prompts: whose they are, where they stand and how attention is cut
into tiles is read from one fixed buffer, which one copy fills. What a plan has less than that is a chunk of the slot
table's dummy row, from its beginning: it reads and writes the pool's dummy slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from draftwing.core import Chunk, IntArray
from draftwing.engine.devices.base import Device
from draftwing.engine.row_table import RowTable
from draftwing.ops.attention import Batch, HeadShape, TiledAttention, spans_of
from draftwing.ops.even import evens

# Queries. On an H200 768 of an 8B model take as long as their launches do. More than 1,024 are rarely prefilled at once
# while requests decode; where they are, the result of the step before waits for up to 18 ms of launches.
SIZES = tuple(evens(1024))
MAX_CHUNKS = 64  # of a graph, the dummy row's included: tiles are for so many, and empty ones cost something, too

Forward = Callable[[Batch], tuple[Tensor, Tensor | None]]


class Inputs(NamedTuple):
    """Parts of the buffer that the graphs of one size read; each begins at an even place, as `RowTable._send` says."""

    token_rows: Tensor  # [M] row of each query
    positions: Tensor  # [M]
    rows: Tensor  # [C] row of each chunk
    tiles: dict[HeadShape, Tensor]  # [T, 5] int32, as `Batch.tiles`


class PrefillGraphs:
    def __init__(
        self,
        device: Device,
        table: RowTable,
        attn: TiledAttention,
        shapes: Sequence[HeadShape],
        max_queries: int,
        forward: Forward,
    ) -> None:
        """shapes: of the target's attention; max_queries: of a plan; forward: the target's, gives hidden states [M, H]
        and auxiliary hidden states."""
        self._device, self._table, self._attn, self._shapes, self._forward = device, table, attn, shapes, forward
        self.sizes = [size for size in prefill_sizes(max_queries) if size <= table.length]
        self.replays = 0
        words = max((self._words(size) for size in self.sizes), default=0)
        self._buffer = table.kv_len.new_zeros(words)
        self._graphs: dict[int, tuple[Callable[[], None], tuple[Tensor, Tensor | None]]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, bar: tqdm[Any]) -> None:
        """Captures all sizes, the largest first."""
        for size in reversed(self.sizes):
            self._fill(size, ())
            self._graphs[size] = self._device.record(partial(self._run, self._inputs(size)))
            bar.update()

    def clear(self) -> None:
        """Lets go of all graphs."""
        self._graphs.clear()

    def run(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor | None] | None:
        """What the forward gives of the chunks' queries, as long as no graph runs after it; None where there is no
        graph of so many queries or chunks."""
        tokens = sum(chunk.length for chunk in chunks)
        at = bisect_left(self.sizes, tokens)
        if at == len(self.sizes) or len(chunks) >= MAX_CHUNKS or self.sizes[at] not in self._graphs:
            return None
        self._fill(self.sizes[at], chunks)
        replay, (hidden, aux_hidden) = self._graphs[self.sizes[at]]
        replay()
        self.replays += 1
        return hidden[:tokens], None if aux_hidden is None else aux_hidden[:tokens]

    # -- the buffer -------------------------------------------------------------------------------------------------

    def _chunks(self, size: int) -> int:
        return min(size, MAX_CHUNKS)

    def _tiles(self, size: int, shape: HeadShape) -> int:
        tiles = self._attn.max_tiles(size, self._chunks(size), shape)
        return tiles + tiles % 2

    def _parts(self, size: int) -> list[int]:
        """Words of each part of the buffer."""
        tiles = [self._tiles(size, shape) * 5 // 2 for shape in self._shapes]
        return [size, size, self._chunks(size), *tiles]

    def _words(self, size: int) -> int:
        return sum(self._parts(size))

    def _inputs(self, size: int) -> Inputs:
        token_rows, positions, rows, *words = self._buffer[: self._words(size)].split(self._parts(size))
        tiles = [part.view(torch.int32).view(-1, 5) for part in words]
        return Inputs(token_rows, positions, rows, dict(zip(self._shapes, tiles, strict=True)))

    def _fill(self, size: int, chunks: Sequence[Chunk]) -> None:
        left = size - sum(chunk.length for chunk in chunks)
        whole = [*chunks, Chunk(self._table.rows, 0, left, False)] if left else [*chunks]
        rows = np.full(self._chunks(size), self._table.rows, np.int64)
        rows[: len(whole)] = [chunk.row for chunk in whole]
        parts: list[IntArray] = [
            np.concatenate([np.full(chunk.length, chunk.row, np.int64) for chunk in whole]),
            np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in whole]),
            rows,
        ]
        for shape in self._shapes:
            tiles = np.zeros((self._tiles(size, shape), 5), np.int32)  # of no length where there are none
            found = self._attn.chunk_tiles(spans_of(whole), shape).numpy()
            tiles[: len(found)] = found
            parts.append(tiles.reshape(-1).view(np.int64))
        self._device.upload_into(self._buffer[: self._words(size)], np.concatenate(parts))

    def _run(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        table, (token_rows, positions, rows, tiles) = self._table, inputs
        batch = Batch(
            rows=rows,
            ids=table.tokens[token_rows, positions],
            positions=positions,
            write_slots=table.page_table[token_rows, positions],
            table=table.page_table,
            prefix_len=rows,  # nobody reads it: tiles say where a chunk begins
            tiles=tiles,
        )
        return self._forward(batch)


def prefill_sizes(max_queries: int) -> list[int]:
    """Queries of the graphs that plans of up to `max_queries` queries need, ascending."""
    return [size for before, size in pairwise((0, *SIZES)) if before < max_queries]


def kept_bytes(max_queries: int, hidden: int, aux_layers: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes of the outputs that these graphs keep."""
    return sum(prefill_sizes(max_queries)) * hidden * (1 + len(aux_layers)) * dtype.itemsize
