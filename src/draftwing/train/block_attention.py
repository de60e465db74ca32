"""Attention of blocks in training: many blocks of each text at once.

What a row of a block sees is what it sees in serving: the text before its anchor, of which the anchor's own position is
no part, for the target has not run over it yet; and its own block. So the keys of a sequence are those of its text and
after them those of all of its blocks, under a mask. On a GPU both parts are done apart and joined by their
log-sum-exps: the text as far as each row sees it, by kernels, and a few products of each block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.attention import FULL, Attend, AttentionKind, default_scale
from draftwing.train.kernels import kernels_take


class BlockAttention:
    """Keeps the keys and values of the texts, and lets blocks attend to them, for all layers of a head.

    Rows of blocks come flat, B * A * rows of them: A blocks of each of B texts of T tokens.
    """

    def __init__(self, anchors: Tensor, rows: int, length: int) -> None:
        """anchors [B, A] int64: the position of each block's first row; rows: of a block; length: T."""
        self._anchors, self._rows, self._length = anchors, rows, length
        self._text: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values [B, kv_heads, T, head_dim]
        self._masks: dict[tuple[int, bool], Tensor] = {}

    def text(self) -> Attend:
        """Takes the keys and values of the texts, all T positions of each."""
        return _Text(self)

    def blocks(self, window: int, causal: bool) -> Attend:
        """The attention of blocks; arguments as in `BlockConfig`."""
        return _Blocks(self, window, causal)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        shape = (self._anchors.shape[0], self._length)
        self._text[layer] = k.unflatten(0, shape).transpose(1, 2), v.unflatten(0, shape).transpose(1, 2)

    def attend(self, kind: tuple[int, bool], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * A * rows, heads, head_dim], k, v with kv_heads -> [B * A * rows, heads * head_dim]"""
        # Rotary tables are in float32 while a product under autocast is not: the kernels want one dtype.
        q, k, v = (x.to(v.dtype).unflatten(0, (self._anchors.shape[0], -1)).transpose(1, 2) for x in (q, k, v))
        text_k, text_v = (x.to(v.dtype) for x in self._text.pop(layer))
        if takes_blocks(q, *kind):
            limits = self._anchors.repeat_interleave(self._rows, 1).to(torch.int32)  # [B, A * rows]
            out: Tensor = Joined.apply(q, text_k, text_v, k, v, limits, self._rows)
            return out.transpose(1, 2).flatten(2).flatten(0, 1)
        k, v = torch.cat((text_k, k), 2), torch.cat((text_v, v), 2)
        group = q.shape[1] // k.shape[1]
        if group > 1:  # the kernels that take a mask want a key for each head
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(kind, q.dtype))
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, kind: tuple[int, bool], dtype: torch.dtype) -> Tensor:
        """[B, 1, A * rows, T + A * rows]: what is added to scores, 0 where a row sees a key."""
        if kind not in self._masks:
            seen = self._seen(*kind)
            self._masks[kind] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return self._masks[kind]

    def _seen(self, window: int, causal: bool) -> Tensor:
        (count, blocks), rows = self._anchors.shape, self._rows
        anchor = self._anchors.repeat_interleave(rows, 1).unsqueeze(2)  # [B, A * rows, 1]
        position = torch.arange(self._length, device=anchor.device)
        text = position < anchor
        if window:
            text &= position > anchor - window
        place = torch.arange(blocks * rows, device=anchor.device)
        own = (place // rows).unsqueeze(1) == place // rows
        if causal:
            own &= place <= place.unsqueeze(1)
        return torch.cat((text, own.expand(count, -1, -1)), 2).unsqueeze(1)


def takes_blocks(q: Tensor, window: int, causal: bool) -> bool:
    """Whether `Joined` does what such queries see: kernels for half types, a whole text and a whole block."""
    return kernels_take(q) and q.dtype != torch.float32 and not window and not causal


class Joined(torch.autograd.Function):
    """Attention to the text up to each query's limit and to the query's own block.

    Written by hand, as `train.chain_attention` is: given the joint output and the joint log-sum-exp, the backward pass
    of each part gives its share of the joint gradient (Liu et al. 2023, arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, text_k: Tensor, text_v: Tensor, k: Tensor, v: Tensor, limits: Tensor, rows: int
    ) -> Tensor:
        """q [B, heads, A * rows, head_dim], text_k, text_v [B, kv_heads, T, head_dim], k, v [B, kv_heads, A * rows,
        head_dim], limits [B, A * rows] int32 ascending -> like q"""
        from draftwing.train.kernels.prefix_attention import prefix_attention

        part, part_lse = prefix_attention(q, text_k, text_v, limits)
        scores = _own_scores(q, k, rows)  # [B, kv_heads, group, A, rows, rows]
        shape = scores.shape[:-1]
        joint = torch.logaddexp(part_lse.reshape(shape), scores.logsumexp(-1))
        own = torch.einsum("bngars,bnasd->bngard", (scores - joint.unsqueeze(-1)).exp().to(v.dtype), _cut(v, rows))
        share = (part_lse.reshape(shape) - joint).exp().unsqueeze(-1)
        out = torch.addcmul(own.to(share.dtype), part.reshape(own.shape).to(share.dtype), share)
        out = out.to(q.dtype).reshape(q.shape)
        ctx.save_for_backward(q, text_k, text_v, k, v, limits, out, joint)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from draftwing.train.kernels.prefix_attention import prefix_gradients

        q, text_k, text_v, k, v, limits, out, joint = ctx.saved_tensors
        grad, rows, scale = grads[0].contiguous(), ctx.rows, default_scale(q.shape[-1])
        inner = (grad.float() * out.float()).sum(-1)  # [B, heads, A * rows]
        flat = joint.reshape(inner.shape).contiguous()
        to_q, to_text_k, to_text_v = prefix_gradients(grad, q, text_k, text_v, flat, inner, limits)
        mine, query = (_grouped(x, k.shape[1], rows) for x in (grad, q))
        prob = (_own_scores(q, k, rows) - joint.unsqueeze(-1)).exp()  # [B, kv_heads, group, A, rows, rows]
        by_v = torch.einsum("bngard,bnasd->bngars", mine, _cut(v, rows)).float()
        slope = (prob * (by_v - inner.reshape(joint.shape).unsqueeze(-1)) * scale).to(q.dtype)
        to_q = to_q + torch.einsum("bngars,bnasd->bngard", slope, _cut(k, rows)).reshape(q.shape)
        to_k = torch.einsum("bngars,bngard->bnasd", slope, query).reshape(k.shape)
        to_v = torch.einsum("bngars,bngard->bnasd", prob.to(v.dtype), mine).reshape(v.shape)
        return to_q, to_text_k, to_text_v, to_k, to_v, None, None


def _cut(x: Tensor, rows: int) -> Tensor:
    """[B, kv_heads, A * rows, head_dim] -> [B, kv_heads, A, rows, head_dim]"""
    return x.unflatten(2, (-1, rows))


def _grouped(x: Tensor, kv_heads: int, rows: int) -> Tensor:
    """[B, heads, A * rows, head_dim] -> [B, kv_heads, group, A, rows, head_dim]"""
    return x.unflatten(1, (kv_heads, -1)).unflatten(3, (-1, rows))


def _own_scores(q: Tensor, k: Tensor, rows: int) -> Tensor:
    """The scores of blocks' rows for those of their own block, float32 [B, kv_heads, group, A, rows, rows]."""
    scores = torch.einsum("bngard,bnasd->bngars", _grouped(q, k.shape[1], rows), _cut(k, rows))
    return scores.float() * default_scale(q.shape[-1])


class _Text(Attend):
    def __init__(self, owner: BlockAttention) -> None:
        self._owner = owner

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._owner.keep(layer, k, v)


class _Blocks(Attend):
    def __init__(self, owner: BlockAttention, window: int, causal: bool) -> None:
        self._owner, self._kind = owner, (window, causal)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        assert kind.is_full, "draft heads say themselves how far they see"
        return self._owner.attend(self._kind, layer, q, k, v)
