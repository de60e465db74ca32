"""What a decoder layer knows of its mixer: the part in which a token reads of those before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.kv.pool import SlotSpec
from draftwing.layers.linear import Linear, row_parallel
from draftwing.ops.attention import Attend
from draftwing.ops.torch.layer_ops import PLAIN, LayerOps
from draftwing.parallel.cut import Cut, Order
from draftwing.parallel.ranks import Ranks

if TYPE_CHECKING:  # `LayerConfig` has a mixer
    from draftwing.layers.config import LayerConfig


class StoredMatrix(NamedTuple):
    """A matrix of a checkpoint, which is some outputs of a `Linear`. Names are below the layer, and below the mixer."""

    checkpoint: str
    param: str
    first: int  # output
    rows: int
    bias: bool
    cut: Cut  # what of it this rank reads
    order: Order | None = None  # of what is read, in place of a cut
    of_heads: bool = False  # its format is `blocks_or_dense`


class StoredVector(NamedTuple):
    """Any other tensor of a checkpoint, which is a parameter. Names are below the layer, and below the mixer."""

    checkpoint: str
    param: str
    rows: int
    cut: Cut | None = None  # None: all of it
    is_norm: bool = False  # `NormConfig.offset` is added
    order: Order | None = None  # of what is read, in place of a cut
    is_log: bool = False  # -exp of it is the parameter


class Mixer(nn.Module):
    """The part of a layer in which a token reads of those before it, by the injected `Attend`."""

    # Whether prompts must come as the host's `Batch.chunks`, with no other batch in the forward, as for `Attend.state`.
    # In the graphs of `PrefillGraphs`, and beside rows that decode, it is not so.
    needs_chunks = True
    before_attention = 1  # how many of `linears`
    takes_fp8 = False  # whether `forward` takes activations in fp8, too
    ops: LayerOps = PLAIN  # of the device, once packed

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        """x [M, in_size]; cos, sin [M, 1, head_dim] of the rotary embedding that the config names; residual [M, hidden]
        is added -> [M, hidden]"""
        raise NotImplementedError

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Leaves in the pool what `forward` leaves there, for queries whose results nobody wants."""
        self.forward(x, cos, sin, attend)

    def use(self, ops: LayerOps) -> None:
        """Lets the device do what lies between its matrices as it does it best."""
        self.ops = ops

    def merge(self, ops: LayerOps) -> None:
        """Makes matrices of the same input one where the device multiplies faster then; before they are packed."""

    def linears(self) -> list[Linear]:
        """Returns its matrices in the order of their calls; attention follows the first `before_attention`."""
        raise NotImplementedError


class Placement(NamedTuple):
    """Where a mixer stands.

    layer: whose mixer it is.  pool_layer: where it finds its entries, counted from the model's first.  dtype, device:
    of its parameters.  in_size: of its input.
    """

    layer: LayerConfig
    pool_layer: int
    dtype: torch.dtype
    device: torch.device
    in_size: int

    def linear(self, outputs: int, inputs: int = 0, bias: bool = False) -> Linear:
        """Makes a matrix in the layer's format. inputs: 0: those of the mixer."""
        return Linear(inputs or self.in_size, outputs, bias, self.dtype, self.device, self.layer.weight_format)

    def out(self, inputs: int, bias: bool = False) -> Linear:
        """Makes the last matrix, whose outputs are the layer's: sums over the ranks."""
        return row_parallel(self.linear(self.layer.hidden, inputs, bias), self.layer.ranks)


class MixerConfig(ABC):
    """What a mixer is built from: a frozen dataclass, one for each kind of mixer.

    rotates: which of `ModelConfig.ropes` turns its heads, and their size; None where positions turn nothing.  kv_from:
    the layer whose entries in the pool it reads instead of writing its own, None: it has its own.
    """

    kv_from: int | None = None

    @property
    def rotates(self) -> tuple[int, int] | None:
        return None

    @abstractmethod
    def keeps(self) -> SlotSpec | None:
        """Returns what it keeps in the pool of each token, None: nothing."""

    @abstractmethod
    def weights(self, hidden: int) -> int:
        """Returns the number of values in its matrices."""

    @abstractmethod
    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        """Returns which tensors of a checkpoint fill it on this rank; called of the config of the whole model."""

    @abstractmethod
    def build(self, place: Placement) -> Mixer:
        """Makes the mixer, its weights not filled."""

    def check(self) -> None:  # noqa: B027 (most have nothing to check)
        """Raises CheckpointError for sizes that cannot be."""

    def spread(self, ranks: Ranks) -> MixerConfig:
        """Returns the sizes of one of several ranks. Raises ConfigError where it cannot be spread over so many."""
        raise ConfigError(f"--tp-size {ranks.size}: the model has layers that cannot be spread; expected 1")
