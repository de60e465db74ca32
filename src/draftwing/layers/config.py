"""`LayerConfig`: what a decoder layer is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of one decoder layer, those of this rank where a model is spread over several."""

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
    weight_format: WeightFormat = DENSE
    ranks: Ranks = ALONE

    def spread(self, ranks: Ranks) -> LayerConfig:
        """The sizes of one rank, which has heads and a share of the MLP; a key/value head may be on several. Raises
        ConfigError for what cannot be spread over so many."""
        size = ranks.size
        if size == 1:
            return self
        if self.heads % size or (self.kv_heads % size and size % self.kv_heads) or self.ffn % size:
            raise ConfigError(
                f"--tp-size {size}: expected a number that divides the model's {self.heads} attention heads and its "
                f"intermediate size of {self.ffn}, and divides its {self.kv_heads} key/value heads or is a multiple of "
                f"them; found {size}"
            )
        kv_heads = max(self.kv_heads // size, 1)
        return replace(self, heads=self.heads // size, kv_heads=kv_heads, ffn=self.ffn // size, ranks=ranks)
