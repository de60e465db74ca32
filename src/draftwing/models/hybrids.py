"""Families whose layers are mostly recurrences, one in some of them attention: what their configs say of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.mixer import MixerConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.fields import WIDEST, Fields

ATTENTION, DELTA, CONV = "full_attention", "linear_attention", "conv"
MOST_TAPS = 64  # of a convolution: published ones have 3 or 4
EVERY = 4  # `full_attention_interval` when the config has none


def qwen_layers(fields: Fields, layer: LayerConfig, count: int, by_key_head: bool = False) -> tuple[LayerConfig, ...]:
    """Returns the layers of Qwen3.5: gated delta nets, and attention in every fourth or as the config says.
    by_key_head: those of Qwen3-Next, stored in other matrices."""
    if not fields.flag("attn_output_gate", True):
        raise fields.unsupported("attn_output_gate", False)
    every = fields.whole("full_attention_interval", default=EVERY)
    kinds = [DELTA if (i + 1) % every else ATTENTION for i in range(count)]
    net = DeltaNetConfig(
        fields.whole("linear_num_key_heads", high=WIDEST, default=16),
        fields.whole("linear_num_value_heads", high=WIDEST, default=32),
        fields.whole("linear_key_head_dim", high=WIDEST, default=128),
        fields.whole("linear_value_head_dim", high=WIDEST, default=128),
        fields.whole("linear_conv_kernel_dim", high=MOST_TAPS, default=4),
        by_key_head=by_key_head,
    )
    return _by_kind(fields, layer, kinds, {ATTENTION: layer.mixer, DELTA: net})


def lfm2_layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of short convolutions, and of attention where `layer_types` or `full_attn_idxs` says so."""
    named = fields.get("full_attn_idxs")
    if named is not None and not (isinstance(named, list) and all(type(one) is int for one in named)):
        raise fields.unlike("full_attn_idxs", "a list of layer numbers")
    kinds = [ATTENTION if named is None or i in named else CONV for i in range(count)]
    conv = ShortConvConfig(layer.hidden, fields.whole("conv_L_cache", high=MOST_TAPS, default=3))
    return _by_kind(fields, layer, kinds, {ATTENTION: layer.mixer, CONV: conv})


def _by_kind(
    fields: Fields, layer: LayerConfig, kinds: list[str], mixers: dict[str, MixerConfig]
) -> tuple[LayerConfig, ...]:
    """kinds: of each layer, where `layer_types` does not say."""
    given = fields.texts("layer_types")
    for kind in set(given) - set(mixers):
        raise fields.unsupported("layer_types", kind)
    if given and len(given) < len(kinds):
        raise fields.unlike("layer_types", f"one for each of {len(kinds)} layers")
    kinds = (given or kinds)[: len(kinds)]
    if ATTENTION not in kinds:
        raise CheckpointError(f"{fields.where}: expected a layer with attention, found none")
    of_kind = {kind: replace(layer, mixer=mixer) for kind, mixer in mixers.items()}
    return tuple(of_kind[kind] for kind in kinds)


def qwen_keys(fields: Fields) -> dict[str, Any]:
    """Returns the width of an MLP where there are experts alone, whose configs have none."""
    shared = fields.get("shared_expert_intermediate_size")
    return {} if shared is None or fields.get("intermediate_size") is not None else {"intermediate_size": shared}


def lfm2_keys(fields: Fields) -> dict[str, Any]:
    """Returns the width of the MLPs, which is a multiple of something near two thirds of what the config says."""
    key = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    ffn = fields.whole(key, high=WIDEST)
    if fields.flag("block_auto_adjust_ff_dim", True):
        ffn, multiple = 2 * ffn // 3, fields.whole("block_multiple_of", high=WIDEST, default=256)
        if fields.get("block_ffn_dim_multiplier") is not None or not fields.has("block_ffn_dim_multiplier"):
            ffn = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * ffn)
            ffn = -(-ffn // multiple) * multiple
    said = {"intermediate_size": ffn, "rms_norm_eps": fields.number("norm_eps", 0, 1, 1e-5)}
    tied = fields.get("tie_embedding")
    return said if tied is None else said | {"tie_word_embeddings": tied}


# What Qwen3.5 and Qwen3-Next have in common, as `Family` has it.
QWEN_HYBRID: dict[str, Any] = {
    "qk_norm": True,
    "head_dim": 256,
    "wide_norms": True,
    "norm_offset": 1.0,
    "gated": True,
    "rotary": 0.25,
    "layers": qwen_layers,
    "keys": qwen_keys,
    "turns_parts": True,
}
