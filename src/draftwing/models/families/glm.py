"""GLM-4, GLM-4.5 with its like, and GLM-4.7-Flash, which has the layers of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.deepseek import IN_GGUF, LATENT, NAMES, dense_layers, experts
from draftwing.models.family import Family, InGGUF, Whole

_DENSE: dict[str, Any] = {
    "bias": True, "o_bias": False, "head_dim": 128, "eps": 1.5625e-7, "turns_parts": True, "rotary": 0.5,
    "rope_interleaved": True, "fused_mlp": True,
}  # fmt: skip
_OF_VISION = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
FAMILIES = {
    "GlmForCausalLM": Family("glm", **_DENSE),
    "Glm4ForCausalLM": Family(
        "glm4",
        **_DENSE,
        out_norms=True,
        layer_names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        wholes={"Glm4vForConditionalGeneration": Whole("glm4v", _OF_VISION)},
        gguf=InGGUF("glm4", names={"ffn_up": "mlp.gate_up_proj"}),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        o_bias=False,
        qk_norm="key",
        eps=1e-5,
        turns_parts=True,
        rotary=0.5,
        experts=experts,
        dense_layers=dense_layers,
        neutral={"first_k_dense_replace": None},
        expert_names=NAMES,
        predicts="numbered",
        wholes={"Glm4vMoeForConditionalGeneration": Whole("glm4v_moe", _OF_VISION)},
        gguf=InGGUF("glm4moe", names={"post_attention_norm": "post_attention_layernorm"}, experts=IN_GGUF),
    ),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", eps=1e-5, **LATENT, predicts="numbered"),  # GGUF: as V3
}
