"""Llama, and what is like it: Mistral, Ministral 3, Mixtral with its experts, CWM with windows, Helium, and the text of
Llama 3.2 Vision, some of whose layers read images alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.layers.config import LayerConfig, NoMixer
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.tiles_images import split_tower
from draftwing.models.family import ExpertMetadata, ExpertNames, Family, InGGUF, Whole, softmax_experts
from draftwing.models.fields import LARGEST, MAX_LAYERS, Fields, Values
from draftwing.models.positions import FULL, SLIDING


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return softmax_experts(fields, layers, "num_local_experts", "intermediate_size")


def _cwm_keys(fields: Fields) -> dict[str, Any]:
    """Says what a config of CWM leaves out: of four layers the first has no window."""
    said: dict[str, Any] = {"rms_norm_eps": fields.number("rms_norm_eps", 0, 1, 1e-5)}
    if not fields.texts("layer_types"):
        count = fields.whole("num_hidden_layers", high=MAX_LAYERS)
        said["layer_types"] = [SLIDING if i % 4 else FULL for i in range(count)]
    return said if fields.get("rope_parameters") or fields.get("rope_scaling") else said | {"rope_scaling": _CWM_ROPE}


_CROSS = "cross_attention_layers"


def _mllama_keys(fields: Fields) -> dict[str, Any]:
    """Says that tokens of images have rows in the table of embeddings, and none in the head."""
    fields.check("tie_word_embeddings", (False,))
    count = fields.whole("vocab_size", high=LARGEST - _OF_IMAGES)
    return {"vocab_size": count + _OF_IMAGES, "output_vocab_size": count}


def _with_images_alone(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that read images do nothing, as without images."""
    named = fields.get(_CROSS)
    named = [*range(3, 40, 5)] if named is None else named
    if not isinstance(named, list) or not all(type(one) is int and one >= 0 for one in named):
        raise fields.unlike(_CROSS, "a list of numbers of layers")
    if {*range(count)} <= {*named}:
        raise CheckpointError(f"{fields.where}: expected a layer that does not read images, found none")
    nothing = replace(layer, mixer=NoMixer(), ffn=0)
    return tuple(nothing if i in named else layer for i in range(count))


_OF_IMAGES = 8
_CWM_ROPE = {
    "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_NEUTRAL: dict[str, Values] = {"qkv_bias": (False,)}
# What SmolVLM's files say of a connector that earlier models of their kind had.
_OF_SMOLVLM: dict[str, Values] = {
    "perceiver_config": None, "pixel_shuffle_factor": None, "qk_layer_norms": (False,), "use_resampler": (False,),
}  # fmt: skip
_LLAMA2 = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama",
        neutral=_NEUTRAL | _OF_SMOLVLM,
        wholes={
            "SmolVLMForConditionalGeneration": Whole("smolvlm", {"rms_norm_eps": 1e-5}, "llama", tower=split_tower),
            "Idefics3ForConditionalGeneration": Whole("idefics3", {"rms_norm_eps": 1e-5}, "llama", tower=split_tower),
            "LlavaForConditionalGeneration": Whole("llava", _LLAMA2, "llama"),
            "LlavaNextForConditionalGeneration": Whole("llava_next", _LLAMA2, "llama"),
            "VoxtralForConditionalGeneration": Whole("voxtral", {}, "llama"),
        },
        gguf=InGGUF("llama", permuted=True),
    ),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        o_bias=False,
        sliding_window=4096,
        neutral=_NEUTRAL,
        wholes={
            "Mistral3ForConditionalGeneration": Whole("mistral3", {}, "mistral"),
            "LlavaForConditionalGeneration": Whole("llava", _MISTRAL, "mistral"),
            "LlavaNextForConditionalGeneration": Whole("llava_next", _MISTRAL, "mistral"),
        },
    ),
    # As transformers saves the same, where layers may have windows by turns.
    "MinistralForCausalLM": Family("ministral", qkv_bias=False, o_bias=False, sliding_window=4096, neutral=_NEUTRAL),
    "CwmForCausalLM": Family(
        "cwm", qkv_bias=False, o_bias=False, head_dim=128, theta=1e6, sliding_window=8192, keys=_cwm_keys
    ),
    "HeliumForCausalLM": Family(
        "helium", o_bias=False, head_dim=128, theta=1e5, eps=1e-8, wide_norms=True, rope_interleaved=True
    ),
    "MllamaForCausalLM": Family(
        "mllama_text_model",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        eps=1e-5,
        theta=5e5,
        keys=_mllama_keys,
        layers=_with_images_alone,
        wholes={"MllamaForConditionalGeneration": Whole("mllama", {})},
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        qkv_bias=False,
        o_bias=False,
        head_dim=128,
        eps=1e-5,
        sliding_window=0,
        query_scale="whole",
        scaled=True,
        neutral=_NEUTRAL,
        wholes={"Mistral3ForConditionalGeneration": Whole("mistral3", {}, "ministral3")},
        gguf=InGGUF("mistral3", permuted=True, yarn_log="rope.scaling.yarn_log_multiplier"),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        o_bias=False,
        sliding_window=0,
        theta=1e6,
        eps=1e-5,
        experts=_experts,
        neutral=_NEUTRAL,
        expert_names=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        gguf=InGGUF(
            "llama",
            when=lambda file, fields: fields.whole("expert_count", 0, default=0) > 0,
            experts=ExpertMetadata(as_mlp=True),
            theta=10000.0,
            permuted=True,
        ),
    ),
}
