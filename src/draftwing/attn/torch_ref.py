"""Attention in plain torch: the CPU's backend and the reference on every device.

A query's result has the same bits however it is asked for: as a plain decode, as a node of any tree, in a prefill
chunk of any length, alone or in a batch. Three things make it so, where matrix products behave like MKL's:

- Scores are sums over head_dim alone, and a maximum does not depend on the order of the keys.
- Sums over keys are chains of multiply-adds in key order, so a key of weight 0 changes nothing wherever it stands.
  A chain ends at the absolute positions 112, 224, ..., for a product may cut a longer one where it likes. The nodes
  of a tree, whose place in the page table is not their position, are therefore offered to every block, each node
  with weight 0 in all blocks but that of its position. On a path they stand in position order.
- The softmax's denominator is summed by the same product, as a column of ones beside the values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.attn.base import Attend, Batch, ChunkSpan, default_scale
from draftwing.kv.pool import KVPool

_BLOCK = 112  # positions of one chain; with a window of 80 it fills the 192 keys that MKL sums in one go
# Sizes of a product are padded to these: fewer rows, or a remainder of them, take another kernel with another order.
_ROW_TILE = 8
_KEY_TILE = 16


class Keys(NamedTuple):
    """What the queries of B rows read, fetched once a layer."""

    slots: Tensor  # [B * blocks * width] int64
    wide: Tensor  # [B, blocks, kv_heads, width, 2 * head_dim + _KEY_TILE] float32: keys, values, ones
    fetched: Tensor  # [B, blocks, width, kv_heads, 2 * head_dim]: the part of `wide` that a layer fills


class Queries(NamedTuple):
    """A stretch of N queries for each of B rows: the operands of its products, as views made once for all layers.

    n = B * blocks * kv_heads products of `tall` query rows: the N * group that share a key head, and padding.
    """

    where: slice  # of the flat batch
    grouped: Tensor  # [B, blocks, N, kv_heads, group, head_dim]: the part of `left` that a layer fills
    left: Tensor  # [n, tall, head_dim] float32, the same for all blocks
    keys: Tensor  # [n, head_dim, width]
    values: Tensor  # [n, width, head_dim + _KEY_TILE], the last columns ones
    mask: Tensor  # [B, masked, 1, tall, width]: 0 or -inf, for the last `masked` blocks


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


class TorchAttention:
    """Implements `AttnBackend` over a `KVPool`; everything between the pool and the result is float32.

    Grouped queries of one key head are rows of one product. The promise above holds for windows of up to 80
    entries.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def bind(self, batch: Batch, first_layer: int) -> Attend:
        work: list[tuple[Keys, list[Queries]]] = []  # made in the first layer, which tells the number of heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self.pool.kv[first_layer + layer]
            self.pool.write(first_layer + layer, batch.write_slots, k, v)
            if not work:
                group = q.shape[1] // k.shape[1]
                work.extend(
                    [_chunk_work(batch.table, chunk, kv, group) for chunk in batch.chunks]
                    if batch.chunks
                    else [_tree_work(batch, kv, group)]
                )
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            for keys, stretches in work:
                _fetch(keys, kv)
                for queries in stretches:
                    _attend(queries, q, out)
            return out

        return attend


def _fetch(keys: Keys, kv: Tensor) -> None:
    keys.fetched.copy_(kv.index_select(0, keys.slots).view(keys.fetched.shape))


def _attend(queries: Queries, q: Tensor, out: Tensor) -> None:
    """q [M, heads, head_dim], out [M, heads * head_dim], of which `queries.where` is read and written."""
    rows, blocks, nodes, kv_heads, group, dim = queries.grouped.shape
    tall, width = queries.left.shape[1], queries.keys.shape[2]

    queries.grouped.copy_(q[queries.where].view(rows, 1, nodes, kv_heads, group, dim))
    scale = default_scale(dim) * math.log2(math.e)  # for exp2, which is several times faster than exp
    nothing = queries.left.new_empty(())  # not read, for beta is 0
    scores = torch.baddbmm(nothing, queries.left, queries.keys, beta=0, alpha=scale)
    scores = scores.view(rows, blocks, kv_heads, tall, width)
    scores[:, -queries.mask.shape[1] :].add_(queries.mask)
    weights = scores.sub_(scores.amax((1, 4), keepdim=True)).exp2_()
    sums = torch.bmm(weights.view(-1, tall, width), queries.values).view(rows, blocks, kv_heads, tall, -1)
    first, *others = sums.unbind(1)
    for later in others:  # one after the other: the order of a sum over an axis is torch's to choose
        first.add_(later)
    mean = first[:, :, : nodes * group, :dim] / first[:, :, : nodes * group, dim : dim + 1]
    out[queries.where].view(rows, nodes, kv_heads, group, dim).copy_(
        mean.view(rows, kv_heads, nodes, group, dim).transpose(1, 2)
    )


def _keys(slots: Tensor, kv: Tensor) -> Keys:
    """slots [B, blocks, width]"""
    rows, blocks, width = slots.shape
    kv_heads, dim = kv.shape[1], kv.shape[3]
    wide = torch.ones(rows, blocks, kv_heads, width, 2 * dim + _KEY_TILE, device=kv.device)
    return Keys(slots.flatten(), wide, wide[..., : 2 * dim].transpose(2, 3))


def _queries(where: slice, seen: Tensor, blocks: int, wide: Tensor, group: int) -> Queries:
    """seen [B, masked, N, width] bool; `blocks`: how many of the first blocks are read. Padding sees everything."""
    rows, masked, nodes, width = seen.shape
    kv_heads, dim = wide.shape[2], (wide.shape[4] - _KEY_TILE) // 2
    tall = _round_up(nodes * group, _ROW_TILE)
    mask = torch.zeros(rows, masked, 1, tall, width, device=wide.device)
    bias = torch.where(seen, 0.0, -torch.inf)[:, :, None, :, None]
    mask[:, :, :, : nodes * group].unflatten(3, (nodes, group)).copy_(bias)
    left = torch.zeros(rows, blocks, kv_heads, tall, dim, device=wide.device)
    grouped = left[:, :, :, : nodes * group].unflatten(3, (nodes, group)).transpose(2, 3)
    right = wide[:, :blocks].flatten(0, 2)  # a view: blocks are left out only where B is 1
    return Queries(where, grouped, left.flatten(0, 2), right[..., :dim].transpose(1, 2), right[..., dim:], mask)


def _tree_work(batch: Batch, kv: Tensor, group: int) -> tuple[Keys, list[Queries]]:
    """Every block's committed positions and, next to them, the tree's whole window."""
    assert batch.path is not None and batch.path_len is not None
    rows, nodes, depth = batch.path.shape
    device = batch.table.device
    blocks = -(-batch.table.shape[1] // _BLOCK)
    table = F.pad(batch.table, (0, blocks * _BLOCK - batch.table.shape[1])).unflatten(1, (blocks, _BLOCK))
    position = torch.arange(blocks * _BLOCK, device=device).view(blocks, _BLOCK)
    prefix = batch.prefix_len[:, None, None]  # [B, 1, 1]
    window = batch.window or nodes
    if window == 1:  # a root alone, which stands at its own position
        slots = table
        seen = (position <= prefix)[:, :, None]  # [B, blocks, 1, width]
    else:
        entry = torch.arange(_round_up(window, _KEY_TILE), device=device)  # [W]; those past the window are never seen
        at = (batch.prefix_len[:, None] + entry).clamp(max=blocks * _BLOCK - 1)
        beside = table.flatten(1).gather(1, at)  # [B, W] slots
        slots = torch.cat((table, beside[:, None].expand(-1, blocks, -1)), 2)
        # The block of the position that an entry has on a query's path, -1 off the path.
        step = torch.arange(depth, device=device)
        used = torch.where(step < batch.path_len[..., None], batch.path, entry.shape[0])  # [B, N, D], or past the end
        home = torch.full((rows, nodes, entry.shape[0] + 1), -1, device=device)
        home = home.scatter(2, used, ((prefix + step) // _BLOCK).expand_as(used))[..., :-1]  # [B, N, W]
        on_path = home[:, None] == torch.arange(blocks, device=device)[:, None, None]  # [B, blocks, N, W]
        committed = (position < prefix)[:, :, None].expand(-1, -1, nodes, -1)
        seen = torch.cat((committed, on_path), 3)  # [B, blocks, N, width]
    keys = _keys(slots, kv)
    return keys, [_queries(slice(0, rows * nodes), seen, blocks, keys.wide, group)]


def _chunk_work(table: Tensor, chunk: ChunkSpan, kv: Tensor, group: int) -> tuple[Keys, list[Queries]]:
    """The row's positions up to the chunk's end. Queries go block by block: each reads the blocks before its own
    whole, and scores stay in the cache."""
    end = chunk.start + chunk.length
    blocks = -(-end // _BLOCK)
    keys = _keys(F.pad(table[chunk.row, :end], (0, blocks * _BLOCK - end)).view(1, blocks, _BLOCK), kv)
    causal = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=table.device).tril()
    stretches = []
    for block in range(chunk.start // _BLOCK, blocks):
        first, last = max(chunk.start, block * _BLOCK), min(end, (block + 1) * _BLOCK)
        here = slice(chunk.offset + first - chunk.start, chunk.offset + last - chunk.start)
        seen = causal[first - block * _BLOCK : last - block * _BLOCK]
        stretches.append(_queries(here, seen[None, None], block + 1, keys.wide, group))
    return keys, stretches
