"""What a model needs of attention: `Attend`, which each layer calls, and the backends that bind it to a batch.

Keys and values live in the `KVPool` under slot ids; a row's page table says which slot holds which position.
A backend writes the new keys and values into the pool first and then reads everything through slots, so a query
finds its own key the same way as those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.ops.attention.batch import (
    FULL,
    AttentionKind,
    Batch,
    ChunkSpan,
    DeltaInputs,
    DeltaWeights,
    HeadNorms,
    HeadShape,
)
from draftwing.ops.delta_net.spec import delta_net
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.indexer.blocks import BlockIndex, block_picks, write_blocks
from draftwing.ops.indexer.spec import Picks, most_seen, one_by_one, picks, rows_of_one
from draftwing.ops.row_states.spec import ancestor_slots

T = TypeVar("T")


class Attend:
    """Attention of one forward, which a model is given, and what else its layers keep. `layer` is that of the pool,
    counted from the model's first. Backends override what they can do in fewer calls."""

    norms_heads = False  # whether `fused` takes the norms of heads, too

    @property
    def picked(self) -> Attend:
        """Returns attention to what the last `pick` of the forward picked."""
        raise NotImplementedError

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        """q [M, heads, head_dim], k [M, kv_heads, head_dim], v [M, kv_heads, values], q and k rotated -> [M, heads *
        values]. values: head_dim, or as `kind` has it."""
        raise NotImplementedError

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        """Returns what a call does without keys and values of its own: over those that an earlier one had for this
        layer."""
        raise NotImplementedError

    def state(self, layer: int) -> tuple[Batch, Tensor]:
        """Returns the forward's batch, and all that the layer's `StateSpec` keeps, [slots + 1, *shape]. Whoever calls
        reads it by page tables and paths, and writes to the batch's `write_slots` (`ops.row_states.spec`)."""
        raise NotImplementedError

    def earlier(self, layer: int, own: Tensor, count: int, step: int = 1) -> Tensor:
        """own [M, n]: what the layer's `StateSpec` keeps of each token -> [M, count, n], that of the `count` tokens
        before it, the nearest first, or of every so many alone; zeros where there are none."""
        raise NotImplementedError

    def short_conv(self, layer: int, made: Tensor, taps: Tensor) -> Tensor:
        """Runs a short convolution between gates. made [M, 3 * channels]: b, c and u of each token; taps [channels,
        width] float32, the newest token's last -> c * conv(b * u), [M, channels]. The layer keeps b * u."""
        b, c, u = made.chunk(3, 1)
        own = b * u
        total = own * taps[:, -1]
        for back, before in enumerate(self.earlier(layer, own, taps.shape[1] - 1).unbind(1), 2):
            total = total + before * taps[:, -back]
        return c * total.to(c.dtype)

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor | Fp8Rows:
        """Runs a gated delta net over the batch, from the states of its rows (`kv.pool`) -> [M, value_heads *
        value_dim] in the inputs' dtype, or as `weights.fp8` allows: normed and gated. Rows of the inputs may be
        apart."""
        raise NotImplementedError

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        """Returns what rotating q and k and a call do, or None: then the caller does it.

        qkv [M, heads + 2 * kv_heads, head_dim], contiguous within each of M, may be overwritten; cos, sin
        [M, 1, head_dim] -> [M, heads * head_dim]. norms: of every head, where `norms_heads`.  With `kind.reads`
        qkv are queries alone, and it is what rotating them and `read` do.
        """
        return None

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Does what a call does for later ones: the keys, rotated, and values of queries whose results nobody wants."""
        raise NotImplementedError

    def fused_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> bool:
        """Returns the same part of `fused`, with its arguments; False where the caller does it. There may be no queries
        in qkv, which is contiguous within each of M."""
        return False

    def write_latents(
        self, layer: int, made: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
        query: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Writes what tokens keep of latent attention; None where the caller norms, rotates and writes it.

        made [M, latent + turned]: of each token, rows perhaps apart; norm [latent]: weights of the latent's RMS norm;
        cos, sin [M, 1, turned]: for the rest. query: x [M, n], rows perhaps apart, and weights [n] of its norm, which
        has the same eps -> x normed, [M, n]; without, [M, 0]."""
        return None

    def write_index(self, layer: int, keys: Tensor) -> None:
        """Keeps keys [M, size] of an indexer, for this batch and later ones."""
        raise NotImplementedError

    def sees_at_most(self, topk: int) -> bool:
        """Returns whether the host knows that no query sees more than `topk` tokens, so that there is nothing to
        pick."""
        raise NotImplementedError

    def pick(self, layer: int, q: Tensor, weights: Tensor, topk: int) -> None:
        """Has each query pick the `topk` tokens that `picked` attends to. q [M, heads, size] and weights [M, heads]
        float32, of the indexer whose keys `write_index` kept for this layer."""
        raise NotImplementedError

    def write_blocks(self, layer: int, keys: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
        """Does what `write_index` does for an indexer of blocks, see `ops.indexer.blocks`."""
        raise NotImplementedError

    def pick_blocks(self, layer: int, q: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
        """Does what `pick` does for an indexer of blocks."""
        raise NotImplementedError

    def run_layers(self, layers: Any, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Returns all that some decoder layers do (`ops.whole_layers`), as `WholeLayers` has it, or None."""
        return None


class BoundAttend(Attend):
    """What attention of one forward over a pool is on every device."""

    def __init__(self, backend: AttnBackend, batch: Batch, first_layer: int) -> None:
        """first_layer: pool layer of the model's first."""
        self._backend, self._pool, self._batch, self._first_layer = backend, backend.pool, batch, first_layer
        self._picked: Attend | None = None

    @property
    def picked(self) -> Attend:
        assert self._picked is not None
        return self._picked

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        self.write(layer, k, v)
        return self.read(layer, q, kind)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._pool.write(self._first_layer + layer, self._batch.write_slots, k, v)

    def state(self, layer: int) -> tuple[Batch, Tensor]:
        return self._batch, self._pool.kv[self._first_layer + layer]

    def earlier(self, layer: int, own: Tensor, count: int, step: int = 1) -> Tensor:
        batch, kept = self.state(layer)
        kept.index_copy_(0, batch.write_slots, own.to(kept.dtype))
        slots = ancestor_slots(batch, count, step)
        return torch.where(slots.unsqueeze(2) > 0, kept[slots], 0).to(own.dtype)

    def write_index(self, layer: int, keys: Tensor) -> None:
        kept = self._pool.index[self._first_layer + layer]
        kept.index_copy_(0, self._batch.write_slots, keys.to(kept.dtype))

    def sees_at_most(self, topk: int) -> bool:
        return most_seen(self._batch) <= topk

    def pick(self, layer: int, q: Tensor, weights: Tensor, topk: int) -> None:
        found = picks(self._batch, self._pool.index[self._first_layer + layer], q, weights, topk)
        self._attend_to((part, rows_of_one(part.last)) for part in found)

    def write_blocks(self, layer: int, keys: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
        write_blocks(self._batch, self._pool.index[self._first_layer + layer], keys, turn, blocks)

    def pick_blocks(self, layer: int, q: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
        found = block_picks(self._batch, self._pool.index[self._first_layer + layer], q, turn, blocks)
        self._attend_to((part, rows_of_one(part.last)) for part in found)

    def _attend_to(self, parts: Iterable[tuple[Picks, tuple[Tensor, ...]]]) -> None:
        """Has `picked` attend to these. parts: with their `rows_of_one`."""
        made = [(part.queries, one_by_one(self._batch, part, alone)) for part, alone in parts]
        self._picked = PickedAttend(self, [(queries, self._backend.bind(b, self._first_layer)) for queries, b in made])

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        assert self._pool.states is not None, "only a pool with states of rows has such layers"
        return delta_net(self._pool.states, self._first_layer + layer, self._batch, inputs, weights)


class PickedAttend(Attend):
    """Attention of one forward whose queries attend to what they picked."""

    def __init__(self, whole: Attend, parts: Sequence[tuple[slice, Attend]]) -> None:
        """whole: of the batch.  parts: of its queries, as rows of their own."""
        self._whole, self._parts = whole, parts

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        self._whole.write(layer, k, v)
        return self.read(layer, q, kind)

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0][1].read(layer, q, kind)
        return torch.cat([part.read(layer, q[queries], kind) for queries, part in self._parts])


def in_turn(first: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
    """Returns what both give; see `Device.beside`."""
    return first(), other()


class MixedAttend(Attend):
    """Attention of one forward over two batches, the queries of the first before those of the other, each as by itself.
    Their rows differ, and so do the state slots that they write. Not for layers that ask for `state`."""

    def __init__(
        self, first: Attend, other: Attend, queries: int, beside: Callable[..., tuple[Any, Any]] = in_turn
    ) -> None:
        """queries: of the first.  beside: as `Device.beside`; of few tokens of prompts the last tiles leave most of a
        GPU to the rows of the first, whose keys take its memory and hardly anything else."""
        self._parts = (first, slice(0, queries)), (other, slice(queries, None))
        self._beside = beside
        self.norms_heads = first.norms_heads

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        return torch.cat(self._both(lambda part, at: part(layer, q[at], k[at], v[at], kind)))

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        return torch.cat(self._both(lambda part, at: part.read(layer, q[at], kind)))

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        return _joined(self._both(lambda part, at: part.fused(layer, qkv[at], cos[at], sin[at], norms, kind)))

    def earlier(self, layer: int, own: Tensor, count: int, step: int = 1) -> Tensor:
        return torch.cat([part.earlier(layer, own[at], count, step) for part, at in self._parts])

    def short_conv(self, layer: int, made: Tensor, taps: Tensor) -> Tensor:
        return torch.cat([part.short_conv(layer, made[at], taps) for part, at in self._parts])

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        weights = weights._replace(fp8=False)  # rows that are quantised cannot be joined
        made = [part.delta(layer, DeltaInputs(*(x[at] for x in inputs)), weights) for part, at in self._parts]
        return torch.cat(cast("list[Tensor]", made))

    def write_latents(
        self, layer: int, made: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
        query: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        return _joined(
            self._both(
                lambda part, at: part.write_latents(
                    layer, made[at], norm, eps, cos[at], sin[at], query and (query[0][at], query[1])
                )
            )
        )

    def _both(self, fn: Callable[[Attend, slice], T]) -> tuple[T, T]:
        """Returns what it gives of each part."""
        first, other = self._parts
        return self._beside(lambda: fn(*first), lambda: fn(*other))


def _joined(made: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Returns what two parts of a batch have made together, None where both leave it to the caller."""
    if made[0] is None or made[1] is None:
        assert made[0] is made[1], "one part has overwritten its queries, and both would be rotated again"
        return None
    return torch.cat([made[0], made[1]])


class KernelAttend(BoundAttend):
    """Attention of one forward by kernels that turn, norm and write keys, too."""

    norms_heads = True

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        return self._attend(layer, q, q.shape[1], kind)

    def fused_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> bool:
        self._turn(layer, qkv, self._pool.kv[self._first_layer + layer].shape[1], cos, sin, norms)
        return True

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor:
        """In place of q; takes no gradient."""
        kv_heads = 0 if kind.reads else self._pool.kv[self._first_layer + layer].shape[1]
        self._turn(layer, qkv, kv_heads, cos, sin, norms)
        return self._attend(layer, qkv, qkv.shape[1] - 2 * kv_heads, kind)

    def _turn(self, layer: int, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> None:
        """What `fused_write` does of so many heads of keys, and as many of values."""
        raise NotImplementedError

    def _attend(self, layer: int, q: Tensor, heads: int, kind: AttentionKind) -> Tensor:
        """q [M, heads or more, head_dim] -> [M, heads * head_dim]"""
        raise NotImplementedError


class AttnBackend(Protocol):
    """Attention over the paged pool. `bind` does the work that all layers of one forward share.

    capturable: whether a CUDA graph can hold a forward, which then runs at any length. takes_tiles: whether
    `Batch.tiles` may be given, as made by `TiledAttention`, which such a backend is.
    """

    pool: KVPool
    capturable: bool
    takes_tiles: bool

    def bind(self, batch: Batch, first_layer: int, inputs_ready: bool = False) -> Attend:
        """first_layer: pool layer of the model's first (the drafter's layers follow the target's).  inputs_ready: all
        of the batch, and the keys and values below `prefix_len`, were there before the forward's first operation, which
        on a GPU is one of torch's; attention may then read them before the operation in front of it has ended."""
        ...


class TiledAttention(AttnBackend, Protocol):
    """Attention whose prefill is cut into tiles, which only the device needs to know."""

    def chunk_tiles(self, spans: Sequence[ChunkSpan], shape: HeadShape) -> Tensor:
        """Returns what `Batch.tiles` is of these chunks for layers of this shape, on the CPU."""
        ...

    def max_tiles(self, queries: int, chunks: int, shape: HeadShape) -> int:
        """Tiles that so many queries in so many chunks have at most."""
        ...

    def chunk_walks(self, spans: Sequence[ChunkSpan], queries: int) -> tuple[Tensor, Tensor]:
        """Returns what `Batch.walks` is of these chunks, int32 on the CPU: [C, 5] of each its batch row, first query,
        length, first segment and their end; [S, 2] of each segment, a part of a chunk at whose end a state is written:
        tokens from the chunk's first, and the state slot. That of a chunk's end is the device's to fill in.  queries:
        of the batch; those that are no chunk's are a span more, which has no segments."""
        ...
