"""One pool of keys and values for every model that the engine runs, target and drafter alike.

Slot s holds "token s" for all of them: the drafter's layers are further layers of the same pool, so one allocator,
one prefix match and one memory formula serve both. Slot 0 is a dummy that padding rows write to; it is never owned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LayerSpec(NamedTuple):
    """Key/value shape of one attention layer."""

    kv_heads: int
    head_dim: int


class KVPool:
    """kv[layer]: [slots, kv_heads, 2, head_dim]; index 0 of the third axis holds keys, index 1 values.

    A head's key and value lie side by side, so that a backend brings both to its own layout by one copy.
    """

    def __init__(self, layers: Sequence[LayerSpec], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """slots: usable slots; one more is allocated for the dummy."""
        self.layers = tuple(layers)
        self.slots = slots
        self.dtype = dtype
        self.kv = [
            zeros_as_written((slots + 1, spec.kv_heads, 2, spec.head_dim), dtype, device) for spec in self.layers
        ]

    @staticmethod
    def bytes_per_slot(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
        return sum(2 * spec.kv_heads * spec.head_dim for spec in layers) * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots [M] int64; k, v [M, kv_heads, head_dim], rounded to the pool's dtype. Two queries may share a slot only
        if it is the dummy."""
        self.kv[layer].index_copy_(0, slots, torch.stack((k, v), 2).to(self.dtype))


def zeros_as_written(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on the CPU, take memory only as it is written (numpy asks the system for zeroed pages)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
