"""What attention is told of a forward pass: heads, kinds of attention, chunks of prompts, whose queries are where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.core import Chunk
from draftwing.kv.pool import DeltaSpec


class HeadNorms(NamedTuple):
    """RMS norms of the heads of queries and keys, and perhaps of values, without weights. after: those of queries and
    keys are of heads that are turned, not of such that are to be."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    eps: float
    values: bool = False
    after: bool = False


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
    cap: scores s, scaled, are cap * tanh(s / cap); 0: as they are.
    values: the first so many elements of a key are the value, and the pool has both once; 0: they are apart.
    reads: whether the layer makes queries alone, over the keys and values that an earlier call had for this layer.
    chunk: positions are cut into chunks of so many, and a query sees those of its own chunk up to its own; 0: they are
    not. A layer has no window then.
    """

    window: int = 0
    sinks: Tensor | None = None
    scalar: int = 0
    cap: float = 0.0
    values: int = 0
    reads: bool = False
    chunk: int = 0

    def scale(self, head_dim: int) -> float:
        """Returns what scores are multiplied with."""
        return float((self.scalar or head_dim) ** -0.5)

    @property
    def reach(self) -> int:
        """Returns the window, or less than 0 for a chunk, and 0 where queries see all before them: see `first_seen`."""
        return self.window or -self.chunk

    @property
    def is_full(self) -> bool:
        """Returns whether queries attend as with `FULL`, whoever wrote the keys."""
        return not self.reach and self.sinks is None and not (self.scalar or self.cap or self.values)


# In which layers tokens of an image see each other: those with windows, all, or none.
Mutual = Literal["", "windows", "all"]
FULL = AttentionKind()  # to everything before, as in Llama


def first_seen(position: Tensor, reach: int) -> Tensor:
    """Returns the first position that queries at these positions see; reach: of their kind, not 0."""
    if reach > 0:
        return (position + 1 - reach).clamp(min=0)
    return position - position % -reach


class DeltaInputs(NamedTuple):
    """What a gated delta net's projections make of M tokens, in the model's dtype."""

    qkv: Tensor  # [M, channels]: queries, keys and values of all heads, before the convolution
    z: Tensor  # [M, value_heads * value_dim]: gates of what the net gives
    b: Tensor  # [M, value_heads]: of which beta is a sigmoid; nobody reads it where `DeltaSpec.corrects` is 0
    a: Tensor  # [M, decays]: of which the decay is made


class DeltaWeights(NamedTuple):
    """Parameters of a gated delta net besides its projections, float32."""

    conv: Tensor  # [channels, conv_width], the newest token's tap last
    decay: Tensor  # [value_heads], or [value_heads, key_dim] with `DeltaSpec.by_state`: -exp(A_log)
    dt_bias: Tensor  # [decays]
    norm: Tensor  # [value_dim]; of a state-space layer [value_heads * value_dim], or nothing: then there is none
    eps: float
    spec: DeltaSpec | None = None  # sizes, for those who have no pool that knows them
    fp8: bool = False  # whether what comes of it is for products with activations in fp8, and may come so
    # Of a state-space layer:
    conv_bias: Tensor | None = None  # [channels]
    skip: Tensor | None = None  # [value_heads]: D, what of a value goes past the state
    gates_first: bool = True  # whether gates come before the norm


class ChunkSpan(NamedTuple):
    """A prefill chunk in a flat batch: queries `[offset, offset + length)` are positions start, start + 1, ... of
    batch row `row`. All host integers: a prefill's lengths are known exactly."""

    row: int
    offset: int
    start: int
    length: int
    final: bool = True  # the last chunk of a prompt
    saves: tuple[tuple[int, int], ...] = ()  # of states: (tokens of the chunk, 1 .. length, state slot), ascending
    mutual: tuple[tuple[int, int], ...] = ()  # positions [start, end), ascending, whose tokens see each other
    second: int = 0  # as of `Chunk`

    def counts(self) -> list[int]:
        """Returns how many of the row's positions each query sees where these tokens see each other."""
        found = list(range(self.start + 1, self.start + self.length + 1))
        for start, end in self.mutual:
            for i in range(max(start - self.start, 0), min(end - self.start, self.length)):
                found[i] = end
        return found


def spans_of(chunks: Sequence[Chunk]) -> tuple[ChunkSpan, ...]:
    """Returns the spans of chunks that follow each other in a flat batch; chunk i is batch row i."""
    offsets = accumulate((chunk.length for chunk in chunks), initial=0)
    return tuple(
        ChunkSpan(i, offset, chunk.start, chunk.length, chunk.final, chunk.saves, second=chunk.second)
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


class ImageRows(NamedTuple):
    """Rows of features that stand in place of embeddings, in some queries of a prefill."""

    mask: Tensor  # [n] bool: which of the queries from `first` on
    rows: Tensor  # [n, (1 + deep) * H]: in place of the embedding, and what the first `deep` layers add; else anything
    deep: int = 0
    first: int = 0

    def put(self, x: Tensor, factor: float = 1.0) -> None:
        """Puts features, times a factor, in place of embeddings x [M, H]."""
        part, rows = x[self.first : self.first + len(self.mask)], self.rows[:, : x.shape[1]]
        torch.where(self.mask.unsqueeze(1), rows if factor == 1 else rows * factor, part, out=part)

    def add(self, x: Tensor, layer: int) -> None:
        """Adds to what a layer made, x [M, H]. layer: from 1 on."""
        part = x[self.first : self.first + len(self.mask)]
        mine = self.rows[:, layer * x.shape[1] : (layer + 1) * x.shape[1]]
        torch.where(self.mask.unsqueeze(1), part + mine, part, out=part)

    def part(self, here: slice) -> ImageRows:
        """Returns those of some of the queries."""
        return self._replace(mask=self.mask[here], rows=self.rows[here])

    def blanked(self, ids: Tensor, blank: int) -> Tensor:
        """ids [M] -> the same with another id where there are features"""
        behind = len(ids) - self.first - len(self.mask)
        return ids.masked_fill(F.pad(self.mask, (self.first, behind)), blank)


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
    # Where a rotary embedding has other positions than the text, behind an image: [M], or [3, M] in three axes.
    turns: Tensor | None = None
    images: ImageRows | None = None
    following: ImageRows | None = None  # of the token behind each query, for draft heads, which read that; one for it
    mutual: Mutual = ""  # where `ChunkSpan.mutual` holds; `write_slots` has all of these tokens, or they are written

    def mutual_in(self, kind: AttentionKind) -> bool:
        """Returns whether tokens of an image see each other in layers of this kind."""
        return self.mutual == "all" or (self.mutual == "windows" and kind.window > 0)

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
            turns=None if self.turns is None else self.turns[..., here],
            images=None if self.images is None else self.images.part(here),
            following=None if self.following is None else self.following.part(here),
        )  # fmt: skip

    def padded(self, size: int, dummy: int) -> Batch:
        """Returns a batch of chunks with `size` queries. Those that it lacks are chunks of row `dummy`, from its
        beginning, whose page table has nothing but the pool's dummy slot."""
        assert self.chunks and self.path is None and self.tiles is None
        count, long = self.ids.shape[0], self.table.shape[1] // 2
        lengths = [min(long, size - at) for at in range(count, size, long)]
        zeros, none = self.ids.new_zeros(size - count), self.rows.new_zeros(len(lengths))
        turns = None if self.turns is None else F.pad(self.turns, (0, size - count))
        at = torch.arange(size - count, device=zeros.device) % long
        spans = [
            ChunkSpan(self.rows.shape[0] + i, count + i * long, 0, length, False) for i, length in enumerate(lengths)
        ]
        return self._replace(
            rows=torch.cat((self.rows, none + dummy)), ids=torch.cat((self.ids, zeros)),
            positions=torch.cat((self.positions, at)), write_slots=torch.cat((self.write_slots, zeros)),
            prefix_len=torch.cat((self.prefix_len, none)), chunks=(*self.chunks, *spans),
            bound=max((self.bound, *lengths)) if self.bound else 0, turns=turns,
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
