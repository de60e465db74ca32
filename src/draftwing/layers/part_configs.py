"""Configs of what a decoder layer has beside its mixer: norms, experts, residual streams, embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from draftwing.errors import CheckpointError, ConfigError
from draftwing.ops.experts.routing import Routing
from draftwing.parallel.ranks import Ranks
from draftwing.parallel.shares import width_share


def check_sizes(config: object, names: Iterable[str], of: str = "") -> None:
    """Raises CheckpointError where one of these sizes of a config is below 1. of: a layer, as in " of a delta net"."""
    for name in names:
        if getattr(config, name) < 1:
            raise CheckpointError(f"{name}{of} must be at least 1, found {getattr(config, name)}")


def check_taps(width: int) -> None:
    """Raises CheckpointError for a convolution that sees one token alone."""
    if width < 2:
        raise CheckpointError(f"taps of a convolution must be at least 2, found {width}")


@dataclass(frozen=True)
class NormConfig:
    """Norms of a model.

    wide: whether weights are in float32, and what they are multiplied with is not rounded before.  offset: what is
    added to a weight as checkpoints store it.  centred: whether a row's mean is taken from it first, so that they are
    LayerNorm, which is rounded once; else they are RMS norms.  bias: whether LayerNorm has one.  bare: whether
    they have no weights.
    """

    eps: float = 1e-6
    wide: bool = False
    offset: float = 0.0
    centred: bool = False
    bias: bool = False
    bare: bool = False

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns that of the weights in a model in `dtype`, which is what float64 stays in tests."""
        return torch.promote_types(dtype, torch.float32) if self.wide else dtype


NORM = NormConfig()  # of Llama
# Of a gate: SiLU, or GELU by tanh. Without a gate: the square of ReLU, xIELU, GELU by tanh and as it is.
Activation = Literal["silu", "gelu", "relu2", "xielu", "ungated_gelu", "ungated_exact_gelu"]


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a layer whose MLP is a mixture of them.

    count: experts that there are.  routing: how a row chooses some of them.  ffn: width of one, of this rank.
    router_bias, bias: of the router, and of the experts' GEMMs.  limit: of a clamped gate (`LayerOps.clamped_swiglu`),
    0: the gate is SiLU.  silu_limit: as `LayerConfig` has it, of those that are chosen.  shared: width, of this rank,
    of one more that every row goes to; 0: there is none.  shared_gate: whether that has a gate of its
    own.  wide_router: whether the router's weight and logits are in float32.  latent: what a row is brought to before
    it goes to experts, and brought back from, 0: its own size.
    beside: whether they are beside the layer's MLP, not in its place (`layers.experts.ExpertsBeside`).  scales_inputs:
    whether the sigmoid of a row's logit multiplies what its one expert reads, and what that gives has weight 1.
    uncorrected: whether checkpoints have no correction of each expert, as if it were 0, though there is one by the
    routing.  own: those that this rank has, whole, and others have not; None: it has (a share of) each.
    """

    count: int
    routing: Routing
    ffn: int
    router_bias: bool = False
    bias: bool = False
    limit: float = 0.0
    silu_limit: float = 0.0
    shared: int = 0
    shared_gate: bool = False
    wide_router: bool = False
    latent: int = 0
    beside: bool = False
    scales_inputs: bool = False
    uncorrected: bool = False
    own: range | None = None

    @property
    def held(self) -> range:
        """Returns those that this rank has something of."""
        return range(self.count) if self.own is None else self.own

    def spread(self, ranks: Ranks, block: int = 1) -> ExpertConfig:
        """Returns what one rank has: some experts whole, or a share of each. block: as `LayerConfig` has it. Raises
        ConfigError for fewer experts than ranks that are to have some."""
        shared = width_share(ranks, self.shared, block).size
        if not ranks.expert_parallel:
            return replace(self, ffn=width_share(ranks, self.ffn, block).size, shared=shared)
        if self.count < ranks.size:
            raise ConfigError(
                f"--enable-expert-parallel: expected a --tp-size of at most the model's {self.count} experts; found "
                f"{ranks.size}"
            )
        start, size, _ = ranks.even_share(self.count)
        return replace(self, shared=shared, own=range(start, start + size))

    def check(self) -> None:
        """Raises CheckpointError for groups of experts that cannot be."""
        routing = self.routing
        size = self.count // routing.groups
        if self.count % routing.groups or not 1 <= routing.top_groups <= routing.groups:
            raise CheckpointError(
                f"expected groups of one size, found {self.count} experts in {routing.groups} groups, of which "
                f"{routing.top_groups} are chosen"
            )
        if routing.top_k > size * routing.top_groups:
            raise CheckpointError(
                f"expected at most the {size * routing.top_groups} experts of {routing.top_groups} groups for a row, "
                f"found {routing.top_k}"
            )


@dataclass(frozen=True)
class StreamsConfig:
    """Residual streams in place of one. count: of them.  rank: of the matrices that make gates."""

    count: int
    rank: int

    def weights(self, hidden: int) -> int:
        """Returns the number of values in the matrices of one part."""
        return self.count * hidden * (2 * self.rank + self.count)

    def around(self, hidden: int) -> int:
        """Returns the same of what is before and behind all layers."""
        return self.weights(hidden)


@dataclass(frozen=True)
class AltUpConfig(StreamsConfig):
    """Streams of which layers compute the first (`layers.altup`). rank: of the product beside attention."""

    def weights(self, hidden: int) -> int:
        return self.rank * hidden + self.count * hidden // 2

    def around(self, hidden: int) -> int:
        return 2 * (self.count - 1) * hidden**2


@dataclass(frozen=True)
class NgramConfig:
    """Embeddings of n-grams that one layer adds to its streams.

    order: of the longest n-grams, the others have 2 tokens and more.  size: of what is joined of a token's rows.
    tables: rows of each head, those of the shortest n-grams first.  multipliers: of the tokens of an n-gram, the newest
    first.  end: the token that ends texts, which stands before each.  taps: of the convolution.  rows: of all tables,
    with padding.  parts: tensors of a checkpoint that the table is cut into, so many of one size but for the last.
    layers: of the model, that have such a table.
    """

    DIGITS: ClassVar[int] = 3  # of a token's id, in slots of the pool

    order: int
    size: int
    tables: tuple[int, ...]
    multipliers: tuple[int, ...]
    end: int
    taps: int
    rows: int
    parts: int
    layers: int = 1
