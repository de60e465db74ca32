"""What operations know of recurrent layers' states of rows (`kv.row_states`, which makes them and says how they are
used)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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


class LayerStates(NamedTuple):
    """States and records of one layer.

    state [slots + 2, value_heads, key_dim, value_dim] float32.  conv [slots + 2, conv_width - 1, channels] in the
    model's dtype: the convolution's inputs of the newest tokens, the oldest first.  inputs
    [rows + 1, 2, nodes, channels] in the model's dtype: records of nodes by row and page: what goes into the
    convolution.  gates [rows + 1, 2, nodes, 2, value_heads] float32: records of log decay and beta.
    """

    spec: DeltaSpec
    state: Tensor
    conv: Tensor
    inputs: Tensor
    gates: Tensor


class RowStates(Protocol):
    """Declares what operations use of `kv.row_states.RowStates`."""

    slots: int  # usable state slots
    nodes: int  # of the largest tree
    dummy: int  # the state slot that no request reads
    layers: Mapping[int, LayerStates]  # by pool layer
    read: Tensor
    write: Tensor
    page: Tensor
    length: Tensor
    node_slots: Tensor

    def set(self, entries: Tensor) -> None:
        """Gives rows other state slots. entries [S, 4] int64 as `Plan.states`, of different rows."""
        ...

    def clear_dummy(self) -> None:
        """Zeroes the dummy's state."""
        ...

    def advance(self, rows: Tensor, length: Tensor) -> None:
        """Makes what a step wrote of rows [B] what the next one reads. length [B]: tokens in it."""
        ...
