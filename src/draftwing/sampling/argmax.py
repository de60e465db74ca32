"""The largest logit of a vocabulary, without reading data on the host and with ties going to the lower id."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def first_argmax(x: Tensor) -> Tensor:
    """Index of the largest value along the last dimension, the first one on a tie: [..., V] -> [...] int64.

    Equals `x.argmax(-1)`, whose CPU kernel drags an index along with every value and takes 4 to 7 times as long for a
    vocabulary: find the block that holds the maximum by values alone, then look inside it.
    """
    block = math.gcd(x.shape[-1], 256)
    if block < 64:
        return x.max(-1).indices
    blocks = x.unflatten(-1, (-1, block))  # [..., V / block, block]
    which = blocks.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    chosen = blocks.gather(-2, which[..., None].expand(*which.shape, block))  # [..., 1, block]
    return torch.add(chosen.argmax(-1), which, alpha=block).squeeze(-1)
