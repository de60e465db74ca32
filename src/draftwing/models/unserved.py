"""Architectures and values of config keys that have no code here, to be refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Models that people ask for, by what they have that has no code here: the architecture and its model_type.
_PARTS: dict[str, dict[str, str]] = {
    "a mixture of experts of its own": {
        "Dots1ForCausalLM": "dots1", "OlmoeForCausalLM": "olmoe", "SolarOpenForCausalLM": "solar_open",
    },
    "a model for images around a language model": {
        "Glm4vForConditionalGeneration": "glm4v", "Glm4vMoeForConditionalGeneration": "glm4v_moe",
        "InternVLChatModel": "internvl_chat", "InternVLForConditionalGeneration": "internvl",
        "KimiK25ForConditionalGeneration": "kimi_k25", "Lfm2VlForConditionalGeneration": "lfm2_vl",
        "LlavaForConditionalGeneration": "llava", "Mistral3ForConditionalGeneration": "mistral3",
        "MllamaForConditionalGeneration": "mllama", "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl", "Qwen3VLForConditionalGeneration": "qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    },
    "a model for sound around a language model": {"VoxtralForConditionalGeneration": "voxtral"},
    "an encoder": {
        "BartForConditionalGeneration": "bart", "T5ForConditionalGeneration": "t5",
        "WhisperForConditionalGeneration": "whisper",
    },
    "attention in chunks": {"Llama4ForConditionalGeneration": "llama4", "Llama4ForCausalLM": "llama4_text"},
    "attention of two kinds of heads and a sigmoid router": {"MiMoV2FlashForCausalLM": "mimo_v2_flash"},
    "biases by keys of its own": {"InternLM3ForCausalLM": "internlm3", "SeedOssForCausalLM": "seed_oss"},
    "capped attention scores": {"Gemma2ForCausalLM": "gemma2"},
    "delta attention with a decay for each channel (KDA)": {
        "KimiLinearForCausalLM": "kimi_linear", "KimiK3ForConditionalGeneration": "kimi_k3",
        "BailingHybridForCausalLM": "bailing_hybrid",
    },
    "experts that all tokens share": {"Qwen2MoeForCausalLM": "qwen2_moe"},
    "experts that do nothing": {"LongcatFlashForCausalLM": "longcat_flash"},
    "gates of heads, clamped gates of MLPs and windows with heads of their own": {
        "Step3p5ForCausalLM": "step3p5", "Step3p7FlashForCausalLM": "step3p7_flash",
        "Step3p7ForConditionalGeneration": "step3p7",
    },
    "layer norms with a mean (LayerNorm)": {
        "CohereForCausalLM": "cohere", "Cohere2ForCausalLM": "cohere2", "FalconForCausalLM": "falcon",
        "GPT2LMHeadModel": "gpt2", "GPTNeoXForCausalLM": "gpt_neox", "OPTForCausalLM": "opt", "PhiForCausalLM": "phi",
        "PhiMoEForCausalLM": "phimoe", "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
    },
    "layers of different sizes": {"DeciLMForCausalLM": "nemotron-nas"},
    "layers without rotary embeddings": {"SmolLM3ForCausalLM": "smollm3"},
    "layers without rotary embeddings, and norms after": {"Exaone4ForCausalLM": "exaone4"},
    "lightning attention": {"MiniMaxForCausalLM": "minimax", "MiniMaxM1ForCausalLM": "minimax_m1"},
    "matrices with other names, or several in one": {
        "BailingMoeForCausalLM": "bailing_moe", "BailingMoeV2ForCausalLM": "bailing_moe_v2",
        "ExaoneForCausalLM": "exaone", "InternLM2ForCausalLM": "internlm2", "Phi3ForCausalLM": "phi3",
    },
    "multipliers of embeddings, residuals and logits": {
        "GraniteForCausalLM": "granite", "GraniteMoeForCausalLM": "granitemoe", "MiniCPMForCausalLM": "minicpm",
        "MiniCPM3ForCausalLM": "minicpm3",
    },
    "norms after layers, and of whole queries and keys": {"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"},
    "norms as Gemma has them, none of heads and none after layers": {"GemmaForCausalLM": "gemma"},
    "norms of heads after rotary embeddings": {
        "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense", "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    },
    "queries scaled by their positions": {"Ministral3ForCausalLM": "ministral3"},
    "rotary embeddings that turn neighbours": {
        "Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe", "Glm4ForCausalLM": "glm4",
        "GlmForCausalLM": "glm",
    },
    "short convolutions beside experts": {"Lfm2MoeForCausalLM": "lfm2_moe"},
    "sparse attention (QSA), and embeddings of n-grams": {
        "Qwen4ExpForConditionalGeneration": "qwen4_exp", "Qwen4ExpForCausalLM": "qwen4_exp_text",
    },
    "sparse attention over compressed keys, and hyper-connections": {"DeepseekV4ForCausalLM": "deepseek_v4"},
    "sparse attention": {
        "MiniMaxM3ForCausalLM": "minimax_m3", "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
        "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
    },
    "sparse attention, and hyper-connections": {"HYV4VLForConditionalGeneration": "hy_v4_vl"},
    "sparse latent attention (DSA)": {
        "DeepseekV32ForCausalLM": "deepseek_v32", "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    },
    "sparse latent attention (DSA), delta attention with a decay for each channel (KDA), and hyper-connections": {
        "Glm5NextForConditionalGeneration": "glm5_next",
    },
    "squared or learned activations": {"ApertusForCausalLM": "apertus", "ArceeForCausalLM": "arcee"},
    "state-space layers (Mamba)": {
        "BambaForCausalLM": "bamba", "FalconH1ForCausalLM": "falcon_h1", "FalconMambaForCausalLM": "falcon_mamba",
        "GraniteMoeHybridForCausalLM": "granitemoehybrid", "JambaForCausalLM": "jamba", "Mamba2ForCausalLM": "mamba2",
        "MambaForCausalLM": "mamba", "NemotronHForCausalLM": "nemotron_h", "Zamba2ForCausalLM": "zamba2",
    },
    "streams beside the residual one (AltUp, LAuReL)": {"Gemma3nForConditionalGeneration": "gemma3n"},
}  # fmt: skip
UNSERVED = {name: (kind, part) for part, names in _PARTS.items() for name, kind in names.items()}
# Ends of architectures that write no text.
_NO_TEXT = {
    "ForMaskedLM": "an encoder", "ForSequenceClassification": "scores in place of text",
    "ForTokenClassification": "scores in place of text", "RewardModel": "scores in place of text",
    "Model": "vectors in place of text",
}  # fmt: skip

# `general.architecture` of their GGUF files, where that is not the model_type.
IN_GGUF = {
    "bailingmoe2": "BailingMoeV2ForCausalLM", "bailingmoe3": "BailingHybridForCausalLM", "chatglm": "GlmForCausalLM",
    "command-r": "CohereForCausalLM", "deci": "DeciLMForCausalLM", "deepseek4": "DeepseekV4ForCausalLM",
    "glm-dsa": "GlmMoeDsaForCausalLM", "granitehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM", "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM", "mistral3": "Ministral3ForCausalLM", "nemotron_h_moe": "NemotronHForCausalLM",
    "phi2": "PhiForCausalLM", "step35": "Step3p5ForCausalLM",
}  # fmt: skip


def unserved_part(architectures: Sequence[str], model_type: object) -> str | None:
    """Returns what a relative that people ask for has and this package has not, None for all other models."""
    for name, (known_type, missing) in UNSERVED.items():
        if name in architectures or (not architectures and known_type == model_type):
            return missing
    ends = (part for end, part in _NO_TEXT.items() if any(name.endswith(end) for name in architectures))
    return next(ends, None)


def unserved_in_gguf(architecture: object) -> str | None:
    """Returns the same of a GGUF file's `general.architecture`."""
    if not isinstance(architecture, str):
        return None
    kind = UNSERVED[IN_GGUF[architecture]][0] if architecture in IN_GGUF else architecture
    return next((part for known, part in UNSERVED.values() if _bare(known) == _bare(kind)), None)


def _bare(model_type: str) -> str:
    """Returns it without what libraries write differently."""
    return model_type.replace("-", "").replace("_", "")


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
