"""Attention on CUDA by the Triton kernels: reads the pool where it lies, and turns and stores keys on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.ops.attention.attend import Attend, KernelAttend
from draftwing.ops.attention.batch import (
    AttentionKind,
    Batch,
    ChunkSpan,
    DeltaInputs,
    DeltaWeights,
    HeadNorms,
    HeadShape,
)
from draftwing.ops.attention.triton_decode import Workspace, tree_attention
from draftwing.ops.attention.triton_groups import TreeGroups, tree_groups
from draftwing.ops.attention.triton_prefill import prefill_attention, prefill_room, prefill_rows
from draftwing.ops.attention.triton_tiles import Room, prefill_tiles
from draftwing.ops.delta_net.triton import delta_net
from draftwing.ops.delta_net.triton_plan import Walks, chunk_walks, plan_chunks, plan_trees
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.rope.triton import rope_and_write, write_latents
from draftwing.ops.short_conv.triton import short_conv, sources_of


class PagedAttention:
    """Implements `AttnBackend` over a `KVPool`.

    exact: a query's result has the same bits however it is asked for (`ops.attention.triton_common`); else trees and
    prefill chunks are summed as is fastest at their size.
    """

    capturable = takes_tiles = True

    def __init__(self, pool: KVPool, exact: bool) -> None:
        self.pool = pool
        self.exact = exact
        self.workspace = Workspace(pool.kv[0].device)
        self._tiles: dict[HeadShape, tuple[int, int, Room]] = {}
        # Which query of the newest batch wrote a slot, for `short_conv.sources_of`.
        has_states = any(kv.dim() == 2 and kv.shape[1] for kv in pool.kv)
        self.owners = pool.kv[0].new_zeros(pool.slots + 1 if has_states else 0, dtype=torch.int32)

    def bind(self, batch: Batch, first_layer: int, inputs_ready: bool = False) -> Attend:
        return TritonAttend(self, batch, first_layer, inputs_ready)

    def chunk_tiles(self, spans: Sequence[ChunkSpan], shape: HeadShape) -> Tensor:
        return prefill_tiles([span[:4] for span in spans], *self._tile(shape))

    def max_tiles(self, queries: int, chunks: int, shape: HeadShape) -> int:
        group, rows, room = self._tile(shape)
        return queries * group // rows + chunks + room.pieces

    def chunk_walks(self, spans: Sequence[ChunkSpan], queries: int) -> tuple[Tensor, Tensor]:
        return chunk_walks(spans, queries)

    def _tile(self, shape: HeadShape) -> tuple[int, int, Room]:
        """Heads per key head, rows of a tile, and what there is for tiles."""
        if shape not in self._tiles:
            of_shape = shape.kv_heads, shape.head_dim
            kv = next(kv for kv in self.pool.kv if kv.dim() == 4 and kv.shape[1::2] == of_shape)
            rows, room = prefill_rows(kv, self.exact), prefill_room(kv, self.exact)
            self._tiles[shape] = shape.heads // shape.kv_heads, rows, room
        return self._tiles[shape]


class TritonAttend(KernelAttend):
    """Attention of one forward."""

    _backend: PagedAttention

    def __init__(self, backend: PagedAttention, batch: Batch, first_layer: int, inputs_ready: bool = False) -> None:
        super().__init__(backend, batch, first_layer)
        self._inputs_ready = inputs_ready
        self._tiles: dict[HeadShape, Tensor] = {}  # of the batch's chunks
        self._counts: Tensor | None = None  # of the keys of its queries, where images' tokens see each other
        self._walks: dict[int, Walks] = {}  # by the convolution's width
        self._sources: dict[int, Tensor] = {}  # the same of short convolutions
        self._groups: TreeGroups | None = None  # of the batch's trees

    def _turn(self, layer: int, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> None:
        kv = self._backend.pool.kv[self._first_layer + layer][:, :kv_heads]
        scales = self._backend.pool.scales[self._first_layer + layer]
        q_norm, k_norm, eps, v_norm, after = norms or (None, None, 0.0, False, False)
        rope_and_write(qkv, cos, sin, self._batch.write_slots, kv, q_norm, k_norm, eps, scales, v_norm, after)

    def write_latents(
        self, layer: int, made: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
        query: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        pool, at = self._backend.pool, self._first_layer + layer
        return write_latents(
            made, norm, eps, cos, sin, self._batch.write_slots, pool.kv[at], pool.scales[at][0], query
        )  # fmt: skip

    def short_conv(self, layer: int, made: Tensor, taps: Tensor) -> Tensor:
        batch, kept, width = self._batch, self._backend.pool.kv[self._first_layer + layer], taps.shape[1]
        is_first = width not in self._sources
        if is_first:
            self._sources[width] = sources_of(batch, width - 1, self._backend.owners)
        return short_conv(made, taps, kept, batch.write_slots, self._sources[width], is_first)

    def delta(  # type: ignore[override]
        self, layer: int, inputs: DeltaInputs, weights: DeltaWeights
    ) -> Tensor | Fp8Rows:
        states = self._backend.pool.states
        assert states is not None, "only a pool with states of rows has such layers"
        kept = states.layers[self._first_layer + layer]
        if kept.spec.by_state:
            return super().delta(layer, inputs, weights)
        width = kept.spec.conv_width
        is_first = width not in self._walks
        if is_first:
            plan = plan_trees if self._batch.path is not None else plan_chunks
            self._walks[width] = plan(states, self._batch, width)
        return delta_net(kept, self._walks[width], inputs, weights, is_first)

    def _attend(self, layer: int, q: Tensor, heads: int, kind: AttentionKind) -> Tensor:
        """q [M, heads or more, head_dim]"""
        batch, backend = self._batch, self._backend
        kv, scales = backend.pool.kv[self._first_layer + layer], backend.pool.scales[self._first_layer + layer]
        out = q.new_empty(q.shape[0], heads * (kind.values or q.shape[2]))
        if batch.chunks or batch.tiles is not None:
            shape = HeadShape(heads, kv.shape[1], kv.shape[3])
            tiles = self._chunk_tiles(shape) if batch.tiles is None else batch.tiles[shape]
            prefill_attention(
                q, kv, batch.table, batch.rows, tiles, out, backend.workspace, backend.exact, None, scales, kind,
                self._mutual_counts() if batch.mutual_in(kind) else None,
            )  # fmt: skip
        else:
            assert batch.path is not None and batch.path_len is not None
            if self._groups is None and backend.exact and batch.path.shape[1:] != (1, 1):
                half = q.dtype != torch.float32
                self._groups = tree_groups(batch.prefix_len, batch.path, batch.path_len, batch.ragged, half)
            tree_attention(
                q, kv, batch.table, batch.rows, batch.prefix_len, batch.path, batch.path_len, out, backend.workspace,
                backend.exact, batch.window, ragged=batch.ragged, scales=scales, kind=kind,
                inputs_ready=self._inputs_ready, groups=self._groups,
            )  # fmt: skip
        return out

    def _chunk_tiles(self, shape: HeadShape) -> Tensor:
        tiles = self._tiles.get(shape)
        if tiles is None:
            tiles = self._tiles[shape] = self._upload(self._backend.chunk_tiles(self._batch.chunks, shape))
        return tiles

    def _mutual_counts(self) -> Tensor:
        if self._counts is None:
            counts = [count for chunk in self._batch.chunks for count in chunk.counts()]
            self._counts = self._upload(torch.tensor(counts, dtype=torch.int32))
        return self._counts

    def _upload(self, made: Tensor) -> Tensor:
        device = self._batch.rows.device
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
