"""MiniMax-M1 of transformers' class for MiniMax-Text-01, which turns whole heads: here as much of them as its rotary
embedding is wide, as the published models do."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.minimax import modeling_minimax

whole = modeling_minimax.apply_rotary_pos_emb


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = cos.shape[-1]
    some = whole(q[..., :size], k[..., :size], cos, sin)
    return torch.cat((some[0], q[..., size:]), -1), torch.cat((some[1], k[..., size:]), -1)


modeling_minimax.apply_rotary_pos_emb = turned
