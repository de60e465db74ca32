"""What layers keep: of each token in the KV pool, and of each row where a state for each token would be too large.

**The pool** is one for every model that the engine runs, target and drafter alike: keys and values mostly, and whatever
else layers have a `SlotSpec` for. Slot s holds "token s" for all of them: the drafter's layers are further layers of
the same pool, so one allocator, one prefix match and one memory formula serve both. Slot 0 is a dummy that padding rows
write to; it is never owned.

**States of rows** are those of recurrent layers (gated delta nets, Mamba-2). A state lies in a *state slot*: of each
layer the matrix S after a number of tokens, and the convolution's last inputs. A running row has two, and reads one
while a step writes the other. The step that verifies a tree

1. reads the state, which is that of the row's first `length` tokens;
2. replays the tokens that were accepted since, from their *records*: the inputs that the step before left of each node;
3. runs the root, which is a token of the text, and writes the state after it;
4. runs the other nodes, each from its parent's state, and leaves their records. Nothing else of them is written.

`RowStates.advance`, at commit, makes the written state the one that is read. So a rejected node leaves nothing, plain
decoding is a tree of one node, and every token has the bits of a plain recurrence over its ancestors: of whichever
tree, chunk or cached prefix it is computed in. Where states are *lazy*, every second plain step writes none: its token
is one that was accepted since, to the step after it. With many rows a step reads and writes states for as long as it
reads weights. State slot 0 is that of an empty text: zeros, never written. The last one is the dummy row's, which no
request reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError

SCALE_BYTES = 4  # of a float32 behind each key, and each value, of a pool in int8
MOST_INT8_DIM = 512  # elements of a key in int8: a sum of more products has no room in 32 bits
Scales = tuple[float, float]  # of a layer's keys, and of its values
FP8 = torch.float8_e4m3fn
_MOST = torch.finfo(FP8).max
_CODES = 127.0  # the greatest of them
_LEAST = 1e-30  # rows of smaller values are zeros: their steps would not be numbers


def zeros_as_written(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros that, on the CPU, take memory only as it is written (numpy asks the system for zeroed pages), begin
    with a cache line, and have one behind their end: kernels read whole vectors."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size + 127, np.uint8))
    first = -memory.data_ptr() % 64
    return memory[first : first + size].view(dtype).view(shape)


class KVSpec(NamedTuple):
    """Keys and values of one attention layer. shared: whether a head's value is its key, which is there once.  state:
    of a recurrent layer beside it, which is kept by row.  index_size: of an indexer's key beside them
    (`ops.indexer.spec`), 0: there is none."""

    kv_heads: int
    head_dim: int
    shared: bool = False
    state: DeltaSpec | None = None
    index_size: int = 0

    def shape_in(self, pool: torch.dtype) -> tuple[int, ...]:
        """Returns the tensor's shape: index 0 of its second axis holds keys, index 1 values."""
        return self.kv_heads, 1 if self.shared else 2, self.head_dim + (SCALE_BYTES if pool == torch.int8 else 0)

    def dtype_in(self, pool: torch.dtype) -> torch.dtype:
        return pool


def _wide(pool: torch.dtype) -> torch.dtype:
    """Returns that of what lies in such a pool beside keys and values."""
    return torch.bfloat16 if pool.itemsize == 1 else pool


class StateSpec(NamedTuple):
    """Anything else that a layer keeps of each token, such as the inputs of a convolution or a state after the
    token. dtype: None is the pool's, or bfloat16 where that has 8 bits.  state: of a recurrent layer beside it, which
    is kept by row."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    state: DeltaSpec | None = None

    def shape_in(self, pool: torch.dtype) -> tuple[int, ...]:
        return self.shape

    def dtype_in(self, pool: torch.dtype) -> torch.dtype:
        return self.dtype or _wide(pool)


class DeltaSpec(NamedTuple):
    """Sizes of a gated delta net on one rank, whose state is kept by row, since one for each token would be too large.
    In the slots of tokens it keeps nothing.

    tiled: value head j reads key head j % key_heads, as GGUF files order them; else j // (value_heads / key_heads).
    corrects: below how many times what the state already has of a key is taken from the value that it gets, 1, or 2
    where that may turn it round; a state-space layer (Mamba-2) has 0, see `ops.delta_net.spec`.  by_channel: whether a
    state decays by each channel of the key, not by value head alone, as in Kimi Delta Attention, whose gates are
    sigmoids.  floor: what log decays are above, by a sigmoid, 0: they have none, and are made by softplus
    (`ops.delta_net.spec`).  by_state: whether each element of a state has a decay of its own, as in Mamba-1, of one
    step size for each value head, which stands for its decay.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # taps of the convolution, 1: there is none
    tiled: bool = False
    corrects: int = 1
    by_channel: bool = False
    floor: float = 0.0
    by_state: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Decays of all heads."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

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
        return self.channels * dtype.itemsize + 4 * (self.decays + self.value_heads)


SlotSpec = KVSpec | StateSpec | DeltaSpec  # what one pool layer holds in each slot


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
    index[layer]: keys of its indexer, [slots + 1, size], in the pool's dtype, or bfloat16 where that has 8 bits.
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
        self.index = {
            at: zeros_as_written((slots + 1, spec.index_size), _wide(dtype), device)
            for at, spec in enumerate(self.layers)
            if isinstance(spec, KVSpec) and spec.index_size
        }
        self.states: RowStates | None = None  # of layers that keep theirs by row

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all that it has of slots, which are the first axis."""
        return [*self.kv, *self.index.values()]

    @staticmethod
    def bytes_per_slot(layers: Sequence[SlotSpec], dtype: torch.dtype) -> int:
        """Returns bytes of one slot in all layers. dtype: of keys and values."""
        index = sum(spec.index_size for spec in layers if isinstance(spec, KVSpec)) * _wide(dtype).itemsize
        return index + sum(math.prod(spec.shape_in(dtype)) * spec.dtype_in(dtype).itemsize for spec in layers)

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
        for kv in self.tensors:
            (kv.view(torch.uint8) if kv.dtype == FP8 else kv).index_fill_(0, slots, 0)


def _in_int8(rows: Tensor) -> Tensor:
    """rows [..., n] -> [..., n + 4] int8: to the nearest of 255 codes, and the scale. What is not finite makes the
    whole row no number."""
    rows = rows.float()
    most = rows.abs().amax(-1, keepdim=True)
    most = torch.where(most < torch.inf, most, torch.nan)
    codes = (rows * torch.where(most >= _LEAST, most.new_tensor(_CODES) / most, 0.0)).round().nan_to_num(0.0)
    return torch.cat((codes.to(torch.int8), (most / _CODES).contiguous().view(torch.int8)), -1)


class LayerStates(NamedTuple):
    """States and records of one layer.

    state [slots + 2, value_heads, key_dim, value_dim] float32.  conv [slots + 2, conv_width - 1, channels] in the
    model's dtype: the convolution's inputs of the newest tokens, the oldest first.  inputs
    [rows + 1, 2, nodes, channels] in the model's dtype: records of nodes by row and page: what goes into the
    convolution.  gates [rows + 1, 2, nodes, decays + value_heads] float32: records of log decays, and then of beta or
    step sizes.
    """

    spec: DeltaSpec
    state: Tensor
    conv: Tensor
    inputs: Tensor
    gates: Tensor


class RowStates:
    """layers: by pool layer.  slots: usable state slots.  nodes: of the largest tree.

    Of each row, on the device, [rows + 1] int64: read, write: the state slots of the next step; page, 0 or 1: where it
    leaves its records (it reads the other one's); length: tokens in the state that is read; fresh, 0 or 1: whether that
    is the newest, so that a plain step may leave it; of lazy states alone.
    node_slots [rows + 1, 2, nodes] int64: the KV slots of the nodes with records, by which a page table names those
    that were accepted, and 0 of nodes without. Rows that were given no state slots have the dummy's.
    """

    def __init__(
        self,
        specs: Mapping[int, DeltaSpec],
        slots: int,
        rows: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device,
        lazy: bool = False,
    ) -> None:
        self.slots, self.nodes, self.dummy, self.lazy = slots, nodes, slots + 1, lazy

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return zeros_as_written(shape, dtype, device)

        self.layers: Mapping[int, LayerStates] = {
            layer: LayerStates(
                spec,
                zeros(slots + 2, spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32),
                zeros(slots + 2, spec.conv_width - 1, spec.channels, dtype=dtype),
                zeros(rows + 1, 2, nodes, spec.channels, dtype=dtype),
                zeros(rows + 1, 2, nodes, spec.decays + spec.value_heads, dtype=torch.float32),
            )
            for layer, spec in specs.items()
        }
        self.read, self.write, self.page, self.length, self.fresh = (zeros(rows + 1) for _ in range(5))
        self.read.fill_(self.dummy)
        self.write.fill_(self.dummy)
        self.node_slots = zeros(rows + 1, 2, nodes)

    @classmethod
    def of(
        cls, layers: Sequence[SlotSpec], slots: int, rows: int, nodes: int, dtype: torch.dtype, device: torch.device,
        lazy: bool = False,
    ) -> RowStates | None:  # fmt: skip
        """Makes those of a pool with these layers; None where no layer keeps its state by row. dtype: the model's."""
        specs = delta_specs(layers)
        return cls(specs, slots, rows, nodes, dtype, device, lazy) if specs else None

    def set(self, entries: Tensor) -> None:
        """Gives rows other state slots. entries [S, 4] int64 as `Plan.states`, of different rows."""
        rows, *values = entries.unbind(1)
        for state, value in zip((self.read, self.write, self.length), values, strict=True):
            state.index_copy_(0, rows, torch.where(value < 0, state[rows], value))

    def clear_dummy(self) -> None:
        """Zeroes the dummy's state. Steps of nobody's rows leave anything in it, and what is not finite would stay."""
        for layer in self.layers.values():
            layer.state[self.dummy].zero_()
            layer.conv[self.dummy].zero_()

    def left(self, rows: Tensor, nodes: int) -> Tensor:
        """Returns of which rows [B] a step writes no state. nodes: of each tree; 0: of chunks."""
        return (self.fresh[rows] > 0) & (self.lazy and nodes == 1)

    def advance(self, rows: Tensor, length: Tensor, nodes: int = 0) -> None:
        """Makes what a step wrote of rows [B] what the next one reads. length [B]: tokens in it. nodes: as of `left`"""
        read, write, page, left = self.read[rows], self.write[rows], 1 - self.page[rows], self.left(rows, nodes)
        self.read.index_copy_(0, rows, torch.where(left, read, write))
        self.write.index_copy_(0, rows, torch.where(left, write, read))
        self.page.index_copy_(0, rows, page)
        self.length.index_copy_(0, rows, torch.where(left, self.length[rows], length))
        self.fresh.index_copy_(0, rows, (~left & (nodes < 2)).long())
        # Who leaves records there next may have fewer nodes; a slot's record of earlier must not be found then.
        self.node_slots.index_put_((rows, page), self.node_slots.new_zeros(()))


def delta_specs(layers: Sequence[SlotSpec]) -> dict[int, DeltaSpec]:
    """Returns the specs of the pool layers that keep their state by row, by layer."""
    own = (spec.state if isinstance(spec, KVSpec | StateSpec) else spec for spec in layers)
    return {at: spec for at, spec in enumerate(own) if isinstance(spec, DeltaSpec)}


def state_bytes(layers: Sequence[SlotSpec], dtype: torch.dtype) -> int:
    """Returns the bytes of one state slot, of all layers. dtype: the model's."""
    return sum(spec.state_bytes(dtype) for spec in delta_specs(layers).values())


def record_bytes(layers: Sequence[SlotSpec], rows: int, nodes: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the records of all rows, for trees of so many nodes."""
    return 2 * (rows + 1) * nodes * sum(spec.record_bytes(dtype) for spec in delta_specs(layers).values())
