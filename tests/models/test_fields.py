"""Keys of configs and metadata that nobody reads: notes of tools start, what may change the arithmetic does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFValueType
from published import published, rows
from reference.hf_configs import GPT_OSS_20B, LLAMA32_1B, MINIMAX_M2, QWEN3_8B, QWEN3_30B, QWEN35_9B
from tiny_gguf import write

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.families import FAMILIES
from draftwing.models.families.unserved import UNSERVED
from draftwing.models.heads.config import config_of_layers
from draftwing.models.loader import load_config

KINDS = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (QWEN3_30B, "use_qk_norm", True), (QWEN3_30B, "qkv_bias", False),
        (QWEN3_30B, "shared_expert_intermediate_size", 0), (QWEN3_8B, "use_qk_norm", True),
        (MINIMAX_M2, "use_qk_norm", True), (QWEN35_9B, "mamba_ssm_dtype", "float32"),
        (GPT_OSS_20B, "initial_context_length", 4096), (LLAMA32_1B, "partial_rotary_factor", 1.0),
        (LLAMA32_1B, "qk_norm", False), (LLAMA32_1B, "pad_token", "<pad>"),
        (QWEN3_8B, "gradient_checkpointing_kwargs", {"use_reentrant": False}),
    ],
)  # fmt: skip
def test_what_an_architecture_does_anyway(config: dict[str, Any], key: str, value: object) -> None:
    assert from_hf({**config, key: value}) == from_hf(config)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA32_1B, "use_qk_norm", True), (QWEN3_30B, "use_qk_norm", False), (QWEN3_30B, "qk_norm", False),
        (LLAMA32_1B, "qk_norm", True), (QWEN3_30B, "shared_expert_intermediate_size", 512),
        (QWEN3_8B, "dual_chunk_attention", True), (QWEN3_8B, "final_logit_softcapping", 30.0),
        (LLAMA32_1B, "residual_multiplier", 0.22), (LLAMA32_1B, "attention_rotation", "left"),
        (LLAMA32_1B, "initial_context_length", 4096),
        (LLAMA32_1B, "rope_scaling", {**LLAMA32_1B["rope_scaling"], "short_factor": [1.0]}),
        (QWEN35_9B, "text_config", {**QWEN35_9B["text_config"], "hyper_connections": 4}),
    ],
)  # fmt: skip
def test_what_nobody_reads(config: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="is not supported") as error:
        from_hf({**config, key: value})
    message = str(error.value)
    assert "\n" not in message and (key in message or "text_config" in key)
    assert from_hf({**config, key: None}) or key in config, "a null is no value"


@pytest.mark.parametrize(
    "notes",
    [
        {"unsloth_version": "2026.1", "unsloth_fixed": True, "_name_or_path": "x", "transformers_version": "4.57"},
        {"pretraining_tp": 1, "auto_map": {"AutoConfig": "c.C"}, "tokenizer_class": "T", "pad_token_id": 0},
        {"attention_dropout": 0.1, "output_router_logits": False, "router_aux_loss_coef": 0.01, "use_cache": False},
        {"return_dict": True, "torchscript": False, "id2label": {"0": "a"}, "do_sample": True, "temperature": 0.7},
        {"_attn_implementation_autoset": True, "_made_up": [1], "model_max_length": 7, "max_window_layers": 3},
    ],
)
def test_notes_of_libraries_and_tools(notes: dict[str, Any]) -> None:
    for config in (LLAMA32_1B, QWEN3_30B, GPT_OSS_20B):
        assert from_hf({**config, **notes}) == from_hf(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_writes_has_no_key_that_is_unknown(name: str) -> None:
    """All keys, also those whose values are its defaults."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if FAMILIES[name].model_type not in kinds:
        pytest.skip("transformers has no such model")
    some = {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3}  # that have no default
    indexer = {"n_heads": 4, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 16}  # without: none
    own = {
        "Glm4MoeForCausalLM": {"head_dim": 128},
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
        "Dots1ForCausalLM": some,
        "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
        "Qwen4ExpForCausalLM": {f"indexer_{key}": value for key, value in indexer.items()},
        **{one: {"num_labels": 1} for one in FAMILIES if one.endswith("SequenceClassification")},
        "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention"] * 31 + ["full_attention"]},
    }
    theirs = kinds[FAMILIES[name].model_type](architectures=[name], **own.get(name, {}))
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))).architecture == name


def test_published_configs_with_a_key_too_many() -> None:
    for name, row in rows().items():
        if row.missing is not None:
            continue
        config = published(name)
        inner = config.get("text_config", config.get("llm_config", config))
        inner["attention_of_tomorrow"] = 2
        with pytest.raises(CheckpointError, match="'attention_of_tomorrow' = 2 is not supported"):
            from_hf(config)


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_weights_quantised_by_mlx(keys: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"expected none or quant_method .*Take the model's checkpoint"):
        from_hf({**LLAMA32_1B, **{key: {"bits": 4, "group_size": 64} for key in keys}})


def test_heads_may_have_keys_of_their_own() -> None:
    config = {**LLAMA32_1B, "eagle_version": 9, "draft_vocab_size": 7}
    assert config_of_layers(config, 1).num_layers == 1
    with pytest.raises(CheckpointError, match="clip_qkv = 8 is not supported"):
        config_of_layers({**config, "clip_qkv": 8}, 1)


@pytest.mark.parametrize(
    ("key", "value", "served"),
    [
        ("vocab_size", 101, True), ("tensor_data_layout", "Meta AI original pth", True),
        ("attention.causal", True, True), ("rope.scaling.finetuned", True, True), ("expert_used_count", 0, True),
        ("expert_used_count", 2, False), ("attention.causal", False, False), ("attention.scale", 0.5, False),
        ("logit_scale", 8.0, False), ("router_logit_softcapping", 30.0, False), ("swiglu_clamp_exp", 7.0, False),
    ],
)  # fmt: skip
def test_metadata_of_gguf_files(tmp_path: Path, key: str, value: object, served: bool) -> None:
    def more(writer: Any) -> None:
        writer.add_key_value(f"llama.{key}", value, KINDS[type(value)])

    path = write(tmp_path / "m.gguf", "llama", edit=more)
    if served:
        assert load_config(path).num_layers
    else:
        with pytest.raises(CheckpointError, match=f"{key}.* is not supported"):
            load_config(path)


@pytest.mark.slow
def test_what_is_missing_is_said_of_each_architecture() -> None:
    for name, (model_type, missing) in UNSERVED.items():
        for config in ({"architectures": [name]}, {"model_type": model_type}):
            with pytest.raises(CheckpointError) as error:
                from_hf(config)
            assert "not served yet" in str(error.value) and "unknown" not in str(error.value)
        assert name not in FAMILIES and missing


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["MPNetModel"]}, "vectors in place of text"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "scores in place of text"),
        ({"architectures": ["LlamaForTokenClassification"]}, "scores in place of text"),
        ({"architectures": ["BertForMaskedLM"]}, "an encoder"),
        ({"architectures": ["DFlashDraftModel"]}, "a draft head"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder"),
        ({"architectures": ["NewForConditionalGeneration"], "vision_config": {"a": 1}}, "a model for images"),
        ({"architectures": ["NewForConditionalGeneration"], "audio_config": {"a": 1}}, "a model for sound"),
        ({"architectures": ["Qwen9ForCausalLM"]}, "nearest that are served: Qwen"),
        ({"architectures": ["XverseForCausalLM"]}, "unknown architecture XverseForCausalLM; docs/models.md"),
    ],
)
def test_other_kinds_of_models(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        from_hf(config)
    assert said in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-4-26b-a4b-it", "qwen3.5-9b"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_the_model_around_says_counts(name: str, tied: bool) -> None:
    config = published(name)
    config |= {"tie_word_embeddings": tied, "eos_token_id": [1, 7]}
    config["text_config"] |= {"tie_word_embeddings": not tied, "eos_token_id": 1}
    found = from_hf(config)
    assert found.tie_embeddings == tied and found.stop_ids == (1, 7)


@pytest.mark.parametrize("name", ["gemma-3-270m-it", "gemma-3-1b-it"])
def test_rotary_embeddings_that_transformers_does_not_read(name: str) -> None:
    flat = {"rope_type": "yarn", "factor": 64.0, "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match="rope_parameters: expected full_attention and sliding_attention"):
        from_hf({**published(name), "rope_scaling": None, "rope_parameters": flat})


def test_weights_of_modelopt(tmp_path: Path) -> None:
    """Which says so in a file beside config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA32_1B))
    assert load_config(tmp_path).dtype == torch.bfloat16
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(CheckpointError, match=r"quant_algo: expected 'FP8' or .*, found 'W4A8_AWQ'"):
        load_config(tmp_path)
