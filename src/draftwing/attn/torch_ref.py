"""Attention in plain torch: the CPU's backend and the reference on every device.

A query's result has the same bits however it is asked for: as a plain decode, as a node of any tree, in a prefill
chunk of any length, alone or in a batch. Three things make it so, on CPUs whose matrix products behave like MKL's:

- Scores are sums over head_dim alone, and a maximum does not depend on the order of the keys.
- Sums over keys are chains of multiply-adds in key order, so a key of weight 0 changes nothing wherever it stands.
  A chain is cut at the absolute positions 128, 256, ..., for a product may cut longer ones where it likes. The nodes
  of a tree, whose place in the page table is not their position, are therefore offered to every block, each node
  with weight 0 in all blocks but that of its position. On a path they stand in position order.
- The softmax's denominator is summed by the same product, as a column of ones beside the values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.attn.base import Attend, Batch, ChunkSpan, default_scale
from draftwing.kv.pool import KVPool

_BLOCK = 128  # positions of one chain; with a tree's nodes it must stay within the 192 that MKL sums in one go
_QUERIES = 128  # queries of one product in prefill, so that their scores stay in the cache
# Sizes of a product are padded to these: fewer rows, or a remainder of them, take another kernel with another order.
_ROW_TILE = 8
_KEY_TILE = 16


class Keys(NamedTuple):
    """What one product of queries with keys reads: for each of B rows, `width` keys for every block of positions."""

    slots: Tensor  # [B * K] int64
    mask: Tensor  # [B * kv_heads or 1, query rows, K] float32: 0 where a query sees a key, else -inf
    width: int


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


class TorchAttention:
    """Implements `AttnBackend` over a `KVPool`; everything between the pool and the result is float32.

    Grouped queries of one key head are rows of one product. Trees may have up to 64 nodes for the promise above.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def bind(self, batch: Batch, first_layer: int) -> Attend:
        return self._bind_chunks(batch, first_layer) if batch.chunks else self._bind_tree(batch, first_layer)

    def _bind_tree(self, batch: Batch, first_layer: int) -> Attend:
        assert batch.path is not None
        rows, nodes, _ = batch.path.shape

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool.write(first_layer + layer, batch.write_slots, k, v)
            return self._attend(first_layer + layer, q.unflatten(0, (rows, nodes)), plan(q.shape[1])).flatten(0, 1)

        plans: dict[int, Keys] = {}  # by query heads: the layers of a model are alike, so one

        def plan(heads: int) -> Keys:
            if heads not in plans:
                kv_heads = self.pool.layers[first_layer].kv_heads
                plans[heads] = _tree_keys(batch, kv_heads, heads // kv_heads)
            return plans[heads]

        return attend

    def _bind_chunks(self, batch: Batch, first_layer: int) -> Attend:
        spans = [
            ChunkSpan(c.row, c.offset + i, c.start + i, min(_QUERIES, c.length - i))
            for c in batch.chunks
            for i in range(0, c.length, _QUERIES)
        ]
        plans: list[Keys] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool.write(first_layer + layer, batch.write_slots, k, v)
            if not plans:
                plans.extend(_chunk_keys(batch.table, span, q.shape[1] // k.shape[1]) for span in spans)
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            for span, keys in zip(spans, plans, strict=True):
                here = slice(span.offset, span.offset + span.length)
                out[here] = self._attend(first_layer + layer, q[None, here], keys)[0]
            return out

        return attend

    def _attend(self, layer: int, q: Tensor, keys: Keys) -> Tensor:
        """q [B, N, heads, head_dim] -> [B, N, heads * head_dim]"""
        rows, nodes, heads, dim = q.shape
        kv = self.pool.kv[layer]  # [slots, kv_heads, 2, head_dim]
        kv_heads, used = kv.shape[1], keys.slots.shape[0] // rows
        group, pairs, padded = heads // kv_heads, rows * kv_heads, keys.mask.shape[1]

        # Per row and key head: the keys, the values, and ones (a tile of them, for the sake of the product's kernel).
        found = kv.index_select(0, keys.slots).view(rows, used, kv_heads, 2 * dim)
        wide = q.new_ones(rows, kv_heads, used, 2 * dim + _KEY_TILE, dtype=torch.float32)
        wide[..., : 2 * dim] = found.transpose(1, 2)
        wide = wide.view(pairs, used, 2 * dim + _KEY_TILE)
        queries = q.new_zeros(rows, kv_heads, padded, dim, dtype=torch.float32)
        grouped = queries[:, :, : nodes * group].unflatten(2, (nodes, group))
        grouped.copy_(q.unflatten(2, (kv_heads, group)).transpose(1, 2))

        scores = torch.baddbmm(
            keys.mask, queries.view(pairs, padded, dim), wide[..., :dim].transpose(1, 2), alpha=default_scale(dim)
        )  # [B * kv_heads, query rows, K]
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        out = torch.bmm(weights[..., : keys.width], wide[:, : keys.width, dim:])
        for start in range(keys.width, used, keys.width):
            block = slice(start, start + keys.width)
            out.baddbmm_(weights[..., block], wide[:, block, dim:])
        out = out[..., :dim] / out[..., dim : dim + 1]
        out = out.view(rows, kv_heads, padded, dim)[:, :, : nodes * group].unflatten(2, (nodes, group))
        return out.transpose(1, 2).reshape(rows, nodes, heads * dim).to(q.dtype)


def _tree_keys(batch: Batch, kv_heads: int, group: int) -> Keys:
    """Keys of trees: each block's committed positions, then all nodes of the tree."""
    assert batch.path is not None and batch.path_len is not None
    rows, nodes, depth = batch.path.shape
    device = batch.table.device
    if nodes == 1:  # the root stands at its own position
        table = F.pad(batch.table, (0, _round_up(batch.table.shape[1], _KEY_TILE) - batch.table.shape[1]))
        seen = (torch.arange(table.shape[1], device=device) <= batch.prefix_len[:, None])[:, None]  # [B, 1, P]
        return Keys(table.flatten(), _mask(seen, kv_heads, group), _BLOCK)

    blocks = -(-batch.table.shape[1] // _BLOCK)
    table = F.pad(batch.table, (0, blocks * _BLOCK - batch.table.shape[1]))  # [B, P]
    node = torch.arange(_round_up(nodes, _KEY_TILE), device=device)  # [W], those past N are never seen
    window = table.gather(1, (batch.prefix_len[:, None] + node).clamp(max=table.shape[1] - 1))  # [B, W]
    slots = torch.cat((table.unflatten(1, (blocks, _BLOCK)), window[:, None].expand(-1, blocks, -1)), 2)

    step = torch.arange(depth, device=device)
    entry = torch.where(
        step < batch.path_len[..., None], batch.path, node.shape[0]
    )  # [B, N, D], past the end if unused
    block = (batch.prefix_len[:, None, None] + step) // _BLOCK  # [B, 1, D], of the position that an entry stands for
    home = torch.full((rows, nodes, node.shape[0] + 1), -1, device=device)
    home = home.scatter(2, entry, block.expand_as(entry))[..., : node.shape[0]]  # [B, N, W], -1 off the path
    on_path = home[:, :, None] == torch.arange(blocks, device=device)[:, None]  # [B, N, blocks, W]
    committed = torch.arange(table.shape[1], device=device).view(blocks, _BLOCK) < batch.prefix_len[:, None, None]
    seen = torch.cat((committed[:, None].expand(-1, nodes, -1, -1), on_path), 3).flatten(2)  # [B, N, K]
    return Keys(slots.flatten(), _mask(seen, kv_heads, group), _BLOCK + node.shape[0])


def _chunk_keys(table: Tensor, span: ChunkSpan, group: int) -> Keys:
    """Keys of a stretch of prefill: the row's positions up to the last query's."""
    end = span.start + span.length
    key = torch.arange(_round_up(end, _KEY_TILE), device=table.device)
    query = torch.arange(span.start, end, device=table.device)
    slots = F.pad(table[span.row, :end], (0, key.shape[0] - end))
    return Keys(slots, _mask((key <= query[:, None])[None], 1, group), _BLOCK)


def _mask(seen: Tensor, kv_heads: int, group: int) -> Tensor:
    """seen [B, N, K] bool -> [B * kv_heads, query rows, K] float32, padded query rows seeing everything."""
    rows, nodes, used = seen.shape
    mask = torch.zeros(rows, kv_heads, _round_up(nodes * group, _ROW_TILE), used, device=seen.device)
    bias = torch.where(seen, 0.0, -torch.inf)[:, None, :, None]  # [B, 1, N, 1, K]
    mask[:, :, : nodes * group].unflatten(2, (nodes, group)).copy_(bias)
    return mask.flatten(0, 1)
