"""Qwen2 and Qwen3, and the experts of both and of those after them; and Mellum 2, such experts with windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.qwen_images import tower
from draftwing.models.family import ExpertMetadata, Family, InGGUF, Whole, dense_by_kinds, softmax_experts
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, Values
from draftwing.models.positions import FULL, SLIDING


def experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns experts as Qwen3's configs speak of them."""
    renormalise = fields.flag("norm_topk_prob")
    return softmax_experts(fields, layers, "num_experts", "moe_intermediate_size", renormalise)


def shared_experts(fields: Fields, layers: int, renormalised: bool = True) -> ExpertConfig:
    """Returns the same with one more for all rows, which has a gate. renormalised: where the config does not say."""
    renormalise = fields.flag("norm_topk_prob", renormalised)
    found = softmax_experts(fields, layers, "num_experts", "moe_intermediate_size", renormalise)
    return replace(found, shared=fields.whole("shared_expert_intermediate_size", high=WIDEST), shared_gate=True)


def dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Returns layers with an MLP in place of experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    step, named = fields.whole("decoder_sparse_step", default=1), fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise fields.unlike("mlp_only_layers", "a list of layer numbers")
    return frozenset(i for i in range(layers) if i in named or (i + 1) % step)


def _windowed_keys(fields: Fields) -> dict[str, Any]:
    """Says what a config of Mellum 2 leaves out: no layer has a window, and weights of experts add up to 1."""
    count = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    said: dict[str, Any] = {"norm_topk_prob": fields.flag("norm_topk_prob", True)}
    if not fields.get("rope_parameters"):
        said["rope_parameters"] = {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}
    return said if fields.texts("layer_types") else {**said, "layer_types": [FULL] * count}


def _keys(fields: Fields) -> dict[str, Any]:
    """Libraries differ in which layers of Qwen2's experts have a window, and no published model has one."""
    fields.check("use_sliding_window", (False,))
    return {}


NEUTRAL: dict[str, Values] = {"use_qk_norm": (True,), "qk_norm": (True,), "qkv_bias": (False,)}  # of Qwen3
_OF_QWEN2 = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_SEES: dict[str, Any] = {
    "tower": partial(tower, token=151655, taps=True), "sections": (24, 20, 20),
    "only": {"use_sliding_window": (False,)},
}  # fmt: skip
FAMILIES = {
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        o_bias=False,
        sliding_window=4096,
        window_switch="upper",
        neutral={"qkv_bias": (True,)},
        wholes={
            "Qwen2VLForConditionalGeneration": Whole("qwen2_vl", _OF_QWEN2),
            "Qwen2_5_VLForConditionalGeneration": Whole("qwen2_5_vl", _OF_QWEN2),
            "LlavaNextForConditionalGeneration": Whole("llava_next", {}, "qwen2"),
            "LlavaOnevisionForConditionalGeneration": Whole("llava_onevision", {}),
            "InternVLForConditionalGeneration": Whole("internvl", {"tie_word_embeddings": True}, "qwen2"),
            "InternVLChatModel": Whole("internvl_chat", {}, "qwen2"),
        },
        gguf=InGGUF("qwen2", ("qwen2vl",)),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qk_norm=True,
        head_dim=128,
        sliding_window=4096,
        window_switch="upper",
        neutral=NEUTRAL,
        wholes={
            "Qwen3VLForConditionalGeneration": Whole("qwen3_vl", {"rope_theta": 5e5}, **_SEES),
            "InternVLForConditionalGeneration": Whole("internvl", {"tie_word_embeddings": True}, "qwen3"),
            "InternVLChatModel": Whole("internvl_chat", {}, "qwen3"),
            "InternS1ForConditionalGeneration": Whole("interns1", {}, "qwen3"),
        },
        gguf=InGGUF("qwen3", ("qwen3vl",)),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        o_bias=False,
        bias=True,
        sliding_window=0,
        window_switch="all",
        keys=_keys,
        experts=partial(shared_experts, renormalised=False),
        dense_layers=dense_layers,
        gguf=InGGUF(
            "qwen2moe",
            names={"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            experts=ExpertMetadata(grouped=True, renormalised=False, shared=True, more={"shared_gate": True}),
        ),
    ),
    "MellumForCausalLM": Family(
        "mellum",
        qk_norm=True,
        head_dim=128,
        sliding_window=1024,
        window_pattern=4,
        pattern_key=False,
        theta=5e5,
        local_theta=1e4,
        keys=_windowed_keys,
        experts=experts,
        dense_layers=lambda fields, layers: dense_by_kinds(fields, layers) or (),
        predicts="mtp",
        predicts_kind=SLIDING,
        gguf=InGGUF("mellum", experts=ExpertMetadata()),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qk_norm=True,
        sliding_window=4096,
        window_switch="all",
        experts=experts,
        dense_layers=dense_layers,
        neutral=NEUTRAL,
        wholes={
            "Qwen3VLMoeForConditionalGeneration": Whole(
                "qwen3_vl_moe", {"norm_topk_prob": True, "rope_theta": 5e5}, **_SEES
            ),
            "InternVLForConditionalGeneration": Whole("internvl", {"tie_word_embeddings": True}, "qwen3_moe"),
            "InternVLChatModel": Whole("internvl_chat", {}, "qwen3_moe"),
            "InternS1ForConditionalGeneration": Whole("interns1", {}, "qwen3_moe"),
        },
        gguf=InGGUF("qwen3moe", ("qwen3vlmoe",), experts=ExpertMetadata()),
    ),
}
