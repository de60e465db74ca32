"""What a model needs of attention, and what a backend needs to know of a forward pass.

Keys and values live in the `KVPool` under slot ids; a row's page table says which slot holds which position.
A backend writes the new keys and values into the pool first and then reads everything through slots, so a query
finds its own key the same way as those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from draftwing.core import Chunk
from draftwing.kv.pool import DeltaSpec, KVPool
from draftwing.ops.torch.delta_net import delta_net

if TYPE_CHECKING:
    from draftwing.ops.fp8_blocks import Fp8Rows

T = TypeVar("T")


class HeadNorms(NamedTuple):
    """RMS norms of the heads of queries and keys, and perhaps of values, without weights."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    eps: float
    values: bool = False


class HeadShape(NamedTuple):
    """Sizes of the attention of a layer, on one rank: what the work of its kernels depends on."""

    heads: int
    kv_heads: int
    head_dim: int


class AttentionKind(NamedTuple):
    """How the queries of a layer attend, beside whom the batch lets them see.

    window: a query at position p sees positions p - window + 1 to p, its own among them; 0: all up to p. Positions
    count, not page-table entries: a node's position follows from its path.
    sinks [heads] float32: logits of a key without a value, which is in the denominator of every query's softmax; as
    they are, without the scale.
    scalar: scores are divided by its square root; 0: head_dim (`query_pre_attn_scalar` of Gemma's configs).
    values: the first so many elements of a key are the value, and the pool has both once; 0: they are apart.
    reads: whether the layer makes queries alone, over the keys and values that an earlier call had for this layer.
    """

    window: int = 0
    sinks: Tensor | None = None
    scalar: int = 0
    values: int = 0
    reads: bool = False

    def scale(self, head_dim: int) -> float:
        """Returns what scores are multiplied with."""
        return float((self.scalar or head_dim) ** -0.5)

    @property
    def is_full(self) -> bool:
        """Returns whether queries attend as with `FULL`, whoever wrote the keys."""
        return not self.window and self.sinks is None and not self.scalar and not self.values


FULL = AttentionKind()  # to everything before, as in Llama


class DeltaInputs(NamedTuple):
    """What a gated delta net's projections make of M tokens, in the model's dtype."""

    qkv: Tensor  # [M, channels]: queries, keys and values of all heads, before the convolution
    z: Tensor  # [M, value_heads * value_dim]: gates of what the net gives
    b: Tensor  # [M, value_heads]: of which beta is the sigmoid
    a: Tensor  # [M, value_heads]: of which the decay is made


class DeltaWeights(NamedTuple):
    """Parameters of a gated delta net besides its projections, float32."""

    conv: Tensor  # [channels, conv_width], the newest token's tap last
    decay: Tensor  # [value_heads]: -exp(A_log)
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float
    spec: DeltaSpec | None = None  # sizes, for those who have no pool that knows them
    fp8: bool = False  # whether what comes of it is for products with activations in fp8, and may come so


class Attend:
    """Attention of one forward, which a model is given, and what else its layers keep. `layer` is that of the pool,
    counted from the model's first. Backends override what they can do in fewer calls."""

    norms_heads = False  # whether `fused` takes the norms of heads, too

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
        reads it by page tables and paths, and writes to the batch's `write_slots` (`ops.torch.state`)."""
        raise NotImplementedError

    def earlier(self, layer: int, own: Tensor, count: int) -> Tensor:
        """own [M, n]: what the layer's `StateSpec` keeps of each token -> [M, count, n], that of the `count` tokens
        before it, the nearest first; zeros where there are none."""
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
        """Runs a gated delta net over the batch, from the states of its rows (`kv.row_states`) -> [M, value_heads *
        value_dim] in the inputs' dtype, or as `weights.fp8` allows: normed and gated. Rows of the inputs may be
        apart."""
        raise NotImplementedError

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        """Returns what rotating q and k and a call do, or None: then the caller does it.

        qkv [M, heads + 2 * kv_heads, head_dim], contiguous within each of M, may be overwritten; cos, sin
        [M, 1, head_dim] -> [M, heads * head_dim]. norms: of every head before, where `norms_heads`.  With `kind.reads`
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

    def run_layers(self, layers: Any, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Returns all that some decoder layers do (`ops.whole_layers`), as `WholeLayers` has it, or None."""
        return None


class ChunkSpan(NamedTuple):
    """A prefill chunk in a flat batch: queries `[offset, offset + length)` are positions start, start + 1, ... of
    batch row `row`. All host integers: a prefill's lengths are known exactly."""

    row: int
    offset: int
    start: int
    length: int
    final: bool = True  # the last chunk of a prompt
    saves: tuple[tuple[int, int], ...] = ()  # of states: (tokens of the chunk, 1 .. length, state slot), ascending


def spans_of(chunks: Sequence[Chunk]) -> tuple[ChunkSpan, ...]:
    """Returns the spans of chunks that follow each other in a flat batch; chunk i is batch row i."""
    offsets = accumulate((chunk.length for chunk in chunks), initial=0)
    return tuple(
        ChunkSpan(i, offset, chunk.start, chunk.length, chunk.final, chunk.saves)
        for i, (offset, chunk) in enumerate(zip(offsets, chunks, strict=False))
    )


class Ragged(NamedTuple):
    """Trees with different numbers of queries: those of tree b are queries `[starts[b], starts[b + 1])` of the batch,
    at most `cap`. A tree may have none."""

    rows: Tensor  # [T] int64, as in `Batch`
    prefix_len: Tensor  # [T] int64
    starts: Tensor  # [T + 1] int64, ascending from 0 to the number of queries
    cap: int
    mean: int  # about as many queries has a tree that has any: for tiles of a good size


class Batch(NamedTuple):
    """One forward of one model over M queries of B rows. One of `chunks` or `tiles` (prefill) or `path` (trees, chains)
    is set.

    For trees M = B * Q, and query q of row b attends to the row's committed positions `[0, prefix_len[b])` and then,
    in position order, to the window entries `path[b, q, 0 .. path_len[b, q])`: entry w stands for page-table
    position `prefix_len[b] + w`, 0 <= w < window. The query itself is the last entry of its path, and its position is
    `prefix_len[b] + path_len[b, q] - 1`, from which a sliding window counts. Entries past `path_len` are valid indices
    whose content is ignored.

    Trees of different sizes are M rows of one query each: `rows` [M], `prefix_len` [M], `path` [M, 1, D]. `ragged` says
    in addition which of them are one tree, for backends that read what these share once; others need not look.
    """

    rows: Tensor  # [B] int64, rows of the RowTable
    ids: Tensor  # [M] int64 token ids
    positions: Tensor  # [M] int64, for RoPE
    write_slots: Tensor  # [M] int64, where each query's key and value go
    table: Tensor  # [R + 1, L] int32 or int64: the page tables of all rows of the RowTable
    prefix_len: Tensor  # [B] int64, lengths on the device
    path: Tensor | None = None  # [B, Q, D] int64
    path_len: Tensor | None = None  # [B, Q] int64, >= 1
    window: int = 0  # for trees: entries past prefix_len that any path may name; Q where nodes are their own entries
    chunks: tuple[ChunkSpan, ...] = ()
    bound: int = 0  # host bound of the page-table entries that may be read; 0: all of them
    # Chunks that only the device knows: [T, 6] int32 for each shape of attention, by `TiledAttention.chunk_tiles`; the
    # row of each query, [M] int64; and where there are states of rows, what `TiledAttention.chunk_walks` gives.
    tiles: Mapping[HeadShape, Tensor] | None = None
    query_rows: Tensor | None = None
    walks: tuple[Tensor, Tensor] | None = None
    ragged: Ragged | None = None

    def part(self, first: int, end: int) -> Batch:
        """Returns the batch of the chunks first .. end - 1, at least one."""
        if end - first == len(self.chunks):
            return self
        begin = self.chunks[first].offset
        chunks = [span._replace(row=span.row - first, offset=span.offset - begin) for span in self.chunks[first:end]]
        here = slice(begin, begin + sum(span.length for span in chunks))
        return self._replace(
            rows=self.rows[first:end], ids=self.ids[here], positions=self.positions[here],
            write_slots=self.write_slots[here], prefix_len=self.prefix_len[first:end], chunks=tuple(chunks),
        )  # fmt: skip

    def padded(self, size: int, dummy: int) -> Batch:
        """Returns a batch of chunks with `size` queries. Those that it lacks are chunks of row `dummy`, from its
        beginning, whose page table has nothing but the pool's dummy slot."""
        assert self.chunks and self.path is None and self.tiles is None
        count, long = self.ids.shape[0], self.table.shape[1] // 2
        lengths = [min(long, size - at) for at in range(count, size, long)]
        zeros, none = self.ids.new_zeros(size - count), self.rows.new_zeros(len(lengths))
        at = torch.arange(size - count, device=zeros.device) % long
        spans = [
            ChunkSpan(self.rows.shape[0] + i, count + i * long, 0, length, False) for i, length in enumerate(lengths)
        ]
        return self._replace(
            rows=torch.cat((self.rows, none + dummy)), ids=torch.cat((self.ids, zeros)),
            positions=torch.cat((self.positions, at)), write_slots=torch.cat((self.write_slots, zeros)),
            prefix_len=torch.cat((self.prefix_len, none)), chunks=(*self.chunks, *spans),
            bound=max((self.bound, *lengths)) if self.bound else 0,
        )  # fmt: skip

    def ends(self, queries: Tensor) -> Batch:
        """Returns the batch of the last queries of the first chunks. queries [F] int64: where these are."""
        at = self.positions[queries]
        spans = [span._replace(offset=i, start=span.start + span.length - 1, length=1, saves=())
                 for i, span in enumerate(self.chunks[: len(queries)])]  # fmt: skip
        return self._replace(
            rows=self.rows[: len(queries)], ids=self.ids[queries], positions=at,
            write_slots=self.write_slots[queries], prefix_len=at, chunks=tuple(spans),
        )  # fmt: skip

    def pages(self) -> Tensor:
        """[B, bound] int64: a copy of the rows' page tables, for backends that read them on the host's terms."""
        return self.table[self.rows, : self.bound or self.table.shape[1]].long()


class BoundAttend(Attend):
    """What attention of one forward over a pool is on every device."""

    def __init__(self, pool: KVPool, batch: Batch, first_layer: int) -> None:
        """first_layer: pool layer of the model's first."""
        self._pool, self._batch, self._first_layer = pool, batch, first_layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        self.write(layer, k, v)
        return self.read(layer, q, kind)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._pool.write(self._first_layer + layer, self._batch.write_slots, k, v)

    def state(self, layer: int) -> tuple[Batch, Tensor]:
        return self._batch, self._pool.kv[self._first_layer + layer]

    def earlier(self, layer: int, own: Tensor, count: int) -> Tensor:
        from draftwing.ops.torch.state import ancestor_slots

        batch, kept = self.state(layer)
        kept.index_copy_(0, batch.write_slots, own.to(kept.dtype))
        slots = ancestor_slots(batch, count)
        return torch.where(slots.unsqueeze(2) > 0, kept[slots], 0).to(own.dtype)

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        assert self._pool.states is not None, "only a pool with states of rows has such layers"
        return delta_net(self._pool.states, self._first_layer + layer, self._batch, inputs, weights)


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
