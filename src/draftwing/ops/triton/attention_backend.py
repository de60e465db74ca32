"""Attention on CUDA by the Triton kernels: reads the pool where it lies, and turns and stores keys on the way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwing.ops.attention import FULL, Attend, AttentionKind, Batch, ChunkSpan, HeadNorms, Pool
from draftwing.ops.triton.attention import Workspace, tree_attention
from draftwing.ops.triton.attention_prefill import prefill_attention, prefill_rows, prefill_tiles
from draftwing.ops.triton.rope import rope_and_write


class PagedAttention:
    """Implements `AttnBackend` over a `KVPool`.

    exact: a query's result has the same bits however it is asked for (`ops.triton.attention_common`); else trees and
    prefill chunks are summed as is fastest at their size.
    """

    capturable = takes_tiles = True

    def __init__(self, pool: Pool, exact: bool) -> None:
        self.pool = pool
        self.exact = exact
        self.workspace = Workspace(pool.kv[0].device)

    def bind(self, batch: Batch, first_layer: int, settled: bool = False) -> Attend:
        return Bound(self, batch, first_layer, settled)

    def chunk_tiles(self, spans: Sequence[ChunkSpan], heads: int, layer: int = 0) -> Tensor:
        """What `Batch.tiles` is of these chunks, on the CPU; heads: of the model; layer: one of its pool layers."""
        group, rows = self._tile(heads, layer)
        return prefill_tiles([span[:4] for span in spans], group, rows)

    def most_tiles(self, queries: int, chunks: int, heads: int, layer: int = 0) -> int:
        """Tiles that so many queries in so many chunks have at most."""
        group, rows = self._tile(heads, layer)
        return queries * group // rows + chunks

    def _tile(self, heads: int, layer: int) -> tuple[int, int]:
        """Heads per key head, and rows of a tile."""
        kv = self.pool.kv[layer]
        return heads // kv.shape[1], prefill_rows(kv, self.exact)


class Bound(Attend):
    """Attention of one forward."""

    norms_heads = True

    def __init__(self, backend: PagedAttention, batch: Batch, first_layer: int, settled: bool = False) -> None:
        self._backend, self._settled = backend, settled
        self._batch = batch
        self._first_layer = first_layer
        self._tiles: dict[int, Tensor] = {}  # of the batch's chunks, by heads

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._backend.pool.write(self._first_layer + layer, self._batch.write_slots, k, v)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        self.write(layer, k, v)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        return self._attend(layer, q, q.shape[1], kind)

    def fused(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None = None,
        kind: AttentionKind = FULL,
    ) -> Tensor:
        """In place of q; takes no gradient."""
        self.fused_write(layer, qkv, cos, sin, norms)
        kv_heads = self._backend.pool.kv[self._first_layer + layer].shape[1]
        return self._attend(layer, qkv, qkv.shape[1] - 2 * kv_heads, kind)

    def fused_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> bool:
        kv = self._backend.pool.kv[self._first_layer + layer]
        scales = self._backend.pool.scales[self._first_layer + layer]
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        rope_and_write(qkv, cos, sin, self._batch.write_slots, kv, None, q_norm, k_norm, eps, scales)
        return True

    def _attend(self, layer: int, q: Tensor, heads: int, kind: AttentionKind) -> Tensor:
        """q [M, heads or more, head_dim]"""
        batch, backend = self._batch, self._backend
        kv, scales = backend.pool.kv[self._first_layer + layer], backend.pool.scales[self._first_layer + layer]
        out = q.new_empty(q.shape[0], heads * q.shape[2])
        if batch.chunks or batch.tiles is not None:
            tiles = self._chunk_tiles(heads, self._first_layer + layer) if batch.tiles is None else batch.tiles
            prefill_attention(q, kv, batch.table, batch.rows, tiles, out, backend.exact, None, scales, kind)
        else:
            assert batch.path is not None and batch.path_len is not None
            tree_attention(
                q, kv, batch.table, batch.rows, batch.prefix_len, batch.path, batch.path_len, out, backend.workspace,
                backend.exact, batch.window, ragged=batch.ragged, scales=scales, kind=kind, settled=self._settled,
            )  # fmt: skip
        return out

    def _chunk_tiles(self, heads: int, layer: int) -> Tensor:
        tiles = self._tiles.get(heads)
        if tiles is None:
            tiles = self._backend.chunk_tiles(self._batch.chunks, heads, layer)
            device = self._backend.pool.kv[layer].device
            if device.type == "cuda":
                tiles = tiles.pin_memory().to(device, non_blocking=True)
            self._tiles[heads] = tiles
        return tiles
