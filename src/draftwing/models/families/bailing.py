"""Ling 2.0 and Sarvam: the experts of DeepSeek-V3, and attention with norms of heads, under names of their own."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.deepseek import IN_GGUF, dense_layers, experts
from draftwing.models.family import ExpertNames, Family, InGGUF, renamed
from draftwing.models.fields import WIDEST, Fields

# What is called otherwise in other configs.
_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("score_function", ("sigmoid",))
    said = fields.renamed(_NAMES)
    usual = {"use_qk_norm": True, "routed_scaling_factor": 2.5}
    found = said | {key: value for key, value in usual.items() if not fields.has(key)}
    check_shared(fields.overruled(found))
    return found


def check_shared(fields: Fields) -> None:
    """Raises CheckpointError for experts of all rows that are not as wide as their number says."""
    width = fields.whole("n_shared_experts", 0, 1 << 10, 1) * fields.whole("moe_intermediate_size", high=WIDEST)
    fields.check("moe_shared_expert_intermediate_size", (width,))


word_embeddings = renamed({"model.word_embeddings.": "model.embed_tokens."})
_BAILING: dict[str, Any] = {
    "o_bias": False, "qk_norm": "key", "turns_parts": True, "fused_qkv": True, "keys": _keys, "experts": experts,
    "dense_layers": dense_layers, "apart": word_embeddings,
    "neutral": {
        "first_k_dense_replace": None, "use_bias": (False,), "use_rmsnorm": (True,), "norm_head": (False,),
        "router_dtype": ("fp32", "float32"), "moe_router_enable_expert_bias": (True,), "output_dropout": None,
    },
    "expert_names": ExpertNames(shared="mlp.shared_experts", correction="mlp.gate.expert_bias"),
    "layer_names": {
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
    },
}  # fmt: skip
FAMILIES = {
    "BailingMoeV2ForCausalLM": Family(
        "bailing_moe_v2",
        **_BAILING,
        predicts="numbered",
        gguf=InGGUF("bailingmoe2", names={"attn_qkv": "self_attn.qkv_proj"}, experts=IN_GGUF),
    ),
    "SarvamMoEForCausalLM": Family("sarvam_moe", **_BAILING, parted=True, head_dim=64, theta=8e6),
}
