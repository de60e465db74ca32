"""One pool for what every model that the engine runs keeps of its tokens, target and drafter alike: keys and values
mostly, and whatever else layers have a `SlotSpec` for.

Slot s holds "token s" for all of them: the drafter's layers are further layers of the same pool, so one allocator,
one prefix match and one memory formula serve both. Slot 0 is a dummy that padding rows write to; it is never owned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.kv.zeros import zeros_as_written

if TYPE_CHECKING:  # which has specs of here
    from draftwing.kv.row_states import RowStates

SCALE_BYTES = 4  # of a float32 behind each key, and each value, of a pool in int8
MOST_INT8_DIM = 512  # elements of a key in int8: a sum of more products has no room in 32 bits


class KVSpec(NamedTuple):
    """Keys and values of one attention layer. shared: whether a head's value is its key, which is there once."""

    kv_heads: int
    head_dim: int
    shared: bool = False

    def shape_in(self, pool: torch.dtype) -> tuple[int, ...]:
        """Returns the tensor's shape: index 0 of its second axis holds keys, index 1 values."""
        return self.kv_heads, 1 if self.shared else 2, self.head_dim + (SCALE_BYTES if pool == torch.int8 else 0)

    def dtype_in(self, pool: torch.dtype) -> torch.dtype:
        return pool


class StateSpec(NamedTuple):
    """Anything else that a layer keeps of each token, such as the inputs of a convolution or a state after the
    token. dtype: None is the pool's, or bfloat16 where that has 8 bits."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def shape_in(self, pool: torch.dtype) -> tuple[int, ...]:
        return self.shape

    def dtype_in(self, pool: torch.dtype) -> torch.dtype:
        return self.dtype or (torch.bfloat16 if pool.itemsize == 1 else pool)


class DeltaSpec(NamedTuple):
    """Sizes of a gated delta net on one rank, whose state is kept by row, since one for each token would be too large.
    In the slots of tokens it keeps nothing.

    tiled: value head j reads key head j % key_heads, as GGUF files order them; else j // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # taps of the convolution
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def shape_in(self, pool: torch.dtype) -> tuple[int, ...]:
        return (0,)

    def dtype_in(self, pool: torch.dtype) -> torch.dtype:
        return pool

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one state. dtype: the model's."""
        inputs = (self.conv_width - 1) * self.channels * dtype.itemsize
        return 4 * self.value_heads * self.key_dim * self.value_dim + inputs

    def record_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the record of one node. dtype: the model's."""
        return self.channels * dtype.itemsize + 2 * 4 * self.value_heads


SlotSpec = KVSpec | StateSpec | DeltaSpec  # what one pool layer holds in each slot


Scales = tuple[float, float]  # of a layer's keys, and of its values
FP8 = torch.float8_e4m3fn
_MOST = torch.finfo(FP8).max
_CODES = 127.0  # the greatest of them
_LEAST = 1e-30  # rows of smaller values are zeros: their steps would not be numbers


def check_int8(layers: Sequence[SlotSpec], dtype: torch.dtype) -> None:
    """Raises ConfigError for a pool in int8 where keys are too long. dtype: of keys and values."""
    longest = max((spec.head_dim for spec in layers if isinstance(spec, KVSpec)), default=0)
    if dtype == torch.int8 and longest > MOST_INT8_DIM:
        raise ConfigError(
            f"--kv-cache-dtype int8: expected heads or latents of at most {MOST_INT8_DIM} elements, found {longest}: "
            "leave it out"
        )


class KVPool:
    """kv[layer]: [slots + 1, *shape of the layer's spec]; of keys and values [slots + 1, kv_heads, 2, head_dim].

    A head's key and value lie side by side, so that a backend brings both to its own layout by one copy. In
    float8_e4m3fn they are divided by the layer's `scales` and lie within -448 and 448. In int8 each key, and each
    value, of a head has a scale of its own, the bytes of a float32 behind its codes: [.., head_dim + 4].
    """

    def __init__(
        self,
        layers: Sequence[SlotSpec],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Scales] = (),
    ) -> None:
        """slots: usable slots; one more is allocated for the dummy. scales: of the first layers; the others have 1."""
        self.layers = tuple(layers)
        known = tuple(scales) if dtype == FP8 else ()
        self.scales: Sequence[Scales] = (*known, *[(1.0, 1.0)] * (len(self.layers) - len(known)))
        self.slots = slots
        self.dtype = dtype
        check_int8(self.layers, dtype)
        self.kv = [
            zeros_as_written((slots + 1, *spec.shape_in(dtype)), spec.dtype_in(dtype), device) for spec in self.layers
        ]
        self.states: RowStates | None = None  # of layers that keep theirs by row

    @staticmethod
    def bytes_per_slot(layers: Sequence[SlotSpec], dtype: torch.dtype) -> int:
        """Returns bytes of one slot in all layers. dtype: of keys and values."""
        return sum(math.prod(spec.shape_in(dtype)) * spec.dtype_in(dtype).itemsize for spec in layers)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes to slots [M] int64; k, v [M, kv_heads, head_dim], rounded to the pool's dtype. Two queries may share a
        slot only if it is the dummy."""
        spec = self.layers[layer]
        both = k.unsqueeze(2) if isinstance(spec, KVSpec) and spec.shared else torch.stack((k, v), 2)
        if self.dtype == torch.int8:
            self.kv[layer].index_copy_(0, slots, _in_int8(both))
            return
        if self.dtype != FP8:
            self.kv[layer].index_copy_(0, slots, both.to(self.dtype))
            return
        by = both.new_tensor([1 / scale for scale in self.scales[layer][: both.shape[2]]], dtype=torch.float32)[:, None]
        codes = (both.float() * by).clamp(-_MOST, _MOST).to(FP8)
        self.kv[layer].view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots [n] int64 of all layers."""
        for kv in self.kv:
            (kv.view(torch.uint8) if kv.dtype == FP8 else kv).index_fill_(0, slots, 0)


def _in_int8(rows: Tensor) -> Tensor:
    """rows [..., n] -> [..., n + 4] int8: to the nearest of 255 codes, and the scale. What is not finite makes the
    whole row no number."""
    rows = rows.float()
    most = rows.abs().amax(-1, keepdim=True)
    most = torch.where(most < torch.inf, most, torch.nan)
    codes = (rows * torch.where(most >= _LEAST, most.new_tensor(_CODES) / most, 0.0)).round().nan_to_num(0.0)
    return torch.cat((codes.to(torch.int8), (most / _CODES).contiguous().view(torch.int8)), -1)
