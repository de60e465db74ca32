"""The indexer of sparse latent attention, which picks the tokens that a query attends to (`ops.indexer.spec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.layers.config import Placement, StoredMatrix, StoredVector
from draftwing.layers.experts import Router
from draftwing.layers.linear import Linear
from draftwing.layers.norm import LayerNorm
from draftwing.ops.attention.attend import Attend
from draftwing.ops.indexer.spec import MOST_SIZE
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut, Order, ordered
from draftwing.parallel.ranks import Share

_EPS = 1e-6  # of the norm of keys, whatever a config says of the others
INDEXER = "self_attn.indexer"  # in checkpoints


@dataclass(frozen=True)
class IndexConfig:
    """Sizes of an indexer, of which each rank has all.

    heads: of queries.  size: of a head and of the one key, the first elements of which are turned, as many as of
    attention's.  topk: tokens that a query attends to at most.  interleaved: whether elements that are turned lie in
    pairs in a checkpoint.  shared: whether the layer has none, and its queries attend to what those of the layer before
    it picked.
    """

    heads: int
    size: int
    topk: int
    interleaved: bool = False
    shared: bool = False

    @property
    def kept(self) -> int:
        """Returns the size of what a token keeps."""
        return 0 if self.shared else self.size

    def check(self, turned: int) -> None:
        """Raises CheckpointError for sizes that cannot be. turned: elements of a head that are."""
        if not turned <= self.size <= MOST_SIZE or self.size % 32:
            raise CheckpointError(
                f"index_head_dim: expected a multiple of 32 from {turned} to {MOST_SIZE}, found {self.size}"
            )

    def weights(self, hidden: int, query_latent: int) -> int:
        """Returns the number of values in its matrices."""
        return 0 if self.shared else hidden * (self.size + self.heads) + query_latent * self.heads * self.size

    def stored(self, turned: int) -> Sequence[StoredMatrix | StoredVector]:
        """Returns which tensors of a checkpoint fill it, below the mixer."""
        if self.shared:
            return ()

        def matrix(name: str, param: str, heads: int) -> StoredMatrix:
            rows, order = heads * self.size, self._order(heads, turned)
            return StoredMatrix(
                f"{INDEXER}.{name}", f"index.{param}", 0, rows, False, Cut(0, Share(0, rows, rows)), order
            )

        order = self._order(1, turned)
        return [
            matrix("wq_b", "query", self.heads),
            matrix("wk", "key", 1),
            StoredVector(f"{INDEXER}.weights_proj.weight", "index.weights.weight", self.heads),
            StoredVector(f"{INDEXER}.k_norm.weight", "index.norm.weight", self.size, order=order),
            StoredVector(f"{INDEXER}.k_norm.bias", "index.norm.bias", self.size, order=order),
        ]

    def _order(self, heads: int, turned: int) -> Order | None:
        """Of rows of heads: of those that are turned the first of all pairs, then the second, then the others."""
        if not self.interleaved:
            return None
        runs = []
        for start in range(0, heads * self.size, self.size):
            runs += [(start + i, 1) for at in (0, 1) for i in range(at, turned, 2)]
            runs.append((start + turned, self.size - turned))
        return ordered(0, runs, heads * self.size)


class Indexer(nn.Module):
    """Queries of heads, made of what attention's are made of, one key for each token, and a weight for each head."""

    def __init__(self, config: IndexConfig, turned: int, query_latent: int, place: Placement) -> None:
        super().__init__()
        self.config, self._turned, dtype, device = config, turned, place.dtype, place.device
        wide = torch.promote_types(dtype, torch.float32)
        self.query = place.linear(config.heads * config.size, query_latent)
        self.key = place.linear(config.size)
        self.weights = Router(place.in_size, config.heads, False, dtype, device, True, each=True)
        self.norm = LayerNorm(config.size, _EPS, wide, device, bias=True)

    def linears(self) -> list[Linear]:
        return [self.key, self.query]

    def write(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, ops: LayerOps) -> None:
        """Leaves the keys of tokens in the pool. x [M, in_size]"""
        normed = self.norm(self.key(x))
        attend.write_index(layer, self._rotated(normed.unsqueeze(1), cos, sin, ops).squeeze(1))

    def pick(
        self, layer: int, x: Tensor, latents: Tensor, cos: Tensor, sin: Tensor, attend: Attend, ops: LayerOps
    ) -> None:
        """Has queries pick, behind `write`. x [M, in_size], latents [M, query_latent]: what queries are made of."""
        q = self._rotated(self.query(latents).unflatten(1, (self.config.heads, -1)), cos, sin, ops)
        attend.pick(layer, q, self.weights(x), self.config.topk)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor, ops: LayerOps) -> Tensor:
        """heads [M, n, size] -> [M, n, size], what is turned now last, for queries and keys alike."""
        return ops.concat_rope(heads[..., self._turned :], heads[..., : self._turned], cos, sin)
