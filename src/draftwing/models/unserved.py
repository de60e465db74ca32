"""Architectures and values of config keys that have no code here, to be refused by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Models that people ask for, by what they have that has no code here: the architecture and its model_type.
_PARTS: dict[str, dict[str, str]] = {
    "a mixture of experts of its own": {
        "Dots1ForCausalLM": "dots1", "OlmoeForCausalLM": "olmoe", "SolarOpenForCausalLM": "solar_open",
    },
    "a model for images around a language model": {
        "Glm4vForConditionalGeneration": "glm4v", "Glm4vMoeForConditionalGeneration": "glm4v_moe",
        "InternVLChatModel": "internvl_chat", "InternVLForConditionalGeneration": "internvl",
        "KimiK25ForConditionalGeneration": "kimi_k25", "Kimi_K25ForConditionalGeneration": "kimi_k25",
        "Lfm2VlForConditionalGeneration": "lfm2_vl", "LlavaForConditionalGeneration": "llava",
        "Mistral3ForConditionalGeneration": "mistral3", "MllamaForConditionalGeneration": "mllama",
        "Qwen2VLForConditionalGeneration": "qwen2_vl", "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
        "Qwen3VLForConditionalGeneration": "qwen3_vl", "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
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
        "GPT2LMHeadModel": "gpt2", "GPTBigCodeForCausalLM": "gpt_bigcode", "GPTJForCausalLM": "gptj",
        "BloomForCausalLM": "bloom", "MptForCausalLM": "mpt", "DbrxForCausalLM": "dbrx",
        "NemotronForCausalLM": "nemotron", "GPTNeoXForCausalLM": "gpt_neox", "OPTForCausalLM": "opt",
        "PhiForCausalLM": "phi", "PhiMoEForCausalLM": "phimoe", "PhimoeForCausalLM": "phimoe",
        "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
    },
    "layers of different sizes": {"DeciLMForCausalLM": "nemotron-nas"},
    "layers without rotary embeddings": {"SmolLM3ForCausalLM": "smollm3"},
    "layers without rotary embeddings, and norms after": {"Exaone4ForCausalLM": "exaone4"},
    "lightning attention": {"MiniMaxForCausalLM": "minimax", "MiniMaxM1ForCausalLM": "minimax_m1"},
    "matrices with other names, or several in one": {
        "BailingMoeForCausalLM": "bailing_moe", "BailingMoeV2ForCausalLM": "bailing_moe_v2",
        "BaichuanForCausalLM": "baichuan", "ChatGLMModel": "chatglm", "ExaoneForCausalLM": "exaone",
        "InternLM2ForCausalLM": "internlm2", "Phi3ForCausalLM": "phi3",
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
    "sparse latent attention (DSA)": {"DeepseekV32ForCausalLM": "deepseek_v32", "GlmMoeDsaForCausalLM": "glm_moe_dsa"},
    "sparse latent attention (DSA), delta attention with a decay for each channel (KDA), and hyper-connections": {
        "Glm5NextForConditionalGeneration": "glm5_next",
    },
    "squared or learned activations": {"ApertusForCausalLM": "apertus", "ArceeForCausalLM": "arcee"},
    "state-space layers (Mamba)": {
        "BambaForCausalLM": "bamba", "FalconH1ForCausalLM": "falcon_h1", "FalconMambaForCausalLM": "falcon_mamba",
        "ZambaForCausalLM": "zamba", "GraniteMoeHybridForCausalLM": "granitemoehybrid", "JambaForCausalLM": "jamba",
        "Mamba2ForCausalLM": "mamba2", "MambaForCausalLM": "mamba", "NemotronHForCausalLM": "nemotron_h",
        "Zamba2ForCausalLM": "zamba2",
    },
    "streams beside the residual one (AltUp, LAuReL)": {
        "Gemma3nForConditionalGeneration": "gemma3n", "Gemma3nForCausalLM": "gemma3n_text",
    },
}  # fmt: skip
UNSERVED = {name: (kind, part) for part, names in _PARTS.items() for name, kind in names.items()}
# Ends of architectures that write no text.
_NO_TEXT = {
    "DraftModel": "the layers of a draft head alone", "Speculator": "the layers of a draft head alone",
    "ForMaskedLM": "an encoder", "ForSequenceClassification": "scores in place of text",
    "ForTokenClassification": "scores in place of text", "RewardModel": "scores in place of text",
    "Model": "vectors in place of text",
}  # fmt: skip

# Keys that say that there is another model.
_BESIDE = {
    "is_encoder_decoder": "an encoder", "vision_config": "a model for images around a language model",
    "audio_config": "a model for sound around a language model",
}  # fmt: skip
_EMPTY: Mapping[str, Any] = {}

# `general.architecture` of their GGUF files, where that is not the model_type.
IN_GGUF = {
    "bailingmoe2": "BailingMoeV2ForCausalLM", "bailingmoe3": "BailingHybridForCausalLM", "chatglm": "GlmForCausalLM",
    "command-r": "CohereForCausalLM", "deci": "DeciLMForCausalLM", "deepseek4": "DeepseekV4ForCausalLM",
    "glm-dsa": "GlmMoeDsaForCausalLM", "granitehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM", "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM", "mistral3": "Ministral3ForCausalLM", "nemotron_h_moe": "NemotronHForCausalLM",
    "phi2": "PhiForCausalLM", "step35": "Step3p5ForCausalLM",
}  # fmt: skip


def named_part(architectures: Sequence[str], model_type: object) -> str | None:
    """Returns what a relative that people ask for has and this package has not, None for all other models."""
    for name, (known_type, missing) in UNSERVED.items():
        if name in architectures or (not architectures and known_type == model_type):
            return missing
    return None


def unserved_part(architectures: Sequence[str], model_type: object, config: Mapping[str, Any] = _EMPTY) -> str | None:
    """Returns the same of any model, also where the kind of it alone is known. config: the rest of what it says."""
    named = named_part(architectures, model_type)
    ends = (part for end, part in _NO_TEXT.items() if any(name.endswith(end) for name in architectures))
    said = (part for key, part in _BESIDE.items() if config.get(key) not in (None, False))
    return named or next(ends, None) or next(said, None)


def unserved_in_gguf(architecture: object) -> str | None:
    """Returns the same of a GGUF file's `general.architecture`."""
    if not isinstance(architecture, str):
        return None
    kind = UNSERVED[IN_GGUF[architecture]][0] if architecture in IN_GGUF else architecture
    return next((part for known, part in UNSERVED.values() if _bare(known) == _bare(kind)), None)


def _bare(model_type: str) -> str:
    """Returns it without what libraries write differently."""
    return model_type.replace("-", "").replace("_", "")


def _letters(name: str) -> str:
    """Returns what a family's names begin with, before the first digit."""
    return re.sub(r"For[A-Z]\w*|Model$|[^A-Za-z].*", "", name)


def nearest(name: str, served: Iterable[str]) -> str:
    """Returns which of those that are served have names like this one, and where all of them are listed."""
    letters = _letters(name)
    related = [one for one in served if letters.startswith(_letters(one)) or _letters(one).startswith(letters)]
    close = difflib.get_close_matches(name, related, 3, 0.0) if letters else []
    hint = f"the nearest that are served: {', '.join(close)}; " if close else ""
    return f"{hint}docs/models.md lists all that are"
