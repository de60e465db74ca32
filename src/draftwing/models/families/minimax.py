"""MiniMax-M2: norms of whole queries and keys, and experts chosen by sigmoids. MiniMax-Text-01 and M1: lightning
attention in most layers, experts by a softmax, and layers that add to what they read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.lightning import LightningConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.family import (
    ATTENTION,
    RECURRENT,
    SIGMOID,
    UNSAID,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
    layers_by_kind,
    softmax_experts,
)
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.ops.experts.routing import Routing

_HEAD_DIM = 128  # where a config has none
# What relatives say otherwise, with the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    fields.check("scoring_func", ("sigmoid",))
    fields.check("topk_method", ("noaux_tc",))
    count = fields.whole("num_local_experts", high=max_experts(layers))
    routing = Routing(fields.whole("num_experts_per_tok", high=count), sigmoid=True)
    return ExpertConfig(count, routing, fields.whole("intermediate_size", high=WIDEST), wide_router=True)


def _keys(fields: Fields) -> dict[str, Any]:
    for key, known in _SERVED.items():
        fields.check(key, known)
    kinds = fields.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == 1 for kind in kinds)):
        raise fields.unsupported("attn_type_list", kinds)
    return _turned(fields)


def _turned(fields: Fields) -> dict[str, Any]:
    """Returns the share of a head that is turned, of which configs say the size."""
    if fields.get("rotary_dim") is None:
        return {}
    head_dim = fields.whole("head_dim", high=WIDEST, default=_HEAD_DIM)
    key, share = "partial_rotary_factor", fields.whole("rotary_dim", high=head_dim) / head_dim
    if fields.get(key) not in (None, share):
        raise fields.unlike(key, f"{share:g}, which rotary_dim says, or none")
    return {key: share}


# ---- MiniMax-Text-01 and MiniMax-M1 ----------------------------------------------------------------------------------

_KINDS = RECURRENT, ATTENTION  # by their number in `attn_type_list`
_FACTORS = "alpha", "beta"  # of what a layer reads, and of what it adds to that
_PARTS = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
# Keys of transformers' own files, and of published ones.
_NAMES = {f"{own}_{name}_factor": f"layernorm_{part}_{name}" for own, part in _PARTS.items() for name in _FACTORS}
_MADE = "slope_rate", "query_decay", "key_decay", "diagonal_decay"  # of sizes, which transformers stores


def _scaled_keys(fields: Fields) -> dict[str, Any]:
    """Says how much is added where the stream is divided by its own factor, which norms undo."""
    for key, served in {"postnorm": (True,), "shared_intermediate_size": (0,)}.items():
        fields.check(key, served)
    said = fields.overruled(fields.renamed(_NAMES))
    (alpha, *alphas), (beta, *betas) = (
        {said.number(f"{part}_{name}_factor", 1e-2, 1e2, 1.0): None for part in _PARTS} for name in _FACTORS
    )
    if alphas or betas:
        raise fields.unlike("mlp_alpha_factor", "one alpha and one beta for all layers and MLPs")
    kinds = fields.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in (0, 1) for kind in kinds)):
        raise fields.unsupported("attn_type_list", kinds)
    return {
        **_turned(fields), **({} if kinds is None else {"layer_types": [_KINDS[kind] for kind in kinds]}),
        "embedding_multiplier": 1 / alpha, "residual_multiplier": beta / alpha,
        "rms_norm_eps": fields.number("rms_norm_eps", 0, 1, 1e-5) / alpha**2,
    }  # fmt: skip


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    attention, made = replace(layer, normed_residual=True), []
    assert isinstance(layer.mixer, AttentionConfig)
    heads, size = layer.mixer.heads, layer.mixer.head_dim
    nothing = LightningConfig((1.0,) * heads, size)
    mixers = {ATTENTION: layer.mixer, RECURRENT: nothing}
    for i, one in enumerate(layers_by_kind(fields, attention, [*islice(cycle(_KINDS[::-1]), count)], mixers)):
        share = 1 - i / (count - 1 + 1e-5) + 1e-5
        slopes = tuple(share * 2 ** (-8 * (head + 1) / heads) for head in range(heads))
        made.append(replace(one, mixer=LightningConfig(slopes, size)) if one.mixer == nothing else one)
    return tuple(made)


_LIGHTNING: dict[str, Any] = {
    "qkv_bias": False,
    "o_bias": False,
    "eps": 1e-5,
    "theta": 1e6,
    "turns_parts": True,
    "multipliers": True,
    "keys": _scaled_keys,
    "layers": _layers,
    "experts": partial(softmax_experts, count_key="num_local_experts", ffn_key="intermediate_size"),
    "expert_names": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "apart": lambda name, value: () if name.endswith(_MADE) else ((name, value),),
    "neutral": {"block_size": None, "shared_moe_mode": None, "sliding_window": (None,)},
}
FAMILIES = {
    "MiniMaxForCausalLM": Family("minimax", **_LIGHTNING),
    "MiniMaxText01ForCausalLM": Family("minimax_text_01", **_LIGHTNING),
    "MiniMaxM1ForCausalLM": Family("minimax_m1", **_LIGHTNING),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        qkv_bias=False,
        o_bias=False,
        qk_norm="whole",
        head_dim=_HEAD_DIM,
        theta=5e6,
        turns_parts=True,
        experts=_experts,
        keys=_keys,
        neutral={"mlp_intermediate_size": None, "shared_moe_mode": None},
        expert_names=ExpertNames(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
            "w1",
            "w3",
            "w2",
            correction="block_sparse_moe.e_score_correction_bias",
        ),
        gguf=InGGUF(
            "minimax-m2",
            experts=ExpertMetadata(
                gating=(UNSAID, SIGMOID), neutral={}, sigmoid=True, shared=True, more={"wide_router": True}
            ),
        ),
    ),
}
