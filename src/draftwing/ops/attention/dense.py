"""Attention without a cache, for training and tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, AttentionKind, DeltaInputs, DeltaWeights
from draftwing.ops.delta_net.spec import over_sequences
from draftwing.ops.indexer.blocks import BlockIndex


class DenseAttend(Attend):
    """Attention of one forward without a cache, for training and tests. sequences: so many of the same length, each
    from its first token on, follow each other in the queries."""

    def __init__(self, sequences: int = 1) -> None:
        self.sequences = sequences
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by pool layer
        self._length = 0  # of each sequence

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        self._kept[layer] = k, v
        return self.attend(layer, q, k, v, kind)

    def read(self, layer: int, q: Tensor, kind: AttentionKind = FULL) -> Tensor:
        return self.attend(layer, q, *self._kept[layer], kind)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        """Does what a call does."""
        raise NotImplementedError

    def write_index(self, layer: int, keys: Tensor) -> None:
        """Keeps their number alone: nothing is picked."""
        self._length = len(keys) // self.sequences

    def write_blocks(self, layer: int, keys: Tensor, turn: Tensor, blocks: BlockIndex) -> None:
        self.write_index(layer, keys)

    def sees_at_most(self, topk: int) -> bool:
        """Returns True. Raises ConfigError for sequences in which there is something to pick."""
        if self._length > topk:
            raise ConfigError(
                f"expected sequences of at most {topk} tokens without a cache, for of more the model attends to some "
                f"alone; found {self._length}"
            )
        return True

    def earlier(self, layer: int, own: Tensor, count: int, step: int = 1) -> Tensor:
        rows = own.unflatten(0, (self.sequences, -1))
        back = [F.pad(rows, (0, 0, i * step, 0))[:, : rows.shape[1]] for i in range(1, count + 1)]
        return torch.stack(back, 2).flatten(0, 1)

    def delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        return over_sequences(inputs, weights, self.sequences)
