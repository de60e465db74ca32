"""States of recurrent layers (gated delta nets), which are too large to keep one for each token.

A state lies in a *state slot*: of each layer the matrix S after a number of tokens, and the convolution's last inputs.
A running row has two, and reads one while a step writes the other. The step that verifies a tree

1. reads the state, which is that of the row's first `length` tokens;
2. replays the tokens that were accepted since, from their *records*: the inputs that the step before left of each node;
3. runs the root, which is a token of the text, and writes the state after it;
4. runs the other nodes, each from its parent's state, and leaves their records. Nothing else of them is written.

`advance`, at commit, makes the written state the one that is read. So a rejected node leaves nothing, plain decoding
is a tree of one node, and every token has the bits of a plain recurrence over its ancestors: of whichever tree, chunk
or cached prefix it is computed in. Where states are *lazy*, every second plain step writes none: its token is one that
was accepted since, to the step after it. With many rows a step reads and writes states for as long as it reads weights.
State slot 0 is that of an empty text: zeros, never written. The last one is the
dummy row's, which no request reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, SlotSpec
from draftwing.kv.zeros import zeros_as_written


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
                zeros(rows + 1, 2, nodes, 2, spec.value_heads, dtype=torch.float32),
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
    return {at: spec for at, spec in enumerate(layers) if isinstance(spec, DeltaSpec)}


def state_bytes(layers: Sequence[SlotSpec], dtype: torch.dtype) -> int:
    """Returns the bytes of one state slot, of all layers. dtype: the model's."""
    return sum(spec.state_bytes(dtype) for spec in delta_specs(layers).values())


def record_bytes(layers: Sequence[SlotSpec], rows: int, nodes: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the records of all rows, for trees of so many nodes."""
    return 2 * (rows + 1) * nodes * sum(spec.record_bytes(dtype) for spec in delta_specs(layers).values())
