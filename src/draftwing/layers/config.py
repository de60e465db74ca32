"""`LayerConfig`: what a decoder layer is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.layers.mixer import MixerConfig
from draftwing.ops.contracts import Routing
from draftwing.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class NormConfig:
    """RMS norms of a model.

    wide: whether weights are in float32, and what they are multiplied with is not rounded before.  offset: what is
    added to a weight as checkpoints store it.
    """

    eps: float = 1e-6
    wide: bool = False
    offset: float = 0.0

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns that of the weights in a model in `dtype`, which is what float64 stays in tests."""
        return torch.promote_types(dtype, torch.float32) if self.wide else dtype


NORM = NormConfig()  # of Llama


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a layer whose MLP is a mixture of them.

    count: experts that there are.  routing: how a row chooses some of them.  ffn: width of one, of this rank.
    router_bias, bias: of the router, and of the experts' GEMMs.  limit: of a clamped gate (`ExpertOps.clamped_swiglu`),
    0: the gate is SiLU.  shared: width, of this rank, of one more that every row goes to; 0: there is none.
    shared_gate: whether that has a gate of its own.  wide_router: whether the router's weight and logits are in
    float32.  beside: whether they are beside the layer's MLP, not in its place (`layers.experts.ExpertsBeside`).  own:
    those that this rank has, whole, and others have not; None: it has (a share of) each.
    """

    count: int
    routing: Routing
    ffn: int
    router_bias: bool = False
    bias: bool = False
    limit: float = 0.0
    shared: int = 0
    shared_gate: bool = False
    wide_router: bool = False
    beside: bool = False
    own: range | None = None

    @property
    def held(self) -> range:
        """Returns those that this rank has something of."""
        return range(self.count) if self.own is None else self.own

    def spread(self, ranks: Ranks) -> ExpertConfig:
        """Returns what one rank has: some experts whole, or a share of each. Raises ConfigError for a number of experts
        that cannot be divided."""
        shared = self.shared // ranks.size
        if not ranks.expert_parallel:
            return replace(self, ffn=self.ffn // ranks.size, shared=shared)
        if self.count % ranks.size:
            raise ConfigError(
                f"--enable-expert-parallel: expected a --tp-size that divides the model's {self.count} experts; found "
                f"{ranks.size}"
            )
        each = self.count // ranks.size
        return replace(self, shared=shared, own=range(ranks.rank * each, (ranks.rank + 1) * each))

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
class LayerConfig:
    """One decoder layer, with the sizes of this rank where a model is spread over several.

    mixer: the part in which tokens read of earlier ones.  ffn: width of its MLP.  experts: in place of an MLP of `ffn`,
    or beside it.  activation: of the MLP's gate.  out_norms: whether there are norms behind mixer and MLP, too, before
    the residual stream is added.  per_layer: size of an embedding of the token that this layer alone reads
    (`layers.embedding`), 0: there is none.  scaled: whether its output has a factor.  weight_format: of its matrices,
    see `ModelConfig.spread`.
    """

    hidden: int
    mixer: MixerConfig
    ffn: int
    norm: NormConfig = NORM
    mlp_bias: bool = False
    experts: ExpertConfig | None = None
    activation: Literal["silu", "gelu"] = "silu"
    out_norms: bool = False
    per_layer: int = 0
    scaled: bool = False
    weight_format: WeightFormat = DENSE
    ranks: Ranks = ALONE

    @property
    def weights(self) -> int:
        """Returns how many values its matrices have."""
        experts, values = self.experts, 2 * self.hidden * self.per_layer
        if experts is None or experts.beside:
            values += 3 * self.hidden * self.ffn
        if experts is not None:
            values += self.hidden * (3 * experts.ffn * len(experts.held) + experts.count)
            values += self.hidden * (3 * experts.shared + experts.shared_gate)
        return self.mixer.weights(self.hidden) + values

    def check(self) -> None:
        """Raises CheckpointError for sizes that cannot be."""
        if self.ffn < 1:
            raise CheckpointError(f"ffn must be at least 1, found {self.ffn}")
        if self.experts is not None:
            self.experts.check()
        self.mixer.check()

    def spread(self, ranks: Ranks) -> LayerConfig:
        """Returns the sizes of one rank, which has a share of the mixer and of the MLP. Raises ConfigError for what
        cannot be spread over so many."""
        size = ranks.size
        if size == 1:
            return self
        mixer, experts, kind = self.mixer.spread(ranks), self.experts, "intermediate size"
        ffn = self.ffn
        if experts is not None:
            kind, ffn = f"experts' {kind}", math.gcd(experts.shared, self.ffn * experts.beside)
            if not ranks.expert_parallel:
                ffn = math.gcd(experts.ffn, ffn)
            experts = experts.spread(ranks)
        if ffn % size:
            raise ConfigError(
                f"--tp-size {size}: expected a number that divides the model's {kind} of {ffn}; found {size}"
            )
        return replace(self, mixer=mixer, ffn=self.ffn // size, experts=experts, ranks=ranks)
