"""Families from GGUF files against transformers: files as converters of llama.cpp lay them out, with the names of
the gguf package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from dense_cache import DenseCache
from gguf import MODEL_ARCH_NAMES, ExpertGatingFuncType
from models.test_decoder import LONGROPE, PLAIN, YARN, random_reference
from safetensors.torch import load_file
from tiny_gguf import finish, permuted
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.families import FAMILIES
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_config, load_model

# By a name of `test_decoder`: the architecture, and whether converters put halves that are turned into pairs.
IN_FILES = {
    "smollm3-default": ("smollm3", True), "phi3": ("phi3", False), "phi3-longrope": ("phi3", False),
    "olmo": ("olmo", True), "olmo2": ("olmo2", False), "olmo3": ("olmo2", False), "ministral3": ("mistral3", True),
    "llama4": ("llama4", False), "llama4-plain": ("llama4", False), "phimoe": ("phimoe", False),
    "exaone4": ("exaone4", False), "exaone4-full": ("exaone4", False),
    "glm4": ("glm4", False), "ernie4.5": ("ernie4_5", False), "seed-oss": ("seed_oss", False),
    "granite": ("granite", True), "qwen2-moe": ("qwen2moe", False), "olmoe": ("olmoe", False),
    "gemma": ("gemma", False), "gemma2": ("gemma2", False),
    "laguna": ("laguna", False), "laguna-defaults": ("laguna", False),
    "afmoe": ("afmoe", False), "mellum": ("mellum", False), "exaone-moe": ("exaone-moe", False),
    "ling2": ("bailingmoe2", False), "ernie4.5-moe-defaults": ("ernie4_5-moe", False),
    "granite-swa": ("granite_swa", True), "granite-swa-defaults": ("granite_swa", True),
    "granite-moe-swa": ("granite_swa", True),
    "granite-moe": ("granitemoe", True), "granite-moe-shared": ("granitemoe", True),
    "apertus": ("apertus", False), "arcee": ("arcee", True),
    "hunyuan": ("hunyuan-dense", False), "hunyuan-moe": ("hunyuan-moe", False),
    "cohere": ("command-r", False), "cohere2": ("cohere2", False),
    "cohere2-moe": ("cohere2moe", False),
    "dots1": ("dots1", False), "hunyuan-v3": ("hy_v3", False), "mistral4": ("mistral4", False),
    "stablelm": ("stablelm", False), "stablelm-parallel": ("stablelm", False), "starcoder2": ("starcoder2", False),
    "phi": ("phi2", False), "falcon": ("falcon", False), "gpt2": ("gpt2", False), "gpt-bigcode": ("starcoder", False),
    "neox": ("gptneox", False), "neox-sequential": ("gptneox", False),
    "nemotron": ("nemotron", False), "jais2": ("jais2", False), "solar": ("glm4moe", False),
    "llama2 as internlm2": ("internlm2", True), "glm as chatglm": ("chatglm", False),
    "granite as minicpm": ("minicpm", True), "minicpm3": ("minicpm3", False), "exaone": ("exaone", False),
}  # fmt: skip
LIKE = {
    "mellum": "qwen3moe",
    "hy_v3": "exaone-moe",
    "laguna": "step35",
    "cohere2moe": "dots1",
    "granite_swa": "granitehybrid",
}  # which the gguf package does not know yet
IN_CONVERTERS = {
    "gate.expert_bias": "gate.expert_bias.bias", "mlp.expert_bias": "mlp.expert_bias.bias",
    "gate.moe_statics.": "moe_statics.",
    "_correction_bias": "_correction.bias", "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear",
    "block_sparse_moe.router.": "block_sparse_moe.router.layer.",
}  # fmt: skip
# What files do not say: windows of some layers, a scale that is that of the heads' size.
UNSAID: dict[str, dict[str, Any]] = {
    "afmoe": {"global_attn_every_n_layers": 4},
    "mellum": {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": True},
    **{key: {"num_key_value_heads": 4, "hidden_act": "gelu"} for key in ("neox", "neox-sequential")},
    **{key: {"num_key_value_heads": 1, "intermediate_size": 256, "n_inner": 256} for key in ("falcon", "gpt-bigcode")},
    "gpt2": {"num_key_value_heads": 4, "intermediate_size": 256},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16},
    "granite as minicpm": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 3**0.5,
        "logits_scaling": 64 / 256,
        "attention_multiplier": 16**-0.5,
    },
    "dots1": {"sliding_window": None},
    "granite-swa": {"num_hidden_layers": 4, "layer_rope_theta": [0, 5e4, 5e4, 0]},
    "gemma2": {"query_pre_attn_scalar": 32},
    "olmo3": {"rope_parameters": {"full_attention": {**YARN, "attention_factor": 1.2}, "sliding_attention": PLAIN}},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "llama4-plain": {  # the one with 128 experts
        "attention_chunk_size": 8192,
        "no_rope_layers": None,
        "layer_types": None,
        "attn_temperature_tuning": True,
        "moe_layers": None,
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
    },
    "phimoe": {
        "router_jitter_noise": 0.01,
        "rope_parameters": {
            **LONGROPE,
            "original_max_position_embeddings": 256,
            "factor": 4.0,
            "long_mscale": 1.243163121016122,
            "short_mscale": 1.243163121016122,
        },
    },
}


_SWASH = "granite_swa", "granitemoe_swa"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_sizes(writer: gguf_package.GGUFWriter, config: Any, predicts: bool) -> None:
    writer.add_block_count(config.num_hidden_layers + predicts)
    if predicts:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    dense = [getattr(config, key, None) for key in ("intermediate_size_mlp", "prefix_dense_intermediate_size")]
    writer.add_feed_forward_length(next((one for one in dense if one), config.intermediate_size))
    writer.add_head_count(getattr(config, "num_attention_heads_per_layer", config.num_attention_heads))
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "kv_lora_rank"):
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.qk_head_dim)
        if config.model_type == "mistral4":
            writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
    if getattr(config, "rms_norm_eps", None) is not None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif config.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)
    else:
        named = (
            getattr(config, f"{key}", None)
            for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        )
        writer.add_layer_norm_eps(next(eps for eps in named if eps is not None))
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(["a", "<|im_end|>", *(f"t{i}" for i in range(config.vocab_size - 2))])
    if config.model_type == "mellum":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "laguna":
        swa = config.rope_parameters["sliding_attention"]
        writer.add_rope_freq_base_swa(swa["rope_theta"])
        writer.add_rope_dimension_count_swa(int(_head_dim(config) * swa.get("partial_rotary_factor", 1)))
    if config.model_type in ("olmo3", "mellum", "exaone_moe", "laguna", "cohere2_moe", *_SWASH):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if getattr(config, "sliding_window", None) and config.model_type != "smollm3":
        writer.add_sliding_window(config.sliding_window)


def _add_rope(writer: gguf_package.GGUFWriter, config: Any) -> None:
    if config.model_type.startswith("gpt") and "neox" not in config.model_type:
        return  # positions are learned
    rope, head_dim = config.rope_parameters, _head_dim(config)
    rope = rope.get("full_attention", rope)
    if config.model_type in _SWASH and config.layer_rope_theta is not None:
        rope = {**rope, "rope_theta": max(config.layer_rope_theta)}
        if not all(config.layer_rope_theta):
            writer.add_array(f"{writer.arch}.attention.rope_pattern", [base > 0 for base in config.layer_rope_theta])
    writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1) ** (head_dim / (head_dim - 2)))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "llama_4_scaling_beta" in rope:
            times = 0.1 if config.model_type == "mistral4" else 1
            writer.add_rope_scaling_yarn_log_mul(times * rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        frequencies = torch.arange(0, head_dim, 2) / head_dim
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -frequencies / (2 * math.pi)
        keep = ((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])).clamp(0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / (keep + (1 - keep) / rope["factor"])).numpy())


def _add_experts(writer: gguf_package.GGUFWriter, config: Any) -> None:
    count = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    writer.add_expert_count(count or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("phimoe", "olmoe"):
        return
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    if config.model_type.startswith("granite"):
        if hasattr(config, "shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        return
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size if config.model_type == "cohere2_moe" else width)
    if config.model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        return
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", True))
    if config.model_type == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
        writer.add_expert_weights_scale(config.router_scaling_factor)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type == "afmoe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_scale(config.route_scale)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type == "exaone_moe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(0)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "mistral4":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "cohere2_moe":
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    if config.model_type == "laguna":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
        writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("dots1", "sarvam_moe", "solar_open"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 0))
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def in_halves(values: np.ndarray[Any, Any], heads: int, share: float) -> np.ndarray[Any, Any]:
    """Rows of queries or keys, of which elements that are turned together lie half a head apart, not side by side."""
    by_head = values.reshape(heads, -1, *values.shape[1:])
    turned, rest = np.split(by_head, [int(by_head.shape[1] * share)], 1)
    return np.concatenate((turned[:, ::2], turned[:, 1::2], rest), 1).reshape(values.shape)


def write(
    path: Path, config: Any, tensors: dict[str, Tensor], arch: str, in_pairs: bool, sections: bool = False
) -> None:
    """sections: whether positions are of three kinds, as in files of models for images."""
    writer, predicts = gguf_package.GGUFWriter(path, arch), any("eh_proj" in name for name in tensors)
    _add_sizes(writer, config, predicts)
    _add_rope(writer, config)
    if hasattr(config, "num_experts_per_tok"):
        _add_experts(writer, config)
    if config.model_type.startswith("granite") and arch != "minicpm":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "granite":  # as of Granite 4 without layers that have them
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_state_size(128)
        writer.add_ssm_time_step_rank(48)
        writer.add_ssm_group_count(1)
    if sections:
        writer.add_rope_dimension_sections([2, 3, 3, 0])
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(value) for name, value in tensors.items() if name.endswith(f".act_fn.{part}")]
            getattr(writer, f"add_xielu_{part}")(values)
    known = gguf_package.get_tensor_name_map(
        next(key for key, name in MODEL_ARCH_NAMES.items() if name == LIKE.get(arch, arch)),
        config.num_hidden_layers + predicts,
    )
    heads_of = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in tensors.items():
        values = value.detach().float().numpy()
        if arch == "llama4" and values.ndim == 3:
            values = values.swapaxes(1, 2).copy()
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if arch == "granite_swa" and (name.endswith("gate_up_proj") or ".input_linear." in name):  # which stay one
            writer.add_tensor(f"{block}.ffn_{'gate_up_exps' if values.ndim == 3 else 'up_shexp'}.weight", values)
            continue
        if name.endswith(".sinks") and arch == "granite_swa":
            writer.add_tensor(f"{block}.attn_sinks.weight", values)
            continue
        if (name.endswith("gate_up_proj") and values.ndim == 3) or ".input_linear." in name:
            kind = "exps" if values.ndim == 3 else "shexp"
            for part, half in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_{kind}.weight", half.copy())
            continue
        if ".act_fn." in name:
            continue
        name = name.removesuffix("_proj") + "_proj.weight" if values.ndim == 3 else name
        if arch == "gptneox" and "query_key_value" in name:  # converters put all queries first
            by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape).copy()
        if arch == "gpt2" and ".c_" in name and values.ndim == 2:
            values = values.T.copy()
        if arch in ("gemma", "gemma2", "nemotron") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("expert_gate.weight"):
            values = values[0]
        for ours, theirs in IN_CONVERTERS.items():
            name = name.replace(ours, theirs)
        stored = known.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        if in_pairs and (heads := heads_of.get(name.split(".")[-2])):
            values = permuted(values, heads)
        if sections and arch == "glm4" and (heads := heads_of.get(name.split(".")[-2])):
            values = in_halves(values, heads, config.rope_parameters["partial_rotary_factor"])
        writer.add_tensor(stored, values)
    finish(writer)


@pytest.mark.parametrize("family", IN_FILES)
@torch.inference_mode()
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = random_reference(family.partition(" as ")[0], **UNSAID.get(family, {}))
    state = reference.state_dict()
    if family == "ling2":  # whose files have names of folders, of experts as transformers has them
        reference.save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        state = {name: value for name, value in stored.items() if ".experts." not in name} | {
            name: value for name, value in state.items() if ".experts." in name
        }
    if reference.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    write(tmp_path / "m.gguf", reference.config, state, *IN_FILES[family])
    model = load_model(tmp_path / "m.gguf", torch.float32, "cpu")
    ids = torch.randint(0, 101, (200,), generator=torch.Generator().manual_seed(1))
    hidden, _ = model(ids, torch.arange(200), DenseCache())
    torch.testing.assert_close(model.logits(hidden), reference(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "arch"), [("glm4", "glm4"), ("qwen2.5", "qwen2vl"), ("qwen2-tied", "qwen2vl")])
@torch.inference_mode()
def test_language_models_of_models_for_images(family: str, arch: str, tmp_path: Path) -> None:
    """GLM-4.1V's queries and keys lie otherwise in its files than GLM-4's."""
    reference = random_reference(family)
    state = reference.state_dict()
    if reference.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    write(tmp_path / "m.gguf", reference.config, state, arch, False, sections=True)
    ids = torch.randint(0, 101, (200,), generator=torch.Generator().manual_seed(1))
    hidden, _ = (model := load_model(tmp_path / "m.gguf", torch.float32, "cpu"))(ids, torch.arange(200), DenseCache())
    torch.testing.assert_close(model.logits(hidden), reference(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_llama4_has_its_chunks_and_scales(tmp_path: Path) -> None:
    reference = random_reference("llama4", attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1)
    reference.save_pretrained(tmp_path)
    write(tmp_path / "m.gguf", reference.config, reference.state_dict(), "llama4", False)
    found, folder = model_config(open_gguf(tmp_path / "m.gguf")), load_config(tmp_path)
    assert [layer.mixer for layer in found.layers] == [layer.mixer for layer in folder.layers]
    assert found.ropes[1] == folder.ropes[1]


@pytest.mark.parametrize("family", ["cohere2", "olmo3", "mellum"])
def test_windows_are_named(family: str, tmp_path: Path) -> None:
    """A file without them is damaged: with none at all its layers would see more than they learnt to."""
    reference = random_reference(family, **UNSAID.get(family, {}))
    state = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    write(tmp_path / "m.gguf", reference.config, state, *IN_FILES[family])
    file = open_gguf(tmp_path / "m.gguf")
    assert any(layer.mixer.window for layer in model_config(file).layers)
    del file.metadata[f"{IN_FILES[family][0]}.attention.sliding_window"]
    with pytest.raises(CheckpointError, match=r"attention\.sliding_window"):
        model_config(file)


def test_norms_for_each_head_are_refused(tmp_path: Path) -> None:
    reference = random_reference("stablelm")
    write(tmp_path / "m.gguf", reference.config, reference.state_dict(), "stablelm", False)
    file = open_gguf(tmp_path / "m.gguf")
    model_config(file)
    normed = {**file.tensors, "blk.0.attn_q_norm.weight": file.tensors["blk.0.attn_norm.weight"]}
    with pytest.raises(CheckpointError, match=r"attn_q_norm\.weight \(a norm for each head\) is not supported"):
        model_config(GGUFFile(file.path, file.metadata, normed, file.data))


@pytest.mark.parametrize("values", [None, 0.5, [0.5, 0.6], "x"])
def test_activations_of_metadata_are_for_each_layer(tmp_path: Path, values: Any) -> None:
    reference = random_reference("apertus")
    write(tmp_path / "m.gguf", reference.config, reference.state_dict(), "apertus", False)
    file = open_gguf(tmp_path / "m.gguf")
    key = "xielu.alpha_p"
    if values is None:
        del file.metadata[key]
    else:
        file.metadata[key] = np.array(values, np.float32) if isinstance(values, list) else values
    make = FAMILIES["ApertusForCausalLM"].gguf
    assert make is not None and make.more is not None
    if values == 0.5:  # for all
        assert [value.item() for name, value in make.more(file, 3) if name.endswith("alpha_p")] == [0.5] * 3
    else:
        with pytest.raises(CheckpointError, match=r"xielu\.alpha_p: expected a number for each of 3 layers"):
            list(make.more(file, 3))
