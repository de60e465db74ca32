"""Qwen3.5 and Qwen3-Next: mostly gated delta nets, with attention in one of some layers.

Converters to GGUF have done some of the arithmetic: Qwen3.5's value heads are tiled (`DeltaSpec`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.models.families.qwen import NEUTRAL, dense_layers, shared_experts
from draftwing.models.families.qwen_images import tower
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    RECURRENT,
    ExpertMetadata,
    Family,
    InGGUF,
    Whole,
    layers_by_attention,
    layers_by_kind,
)
from draftwing.models.fields import WIDEST, Fields

_EVERY = 4  # `full_attention_interval` when a file has none


def hybrid_layers(fields: Fields, layer: LayerConfig, count: int, by_key_head: bool = False) -> tuple[LayerConfig, ...]:
    """Returns gated delta nets, and attention in every fourth layer or as the config says. by_key_head: those of
    Qwen3-Next, stored in other matrices."""
    if not fields.flag("attn_output_gate", True):
        raise fields.unsupported("attn_output_gate", False)
    every = fields.whole("full_attention_interval", default=_EVERY)
    kinds = [RECURRENT if (i + 1) % every else ATTENTION for i in range(count)]
    net = DeltaNetConfig(
        fields.whole("linear_num_key_heads", high=WIDEST, default=16),
        fields.whole("linear_num_value_heads", high=WIDEST, default=32),
        fields.whole("linear_key_head_dim", high=WIDEST, default=128),
        fields.whole("linear_value_head_dim", high=WIDEST, default=128),
        fields.whole("linear_conv_kernel_dim", high=MOST_TAPS, default=4),
        by_key_head=by_key_head,
    )
    return layers_by_kind(fields, layer, kinds, {ATTENTION: layer.mixer, RECURRENT: net})


def _keys(fields: Fields) -> dict[str, Any]:
    """Returns the width of an MLP where there are experts alone, whose configs have none."""
    shared = fields.get("shared_expert_intermediate_size")
    return {} if shared is None or fields.get("intermediate_size") is not None else {"intermediate_size": shared}


def nets_in_gguf(
    file: GGUFFile, fields: Fields, layer: LayerConfig, count: int, tiled: bool = True
) -> tuple[LayerConfig, ...]:
    value_heads = fields.whole("ssm.time_step_rank", high=WIDEST)
    inner = fields.whole("ssm.inner_size", high=WIDEST)
    if inner % value_heads:
        raise fields.unlike("ssm.inner_size", f"a multiple of the {value_heads} value heads")
    net = DeltaNetConfig(
        fields.whole("ssm.group_count", high=WIDEST),
        value_heads,
        fields.whole("ssm.state_size", high=WIDEST),
        inner // value_heads,
        fields.whole("ssm.conv_kernel", high=MOST_TAPS),
        tiled=tiled,
    )
    return layers_by_attention(file, layer, _attends(fields, count), net)


def _attends(fields: Fields, count: int) -> list[bool]:
    key = "attention.recurrent_layers"
    named = fields.get(key)
    if not isinstance(named, np.ndarray):
        every = fields.whole("full_attention_interval", default=_EVERY)
        return [not (i + 1) % every for i in range(count)]
    if len(named) < count:
        raise fields.unlike(key, f"one for each of {count} layers")
    return [not one for one in named[:count].tolist()]


NAMES_IN_GGUF = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERTS_IN_GGUF = ExpertMetadata(shared=True, more={"shared_gate": True})
_COMMON: dict[str, Any] = {
    "qk_norm": True,
    "head_dim": 256,
    "wide_norms": True,
    "norm_offset": 1.0,
    "gated": True,
    "turns_parts": True,
    "rotary": 0.25,
    "layers": hybrid_layers,
    "keys": _keys,
    "neutral": {
        **NEUTRAL,
        "mamba_ssm_dtype": ("float32",),  # as states are here
        "output_gate_type": ("swish", "silu"),
        "mlp_only_layers": ([],),
    },
    "predicts": "mtp",
}
_MOE = _COMMON | {"experts": shared_experts, "dense_layers": dense_layers}
_SIZES = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip
_MOE_SIZES = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
_SEES: dict[str, Any] = {"tower": partial(tower, token=248056, taps=False), "sections": (11, 11, 10)}
FAMILIES = {
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        **_COMMON,
        wholes={
            "Qwen3_5ForConditionalGeneration": Whole("qwen3_5", _SIZES, **_SEES),
            "MiniCPMV4_6ForConditionalGeneration": Whole("minicpmv4_6", _SIZES),
            "MiniCPMV4_7ForConditionalGeneration": Whole("minicpmv4_7", _SIZES),
        },
        gguf=InGGUF("qwen35", names=NAMES_IN_GGUF, layers=nets_in_gguf),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        **_MOE,
        wholes={"Qwen3_5MoeForConditionalGeneration": Whole("qwen3_5_moe", _MOE_SIZES, **_SEES)},
        gguf=InGGUF("qwen35moe", names=NAMES_IN_GGUF, experts=EXPERTS_IN_GGUF, layers=nets_in_gguf),
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        **_MOE | {"layers": partial(hybrid_layers, by_key_head=True)},
        gguf=InGGUF(
            "qwen3next", names=NAMES_IN_GGUF, experts=EXPERTS_IN_GGUF, layers=partial(nets_in_gguf, tiled=False)
        ),
    ),
}
