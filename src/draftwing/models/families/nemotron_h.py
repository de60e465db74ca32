"""Nemotron-H and Nemotron 3: a layer is one part alone, a state-space layer (Mamba-2), attention that turns nothing, an
MLP with the square of ReLU, or experts of such MLPs, which may be of a smaller size than the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig, NoMixer
from draftwing.layers.mamba import Mamba2Config
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families import deepseek
from draftwing.models.families.granite_hybrid import IN_GGUF, check_steps, has_conv_bias, mamba2_in_gguf
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    RECURRENT,
    SIGMOID,
    UNSAID,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
)
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, Values

_MLP, _MOE = "mlp", "moe"
_LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": _MLP, "E": _MOE}
_KINDS = {"mamba": RECURRENT, "attention": ATTENTION}  # what older files call them
_HEAD_DIM = 128  # where a file has none


def _kinds(fields: Fields) -> list[str]:
    """Returns what each layer is."""
    pattern = fields.get("hybrid_override_pattern")
    named = fields.texts("layers_block_type") or fields.texts("layer_types")
    if not named and not (isinstance(pattern, str) and set(pattern) <= _LETTERS.keys()):
        raise fields.unlike("hybrid_override_pattern", "a text of letters M, *, - and E, one for each layer")
    kinds = [_KINDS.get(kind, kind) for kind in named] if named else [_LETTERS[letter] for letter in pattern]
    for kind in set(kinds) - {*_LETTERS.values()}:
        raise fields.unsupported("layers_block_type", kind)
    if not 0 < len(kinds) <= MAX_LAYERS or ATTENTION not in kinds:
        raise CheckpointError(f"{fields.where}: expected 1 to {MAX_LAYERS} layers, one with attention, found {kinds}")
    return kinds


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    check_steps(fields)
    net = Mamba2Config(
        fields.whole("n_groups", high=WIDEST, default=8),
        fields.whole("mamba_num_heads", high=WIDEST, default=128),
        fields.whole("mamba_head_dim", high=WIDEST, default=64),
        fields.whole("ssm_state_size", high=WIDEST, default=128),
        fields.whole("conv_kernel", high=MOST_TAPS, default=4),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    return _of_kinds(layer, net, _kinds(fields))


def _of_kinds(layer: LayerConfig, net: Mamba2Config, kinds: Iterable[str]) -> tuple[LayerConfig, ...]:
    """layer: with all parts."""
    mlp = replace(layer, mixer=NoMixer())
    of_kind = {
        RECURRENT: replace(layer, mixer=net, ffn=0, experts=None),
        ATTENTION: replace(layer, ffn=0, experts=None),
        _MLP: replace(mlp, experts=None),
        _MOE: mlp,
    }
    return tuple(of_kind[kind] for kind in kinds)


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads sizes under the names that they have elsewhere; `num_hidden_layers` need not be the number of layers."""
    head_dim = fields.whole("head_dim", high=WIDEST, default=_HEAD_DIM)
    fields.check("attention_head_dim", (head_dim,))
    fields.check("tie_word_embeddings", (False,))  # which transformers does not read
    return {
        "num_hidden_layers": len(_kinds(fields)),
        "head_dim": head_dim,
        "num_key_value_heads": fields.whole("num_key_value_heads", high=WIDEST, default=8),
        "hidden_act": fields.text("mlp_hidden_act", "relu2"),
        "intermediate_size": fields.whole("intermediate_size", high=WIDEST, default=21504),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 0, 1, 1e-5),
    }


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    """Returns those of DeepSeek-V3, without gates; None where no layer has any."""
    if _MOE not in _kinds(fields):
        return None
    if fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", True)
    usual = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    usual = {key: value for key, value in usual.items() if fields.get(key) is None}
    shared = fields.whole("moe_shared_expert_intermediate_size", 0, WIDEST, 7688)
    return replace(
        deepseek.experts(fields.overruled({**usual, "n_shared_experts": 0}), layers),
        shared=shared or fields.whole("intermediate_size", high=WIDEST),  # as transformers reads it
        latent=0 if fields.get("moe_latent_size") is None else fields.whole("moe_latent_size", high=WIDEST),
    )


def _apart(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    yield ("model.embed_tokens.weight" if name == "model.embeddings.weight" else name), value


# ---- GGUF files ------------------------------------------------------------------------------------------------------

_WIDTH = "feed_forward_length"  # a number for each layer, 0 of those without an MLP


def _metadata(fields: Fields) -> Fields:
    """Returns the metadata with one width of MLPs."""
    widths = fields.get(_WIDTH)
    if not isinstance(widths, np.ndarray):
        return fields
    different = {int(one) for one in widths.tolist()} - {0} if widths.dtype.kind in "iu" else set()
    if len(different) != 1:
        raise fields.unlike(_WIDTH, "one number for all layers with an MLP")
    return fields.overruled({_WIDTH: different.pop()})


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Blocks are told by their tensors."""
    parts = (("ssm_in", RECURRENT), ("attn_q", ATTENTION), ("ffn_gate_inp", _MOE))
    kinds = [
        next((kind for part, kind in parts if f"blk.{i}.{part}.weight" in file.tensors), _MLP) for i in range(count)
    ]
    if ATTENTION not in kinds:
        raise CheckpointError(f"{file.path}: expected a layer with attention, found none")
    return _of_kinds(layer, mamba2_in_gguf(fields, conv_bias=has_conv_bias(file)), kinds)


_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj"),
    "mamba": ("in_proj", "out_proj", "conv1d", "conv1d.bias", "A_log", "dt_bias", "D", "norm"),
}
_NEUTRAL: dict[str, Values] = {
    **dict.fromkeys(
        ("chunk_size", "expand", "hybrid_override_pattern", "layer_types", "layers_block_type", "mamba_ssm_cache_dtype",
         "moe_latent_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
         "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_group",
         "n_routed_experts", "norm_eps", "norm_topk_prob", "num_experts_per_tok", "num_logits_to_keep",
         "rescale_prenorm_residual", "rms_norm_eps", "routed_scaling_factor", "time_step_floor", "time_step_max",
         "time_step_min", "time_step_rank", "topk_group", "use_mamba_kernels")
    ),
    "attention_bias": (False,),
    "mamba_hidden_act": ("silu",),
    "mamba_proj_bias": (False,),
    "n_shared_experts": (1,),
    "residual_in_fp32": (False,),
    "use_bias": (False,),
}  # fmt: skip
_NEMOTRON_H: dict[str, Any] = {
    "qkv_bias": False,
    "o_bias": False,
    "eps": 1e-5,
    "activation": "relu2",
    "turns": False,
    "keys": _keys,
    "layers": _layers,
    "experts": _experts,
    "expert_names": ExpertNames(
        "mixer.gate",
        "mixer.experts",
        shared="mixer.shared_experts",
        correction="mixer.gate.e_score_correction_bias",
        into="mixer.fc1_latent_proj",
        back="mixer.fc2_latent_proj",
    ),
    "layer_names": {
        **{f"{old}.{part}": f"mixer.{part}" for old, parts in _PARTS.items() for part in parts},
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
    },
    "final_norm": "model.norm_f",
    "predicts": "mtp",
    "mtp_names": {
        "fc": "layers.0.eh_proj",
        "pre_fc_norm_embedding": "layers.0.enorm",
        "pre_fc_norm_hidden": "layers.0.hnorm",
        "norm": "layers.1.final_layernorm",
    },
    "neutral": _NEUTRAL,
    "apart": _apart,
}
_IN_GGUF: dict[str, Any] = {
    "names": {
        **IN_GGUF,
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
        "post_attention_norm": "post_attention_layernorm",  # of prediction layers
    },
    "top_names": {"output_norm.weight": "model.norm_f.weight"},
    "fields": _metadata,
    "layers": _in_gguf,
    "permuted": True,
    "turns": False,
}
_METADATA = ExpertMetadata(
    gating=(UNSAID, SIGMOID),
    neutral={"expert_shared_count": (0, 1)},
    sigmoid=True,
    grouped=True,
    shared=True,
    latent=True,
    more={"wide_router": True},
)
_GGUF = InGGUF("nemotron_h", ("nemotron_h_moe",), experts=_METADATA, **_IN_GGUF)
FAMILIES = {"NemotronHForCausalLM": Family("nemotron_h", **_NEMOTRON_H, gguf=_GGUF)}
