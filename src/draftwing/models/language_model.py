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


WHOLES = {
    "Gemma3ForConditionalGeneration": Whole(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 256, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 262208,
        },
    ),
}  # fmt: skip
_OF_BOTH = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a parsed config.json, which mostly is all of it. Raises CheckpointError."""
    fields = Fields(config, "config")
    names = fields.texts("architectures")
    for name, whole in WHOLES.items():
        if name in names or (not names and fields.get("model_type") == whole.model_type):
            own = {key: value for key, value in fields.inner("text_config").items() if value is not None}
            outer = {key: config[key] for key in _OF_BOTH if config.get(key) is not None}
            return {**whole.defaults, **outer, **own, "architectures": [whole.architecture]}
    return config


def own_name(name: str) -> str:
    """The name of a language model's tensor without that of the model around it."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
