"""LFM3: short convolutions and attention by turns, of which every second has a window; a gate for each head, norms
before and after each part. Tensors have names of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.family import ATTENTION, MOST_TAPS, Family, Whole, layers_by_kind, renamed
from draftwing.models.fields import Fields
from draftwing.models.positions import SLIDING

_CONV = "conv"
_ROPES = {
    ATTENTION: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of short convolutions, and of attention with and without a window, as `layer_types` says."""
    kinds = [ATTENTION if i % 4 == 2 else SLIDING if i % 4 == 0 and i else _CONV for i in range(count)]
    assert isinstance(layer.mixer, AttentionConfig)
    window = fields.whole("sliding_window", high=2**40, default=256)
    mixers = {
        ATTENTION: layer.mixer,
        SLIDING: replace(layer.mixer, window=window, rope=1),
        _CONV: ShortConvConfig(layer.hidden, fields.whole("conv_L_cache", high=MOST_TAPS, default=7)),
    }
    return layers_by_kind(fields, layer, kinds, mixers)


def _keys(fields: Fields) -> dict[str, Any]:
    for key, served in (("use_sandwich_norm", True), ("use_attention_gate", True), ("attention_bias", False)):
        fields.check(key, (served,))
    said = {"rms_norm_eps": fields.number("norm_eps", 0, 1, 1e-5)}
    return said if fields.get("rope_parameters") is not None else said | {"rope_parameters": _ROPES}


FAMILIES = {
    "Lfm3ForCausalLM": Family(
        "lfm3",
        qk_norm=True,
        gated=True,
        gate_rows="head",
        head_dim=128,
        tied=True,
        out_norms=True,
        local_theta=1e4,
        layers=_layers,
        keys=_keys,
        apart=renamed({".self_attn.g_proj.": ".self_attn.gate_proj."}),  # of adapters
        wholes={"Lfm3VlForConditionalGeneration": Whole("lfm3_vl", {})},
        layer_names={
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "post_operator_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        final_norm="model.embedding_norm",
    ),
}
