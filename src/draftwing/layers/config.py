"""`LayerConfig`: what a decoder layer is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a layer whose MLP is a mixture of them.

    count: experts that there are.  top_k: of them that a row goes to.  ffn: width of one, of this rank.  renormalise:
    whether the probabilities of those chosen are made to sum to 1.  router_bias, bias: of the router, and of the
    experts' GEMMs.  limit: of a clamped gate (`ExpertOps.gate`), 0: the gate is SiLU.
    """

    count: int
    top_k: int
    ffn: int
    renormalise: bool = True
    router_bias: bool = False
    bias: bool = False
    limit: float = 0.0


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of one decoder layer, those of this rank where a model is spread over several.

    window, query_pre_attn_scalar: as `AttentionKind` has them.  sinks: whether its heads have them.  wide_norms:
    whether weights of norms are in float32, and what they are multiplied with is not rounded before.  gemma: norms
    after attention and MLP too, and a gate by GELU.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertConfig | None = None  # in place of an MLP of `ffn`
    window: int = 0
    sinks: bool = False
    query_pre_attn_scalar: int = 0
    wide_norms: bool = False
    gemma: bool = False
    weight_format: WeightFormat = DENSE
    ranks: Ranks = ALONE

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the weights of norms in a model in `dtype`, which is what float64 stays in tests."""
        return torch.promote_types(dtype, torch.float32) if self.wide_norms else dtype

    def spread(self, ranks: Ranks) -> LayerConfig:
        """The sizes of one rank, which has heads and a share of the MLP; a key/value head may be on several. Raises
        ConfigError for what cannot be spread over so many."""
        size = ranks.size
        if size == 1:
            return self
        experts, kind = self.experts, "intermediate size"
        ffn = self.ffn if experts is None else experts.ffn
        if experts is not None:
            kind, experts = f"experts' {kind}", replace(experts, ffn=ffn // size)
        if self.heads % size or (self.kv_heads % size and size % self.kv_heads) or ffn % size:
            raise ConfigError(
                f"--tp-size {size}: expected a number that divides the model's {self.heads} attention heads and its "
                f"{kind} of {ffn}, and divides its {self.kv_heads} key/value heads or is a multiple of "
                f"them; found {size}"
            )
        kv_heads = max(self.kv_heads // size, 1)
        return replace(
            self, heads=self.heads // size, kv_heads=kv_heads, ffn=self.ffn // size, experts=experts, ranks=ranks
        )
