"""Configs of small decoders whose layers are alike but for a few values, said flat."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import NormConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.config import ModelConfig, layers_like

OF_ATTENTION = {"num_heads": "heads", "num_kv_heads": "kv_heads"}
OF_ATTENTION |= {name: name for name in ("head_dim", "qkv_bias", "o_bias", "qk_norm", "sinks", "scalar", "window")}
OF_LAYER = {"hidden_size": "hidden", "ffn_size": "ffn"}
OF_LAYER |= {name: name for name in ("mlp_bias", "experts", "activation")}
LLAMA = RopeConfig()
GEMMA = {"activation": "gelu", "out_norms": True}


def decoder_config(
    num_layers: int,
    *,
    architecture: str = "LlamaForCausalLM",
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    vocab_size: int,
    max_positions: int,
    norm_eps: float = 1e-6,
    wide_norms: bool = False,
    gemma: bool = False,
    rope: RopeConfig = LLAMA,
    local_rope: RopeConfig | None = None,
    windows: Sequence[int] = (),
    dense_layers: Collection[int] = (),
    **switches: Any,
) -> ModelConfig:
    """gemma: norms behind each part, too, whose weights are stored less 1, a GELU gate and scaled embeddings.
    switches: as `changed` has them."""
    norm, own = NormConfig(norm_eps, wide_norms, float(gemma)), GEMMA if gemma else {}
    mixer = AttentionConfig(num_heads, num_kv_heads, head_dim, **_taken(switches, OF_ATTENTION))
    layer = LayerConfig(hidden_size, mixer, ffn_size, norm, **own, **_taken(switches, OF_LAYER))  # type: ignore[arg-type]
    layers = layers_like(layer, mixer, windows or (0,) * num_layers, local_rope is not None, dense_layers)
    ropes = (rope,) if local_rope is None else (rope, local_rope)
    scale = hidden_size**0.5 if gemma else 1.0
    return ModelConfig(
        architecture, hidden_size, vocab_size, max_positions, layers, ropes, norm, embed_scale=scale, **switches
    )


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns it with other values: of its own, of all its layers, of their attention, or of the number of layers."""
    layers = changes.pop("layers", config.layers)
    count = changes.pop("num_layers", len(layers))
    own = {"hidden_size": changes["hidden_size"]} if "hidden_size" in changes else {}
    attention, layer = _taken(changes, OF_ATTENTION), _taken(changes, OF_LAYER)
    made = [replace(one, mixer=replace(one.mixer, **attention), **layer) for one in (layers * count)[:count]]  # type: ignore[type-var]
    return replace(config, layers=tuple(made), **own, **changes)


def _taken(changes: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Takes those that have such names out of `changes`, by the names that they have there."""
    return {own: changes.pop(name) for name, own in names.items() if name in changes}
