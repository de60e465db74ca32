"""The indexer of attention that picks blocks of tokens (`ops.indexer.blocks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.layers.config import Placement, StoredMatrix, StoredVector
from draftwing.layers.indexer import INDEXER
from draftwing.layers.linear import Linear
from draftwing.layers.norm import RMSNorm
from draftwing.ops.attention.attend import Attend
from draftwing.ops.indexer.blocks import BlockIndex
from draftwing.ops.indexer.spec import MOST_SIZE
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share


@dataclass(frozen=True)
class BlockIndexConfig:
    """Sizes of an indexer, of which each rank has all.

    heads: of queries.  size: of a head and of the one key.  turned: its first elements so many of which are turned.
    topk: blocks that a query attends to at most.  ratio: tokens of a block.  apart: whether a checkpoint has one matrix
    of queries and one of the key.
    """

    heads: int
    size: int
    turned: int
    topk: int
    ratio: int
    apart: bool = False

    @property
    def kept(self) -> int:
        """Returns the size of what a token keeps: its key, and what that is turned by."""
        return self.size + self.turned

    @property
    def width(self) -> int:
        """Returns how many tokens a query attends to at most."""
        return self.topk * self.ratio + self.ratio - 1

    def check(self) -> None:
        """Raises CheckpointError for sizes that cannot be."""
        if not self.turned <= self.size <= MOST_SIZE:
            raise CheckpointError(
                f"indexer_head_dim: expected at least the {self.turned} elements of a head that are turned, and at "
                f"most {MOST_SIZE}, found {self.size}"
            )

    def weights(self, hidden: int) -> int:
        """Returns the number of values in its matrix."""
        return hidden * (self.heads + 1) * self.size

    def stored(self) -> Sequence[StoredMatrix | StoredVector]:
        """Returns which tensors of a checkpoint fill it, below the mixer."""
        queries, rows = self.heads * self.size, (self.heads + 1) * self.size
        made = [("index_qk_proj", 0, rows)]
        if self.apart:
            made = [("q_proj", 0, queries), ("k_proj", queries, self.size)]
        return [
            *(
                StoredMatrix(f"{INDEXER}.{name}", "index.made", first, size, False, Cut(0, Share(0, size, size)))
                for name, first, size in made
            ),
            StoredVector(f"{INDEXER}.q_layernorm.weight", "index.query_norm.weight", self.size, is_norm=True),
            StoredVector(f"{INDEXER}.k_layernorm.weight", "index.key_norm", self.size, is_norm=True),
        ]


class BlockIndexer(nn.Module):
    """Queries of heads and one key for each token, of one matrix."""

    def __init__(self, config: BlockIndexConfig, place: Placement) -> None:
        super().__init__()
        self.config, self._eps = config, place.layer.norm.eps
        wide = place.layer.norm.dtype(place.dtype)
        self.made = place.linear((config.heads + 1) * config.size)
        self.query_norm = RMSNorm(config.size, self._eps, wide, place.device)
        self.key_norm = nn.Parameter(torch.ones(config.size, dtype=wide, device=place.device), False)

    def write(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Leaves in the pool what tokens keep. x [M, in_size]; cos, sin [M, 1, head_dim] of attention's heads"""
        keys = self.made.last(x, self.config.size)[:, -self.config.size :]
        attend.write_blocks(layer, keys, self._turn(cos, sin), self._blocks())

    def pick(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Has queries pick, behind `write`."""
        config = self.config
        q = self.made(x)[:, : -config.size].reshape(len(x), config.heads, config.size)
        attend.pick_blocks(layer, self.query_norm(q), self._turn(cos, sin), self._blocks())

    def linears(self) -> list[Linear]:
        return [self.made]

    def _blocks(self) -> BlockIndex:
        return BlockIndex(self.config.topk, self.config.ratio, self.key_norm, self._eps)

    def _turn(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns cosines and sines of pairs that are turned, [M, turned]."""
        half = self.config.turned // 2
        second = sin.shape[2] // 2  # the first half's have the other sign
        return torch.cat((cos[:, 0, :half], sin[:, 0, second : second + half]), 1)
