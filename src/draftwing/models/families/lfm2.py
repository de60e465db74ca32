"""LFM2, dense and with experts: short convolutions, with attention in some layers. Tensors have names of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.models.families.tiles_images import grid_tower
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    SIGMOID,
    UNSAID,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
    Whole,
    attends_by_heads,
    layers_by_attention,
    layers_by_kind,
)
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.ops.experts.routing import Routing

_CONV = "conv"


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of short convolutions, and of attention where `layer_types` or `full_attn_idxs` says so."""
    named = fields.get("full_attn_idxs")
    if named is not None and not (isinstance(named, list) and all(type(one) is int for one in named)):
        raise fields.unlike("full_attn_idxs", "a list of layer numbers")
    kinds = [ATTENTION if named is None or i in named else _CONV for i in range(count)]
    conv = ShortConvConfig(layer.hidden, fields.whole("conv_L_cache", high=MOST_TAPS, default=3))
    return layers_by_kind(fields, layer, kinds, {ATTENTION: layer.mixer, _CONV: conv})


def _keys(fields: Fields) -> dict[str, Any]:
    """Returns the width of the MLPs, which is a multiple of something near two thirds of what the config says."""
    key = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    ffn = fields.whole(key, high=WIDEST)
    if fields.flag("block_auto_adjust_ff_dim", True):
        ffn, multiple = 2 * ffn // 3, fields.whole("block_multiple_of", high=WIDEST, default=256)
        if fields.get("block_ffn_dim_multiplier") is not None or not fields.has("block_ffn_dim_multiplier"):
            ffn = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * ffn)
            ffn = -(-ffn // multiple) * multiple
    return {"intermediate_size": ffn, **_renamed(fields)}


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    conv = ShortConvConfig(layer.hidden, fields.whole("shortconv.l_cache", high=MOST_TAPS))
    return layers_by_attention(file, layer, attends_by_heads(fields, count), conv)


def _renamed(fields: Fields) -> dict[str, Any]:
    """Returns what other families' configs have under other names."""
    said = {"rms_norm_eps": fields.number("norm_eps", 0, 1, 1e-5)}
    tied = fields.get("tie_embedding")
    return said if tied is None else said | {"tie_word_embeddings": tied}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns experts that are chosen by sigmoids, with a correction of each."""
    if not fields.flag("use_expert_bias", True):
        raise fields.unsupported("use_expert_bias", False)
    count = fields.whole("num_experts", high=max_experts(layers), default=32)
    routing = Routing(
        fields.whole("num_experts_per_tok", high=count, default=4),
        renormalise=fields.flag("norm_topk_prob", True),
        sigmoid=True,
        scale=fields.number("routed_scaling_factor", 1e-3, 1e3, 1.0),
    )
    return ExpertConfig(count, routing, fields.whole("moe_intermediate_size", high=WIDEST))


def _dense_layers(fields: Fields, layers: int) -> Collection[int]:
    return range(fields.whole("num_dense_layers", 0, default=2))


_LFM2: dict[str, Any] = {
    "qkv_bias": False, "o_bias": False, "qk_norm": True, "theta": 1e6, "eps": 1e-5, "tied": True, "layers": _layers,
    "layer_names": {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    "final_norm": "model.embedding_norm",
}  # fmt: skip
_IN_GGUF: dict[str, Any] = {
    "names": {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
              "shortconv.conv": "conv.conv"},
    "top_names": dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight"),
    "layers": _in_gguf,
}  # fmt: skip
_EXPERT_NAMES = ExpertNames(
    "feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2", correction="feed_forward.expert_bias"
)
FAMILIES = {
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe",
        **_LFM2,
        keys=_renamed,
        experts=_experts,
        dense_layers=_dense_layers,
        expert_names=_EXPERT_NAMES,
        gguf=InGGUF(
            "lfm2moe",
            **_IN_GGUF,
            experts=ExpertMetadata(gating=(UNSAID, SIGMOID), sigmoid=True),
        ),
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        **_LFM2,
        keys=_keys,
        wholes={"Lfm2VlForConditionalGeneration": Whole("lfm2_vl", {}, tower=grid_tower)},
        neutral={
            **dict.fromkeys(
                ("block_dim", "block_ffn_dim_multiplier", "block_mlp_init_scale", "block_multiple_of", "block_norm_eps",
                 "block_out_init_scale", "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
                 "num_heads", "theta", "intermediate_size", "full_attn_idxs")
            ),
            "block_use_swiglu": (True,),
            "use_pos_enc": (True,),
        },
        gguf=InGGUF("lfm2", **_IN_GGUF),
    ),
}  # fmt: skip
