"""Ling 3.0: Kimi Delta Attention whose decays have a floor in most layers, latent attention with gates of heads in
others, and the experts of DeepSeek-V3 under names of Ling's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.kda import KdaConfig
from draftwing.models.families.bailing import check_shared, word_embeddings
from draftwing.models.families.deepseek import (
    IN_GGUF,
    LATENT_NAMES,
    dense_layers,
    experts,
    latent_attention,
    turned,
    turned_apart,
)
from draftwing.models.families.kimi_linear import NAMES, NAMES_IN_GGUF, nets_in_gguf
from draftwing.models.family import ATTENTION, MOST_TAPS, RECURRENT, ExpertNames, Family, InGGUF, layers_by_kind
from draftwing.models.fields import WIDEST, Fields, Values

_USUAL = {
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 2, "n_shared_experts": 1,
}  # fmt: skip
# Names below a layer but for that of the last matrix.
_PARTS = (
    "q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_proj", "g_proj", "b_proj", "o_norm", "A_log",
    "dt_bias", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "k_b_proj", "v_b_proj",
)  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("score_function", ("sigmoid",))
    fields.check("rope_interleave", (True,))
    fields.check("tie_word_embeddings", (False,))  # which transformers does not read
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):  # of each layer
        limits = fields.get(key)
        if limits is not None and not (isinstance(limits, list) and all(one in (None, 0) for one in limits)):
            raise fields.unsupported(key, limits)
    found = fields.renamed(NAMES)
    every = fields.overruled(found)
    found |= {key: value for key, value in _USUAL.items() if not every.has(key)}
    check_shared(fields.overruled(found))
    return found | turned_apart(fields)


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    floor = fields.number("kda_lower_bound", -1e3, -1e-3, -5.0)

    def size(key: str, other: str, high: int, default: int | None = None) -> int:
        """Reads a key of transformers' own files, which have another `head_dim`, or that of published ones."""
        return fields.whole(key, high=high, default=fields.whole(other, high=high, default=default))

    delta = KdaConfig(
        size("linear_num_heads", "num_attention_heads", WIDEST),
        size("linear_head_dim", "head_dim", WIDEST, 128),
        size("linear_conv_kernel_dim", "short_conv_kernel_size", MOST_TAPS, 4),
        direct=True,
        floor=floor if fields.flag("kda_safe_gate", True) else 0.0,
    )
    every = fields.whole("layer_group_size", default=6)
    kinds = [RECURRENT if (i + 1) % every else ATTENTION for i in range(count)]
    latent = replace(latent_attention(fields), gated=True)
    return layers_by_kind(fields, layer, kinds, {ATTENTION: latent, RECURRENT: delta})


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    if not fields.flag("kda.safe_gate", True):
        raise fields.unsupported("kda.safe_gate", False)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if np.any(limits := fields.get(key)):
            raise fields.unsupported(key, limits)
    floor = fields.number("kda.gate_lower_bound", -1e3, -1e-3)
    return nets_in_gguf(file, fields, layer, count, floor, gated=True)


# Of published configs: what the layers are anyway, or what only other kinds of layers have.
_PUBLISHED: dict[str, Values] = {
    **dict.fromkeys(("no_kda_lora", "moe_router_enable_expert_bias", "use_qk_norm", "linear_silu"), (True,)),
    **dict.fromkeys(
        ("use_kda_lora", "use_mla_nope", "use_nGPT", "scale_router_input", "up_proj_norm", "value_norm",
         "mtp_use_kda"), (False,),
    ),
    **dict.fromkeys(("rotary_dim", "partial_rotary_factor", "embedding_dropout", "output_dropout")),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "group_norm_size": (1,),
    "num_kv_heads_for_linear_attn": (0,),
}  # fmt: skip
_IN_GGUF = {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"}
_LING3 = Family(
    "bailing_hybrid",
    theta=6e6,
    experts=experts,
    dense_layers=dense_layers,
    layers=_layers,
    keys=_keys,
    apart=word_embeddings,
    predicts="numbered",
    neutral={
        "qk_head_dim": None,  # the sum of both parts
        "first_k_dense_replace": None,  # beside `mlp_layer_types`
        "use_bias": (False,),
        "use_qkv_bias": (False,),
        "router_dtype": ("fp32", "float32"),
        **_PUBLISHED,
    },
    expert_names=ExpertNames(shared="mlp.shared_experts", correction="mlp.gate.expert_bias"),
    layer_names={
        **{f"self_attn.{part}": f"attention.{part}" for part in _PARTS},
        "self_attn.o_proj": "attention.dense",
    },
    gguf=InGGUF(
        "bailingmoe3",
        names=LATENT_NAMES | NAMES_IN_GGUF | _IN_GGUF,
        fields=turned,
        layers=_in_gguf,
        experts=IN_GGUF,
    ),
)
FAMILIES = {
    "BailingHybridForCausalLM": _LING3,  # as transformers calls it
    "BailingMoeV3ForCausalLM": _LING3,  # as it is published
}
