"""Attention of blocks in training: many blocks of each text at once.

What a row of a block sees is what it sees in serving: the text before its anchor, of which the anchor's own position is
no part, for the target has not run over it yet; and its own block. So the keys of a sequence are those of its text and
after them those of all of its blocks, under a mask. On a GPU kernels go over as much of the text as each row sees and
over its own block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.attention import FULL, Attend, AttentionKind, HeadNorms
from draftwing.train.kernels import kernels_take


class BlockAttention(Attend):
    """Takes the keys and values of the texts, all T positions of each, and lets blocks attend to them, for all layers
    of a head.

    Rows of blocks come flat, B * A * rows of them: A blocks of each of B texts of T tokens.
    """

    norms_heads = True

    def __init__(self, anchors: Tensor, rows: int, length: int) -> None:
        """anchors [B, A] int64, ascending: the position of each block's first row; rows: of a block; length: T."""
        self._anchors, self._rows, self._length = anchors, rows, length
        self._text: dict[int, Tensor] = {}  # layer -> keys, then values [B, T, 2 * kv_heads, head_dim]
        self._masks: dict[tuple[int, bool], Tensor] = {}
        self._reach: Any = None  # once it is asked for

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._keep(layer, torch.cat((k.to(v.dtype), v), 1))

    def fused_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> bool:
        if not kernels_take(qkv):
            return False
        from draftwing.train.kernels.rope_backward import turn

        assert qkv.shape[1] % 2 == 0, "keys and values alone"
        self._keep(layer, turn(qkv, cos, sin, qkv.shape[1] // 2, 0, norms))
        return True

    def blocks(self, window: int, causal: bool, kv_heads: int) -> Attend:
        """Returns the attention of blocks with so many heads of keys; window, causal: as in `BlockConfig`."""
        return _Blocks(self, window, causal, kv_heads)

    def _keep(self, layer: int, kv: Tensor) -> None:
        """kv [B * T, 2 * kv_heads, head_dim]: keys, rotated, and values"""
        self._text[layer] = kv.unflatten(0, (len(self._anchors), self._length))

    def attend(self, kind: tuple[int, bool], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * A * rows, heads, head_dim], k, v with kv_heads -> [B * A * rows, heads * head_dim]"""
        # Rotary tables are in float32 while a product under autocast is not: the kernels want one dtype.
        q, k, v = (x.to(v.dtype).unflatten(0, (self._anchors.shape[0], -1)).transpose(1, 2) for x in (q, k, v))
        text_k, text_v = self._text.pop(layer).to(v.dtype).transpose(1, 2).chunk(2, 1)
        k, v = torch.cat((text_k, k), 2), torch.cat((text_v, v), 2)
        group = q.shape[1] // k.shape[1]
        if group > 1:  # the kernels that take a mask want a key for each head
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(kind, q.dtype))
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def attend_by_kernels(self, layer: int, qkv: Tensor) -> Tensor:
        """Attends with q, k and v concatenated, for what `takes_blocks`; all text is seen before the anchor."""
        from draftwing.train.kernels.block_attention import reach

        if self._reach is None:
            limits = self._anchors.repeat_interleave(self._rows, 1).to(torch.int32)  # [B, A * rows]
            self._reach = reach(limits, self._length, self._rows)
        qkv = qkv.unflatten(0, (len(self._anchors), -1))
        out: Tensor = ToTextAndBlocks.apply(qkv, self._text.pop(layer).to(qkv.dtype), self._reach)
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
    """Returns whether `ToTextAndBlocks` does what such queries see: kernels for half types, a whole text and a whole
    block."""
    return kernels_take(q) and q.dtype != torch.float32 and not window and not causal


class ToTextAndBlocks(torch.autograd.Function):
    """Attention to the text up to each query's limit and to the query's own block, by `train.kernels.block_attention`.
    What comes concatenated has its gradients concatenated."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, text: Tensor, far: Any) -> Tensor:
        """qkv [B, A * rows, heads + 2 * kv_heads, head_dim], text [B, T, 2 * kv_heads, head_dim], far: a `Reach` ->
        [B, heads, A * rows, head_dim]"""
        from draftwing.train.kernels.block_attention import block_attention

        out, lse = block_attention(_views(qkv, text), far)
        ctx.save_for_backward(qkv, text, out, lse)
        ctx.far = far
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from draftwing.train.kernels.block_attention import block_gradients

        qkv, text, out, lse = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        to_qkv, to_text = torch.empty_like(qkv), torch.empty_like(text)
        block_gradients(grad, out, lse, _views(qkv, text), ctx.far, _views(to_qkv, to_text))
        return to_qkv, to_text, None


def _views(qkv: Tensor, text: Tensor) -> Any:
    from draftwing.train.kernels.block_attention import Inputs

    kv_heads = text.shape[2] // 2
    q, k, v = qkv.transpose(1, 2).split([qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 1)
    text_k, text_v = text.transpose(1, 2).split(kv_heads, 1)
    return Inputs(q, text_k, text_v, k, v)


class _Blocks(Attend):
    norms_heads = True

    def __init__(self, owner: BlockAttention, window: int, causal: bool, kv_heads: int) -> None:
        self._owner, self._kind, self._kv_heads = owner, (window, causal), kv_heads

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        assert kind.is_full, "draft heads say themselves how far they see"
        return self._owner.attend(self._kind, layer, q, k, v)

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        if not kernels_take(qkv):
            return None
        from draftwing.train.kernels.rope_backward import turn

        kv = self._kv_heads
        queries = qkv.shape[1] - 2 * kv
        qkv = turn(qkv, cos, sin, queries + kv, queries, norms)
        if takes_blocks(qkv, *self._kind):
            return self._owner.attend_by_kernels(layer, qkv)
        q, k, v = qkv.split([queries, kv, kv], 1)
        return self(layer, q, k, v, kind)
