"""What graphs of prompts read: one fixed buffer, which one copy fills, and rows of features of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.core import Chunk, IntArray
from draftwing.engine.devices.base import Device
from draftwing.engine.row_table import RowTable
from draftwing.ops.attention.attend import TiledAttention
from draftwing.ops.attention.batch import Batch, HeadShape, ImageRows, spans_of

_SAVES = 2  # states that are written of a chunk on average, the one at its end among them
MAX_CHUNKS = 64  # of a graph, the dummy row's included: tiles are for so many, and empty ones cost something, too


class ImageShape(NamedTuple):
    """What images have in prompts. width: of a row of features, which has one for each of `deep` layers, too.  in_axes:
    whether the rotary embedding has three axes."""

    width: int
    deep: int
    in_axes: bool
    dtype: torch.dtype


class _Parts(NamedTuple):
    """Parts of the buffer that the graphs of one size read; each begins at an even place, as `RowTable._send` says."""

    token_rows: Tensor  # [M] row of each query
    positions: Tensor  # [M]
    rows: Tensor  # [C] row of each chunk
    tiles: dict[HeadShape, Tensor]  # [T, 6] int32, as `Batch.tiles`
    walks: tuple[Tensor, Tensor] | None  # as `Batch.walks`, of `_SAVES` segments a chunk
    turns: Tensor | None  # [3, M] as `Batch.turns`
    images: ImageRows | None  # of all queries


class PrefillInputs:
    def __init__(
        self, device: Device, table: RowTable, attn: TiledAttention, shapes: Sequence[HeadShape],
        sizes: Sequence[int], images: ImageShape | None,
    ) -> None:  # fmt: skip
        """shapes: of the target's attention; sizes: queries of each graph; images: None where no graph is for these."""
        self._device, self._table, self._attn, self._shapes, self._images = device, table, attn, shapes, images
        self._has_walks = table.states is not None
        self._buffer = table.kv_len.new_zeros(max(map(self._words, sizes), default=0))
        self._features = torch.empty(0)  # [most queries, width] of images
        if images is not None:
            rows = max(sizes, default=0)
            self._features = torch.zeros(rows, images.width, dtype=images.dtype, device=device.device)

    def takes(self, size: int, chunks: Sequence[Chunk], batch: Batch | None = None) -> bool:
        """Returns whether a graph of so many queries has room for the chunks, and reads all of their batch."""
        if self._images is None and batch is not None and (batch.images is not None or batch.turns is not None):
            return False
        ends = sum(len(chunk.saves) + 1 for chunk in chunks)
        return len(chunks) < MAX_CHUNKS and ends <= self._chunks(size) * _SAVES

    def fill(self, size: int, chunks: Sequence[Chunk], batch: Batch | None = None) -> None:
        """Sets what a graph of so many queries reads. batch: of the chunks, where there may be images in it."""
        left = size - sum(chunk.length for chunk in chunks)
        whole = [*chunks, Chunk(self._table.rows, 0, left, False)] if left else [*chunks]
        rows = np.full(self._chunks(size), self._table.rows, np.int64)
        rows[: len(whole)] = [chunk.row for chunk in whole]
        sections = self._sections(size)
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in whole])
        parts: list[IntArray] = [
            np.concatenate([np.full(chunk.length, chunk.row, np.int64) for chunk in whole]), positions, rows,
        ]  # fmt: skip
        if self._has_walks:
            walks = self._attn.chunk_walks(spans_of(chunks), size)
            parts += [_words_of(part, words) for part, words in zip(walks, sections[3:5], strict=True)]
        for shape, words in zip(self._shapes, sections[len(parts) :], strict=False):
            parts.append(_words_of(self._attn.chunk_tiles(spans_of(whole), shape), words))
        if self._images is not None:
            parts += [np.tile(positions, 3 * self._images.in_axes), np.zeros(sections[-1], np.int64)]
        self._device.upload_into(self._buffer[: sum(sections)], np.concatenate(parts))
        if batch is not None and (batch.images is not None or batch.turns is not None):
            self._put_images(size, batch)

    def _put_images(self, size: int, batch: Batch) -> None:
        """Sets what a batch with images has beside text."""
        parts, count = self._parts(size), len(batch.ids)
        if parts.turns is not None and batch.turns is not None:
            parts.turns[:, :count].copy_(batch.turns)
        if parts.images is not None and batch.images is not None:
            parts.images.mask[:count].copy_(batch.images.mask)
            parts.images.rows[:count].copy_(batch.images.rows)

    def batch(self, size: int) -> Batch:
        """Returns the batch of what a graph of so many queries reads. To be called while it is captured."""
        table, (token_rows, positions, rows, tiles, walks, turns, images) = self._table, self._parts(size)
        return Batch(
            rows=rows,
            ids=table.tokens_at(token_rows, positions),
            positions=positions,
            write_slots=table.slots_at(token_rows, positions),
            table=table.page_table,
            prefix_len=rows,  # nobody reads it: tiles say where a chunk begins
            tiles=tiles,
            query_rows=token_rows,
            walks=walks,
            turns=turns,
            images=images,
        )

    def _chunks(self, size: int) -> int:
        return min(size, MAX_CHUNKS)

    def _sections(self, size: int) -> list[int]:
        """Returns words of each part of the buffer."""
        chunks = self._chunks(size)
        tiles = [self._attn.max_tiles(size, chunks, shape) * 3 for shape in self._shapes]
        walks = [(chunks * 5 + 1) // 2, chunks * _SAVES] if self._has_walks else []
        images = [] if self._images is None else [3 * size * self._images.in_axes, -(-size // 16) * 2]
        return [size, size, chunks, *walks, *tiles, *images]

    def _words(self, size: int) -> int:
        return sum(self._sections(size))

    def _parts(self, size: int) -> _Parts:
        token_rows, positions, rows, *words = self._buffer[: self._words(size)].split(self._sections(size))
        walks = turns = images = None
        if self._images is not None:
            *words, axes, mask = words
            turns = axes.view(3, size) if self._images.in_axes else None
            images = ImageRows(mask.view(torch.bool)[:size], self._features[:size], self._images.deep)
        if self._has_walks:
            spans, segments, *words = words
            walks = spans.view(torch.int32)[: len(rows) * 5].view(-1, 5), segments.view(torch.int32).view(-1, 2)
        tiles = [part.view(torch.int32).view(-1, 6) for part in words]
        return _Parts(
            token_rows, positions, rows, dict(zip(self._shapes, tiles, strict=True)), walks, turns, images
        )  # fmt: skip


def _words_of(found: Tensor, words: int) -> IntArray:
    """found: int32 -> the same in so many words [words] int64, with zeros behind it, which are chunks of no length."""
    part = np.zeros(words * 2, np.int32)
    part[: found.numel()] = found.numpy().reshape(-1)
    return part.view(np.int64)
