"""Attention on the CPU by the C kernels: reads the pool where it lies, and turns and stores keys on the way.

A query's result has the same bits however it is asked for, as with `TorchAttention` but for trees of any size: its sums
run over its keys in position order, in blocks of absolute positions. The two backends differ in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.kv.pool import SCALE_BYTES, KVPool, zeros_as_written
from draftwing.ops.attention.attend import Attend, AttnBackend, KernelAttend
from draftwing.ops.attention.batch import (
    AttentionKind,
    Batch,
    DeltaInputs,
    DeltaWeights,
    HeadNorms,
    HeadShape,
    first_seen,
)
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import CpuRuntime
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.delta_net import cpu as delta_net
from draftwing.ops.indexer import cpu as indexer
from draftwing.ops.runtime import RECORDED_ROWS
from draftwing.ops.whole_layers.cpu import NativeLayers, numbers_of_kind

POOL_TYPES = (torch.float32, torch.bfloat16, torch.int8)  # as cpu.h numbers them
SPARE = 1 << 20  # bytes that are kept; to touch more anew costs less than a hundredth of what so many rows compute
LINE = 64  # bytes: kernels read whole vectors
_MOST_TAPS = 8  # of a short convolution


class NativeAttention:
    """Implements `AttnBackend` over a `KVPool` of real CPU tensors. One forward at a time."""

    capturable = takes_tiles = False

    def __init__(self, pool: KVPool, raw: Any, workers: Workers) -> None:
        """raw: the extension module."""
        assert pool.dtype in POOL_TYPES
        self.pool, self.raw, self.workers = pool, raw, workers
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._spare = torch.empty(0, dtype=torch.uint8)
        # Recorded steps go on using them; each has half of the next one's size at most.
        self._outgrown: list[Tensor] = []
        self._pools = torch.tensor([kv.data_ptr() for kv in pool.kv])

    def bind(self, batch: Batch, first_layer: int, inputs_ready: bool = False) -> Attend:
        return CpuAttend(self, batch, first_layer)

    def scratch(self, size: int) -> Tensor:
        """[size] float32, zeros at first, kept: pages that are new to the process cost more than the work done in
        them."""
        self._scratch = self._grown(self._scratch, size)
        return self._scratch

    def pools(self, first: int, count: int, shape: HeadShape) -> int:
        """Returns where the addresses of so many layers' keys and values stand, which are all of this shape."""
        row = shape.head_dim + (SCALE_BYTES if self.pool.dtype == torch.int8 else 0)
        expected = (self.pool.slots + 1, shape.kv_heads, 2, row)
        assert all(kv.shape == expected for kv in self.pool.kv[first : first + count])
        return self._pools.data_ptr() + first * self._pools.itemsize

    def spare(self, size: int, rows: int) -> Tensor:
        """[size] bytes for what layers compute on their way for so many rows; kept for steps that may be recorded, and
        as far as that is little."""
        if rows > RECORDED_ROWS and size > SPARE:
            return torch.empty(size + LINE, dtype=torch.uint8)
        self._spare = self._grown(self._spare, max(size, SPARE))
        return self._spare

    def _grown(self, kept: Tensor, size: int) -> Tensor:
        if kept.numel() >= size:
            return kept
        self._outgrown.append(kept)
        return zeros_as_written((max(size, 2 * kept.numel()),), kept.dtype, kept.device)


class CpuAttend(KernelAttend):
    """Attention of one forward."""

    _backend: NativeAttention

    def __init__(self, backend: NativeAttention, batch: Batch, first_layer: int) -> None:
        super().__init__(backend, batch, first_layer)
        self._raw = backend.raw
        self._workers = backend.workers
        self._kv = backend.pool.kv
        self._kv_type = POOL_TYPES.index(backend.pool.dtype)
        trees = batch.ragged or batch
        rows, table = trees.rows.contiguous(), batch.table
        assert table.stride(1) == 1
        self._slots = batch.write_slots.contiguous()
        self._saves: Tensor | None = None  # see `delta_net.saves_of`
        # Who attends to what: prefix_len, path, path_len, spans, starts, how many rows or chunks, nodes, depth.
        counts: Tensor | None = None  # of the keys of chunks' queries, in layers in which images' tokens see each other
        if batch.chunks:
            if batch.mutual and any(chunk.mutual for chunk in batch.chunks):
                counts = torch.tensor([count for chunk in batch.chunks for count in chunk.counts()])
            spans = torch.tensor([chunk[:4] for chunk in batch.chunks])  # row, offset, start, length
            longest = max(chunk.length for chunk in batch.chunks)
            who: tuple[Any, ...] = (None, None, None, spans, None, len(batch.chunks), longest, 0)
        else:
            assert batch.path is not None and batch.path_len is not None
            _, nodes, depth = batch.path.shape
            starts = None
            if batch.ragged is not None:
                assert nodes == 1 and batch.ragged.starts.is_contiguous()
                nodes, starts = batch.ragged.cap, batch.ragged.starts
            read = trees.prefix_len.contiguous(), batch.path.contiguous(), batch.path_len.contiguous()
            who = (*read, None, starts, rows.shape[0], nodes, depth)
        self.who = (rows, table, table.stride(0), *who)
        self._mutual = None if counts is None else (rows, table, table.stride(0), None, None, counts, *who[3:])
        self._of_chunks: dict[int, tuple[Any, ...]] = {}  # `who` of layers with chunks of so many positions
        self._shape: tuple[HeadShape, bool] | None = None  # of what follows
        self._how: tuple[Any, ...] = ()
        self._hows: dict[tuple[HeadShape, bool], tuple[Any, ...]] = {}

    def _turn(self, layer: int, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> None:
        kv = self._kv[self._first_layer + layer]
        rows, all_heads, dim = qkv.shape
        heads = all_heads - 2 * kv_heads
        assert qkv.dtype == cos.dtype and qkv.stride()[1:] == (dim, 1) and self._slots.shape[0] == rows
        q_norm, k_norm, eps, values, after = norms or (None, None, 0.0, False, False)
        assert q_norm is None or q_norm.dtype in (qkv.dtype, torch.float32)
        wide = q_norm is not None and q_norm.dtype != qkv.dtype
        self._raw.rope_write(
            qkv, kv, self._slots, cos, sin, rows, heads, kv_heads, dim, qkv.stride(0), cos.stride(0), self._half(qkv),
            self._kv_type, q_norm, k_norm, self._workers.address, wide, values, after, eps,
        )  # fmt: skip

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        kv = self._kv[self._first_layer + layer]
        if kv.shape[2] != 1 or self._kv_type > 1 or k.dtype not in DTYPES:  # keys that are no values, too, or int8
            super().write(layer, k, v)
            return
        rows, size = k.shape[0], kv[0].numel()
        assert k.shape[1:] == kv.shape[1:2] + kv.shape[3:] and k.is_contiguous() and self._slots.shape[0] == rows
        self._raw.keep_rows(kv, self._slots, k, rows, size, k.dtype == torch.bfloat16, self._kv_type)

    def run_layers(
        self, layers: NativeLayers, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor
    ) -> Tensor | None:
        """Takes no gradient."""
        if self._mutual is not None:  # which is not so in each of the layers
            return None
        first, (rows, hidden), (heads, kv_heads, dim) = self._first_layer + layers.first, x.shape, layers.shape
        assert x.dtype == cos.dtype == layers.dtype
        assert hidden == layers.hidden and self._slots.shape[0] == rows <= layers.max_rows
        x = x.contiguous()
        if normed is None:
            assert layers.norms_input
        else:
            assert layers.count == 1 and normed.shape == (rows, layers.inputs)
            normed = normed.contiguous()
        self._prepare(heads, kv_heads, dim)
        outs = x.new_empty(1 + len(layers.place), rows, hidden)
        spare = self._backend.spare(layers.spare(rows, self._workers.most), rows)
        layers.raw.layers(
            x, normed, outs, layers.count, layers.address, self._backend.pools(first, layers.count, layers.shape),
            layers.places, spare, layers.width, self._slots, cos, sin, cos.stride(0), rows, self._half(x), 0, 0, 0, 0,
            heads, kv_heads, dim, self._half(x), self._kv_type, *self._how, 0, 0, 0, 2, 0, layers.slots, layers.eps,
        )  # fmt: skip
        return outs

    def short_conv(self, layer: int, made: Tensor, taps: Tensor) -> Tensor:
        kept = self._kv[self._first_layer + layer]
        (queries, size), (channels, width) = made.shape, taps.shape
        half, kept_half = made.dtype == torch.bfloat16, kept.dtype == torch.bfloat16
        known = made.dtype in DTYPES and kept.dtype in DTYPES and kept_half >= half
        if not known or width > _MOST_TAPS or type(made) is not Tensor:
            return super().short_conv(layer, made, taps)
        assert size == 3 * channels and kept.shape[1:] == (channels,) and taps.dtype == torch.float32
        assert made.stride(1) == 1 and taps.is_contiguous() and kept.is_contiguous()
        out = made.new_empty(queries, channels)
        self._raw.short_conv(
            out, made, made.stride(0), taps, kept, self._slots, channels, width, half, kept_half, self._workers.address,
            queries, *self.who,
        )  # fmt: skip
        return out

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        states, layer_of_pool = self._pool.states, self._first_layer + layer
        assert states is not None, "only a pool with states of rows has such layers"
        if not delta_net.can_run(states.layers[layer_of_pool].spec, inputs):
            return super().delta(layer, inputs, weights)
        assert self._batch.window <= states.nodes
        if self._batch.chunks and self._saves is None:
            self._saves = delta_net.saves_of(self._batch.chunks)
        return delta_net.delta_net(
            self._raw, self._backend.spare, states, layer_of_pool, self.who, self._slots, self._saves, self._workers,
            inputs, weights,
        )  # fmt: skip

    def write_index(self, layer: int, keys: Tensor) -> None:
        kept = self._pool.index[self._first_layer + layer]
        if keys.dtype not in DTYPES or type(keys) is not Tensor:
            super().write_index(layer, keys)
            return
        rows, size = keys.shape
        assert keys.is_contiguous() and self._slots.shape[0] == rows and kept.shape[1] == size
        half, kept_half = keys.dtype == torch.bfloat16, kept.dtype == torch.bfloat16
        self._raw.keep_rows(kept, self._slots, keys, rows, size, half, kept_half)

    def pick(self, layer: int, q: Tensor, weights: Tensor, topk: int) -> None:
        if q.dtype not in DTYPES or type(q) is not Tensor:
            super().pick(layer, q, weights, topk)
            return
        found = indexer.pick(
            self._raw, self._backend.spare, self._workers, self._batch, self.who,
            self._pool.index[self._first_layer + layer], q, weights, topk,
        )  # fmt: skip
        self._attend_to([(found, indexer.rows_of_one(len(q)))])

    def _attend(self, layer: int, q: Tensor, heads: int, kind: AttentionKind) -> Tensor:
        """q [M, heads or more, head_dim]"""
        kv = self._kv[self._first_layer + layer]
        kv_heads, dim = kv.shape[1], q.shape[2]
        self._prepare(heads, kv_heads, dim, self._mutual is not None and self._batch.mutual_in(kind))
        how = self._how
        if kind.chunk:
            how = (*self._in_chunks(kind.chunk), *how[len(self.who) :])
            kind = kind._replace(chunk=0)
        out = q.new_empty(q.shape[0], heads * (kind.values or dim))
        self._raw.attend(
            out, q, kv, q.stride(0), heads, kv_heads, dim, self._half(q), self._kv_type, *how,
            *numbers_of_kind(kind), kv.shape[2], kind.values, kind.cap,
        )  # fmt: skip
        return out

    def _in_chunks(self, chunk: int) -> tuple[Any, ...]:
        """Returns `who` of the same queries, each of which sees its own chunk: page tables begin where chunks do.
        Prompts are cut there, and each node is a tree of its own, without what of its path is in an earlier chunk."""
        if chunk in self._of_chunks:
            return self._of_chunks[chunk]
        rows, table, stride, prefix, path, path_len, spans, starts, count, _, depth = self.who
        who: tuple[Any, ...]
        if spans is not None:
            pieces = []
            for row, offset, start, length in spans.tolist():
                first, end = start - start % chunk, start + length
                for begin in range(first, end, chunk):
                    at, stop = max(start, begin), min(end, begin + chunk)
                    pieces.append((row, begin, offset + at - start, at - begin, stop - at))
            made = torch.tensor(pieces)  # [P, 5]
            first, own = made[:, 1], made[:, 0]
            spans = torch.cat((torch.arange(len(made))[:, None], made[:, 2:]), 1)
            who = (None, None, None, spans, None, len(made), int(made[:, 4].max()), 0)
        else:
            queries = len(self._slots)
            node = torch.arange(queries)
            if starts is None:
                own = node // (queries // count)
            else:  # nodes behind the last tree are nobody's
                own = (torch.searchsorted(starts.long(), node, right=True) - 1).clamp(max=count - 1)
            before, length = prefix[own], path_len.flatten()
            first = first_seen((before + length - 1).clamp(min=0), -chunk)
            gone = (first - before).clamp(min=0)  # of a path
            first = torch.minimum(first, before)
            step = (torch.arange(depth) + gone[:, None]).clamp(max=depth - 1)
            path = path.view(queries, depth).gather(1, step).view(queries, 1, depth)
            who = (before - first, path, (length - gone).view(queries, 1), None, None, queries, 1, depth)
        self._of_chunks[chunk] = found = (rows[own] * stride + first, table, 1, *who)
        return found

    def _half(self, x: Tensor) -> bool:
        """Returns whether the kernels take x, which is in float32 or as the pool is, as bfloat16."""
        half = x.dtype == torch.bfloat16
        assert self._kv_type if half else x.dtype == torch.float32, f"{x.dtype} over a pool in {self._kv[0].dtype}"
        return half

    def _prepare(self, heads: int, kv_heads: int, dim: int, mutual: bool = False) -> None:
        """Sets `_how` for layers of this shape, which mostly is that of the layer before. mutual: whether images'
        tokens see each other in them."""
        if self._shape == ((heads, kv_heads, dim), mutual):
            return
        assert heads % kv_heads == 0
        shape = HeadShape(heads, kv_heads, dim)
        self._shape = shape, mutual
        how = self._hows.get(self._shape)
        if how is None:
            size = self._raw.scratch_size(*shape, self._workers.most)
            scratch = self._backend.scratch(size)
            who = self._mutual if mutual and self._mutual is not None else self.who
            how = self._hows[self._shape] = (*who, scratch, size, self._workers.address)
        self._how = how


def native_attention(runtime: CpuRuntime, pool: KVPool, exact: bool = False) -> AttnBackend:
    """Returns attention over the pool in C, or in torch where C does not read it. A row has the same bits anyway."""
    return NativeAttention(pool, runtime.raw, runtime.workers) if pool.dtype in POOL_TYPES else TorchAttention(pool)
