"""Attention in plain torch over the chunks that tiles and walks tell of: what graphs of prompts are given, without
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from draftwing.kv.pool import KVPool
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, Batch, ChunkSpan, DeltaInputs, DeltaWeights, HeadShape
from draftwing.ops.attention.spec import TorchAttend, TorchAttention

paged: Any = pytest.importorskip("draftwing.ops.attention.triton")


class TileAttention(paged.PagedAttention):
    """Tiles as ever."""

    def __init__(self, pool: KVPool, exact: bool) -> None:
        super().__init__(pool, exact)
        self._torch = TorchAttention(pool)

    def bind(self, batch: Batch, first_layer: int, inputs_ready: bool = False) -> Attend:
        bound = TorchAttend if batch.tiles is None else TileAttend
        return bound(self._torch, batch, first_layer)


class TileAttend(TorchAttend):
    def __init__(self, backend: TorchAttention, batch: Batch, first_layer: int) -> None:
        super().__init__(backend, batch, first_layer)
        self._tiled = backend

    def read(self, layer: int, q: Any, kind: Any = FULL) -> Any:
        kv, tiles = self._pool.kv[self._first_layer + layer], self._batch.tiles
        assert tiles is not None
        found = tiles[HeadShape(q.shape[1], kv.shape[1], kv.shape[3])].tolist()
        return self._over(tile[:4] for tile in found if not tile[4]).read(layer, q, kind)

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Any:
        """Of queries that are no chunk's it makes zeros."""
        assert self._batch.walks is not None
        walks, segments = (part.tolist() for part in self._batch.walks)
        spans = [
            (row, offset, int(self._batch.positions[offset]), length, True, tuple(segments[first : end - 1]))
            for row, offset, length, first, end in walks
            if end > first
        ]
        if not spans:
            return torch.zeros_like(inputs.z)
        count, whole = sum(span[3] for span in spans), len(inputs.qkv)
        made = self._over(spans).delta(layer, DeltaInputs(*(part[:count] for part in inputs)), weights)
        return torch.cat((made, made.new_zeros(whole - count, made.shape[1])))

    def _over(self, spans: Iterable[Any]) -> TorchAttend:
        chunks = tuple(ChunkSpan(*span) for span in spans if span[3])
        return TorchAttend(self._tiled, self._batch._replace(chunks=chunks, tiles=None), self._first_layer)
