"""Attention of blocks in training: many blocks of each text at once.

What a row of a block sees is what it sees in serving: the text before its anchor, of which the anchor's own position is
no part, for the target has not run over it yet; and its own block. So the keys of a sequence are those of its text and
after them those of all of its blocks, under a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.attention import FULL, Attend, AttentionKind


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
        before = (x.to(v.dtype) for x in self._text.pop(layer))
        k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
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
