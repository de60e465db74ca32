"""Attention in plain torch: the reference on every device, and the backend where there are no kernels.

A query's result has the same bits however it is asked for: as a plain decode, as a node of any tree, in a prefill
chunk of any length, alone or in a batch. That holds where torch's GEMM in float32 sums over up to 192 terms in one
chain, in their order, as MKL's does on most CPUs. It is not so everywhere: on some CPUs, and with some versions, the
order follows from the sizes, and then results differ in the last bits. (The C kernels need no such thing.) Given that,
three things make it so:

- Scores are sums over head_dim alone, and a maximum does not depend on the order of the keys.
- Sums over keys are chains of multiply-adds in key order, so a key of weight 0 changes nothing wherever it stands.
  A chain ends at the absolute positions 112, 224, ..., for a product may cut a longer one where it likes. The nodes
  of a tree, whose place in the page table is not their position, are therefore offered to every block, each node
  with weight 0 in all blocks but that of its position. On a path they stand in position order.
- The softmax's denominator is summed by the same product, as a column of ones next to the values. The weight of a sink
  is added to it last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.ops.attention.attend import Attend, BoundAttend
from draftwing.ops.attention.batch import FULL, AttentionKind, Batch, ChunkSpan, first_seen

_BLOCK = 112  # positions of one chain; with a window of 80 it fills the 192 keys that MKL sums in one go
# Sizes of a product are padded to these: fewer rows, or a remainder of them, take another kernel with another order.
_ROW_TILE = 8
_KEY_TILE = 16


class Keys(NamedTuple):
    """What the queries of B rows read, fetched once a layer."""

    rows: Tensor  # [K] int64, K = B * blocks * kv_heads * width: rows of the pool's layer as [slots * kv_heads, ...]
    staged: Tensor  # [K, 2 * head_dim] in the pool's dtype; `fetched` itself where that is float32
    fetched: Tensor  # [K, 2 * head_dim]: the part of `wide` that a layer fills
    wide: Tensor  # [B, blocks, kv_heads, width, 2 * head_dim + _KEY_TILE] float32: keys, values, ones
    foreign: Tensor  # [K, 1] bool: read by no query, so it may be anybody's, and NaN


class Buffers:
    """Operands and intermediate results. Every stretch of every layer writes them before it reads them, so that all
    share them; they are kept, for pages that are new to the process cost more than the work done in them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._outgrown: list[Tensor] = []  # CUDA graphs captured with them go on using them

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """Returns [rows, columns] float32: ones at first, later what the last user left."""
        kept = self._kept.get((name, columns))
        if kept is None or kept.shape[0] < rows:
            if kept is not None and kept.is_cuda:
                self._outgrown.append(kept)
            kept = self._kept[name, columns] = torch.ones(rows, columns, dtype=torch.float32, device=self.device)
        return kept[:rows]


class Queries(NamedTuple):
    """A stretch of N queries for each of B rows: the operands of its products, as views made once for all layers.

    n = B * blocks * kv_heads products of `tall` query rows: the N * group that share a key head, and padding.
    """

    where: slice  # of the flat batch
    grouped: Tensor  # [B, blocks, N, kv_heads, group, head_dim]: the part of `left` that a layer fills
    left: Tensor  # [n, tall, head_dim] float32, the same for all blocks
    keys: Tensor  # [n, head_dim, width]
    scores: Tensor  # [n, tall, width]
    by_block: Tensor  # [B, blocks, kv_heads, tall, width]: `scores`
    masked: Tensor  # [B, masked, kv_heads, tall, width]: the last blocks of `scores`
    mask: Tensor  # [B, masked, 1, tall, width]: 0 or -inf
    values: Tensor  # [n, width, head_dim + _KEY_TILE], the last columns ones
    sums: Tensor  # [n, tall, head_dim + _KEY_TILE]
    of_block: tuple[Tensor, ...]  # each [B, kv_heads, tall, head_dim + _KEY_TILE]: `sums`
    numerator: Tensor  # [B, N, kv_heads, group, head_dim], of the first block
    denominator: Tensor  # [B, N, kv_heads, group, 1]
    mean: Tensor  # [B, N, kv_heads, group, head_dim]: where the result goes


Work = list[tuple[Keys, list[Queries]]]


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


class TorchAttention:
    """Implements `AttnBackend` over a `KVPool`; everything between the pool and the result is float32.

    Grouped queries of one key head are rows of one product. The promise above holds for windows of up to 80
    entries.
    """

    capturable = False  # it reads whole page tables where the host gives it no bound
    takes_tiles = False

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.buffers = Buffers(pool.kv[0].device)

    def bind(self, batch: Batch, first_layer: int, inputs_ready: bool = False) -> Attend:
        return TorchAttend(self, batch, first_layer)


class TorchAttend(BoundAttend):
    """Attention of one forward."""

    def __init__(self, backend: TorchAttention, batch: Batch, first_layer: int) -> None:
        super().__init__(backend, batch, first_layer)
        self._buffers = backend.buffers
        # By the reach and the shape of queries and keys, made in the first layer that has them.
        self._prepared: dict[tuple[int, torch.Size, torch.Size], tuple[Tensor, Work]] = {}

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        kv = self._pool.kv[self._first_layer + layer]
        alike = kind.reach, q.shape, kv.shape
        if alike not in self._prepared:
            self._prepared[alike] = self._prepare(kv, q, kind)
        mean, work = self._prepared[alike]
        for keys, stretches in work:
            _fetch(keys, kv)
            for queries in stretches:
                _attend(queries, q, kind)
        mean = mean[..., : kind.values or q.shape[2]]
        return mean.flatten(1).to(q.dtype, copy=True)  # a copy, for the next layer writes `mean` again

    def _prepare(self, kv: Tensor, q: Tensor, kind: AttentionKind) -> tuple[Tensor, Work]:
        """Also the tensor that every layer's result goes to: [M, heads, head_dim] float32."""
        batch, buffers = self._batch, self._buffers
        mean = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        if batch.chunks:
            pages, chunks = batch.pages(), batch.chunks
            if not batch.mutual_in(kind):
                chunks = tuple(chunk._replace(mutual=()) for chunk in chunks)
            return mean, [_chunk_work(pages, chunk, kind.reach, kv, mean, buffers) for chunk in chunks]
        return mean, [_tree_work(batch, kind.reach, kv, mean, buffers)]


def _fetch(keys: Keys, kv: Tensor) -> None:
    # A head's key and value are one row, and rows come in the order of the products' operands: nothing is transposed.
    torch.index_select(kv.view(-1, kv.shape[2] * kv.shape[3]), 0, keys.rows, out=keys.staged)
    if keys.staged is not keys.fetched:
        keys.fetched.copy_(keys.staged)
    keys.fetched.masked_fill_(keys.foreign, 0.0)  # a weight of 0 would not keep out a NaN
    if kv.shape[2] == 1:  # a head's value is its key
        keys.wide.flatten(0, 3)[:, kv.shape[3] : 2 * kv.shape[3]].copy_(keys.fetched)


def _attend(queries: Queries, q: Tensor, kind: AttentionKind) -> None:
    """q [M, heads, head_dim], of which `queries.where` is read, to `queries.mean`."""
    rows, _, nodes, kv_heads, group, dim = queries.grouped.shape
    queries.grouped.copy_(q[queries.where].view(rows, 1, nodes, kv_heads, group, dim))
    log2e = math.log2(math.e)  # for exp2, which is several times faster than exp
    scale = kind.scale(dim) * log2e
    torch.baddbmm(queries.scores, queries.left, queries.keys, beta=0, alpha=scale, out=queries.scores)
    if kind.cap:  # cap - 2 * cap / (1 + exp2(2 * s / cap)), s in powers of 2
        cap = kind.cap * log2e
        queries.scores.mul_(2 * log2e / cap).exp2_().add_(1).reciprocal_().mul_(-2 * cap).add_(cap)
    queries.masked.add_(queries.mask)
    top = queries.by_block.amax((1, 4), keepdim=True)  # [B, 1, kv_heads, tall, 1]
    sink = None
    if kind.sinks is not None:
        of_rows = (kind.sinks.float() * log2e).view(kv_heads, 1, group).expand(-1, nodes, -1).flatten(1)
        of_rows = F.pad(of_rows, (0, top.shape[3] - nodes * group))[:, :, None]  # [kv_heads, tall, 1]
        top = torch.maximum(top, of_rows)
        # So wide that no element is at the end of a vector, where torch rounds in another way.
        sink = (of_rows - top.squeeze(1)).expand(-1, -1, -1, _KEY_TILE).contiguous().exp2_()
    queries.by_block.sub_(top).exp2_()
    torch.bmm(queries.scores, queries.values, out=queries.sums)
    first, *others = queries.of_block
    for later in others:  # one after the other: the order of a sum over an axis is torch's to choose
        first.add_(later)
    if sink is not None:
        first[..., dim:].add_(sink)
    torch.div(queries.numerator, queries.denominator, out=queries.mean)


def _keys(slots: Tensor, read: Tensor, kv: Tensor, buffers: Buffers) -> Keys:
    """slots [B, blocks, width]; read: which of them some query reads, bool of the same shape"""
    rows, blocks, width = slots.shape
    kv_heads, dim = kv.shape[1], kv.shape[3]
    head = torch.arange(kv_heads, device=kv.device).unsqueeze(1)
    index = (slots.unsqueeze(2) * kv_heads + head).flatten()  # of [B, blocks, kv_heads, width]
    wide = buffers.take("wide", index.shape[0], 2 * dim + _KEY_TILE)  # the last columns stay ones
    fetched = wide[:, : kv.shape[2] * dim]
    staged = fetched if kv.dtype == wide.dtype else kv.new_empty(fetched.shape)
    foreign = ~read.unsqueeze(2).expand(-1, -1, kv_heads, -1).reshape(-1, 1)
    return Keys(index, staged, fetched, wide.view(rows, blocks, kv_heads, width, -1), foreign)


def _queries(where: slice, seen: Tensor, blocks: int, wide: Tensor, mean: Tensor, buffers: Buffers) -> Queries:
    """seen [B, masked, N, width] bool; `blocks`: how many of the first blocks are read; mean [M, heads, head_dim].
    Padding sees everything."""
    rows, masked, nodes, width = seen.shape
    kv_heads, dim = wide.shape[2], mean.shape[2]
    group = mean.shape[1] // kv_heads
    tall, products = _round_up(nodes * group, _ROW_TILE), rows * blocks * kv_heads
    mask = torch.zeros(rows, masked, 1, tall, width, device=wide.device)
    bias = torch.where(seen, 0.0, -torch.inf)[:, :, None, :, None]
    mask[:, :, :, : nodes * group].unflatten(3, (nodes, group)).copy_(bias)
    left, scores, sums = (
        buffers.take(name, products * tall, columns).view(products, tall, columns)
        for name, columns in (("left", dim), ("scores", width), ("sums", dim + _KEY_TILE))
    )
    by_block, of_block = scores.view(rows, blocks, kv_heads, tall, width), sums.view(rows, blocks, kv_heads, tall, -1)
    grouped = left.view(rows, blocks, kv_heads, tall, dim)[:, :, :, : nodes * group]
    total = of_block[:, 0, :, : nodes * group].unflatten(2, (nodes, group)).transpose(1, 2)
    right = wide[:, :blocks].flatten(0, 2)  # a view: blocks are left out only where B is 1
    return Queries(
        where=where,
        grouped=grouped.unflatten(3, (nodes, group)).transpose(2, 3),
        left=left,
        keys=right[..., :dim].transpose(1, 2),
        scores=scores,
        by_block=by_block,
        masked=by_block[:, -masked:],
        mask=mask,
        values=right[..., dim:],
        sums=sums,
        of_block=of_block.unbind(1),
        numerator=total[..., :dim],
        denominator=total[..., dim : dim + 1],
        mean=mean[where].view(rows, nodes, kv_heads, group, dim),
    )


def _tree_work(batch: Batch, reach: int, kv: Tensor, mean: Tensor, buffers: Buffers) -> tuple[Keys, list[Queries]]:
    """Every block's committed positions and, next to them, the tree's whole window."""
    assert batch.path is not None and batch.path_len is not None
    rows, nodes, depth = batch.path.shape
    pages = batch.pages()
    device = pages.device
    blocks = -(-pages.shape[1] // _BLOCK)
    table = F.pad(pages, (0, blocks * _BLOCK - pages.shape[1])).unflatten(1, (blocks, _BLOCK))
    position = torch.arange(blocks * _BLOCK, device=device).view(blocks, _BLOCK)
    prefix = batch.prefix_len[:, None, None]  # [B, 1, 1]
    window = batch.window or nodes
    # The first position that a query sees, [B, N].
    own = batch.prefix_len[:, None] + batch.path_len - 1
    first = first_seen(own, reach) if reach else torch.zeros_like(batch.path_len)
    near = position[:, None] >= first[:, None, :, None]  # [B, blocks, N, width]
    if window == 1:  # a root alone, which stands at its own position
        slots = table
        seen = (position <= prefix)[:, :, None] & near
    else:
        entry = torch.arange(_round_up(window, _KEY_TILE), device=device)  # [W]; those past the window are never seen
        at = (batch.prefix_len[:, None] + entry).clamp(max=blocks * _BLOCK - 1)
        beside = table.flatten(1).gather(1, at)  # [B, W] slots
        slots = torch.cat((table, beside[:, None].expand(-1, blocks, -1)), 2)
        # The block of the position that an entry has on a query's path, -1 off the path.
        step = torch.arange(depth, device=device)
        sees = (step < batch.path_len[..., None]) & (batch.prefix_len[:, None, None] + step >= first[..., None])
        used = torch.where(sees, batch.path, entry.shape[0])  # [B, N, D], or past the end
        home = torch.full((rows, nodes, entry.shape[0] + 1), -1, device=device)
        home = home.scatter(2, used, ((prefix + step) // _BLOCK).expand_as(used))[..., :-1]  # [B, N, W]
        on_path = home[:, None] == torch.arange(blocks, device=device)[:, None, None]  # [B, blocks, N, W]
        committed = (position < prefix)[:, :, None] & near
        seen = torch.cat((committed, on_path), 3)  # [B, blocks, N, width]
    keys = _keys(slots, seen.any(2), kv, buffers)
    return keys, [_queries(slice(0, rows * nodes), seen, blocks, keys.wide, mean, buffers)]


def _chunk_work(
    table: Tensor, chunk: ChunkSpan, reach: int, kv: Tensor, mean: Tensor, buffers: Buffers
) -> tuple[Keys, list[Queries]]:
    """Returns the row's positions up to the chunk's end. Queries go block by block: each reads the blocks before its
    own whole, or as far as it reaches, and those behind it as far as it sees; scores stay in the cache."""
    counts = chunk.counts()
    end = chunk.start + chunk.length
    blocks = -(-end // _BLOCK)
    slots = F.pad(table[chunk.row, :end], (0, blocks * _BLOCK - end)).view(1, blocks, _BLOCK)
    read = torch.arange(blocks * _BLOCK, device=table.device).view(1, blocks, _BLOCK) < end
    keys = _keys(slots, read, kv, buffers)
    causal = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=table.device).tril()
    stretches = []
    for block in reversed(range(chunk.start // _BLOCK, blocks)):  # the largest first: it makes the buffers of all
        first, last = max(chunk.start, block * _BLOCK), min(end, (block + 1) * _BLOCK)
        here = slice(chunk.offset + first - chunk.start, chunk.offset + last - chunk.start)
        seen = causal[None, first - block * _BLOCK : last - block * _BLOCK]  # [1, N, width]: of the last block
        upto = counts[first - chunk.start : last - chunk.start]
        whole = -(-upto[-1] // _BLOCK)  # blocks that are read
        if reach or chunk.mutual:
            position = torch.arange(first, last, device=table.device)[:, None]
            key = torch.arange(whole * _BLOCK, device=table.device)
            sees = position + 1
            for begin, stop in chunk.mutual:
                sees = sees.masked_fill((position >= begin) & (position < stop), stop)
            near = key < sees
            near &= (key >= first_seen(position, reach)) if reach else True
            seen = near.unflatten(1, (-1, _BLOCK)).transpose(0, 1)
        stretches.append(_queries(here, seen[None], whole, keys.wide, mean, buffers))
    return keys, stretches
