"""Attention in plain torch: the CPU's backend and the reference on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.attn.base import Attend, Batch, default_scale
from draftwing.kv.pool import KVPool


class TorchAttention:
    """Implements `AttnBackend` over a `KVPool`; the softmax is in float32."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def bind(self, batch: Batch, first_layer: int) -> Attend:
        return self._prefill(batch, first_layer) if batch.chunks else self._tree(batch, first_layer)

    def _tree(self, batch: Batch, first_layer: int) -> Attend:
        assert batch.path is not None and batch.path_len is not None
        rows, nodes, depth = batch.path.shape
        bound = batch.table.shape[1]
        device = batch.table.device
        prefix = torch.arange(bound, device=device)  # [P]
        window = batch.prefix_len[:, None] + torch.arange(nodes, device=device)  # [B, N] page-table positions
        slots = torch.cat((batch.table, batch.table.gather(1, window.clamp(max=bound - 1))), 1).flatten()  # [B*(P+N)]
        used = torch.arange(depth, device=device) < batch.path_len[..., None]  # [B, N, D]
        on_path = torch.zeros(rows, nodes, nodes + 1, dtype=torch.bool, device=device)
        on_path = on_path.scatter(2, torch.where(used, batch.path, nodes), True)[..., :nodes]  # [B, N, N]
        committed = (prefix < batch.prefix_len[:, None])[:, None].expand(rows, nodes, bound)
        seen = torch.cat((committed, on_path), 2)  # [B, N, P + N]
        mask = torch.where(seen, 0.0, -torch.inf)[:, None, None]  # [B, 1, 1, N, P + N]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool.write(first_layer + layer, batch.write_slots, k, v)
            kv = self.pool.kv[first_layer + layer].index_select(0, slots).float()
            keys, values = kv.unflatten(0, (rows, bound + nodes)).permute(2, 0, 3, 1, 4)  # [B, kv_heads, P + N, dim]
            grouped = q.float().view(rows, nodes, k.shape[1], -1, q.shape[2]).permute(0, 2, 3, 1, 4)
            scores = grouped @ keys.transpose(-1, -2)[:, :, None] * default_scale(q.shape[2]) + mask
            out = scores.softmax(-1) @ values[:, :, None]  # [B, kv_heads, group, N, dim]
            return out.permute(0, 3, 1, 2, 4).reshape(rows * nodes, -1).to(q.dtype)

        return attend

    def _prefill(self, batch: Batch, first_layer: int) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool.write(first_layer + layer, batch.write_slots, k, v)
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
            for chunk in batch.chunks:
                here = slice(chunk.offset, chunk.offset + chunk.length)
                end = chunk.start + chunk.length
                kv = self.pool.kv[first_layer + layer].index_select(0, batch.table[chunk.row, :end]).float()
                keys, values = kv.permute(1, 2, 0, 3)  # [kv_heads, end, dim]
                grouped = q[here].float().view(chunk.length, k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
                future = torch.ones(chunk.length, end, dtype=torch.bool, device=q.device).triu(chunk.start + 1)
                scores = grouped @ keys.transpose(-1, -2)[:, None] * default_scale(q.shape[2])
                out_chunk = scores.masked_fill(future, -torch.inf).softmax(-1) @ values[:, None]
                out[here] = out_chunk.permute(2, 0, 1, 3).reshape(chunk.length, -1).to(q.dtype)
            return out

        return attend
