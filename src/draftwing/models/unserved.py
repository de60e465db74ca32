"""Architectures and values of config keys that have no code here, to be refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Relatives that people ask for: model_type, and what they have that has no code here.
UNSERVED = {
    "DeepseekV32ForCausalLM": ("deepseek_v32", "sparse latent attention (DSA)"),
    "KimiK25ForConditionalGeneration": ("kimi_k25", "a model for images around DeepSeek-V3's"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "sparse attention over compressed keys, and hyper-connections"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "sparse latent attention (DSA)"),
    "Glm5NextForConditionalGeneration": (
        "glm5_next",
        "sparse latent attention (DSA), delta attention with a decay for each channel (KDA), and hyper-connections",
    ),
    "HYV4VLForConditionalGeneration": ("hy_v4_vl", "sparse attention, and hyper-connections"),
    "KimiLinearForCausalLM": ("kimi_linear", "delta attention with a decay for each channel (KDA)"),
    "BailingHybridForCausalLM": ("bailing_hybrid", "delta attention with a decay for each channel (KDA)"),
    "MiniMaxForCausalLM": ("minimax", "lightning attention"),
    "MiniMaxM3VLForCausalLM": ("minimax_m3_vl_text", "sparse attention"),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl", "sparse attention"),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp", "sparse attention (QSA), and embeddings of n-grams"),
    "Qwen4ExpForCausalLM": ("qwen4_exp_text", "sparse attention (QSA), and embeddings of n-grams"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "experts that all tokens share"),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", "attention of two kinds of heads and a sigmoid router"),
    "Llama4ForConditionalGeneration": ("llama4", "attention in chunks"),
    "Llama4ForCausalLM": ("llama4_text", "attention in chunks"),
    "NemotronHForCausalLM": ("nemotron_h", "state-space layers (Mamba)"),
}

# `general.architecture` of their GGUF files.
IN_GGUF = {
    "bailingmoe3": "BailingHybridForCausalLM", "deepseek4": "DeepseekV4ForCausalLM", "glm-dsa": "GlmMoeDsaForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration", "kimi-linear": "KimiLinearForCausalLM",
    "llama4": "Llama4ForCausalLM", "mimo2": "MiMoV2FlashForCausalLM", "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM", "qwen4exp": "Qwen4ExpForCausalLM",
}  # fmt: skip


def unserved_part(architectures: Sequence[str], model_type: object) -> str | None:
    """Returns what a relative that people ask for has and this package has not, None for all other models."""
    for name, (known_type, missing) in UNSERVED.items():
        if name in architectures or (not architectures and known_type == model_type):
            return missing
    return None


def unserved_in_gguf(architecture: object) -> str | None:
    """Returns the same of a GGUF file's `general.architecture`."""
    name = IN_GGUF.get(architecture) if isinstance(architecture, str) else None
    return None if name is None else UNSERVED[name][1]


# Keys that change the arithmetic, with the values (besides null) at which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "attention_sinks": (False,),
    "attn_logit_softcapping": (0,),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "compression_config": (),
    "conv_bias": (False,),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "q_lora_rank": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
