"""The attention part of a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear, row_parallel
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import rotate
from draftwing.ops.attention import Attend, AttentionKind, HeadNorms


class Attention(nn.Module):
    """Grouped-query attention; q, k and v are one GEMM. Who attends to whom is the injected `attend`'s."""

    def __init__(
        self, config: LayerConfig, index: int, dtype: torch.dtype, device: torch.device, in_size: int = 0
    ) -> None:
        """index: of the layer in its model. in_size: of the input, 0: the hidden size."""
        super().__init__()
        self.index = index
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        q_rows, kv_rows, form = self.heads * self.head_dim, self.kv_heads * self.head_dim, config.weight_format
        hidden = config.hidden
        self.qkv = Linear(in_size or hidden, q_rows + 2 * kv_rows, config.qkv_bias, dtype, device, form)
        wide = config.norm_dtype(dtype)
        self.q_norm = RMSNorm(self.head_dim, config.eps, wide, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.eps, wide, device) if config.qk_norm else None
        self.o = row_parallel(Linear(q_rows, hidden, config.o_bias, dtype, device, form), config.ranks)
        # In float32: they join scores, which are.
        self.sinks = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32, device=device)) if config.sinks else None
        self._window, self._scalar = config.window, config.query_pre_attn_scalar

    @property
    def kind(self) -> AttentionKind:
        """What the injected attention is told of this layer."""
        return AttentionKind(self._window, self.sinks, self._scalar)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        """x [M, in_size]; cos, sin [M, 1, head_dim]; residual [M, hidden] is added -> [M, hidden]"""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [M, heads + 2 * kv_heads, head_dim]
        return self.o(self._attend(qkv, cos, sin, attend), residual)

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """What `forward` leaves for later queries: keys and values of x [M, in_size]."""
        kv = self.qkv.last(x, 2 * self.kv_heads * self.head_dim)
        self.write_heads(kv.view(x.shape[0], -1, self.head_dim), cos, sin, attend)

    def write_heads(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """The same of what `qkv` makes, [M, heads + 2 * kv_heads, head_dim], where queries may be missing."""
        norms = self.head_norms()
        if (norms is None or attend.norms_heads) and attend.fused_write(self.index, qkv, cos, sin, norms):
            return
        k, v = qkv[:, -2 * self.kv_heads :].split(self.kv_heads, 1)
        attend.write(self.index, rotate(k if self.k_norm is None else self.k_norm(k), cos, sin), v)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys, where they have any."""
        if self.q_norm is None or self.k_norm is None:
            return None
        assert self.q_norm.eps == self.k_norm.eps
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """qkv [M, heads + 2 * kv_heads, head_dim], which may be overwritten -> [M, heads * head_dim]"""
        out = None
        norms = self.head_norms()
        if norms is None or attend.norms_heads:
            out = attend.fused(self.index, qkv, cos, sin, norms, self.kind)
        if out is not None:
            return out
        qk = qkv[:, : self.heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), 1)
        qk = rotate(qk, cos, sin)
        v = qkv[:, self.heads + self.kv_heads :]
        return attend(self.index, qk[:, : self.heads], qk[:, self.heads :], v, self.kind)
