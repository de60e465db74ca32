"""Falcon-H1: attention and a state-space layer (Mamba-2) beside each other in each layer, and factors of what matrices
give, with which the matrices are multiplied when they are loaded, as converters to GGUF do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.mamba import PARTS
from draftwing.models.families.granite_hybrid import IN_GGUF, has_conv_bias, mamba2, mamba2_in_gguf
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import WIDEST, Fields


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    assert isinstance(layer.mixer, AttentionConfig)
    inner = fields.whole("mamba_d_ssm", high=WIDEST, default=1024)
    if fields.has("mamba_d_ssm") and fields.get("mamba_d_ssm") is None:
        inner = fields.whole("mamba_expand", high=WIDEST, default=2) * layer.hidden
    net = mamba2(
        fields,
        inner,
        norm=fields.flag("mamba_rms_norm"),
        gates_first=not fields.flag("mamba_norm_before_gate", True),
        in_parts=True,
    )
    return (replace(layer, mixer=HybridConfig(layer.mixer, net)),) * count


def _keys(fields: Fields) -> dict[str, Any]:
    for key, served in (("attention_bias", False), ("mlp_bias", False), ("logits_scaling", 1)):
        fields.check(key, (served,))  # of biases factors are others
    return {
        "residual_multiplier": 1.0,  # which nobody reads
        "logits_scaling": 1 / fields.number("lm_head_multiplier", 1e-3, 1e3, 1.0),
        "num_key_value_heads": fields.whole("num_key_value_heads", high=WIDEST, default=8),
    }


def _factors(fields: Fields) -> dict[str, float]:
    """Returns those of matrices, by their names below a layer."""

    def one(key: str) -> float:
        return fields.number(key, -1e3, 1e3, 1.0)

    def several(key: str, count: int) -> tuple[float, ...]:
        found = (1.0,) * count if fields.get(key) is None else fields.numbers(key, -1e3, 1e3)
        if len(found) != count:
            raise fields.unlike(key, f"a list of {count} numbers")
        return found

    into, attention = one("ssm_in_multiplier"), one("attention_in_multiplier")
    gate, down = several("mlp_multipliers", 2)
    of_parts = zip(PARTS, several("ssm_multipliers", len(PARTS)), strict=True)
    return {
        **{f"mamba.in_proj.{part}": into * factor for part, factor in of_parts},
        "mamba.out_proj": one("ssm_out_multiplier"),
        "self_attn.q_proj": attention,
        "self_attn.k_proj": attention * one("key_multiplier"),
        "self_attn.v_proj": attention,
        "self_attn.o_proj": one("attention_out_multiplier"),
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    assert isinstance(layer.mixer, AttentionConfig)
    normed = any(name.endswith(".ssm_norm.weight") for name in file.tensors)
    net = mamba2_in_gguf(fields, norm=normed, conv_bias=has_conv_bias(file))
    return (replace(layer, mixer=HybridConfig(layer.mixer, net)),) * count


FAMILIES = {
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        qkv_bias=False,
        o_bias=False,
        eps=1e-5,
        multipliers=True,
        keys=_keys,
        layers=_layers,
        factors=_factors,
        layer_names={
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "post_attention_layernorm": "pre_ff_layernorm",
        },
        final_norm="model.final_layernorm",
        neutral={
            **dict.fromkeys(("mamba_chunk_size", "mamba_expand", "num_logits_to_keep", "residual_multiplier")),
            "attention_bias": (False,),
            "mamba_proj_bias": (False,),
            "mamba_use_mlp": (True,),
            "projectors_bias": (False,),
        },
        gguf=InGGUF(
            "falcon-h1",
            names=IN_GGUF,
            top_names={"output_norm.weight": "model.final_layernorm.weight"},
            layers=_in_gguf,
        ),
    ),
}
