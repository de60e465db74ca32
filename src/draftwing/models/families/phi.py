"""Phi-3 and Phi-4: Llama with fewer, larger matrices, and two rotary embeddings, for short and for long contexts.
Phi-3.5-MoE: the same embeddings, LayerNorm, and experts by SparseMixer. Phi-1 to Phi-2: LayerNorm, biases everywhere,
and an MLP without a gate beside attention."""

from __future__ import annotations

from typing import Any

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.family import ExpertMetadata, ExpertNames, Family, InGGUF
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.models.positions import rope_fields
from draftwing.ops.experts.routing import Routing

_MSCALE, _JITTER = 1.243163121016122, 0.01  # of Phi-3.5-MoE
_TRAINED = 4096  # positions, where a config does not say


def _keys(fields: Fields) -> dict[str, Any]:
    scaling, key = rope_fields(fields), "original_max_position_embeddings"
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise scaling.unsupported("rope_type", kind)
    found = (fields.get(key), scaling.get(key), _TRAINED)
    return {key: next(one for one in found if one is not None)}


def _moe_keys(fields: Fields) -> dict[str, Any]:
    """Reads the factor of cosines and sines, one for short and long texts, under the name that it has elsewhere."""
    scaling = rope_fields(fields)
    if scaling.text("rope_type", scaling.text("type", "default")) == "default":
        return {}
    factor = scaling.number("long_mscale", 0, 1e3)
    scaling.check("short_mscale", (factor,))
    own = {key: value for key, value in scaling.items() if key not in ("long_mscale", "short_mscale")}
    return {scaling.inside.rstrip("."): {**own, "attention_factor": factor}}


def _sparse_experts(fields: Fields, layers: int) -> ExpertConfig:
    count = fields.whole("num_local_experts", high=max_experts(layers), default=16)
    fields.check("num_experts_per_tok", (2,))
    routing = Routing(2, near=2 * fields.number("router_jitter_noise", 1e-6, 1, _JITTER))
    return ExpertConfig(count, routing, fields.whole("intermediate_size", high=WIDEST, default=6400))


def _moe_metadata(fields: Fields) -> Fields:
    """Files name the norms' other kind, and have the factor of cosines and sines that Phi-3 would have."""
    eps, factor = (fields.get(key) for key in ("attention.layer_norm_rms_epsilon", "rope.scaling.attn_factor"))
    longrope = {} if factor is None else {"rope.scaling.attn_factor": _MSCALE}
    return fields.overruled({"attention.layer_norm_epsilon": eps, **longrope})


_OLDER = {  # what Llama calls otherwise
    "self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
}  # fmt: skip
_MOE: dict[str, Any] = {
    "head_bias": "lm_head_bias", "eps": 1e-5, "theta": 1e6, "centred": True, "norm_bias": True, "sliding_window": 0,
    "keys": _moe_keys,
    "experts": _sparse_experts, "neutral": {"input_jitter_noise": None, "original_max_position_embeddings": None},
    "expert_names": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "gguf": InGGUF(
        "phimoe", experts=ExpertMetadata(as_mlp=True, near=2 * _JITTER), fields=_moe_metadata, longrope=True
    ),
}  # fmt: skip
FAMILIES = {
    **{name: Family("phimoe", **_MOE) for name in ("PhiMoEForCausalLM", "PhimoeForCausalLM")},
    "PhiForCausalLM": Family(
        "phi",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        eps=1e-5,
        eps_key="layer_norm_eps",
        centred=True,
        norm_bias=True,
        parallel=True,
        activation="ungated_gelu",
        sliding_window=None,
        turns_parts=True,
        rotary=0.5,
        neutral={"qk_layernorm": (False,)},
        layer_names=_OLDER,
        final_norm="model.final_layernorm",
        gguf=InGGUF(
            "phi2",
            top_names={f"output_norm.{part}": f"model.final_layernorm.{part}" for part in ("weight", "bias")},
        ),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        o_bias=False,
        eps=1e-5,
        sliding_window=0,
        turns_parts=True,
        fused_qkv=True,
        fused_mlp=True,
        keys=_keys,
        neutral={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
        gguf=InGGUF("phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, longrope=True),
    ),
}
