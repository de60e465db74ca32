"""Graphs of the target's forward over prompts. A short one keeps a GPU busy for less time than its launches take; and
while the host launches, the result of the step before waits to be looked at, and with it whoever reads the answer.

A graph is of a number of queries, not of certain prompts: whose they are, where they stand and how attention is cut
into tiles is read from one fixed buffer, which one copy fills. What a plan has less than that is a chunk of the slot
table's dummy row, from its beginning: it reads and writes the pool's dummy slot.

Where prompts are mixed with rows that decode, there are graphs of both: of a number of queries and a number of rows,
each with its newest token alone. Rows that a plan lacks are the dummy row, too.
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

MIXED_ROWS = (8, 16, 32, 64, 128)  # that decode beside prompts: a row more costs what a token of a prompt does
MIXED_QUERIES = 128  # least of prompts beside them: fewer are rounded up

States = tuple[Tensor, Tensor | None]  # hidden states [M, H], and auxiliary ones
Forward = Callable[[Batch, Batch | None], States]


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
        rows: Tensor,
        plain: Callable[[Tensor], Batch],
    ) -> None:
        """shapes: of the target's attention; max_queries: of a plan; forward: the target's, of prompts and of the trees
        in front of them; rows: where those that decode beside prompts will stand, none where nothing is mixed; plain:
        makes their batch."""
        self._device, self._table, self._attn, self._shapes, self._forward = device, table, attn, shapes, forward
        self._rows, self._plain = rows, plain
        self.sizes = [size for size in prefill_sizes(max_queries) if size <= table.length]
        self.replays = 0
        words = max((self._words(size) for size in self.sizes), default=0)
        self._buffer = table.kv_len.new_zeros(words)
        self._graphs: dict[int, tuple[Callable[[], None], States]] = {}
        most = rows.shape[0] if self.sizes and self.sizes[-1] >= MIXED_QUERIES else 0  # else no graph is mixed
        self.row_sizes = [size for size in MIXED_ROWS if size <= most]
        self._mixed: dict[tuple[int, int], Callable[[], None]] = {}  # by queries of prompts, and rows
        self._mixed_states: States | None = None  # where all of these leave what they give

    def __len__(self) -> int:
        return len(self._graphs) + len(self._mixed)

    @property
    def planned(self) -> int:
        """How many graphs `capture` captures."""
        return len(self.sizes) + sum(size >= MIXED_QUERIES for size in self.sizes) * len(self.row_sizes)

    def capture(self, bar: tqdm[Any]) -> None:
        """Captures all sizes, the largest first."""
        for size in reversed(self.sizes):
            self._fill(size, ())
            inputs = self._inputs(size)
            for rows in reversed(self.row_sizes if size >= MIXED_QUERIES else ()):
                self._mixed[size, rows], _ = self._device.record(partial(self._run_mixed, inputs, rows))
                bar.update()
            self._graphs[size] = self._device.record(partial(self._run, inputs))
            bar.update()

    def clear(self) -> None:
        """Lets go of all graphs."""
        self._graphs.clear()
        self._mixed.clear()
        self._mixed_states = None

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

    def row_size(self, rows: int) -> int:
        """How many rows have the graphs for so many that decode; 0: there are none."""
        at = bisect_left(self.row_sizes, rows)
        return self.row_sizes[at] if at < len(self.row_sizes) else 0

    def run_mixed(self, chunks: Sequence[Chunk], rows: int) -> tuple[States, States] | None:
        """What one forward gives of so many rows, a `row_size`, and of the chunks' queries; as `run` otherwise."""
        tokens = sum(chunk.length for chunk in chunks)
        at = bisect_left(self.sizes, max(tokens, MIXED_QUERIES))
        if at == len(self.sizes) or len(chunks) >= MAX_CHUNKS or (self.sizes[at], rows) not in self._mixed:
            return None
        self._fill(self.sizes[at], chunks)
        self._mixed[self.sizes[at], rows]()
        self.replays += 1
        assert self._mixed_states is not None
        return cut(self._mixed_states, rows, rows + tokens)

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

    def _run(self, inputs: Inputs) -> States:
        return self._forward(self._batch(inputs), None)

    def _run_mixed(self, inputs: Inputs, rows: int) -> None:
        hidden, aux_hidden = self._forward(self._batch(inputs), self._plain(self._rows[:rows]))
        if self._mixed_states is None:  # the largest are captured first
            self._mixed_states = torch.empty_like(hidden), None if aux_hidden is None else torch.empty_like(aux_hidden)
        for part, kept in zip((hidden, aux_hidden), self._mixed_states, strict=True):
            if part is not None and kept is not None:
                kept[: part.shape[0]].copy_(part)

    def _batch(self, inputs: Inputs) -> Batch:
        table, (token_rows, positions, rows, tiles) = self._table, inputs
        return Batch(
            rows=rows,
            ids=table.tokens[token_rows, positions],
            positions=positions,
            write_slots=table.page_table[token_rows, positions],
            table=table.page_table,
            prefix_len=rows,  # nobody reads it: tiles say where a chunk begins
            tiles=tiles,
        )


def cut(states: States, first: int, end: int) -> tuple[States, States]:
    """Returns those of the first queries, and of the others up to `end`."""
    hidden, aux_hidden = states
    if aux_hidden is None:
        return (hidden[:first], None), (hidden[first:end], None)
    return (hidden[:first], aux_hidden[:first]), (hidden[first:end], aux_hidden[first:end])


def prefill_sizes(max_queries: int) -> list[int]:
    """Queries of the graphs that plans of up to `max_queries` queries need, ascending."""
    return [size for before, size in pairwise((0, *SIZES)) if before < max_queries]


def kept_bytes(
    max_queries: int, hidden: int, aux_layers: tuple[int, ...], dtype: torch.dtype, mixed: bool = False
) -> int:
    """Returns the bytes of the outputs that these graphs keep."""
    sizes = prefill_sizes(max_queries)
    states = sum(sizes) + (sizes[-1] + MIXED_ROWS[-1] if mixed else 0)
    return states * hidden * (1 + len(aux_layers)) * dtype.itemsize
