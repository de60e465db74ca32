"""`LayerConfig`: what a decoder layer is built from."""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.formats import DENSE


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of one decoder layer, those of this process where a model is spread over several."""

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
