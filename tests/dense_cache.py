"""Attention that tests compare with: all keys and values kept as they came."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, AttentionKind


class DenseCache(Attend):
    """Causal attention with a cache that grows by every call, in plain matrix products."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.index: dict[int, Tensor] = {}
        self.left_out: Tensor | None = None  # [M, T], by the last `pick`
        self.hidden: Tensor | None = None  # from the next read

    def write_index(self, layer: int, keys: Tensor) -> None:
        self.index[layer] = torch.cat((self.index[layer], keys)) if layer in self.index else keys

    def sees_at_most(self, topk: int) -> bool:
        return False

    @property
    def picked(self) -> Attend:
        self.hidden = self.left_out
        return self

    def pick(self, layer: int, q: Tensor, weights: Tensor, topk: int) -> None:
        keys = self.index[layer].double()
        scores = torch.einsum("mhd,td->mht", q.double(), keys).relu()
        scores = torch.einsum("mht,mh->mt", scores, weights.double())
        seen = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        best = scores.masked_fill(~seen, -torch.inf).topk(min(topk, len(keys)), 1).indices
        self.left_out = torch.ones_like(seen).scatter_(1, best, False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        if layer in self.kv:
            k, v = torch.cat((self.kv[layer][0], k)), torch.cat((self.kv[layer][1], v))
        self.kv[layer] = (k, v)
        return self.read(layer, q, kind)

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        k, v = self.kv[layer]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [T, heads, head_dim]
        scores = torch.einsum("mhd,thd->hmt", q, k) * (kind.scalar or q.shape[-1]) ** -0.5
        if kind.cap:
            scores = kind.cap * (scores / kind.cap).tanh()
        seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        if kind.window:
            seen = seen.triu(k.shape[0] - q.shape[0] - kind.window + 1)
        if kind.chunk:
            place = torch.arange(k.shape[0])
            seen &= place // kind.chunk == place[k.shape[0] - q.shape[0] :, None] // kind.chunk
        if self.hidden is not None:
            seen &= ~self.hidden
            self.hidden = None
        scores = scores.masked_fill(~seen, -torch.inf)
        if kind.sinks is not None:
            scores = torch.cat((scores, kind.sinks[:, None, None].expand(-1, len(q), 1)), 2)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hmt,thd->mhd", weights, v).flatten(1)
