"""Checkpoints of models for texts and images, of which the language model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftwing.models.fields import Fields


class Whole(NamedTuple):
    """A model around a language model: its `model_type`, the architecture within, and what files leave out of that."""

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]


_GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
}  # fmt: skip
WHOLES = {
    "Gemma3ForConditionalGeneration": Whole(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 256, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 262208,
        },
    ),
    "Qwen3_5ForConditionalGeneration": Whole(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": Whole(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        {
            "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "max_position_embeddings": 32768,
        },
    ),
    "Gemma4ForConditionalGeneration": Whole("gemma4", "Gemma4ForCausalLM", _GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": Whole(
        "gemma4_unified",
        "Gemma4ForCausalLM",
        _GEMMA4 | {"max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
    ),
}  # fmt: skip
_OF_BOTH = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
# Of the tensors that Qwen's and Gemma 4's models read images and sound with.
OTHER_SENSES = (
    "model.visual.", "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
    "model.vision_embedder.",
)  # fmt: skip
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the language model in a parsed config.json, which mostly is all of it. Raises
    CheckpointError."""
    fields = Fields(config, "config")
    names = fields.texts("architectures")
    for name, whole in WHOLES.items():
        if name in names or (not names and fields.get("model_type") == whole.model_type):
            own = {key: value for key, value in fields.inner("text_config").items() if value is not None}
            outer = {key: config[key] for key in _OF_BOTH if config.get(key) is not None}
            return {**whole.defaults, **own, **outer, "architectures": [whole.architecture]}
    return config


def own_name(name: str) -> str:
    """Returns the name of a language model's tensor without that of the model around it."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
