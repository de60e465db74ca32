"""Attention to all of a picture's patches, of which nothing is kept: every query sees every key."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

WholeAttention = Callable[[Tensor], Tensor]  # of queries [n, heads, size] -> [n, heads * size]


def whole_attention(k: Tensor, v: Tensor, scalar: int = 0) -> WholeAttention:
    """Returns attention to keys and values [N, heads, size]. scalar: scores are divided by its square root; 0: size."""
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))  # [1, heads, N, size]
    scale = float((scalar or k.shape[2]) ** -0.5)

    def attend(q: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), keys, values, scale=scale)
        return out[0].transpose(0, 1).flatten(1)

    return attend
