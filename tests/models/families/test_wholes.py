"""The language model in models for texts and images, against transformers' own on text alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hybrid_models import whole_logits
from published import written
from safetensors.torch import load_file, save_file

from draftwing.errors import CheckpointError
from draftwing.models.families import language_model
from draftwing.models.loader import load_model

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
SIGHT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
QWEN_SIGHT = {**SIGHT, "fullatt_block_indexes": [0]}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2,
}  # fmt: skip
PARTIAL = MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SIGMOIDS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
INTERN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {"model_type": "siglip2_vision_model", **INTERN}
CLIP = {"model_type": "clip_vision_model", **INTERN}
COHERE2 = {"model_type": "cohere2", "sliding_window": 20, "num_hidden_layers": 4, "logit_scale": 0.5}
DELTA = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# As published: of a connector that earlier models of the kind had.
OF_SMOLVLM: dict[str, Any] = {
    "perceiver_config": {"model_type": "vllama3", "qk_layer_norms_perceiver": False, "resampler_depth": 6},
    "pixel_shuffle_factor": 4, "qk_layer_norms": False, "use_resampler": False, "is_llama_config": True,
}  # fmt: skip
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "ministral3": ("Mistral3", {"model_type": "ministral3", "rope_parameters": YARN}, PIXTRAL),
    "qwen3-vl": ("Qwen3VL", {"rope_parameters": MROPE}, {**SIGHT, "deepstack_visual_indexes": [0]}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, QWEN_SIGHT),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"rope_parameters": MROPE, **EXPERTS}, {**SIGHT, "deepstack_visual_indexes": [0]}),
    "qwen3-vl-moe-rows": ("Qwen3VLMoe", EXPERTS, {**SIGHT, "deepstack_visual_indexes": [0]}),
    "internvl-qwen3": ("InternVL", {"model_type": "qwen3"}, INTERN),
    "internvl-qwen2": ("InternVL", {"model_type": "qwen2"}, INTERN),
    "glm4v": ("Glm4v", {"rope_parameters": PARTIAL}, SIGHT | {"image_size": 28}),
    "glm4v-moe": ("Glm4vMoe", {"rope_parameters": PARTIAL, **SIGMOIDS}, SIGHT | {"image_size": 28}),
    "lfm2-vl": ("Lfm2Vl", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, SIGLIP),
    "llava": ("Llava", {"model_type": "llama"}, CLIP),
    "pixtral": ("Llava", {"model_type": "mistral", "sliding_window": 20}, PIXTRAL),
    "pixtral-without-windows": ("Llava", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    **{
        f"llava-next-{kind}": ("LlavaNext", {"model_type": kind, **more}, CLIP)
        for kind, more in {
            "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {},
            "granite": {"attention_multiplier": 0.25, "logits_scaling": 4.0, "residual_multiplier": 0.5},
        }.items()
    },
    "llava-onevision": ("LlavaOnevision", {"model_type": "qwen2"}, {**SIGLIP, "model_type": "siglip_vision_model"}),
    "smolvlm": ("SmolVLM", {"model_type": "llama", **OF_SMOLVLM}, {**INTERN, "image_size": 32, "patch_size": 8}),
    "idefics3": ("Idefics3", {"model_type": "llama", **OF_SMOLVLM}, {**INTERN, "image_size": 32, "patch_size": 8}),
    "aya-vision": ("AyaVision", COHERE2, {**SIGLIP, "model_type": "siglip_vision_model"}),
    "aya-vision-cohere": (
        "AyaVision", {"model_type": "cohere", "logit_scale": 0.5}, {**SIGLIP, "model_type": "siglip_vision_model"}
    ),
    "command-a-vision": ("Cohere2Vision", COHERE2, {**SIGLIP, "model_type": "siglip_vision_model"}),
    "exaone-4.5": ("Exaone4_5_", {"model_type": "exaone4", "sliding_window": 20}, QWEN_SIGHT),
    "minicpm-v-4.6": ("MiniCPMV4_6", DELTA, {**INTERN, "image_size": 56, "patch_size": 14}),
    "minicpm-v-4.7": ("MiniCPMV4_7", DELTA, {**INTERN, "image_size": 56, "patch_size": 14}),
    "lfm3-vl": ("Lfm3Vl", {"model_type": "lfm3", "layer_types": ["conv", "full_attention"]}, INTERN),
    "hyperclovax-vision": ("HyperCLOVAXVisionV2", {"model_type": "hyperclovax"}, QWEN_SIGHT),
    "voxtral": ("Voxtral", {"model_type": "llama"}, {**INTERN, "num_mel_bins": 16, "max_source_positions": 32}),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": MROPE}, SIGHT | {"embed_dim": 32, "hidden_size": 64}),
}  # fmt: skip

# The factor of logits, which transformers has in the language model alone, and not in the whole.
LEFT_OUT = {"aya-vision": 0.5, "aya-vision-cohere": 0.5, "command-a-vision": 0.5, "llava-next-granite": 0.25}


@pytest.mark.parametrize("name", WHOLES)
@torch.inference_mode()
def test_text_alone_equals_transformers(name: str, tmp_path: Path) -> None:
    prefix, text, sight = WHOLES[name]
    tower = {"audio_config" if prefix == "Voxtral" else "vision_config": sight}
    config = getattr(transformers, f"{prefix}Config")(text_config=TEXT | text, **tower)
    torch.manual_seed(0)
    reference = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    for key, param in reference.named_parameters():
        param.uniform_(0.5, 1.5) if "norm" in key else param.normal_(0, 0.15)
    reference.save_pretrained(tmp_path)
    if name == "qwen3-vl-moe":  # published files have the transpose
        file = tmp_path / "model.safetensors"
        save_file({k: v.mT.contiguous() if ".experts." in k else v for k, v in load_file(file).items()}, file)
    model = load_model(tmp_path, torch.float32, "cpu")
    ids = torch.randint(1, 101, (100,))
    expected = reference(ids[None]).logits[0] * LEFT_OUT.get(name, 1.0)
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)


LATENT = {
    **SIGMOIDS, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("InternVLChatModel", "Qwen2", {}),
        ("InternVLChatModel", "Qwen3", {}),
        ("InternS1ForConditionalGeneration", "Qwen3", {}),
        ("KimiVLForConditionalGeneration", "DeepseekV3", LATENT),
    ],
)
@torch.inference_mode()
def test_text_of_models_as_their_authors_publish_them(
    name: str, kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Its language model may be `llm_config`, and its tensors lie behind those of the tower."""
    text = getattr(transformers, f"{kind}Config")(**TEXT | {"tie_word_embeddings": False} | more)
    torch.manual_seed(0)
    reference = getattr(transformers, f"{kind}ForCausalLM")(text).float().eval()
    for key, param in reference.named_parameters():
        param.uniform_(0.5, 1.5) if "norm" in key else param.normal_(0, 0.15)
    sight = {"vision_model.embeddings.class_embedding": torch.zeros(1, 1, 32), "mlp1.0.weight": torch.zeros(128)}
    own = {f"language_model.{name}": value for name, value in reference.state_dict().items()}
    save_file({**sight, **own}, tmp_path / "model.safetensors")
    inner = {key: value for key, value in text.to_dict().items() if key != "architectures"}
    key = "llm_config" if name == "InternVLChatModel" else "text_config"
    config = {"architectures": [name], key: inner, "vision_config": INTERN, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, torch.float32, "cpu")
    ids = torch.randint(1, 101, (100,))
    torch.testing.assert_close(whole_logits(model, ids), reference(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["AyaVision", "Cohere2Vision", "LlavaOnevision", "Exaone4_5_", "Qwen3VL", "Lfm3Vl"])
def test_language_models_of_another_kind_are_refused(name: str) -> None:
    """Whose text would be wrong; one that is not known is the model's own, unless several kinds are served."""
    config = getattr(transformers, f"{name}Config")().to_dict()
    config["architectures"] = [f"{name}ForConditionalGeneration"]
    for kind, served in ((None, True), ("one_of_its_own", name != "AyaVision"), ("llama", False), ("qwen3_moe", False)):
        changed = config | {"text_config": config["text_config"] | {"model_type": kind}}
        if served:
            assert language_model(changed)["architectures"] == language_model(config)["architectures"]
        else:
            with pytest.raises(CheckpointError, match=f"text_config.model_type: expected .*; found {kind!r}"):
                language_model(changed)


def test_layers_that_read_images_alone_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    written(tmp_path, "llama-3.2-11b-vision-instruct")  # of five layers
    load_model(tmp_path, torch.float32, "cpu")
    parts = "vision_model", "multi_modal", ".layers.1.", ".layers.3."
    aside = [name for name in load_file(tmp_path / "model.safetensors") if any(part in name for part in parts)]
    assert f"{len(aside)} tensors for images or sound are not loaded" in caplog.text and "not used" not in caplog.text
