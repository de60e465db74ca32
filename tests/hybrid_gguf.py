"""GGUF files of small hybrid models, written by the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf as gguf_package
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from moe_models import add_yarn, quantised
from tiny_gguf import finish, permuted
from torch import Tensor

ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h", "falcon_h1": "falcon-h1", "kimi_linear": "kimi-linear",
    "qwen4_exp_text": "qwen4exp", "bamba": "granitehybrid", "bailing_hybrid": "bailingmoe3",
    "jamba": "jamba",
}  # fmt: skip
QWEN = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
STREAMS = {
    "hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject",
}  # fmt: skip
QWEN4 = {
    **{f"attn_hyper_connection.{theirs}": f"hc_attn_{part}" for theirs, part in STREAMS.items()},
    **{f"mlp_hyper_connection.{theirs}": f"hc_ffn_{part}" for theirs, part in STREAMS.items()},
    **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
    **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")},
    "ple.key_proj": "ple_key", "ple.value_proj": "ple_value", "ple.conv1d": "ple_conv1d",
}  # fmt: skip
LFM2 = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
MAMBA = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out", "A_log": "ssm_a",
    "D": "ssm_d", "dt_bias": "ssm_dt.bias",
}  # fmt: skip
NEXTN = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    "mtp.layers.0.eh_proj": "nextn.eh_proj", "mtp.layers.0.enorm": "nextn.enorm", "mtp.layers.0.hnorm": "nextn.hnorm",
    "mtp.layers.1.final_layernorm": "nextn.shared_head_norm", "mtp.layers.1.norm": "ffn_norm",
}  # fmt: skip


def write(
    path: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    kind: Type = Type.F32,
    joined_experts: bool = False,
    joined_inputs: bool = False,
    only_mtp: bool = False,
    edit: Callable[[gguf_package.GGUFWriter], None] | None = None,
) -> Path:
    """config: of transformers.  tensors: of its model and, as `mtp.*`, of a prediction layer.  kind: of matrices.
    joined_experts, joined_inputs: whether gates and ups are one tensor, and what goes into a delta net.  only_mtp: a
    file that comes with that of the model."""
    arch = ARCHITECTURES[config.model_type]
    if arch == "nemotron_h" and "moe" in config.layer_types:
        arch += "_moe"
    writer = gguf_package.GGUFWriter(path, arch)
    predicts = any(name.startswith("mtp.") for name in tensors)
    metadata(writer, arch, config, config.num_hidden_layers + predicts)
    if predicts:
        writer.add_nextn_predict_layers(1)
    if edit is not None:
        edit(writer)
    for name, value in tensors.items():
        mtp = name.startswith("mtp.")
        top = not name.startswith("model.layers.") and not mtp
        if only_mtp and not (mtp or top):
            continue
        own_parts = _qwen4(writer, name, value.detach(), config) if arch == "qwen4exp" else None
        if own_parts is None:
            own_parts = _converted(name, value.detach().float(), arch, config, joined_experts, joined_inputs)
        for theirs, made in own_parts:
            wide = made.dim() == 1 or made.shape[-1] % GGML_QUANT_SIZES[kind][0] != 0
            named = ("conv1d", ".conv.", "gate_inp", "token_embd", "ssm_norm", "ssm_d")
            wide |= "per_layer" not in theirs and any(part in theirs for part in named)
            own = Type.F32 if wide else kind
            writer.add_tensor(theirs, quantised(made.contiguous().numpy(), own), raw_dtype=own)
    finish(writer)
    return path


def metadata(writer: gguf_package.GGUFWriter, arch: str, config: Any, blocks: int) -> None:
    heads, wide = config.num_attention_heads, config.hidden_size
    writer.add_block_count(blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(wide)
    writer.add_head_count(heads)
    writer.add_token_list(["a", "<|im_end|>", *(f"t{i}" for i in range(config.vocab_size - 2))])
    writer.add_eos_token_id(1)
    if config.model_type == "bamba":
        _of_bamba(writer, config)
        return
    if arch == "granitehybrid":
        _of_granite(writer, config)
        return
    if arch == "jamba":
        _of_jamba(writer, config)
        return
    if arch.startswith("nemotron_h"):
        _of_nemotron(writer, config, blocks)
        return
    if arch == "falcon-h1":
        _of_falcon(writer, config)
        return
    if arch in ("kimi-linear", "bailingmoe3"):
        _of_kimi(writer, config)
        return
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch.startswith("lfm2"):
        writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        ffn = config.intermediate_size
        if arch == "lfm2moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_gating_func(gguf_package.ExpertGatingFuncType.SIGMOID)
            writer.add_leading_dense_block_count(config.num_dense_layers)
        elif config.block_auto_adjust_ff_dim:
            ffn = -(-(2 * ffn // 3) // config.block_multiple_of) * config.block_multiple_of
        writer.add_feed_forward_length(ffn)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    add_yarn(writer, config.rope_parameters)
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * (len(config.layer_types) // 4):
        writer.add_full_attention_interval(4)
    else:
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{arch}.attention.recurrent_layers", recurrent + [False] * (blocks - len(recurrent)))
    if arch == "qwen4exp":
        _of_qwen4(writer, config)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)


def _of_qwen4(writer: gguf_package.GGUFWriter, config: Any) -> None:
    """The hashes of n-grams are those of transformers."""
    sizes = {
        "hyper_connection.count": config.hc_count, "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads, "ple.conv_kernel": config.ple_conv_kernel_size,
        "attention.indexer.key_length": config.indexer_head_dim, "attention.indexer.top_k": config.indexer_budget,
        "ple.ngram_size": config.ngram_size, "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.eos_token_id": config.eos_token_id, "ple.image_token_id": 99,
        "embedding_length_out": config.hc_count * config.hidden_size,
        "embedding_length_per_layer_input":
            config.ple_embed_dim // ((config.ngram_size - 1) * config.heads_per_ngram),
    }  # fmt: skip
    for key, size in sizes.items():
        writer.add_uint32(f"qwen4exp.{key}", size)
    ratios = [config.indexer_compress_ratio * (kind != "linear_attention") for kind in config.layer_types]
    writer.add_array("qwen4exp.attention.compress_ratios", ratios)
    writer.add_array("qwen4exp.ple.layers", [one - 1 for one in config.ple_layer_ids])


def _qwen4(writer: gguf_package.GGUFWriter, name: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]] | None:
    """None: it is one of Qwen3.5's."""
    ending = name.rpartition("ple.ple_embedding.")[2]
    keys = {
        "layer_multipliers": "layer_multipliers", "ngram_heads_vocab_sizes": "head_vocab_sizes",
        "ngram_heads_offsets": "head_offsets",
    }  # fmt: skip
    if ending in keys:
        array, numbers = gguf_package.GGUFValueType.ARRAY, gguf_package.GGUFValueType.UINT64
        writer.add_key_value(f"qwen4exp.ple.{keys[ending]}", value.tolist(), array, numbers)
        return []
    if ending == "ngram_embedding.weight":
        return [("per_layer_token_embd.weight", value)]
    module = name.removesuffix(".weight")
    if not name.startswith("model.layers.") and "hyper_connection" not in name:
        return None
    block = f"blk.{name.split('.')[2]}"
    if module.startswith("model.hyper_connection_mixer."):
        part = STREAMS[module.rpartition(".")[2]]
        return [(f"output_hc_{part}.weight", value + (part == "norm"))]
    if module.endswith("index_qk_proj"):
        queries = config.indexer_n_heads * config.indexer_head_dim
        halves = (value[:queries], value[queries:])
        return [(f"{block}.indexer.{part}_proj.weight", one) for part, one in zip("qk", halves, strict=True)]
    own = QWEN4.get(".".join(module.split(".")[3:]))
    if own is None:
        return None
    value = value.squeeze(1) if own.endswith("conv1d") else value
    return [(f"{block}.{own}.weight", value + ("norm" in own))]


def _of_granite(writer: gguf_package.GGUFWriter, config: Any) -> None:
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    experts = config.num_local_experts
    writer.add_feed_forward_length(config.intermediate_size if experts else config.shared_intermediate_size)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok * (experts > 0))
    _add_mamba(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads,
               config.mamba_n_heads * config.mamba_d_head)  # fmt: skip


def _of_bamba(writer: gguf_package.GGUFWriter, config: Any) -> None:
    attends = [i in config.attn_layer_indices for i in range(config.num_hidden_layers)]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)
    writer.add_rope_scaling_finetuned(True)
    writer.add_feed_forward_length(config.intermediate_size)
    _add_mamba(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads,
               config.mamba_n_heads * config.mamba_d_head)  # fmt: skip


def _of_jamba(writer: gguf_package.GGUFWriter, config: Any) -> None:
    attends = [i % config.attn_layer_period == config.attn_layer_offset for i in range(config.num_hidden_layers)]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)


def _jamba(block: str, part: str, suffix: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Other than of Mamba-2 a converter leaves each tensor its shape."""
    if suffix in ("A_log", "D"):
        return [(f"{block}.ssm_a", -value.exp()) if suffix == "A_log" else (f"{block}.ssm_d", value)]
    if suffix == "gate_up_proj":
        gate, up = value.tensor_split(2, 1)
        return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
    if suffix == "down_proj":
        return [(f"{block}.ffn_down_exps.weight", value)]
    names = {**QWEN, "pre_ff_layernorm": "ffn_norm", "feed_forward.router": "ffn_gate_inp"}
    names |= {f"mamba.{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")}
    names |= {f"mamba.{name}_proj": f"ssm_{name}" for name in ("in", "x", "dt", "out")} | {"mamba.conv1d": "ssm_conv1d"}
    ours = names.get(part) or names[part.replace("feed_forward", "mlp")]
    return [(f"{block}.{ours}.{suffix}", value.squeeze(1) if part.endswith("conv1d") else value)]


def _of_nemotron(writer: gguf_package.GGUFWriter, config: Any, blocks: int) -> None:
    kinds, experts = [[kind] for kind in config.layer_types], "moe" in config.layer_types
    kinds += [["full_attention", "moe"]] * (blocks - len(kinds))  # a prediction layer
    writer.add_head_count_kv([config.num_key_value_heads * ("full_attention" in kind) for kind in kinds])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)  # which turns nothing
    writer.add_rope_scaling_finetuned(False)
    ffn = config.moe_intermediate_size if experts else config.intermediate_size
    writer.add_feed_forward_length([ffn * ("mlp" in kind or "moe" in kind) for kind in kinds])
    if experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(ffn)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    _add_mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads,
               config.mamba_num_heads * config.mamba_head_dim)  # fmt: skip


def _of_kimi(writer: gguf_package.GGUFWriter, config: Any) -> None:
    turned = config.qk_rope_head_dim
    if config.model_type == "bailing_hybrid":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_bool("bailingmoe3.kda.safe_gate", config.kda_safe_gate)
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", config.kda_lower_bound)
        writer.add_array("bailingmoe3.swiglu_clamp_exp", [0.0] * config.num_hidden_layers)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(turned)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + turned)
    writer.add_value_length(config.head_dim)  # of heads as a config has them
    writer.add_key_length_mla(config.qk_nope_head_dim + turned)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_gating_func(gguf_package.ExpertGatingFuncType.SIGMOID)


KIMI = {
    **QWEN, "post_attention_layernorm": "ffn_norm", "self_attn.o_norm": "ssm_norm", "self_attn.b_proj": "ssm_beta",
    **{f"self_attn.forget_gate.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b")},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("g_a", "g_b")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.forget_gate.f_proj": "ssm_f_a",
}  # fmt: skip


def _kimi(block: str, part: str, suffix: str, value: Tensor, config: Any, joined: bool) -> list[tuple[str, Tensor]]:
    """joined: whether what makes keys and values of latents is one matrix."""
    if suffix == "A_log":
        return [(f"{block}.ssm_a", value.exp() if config.model_type == "bailing_hybrid" else -value.exp())]
    if suffix == "dt_bias":
        return [(f"{block}.ssm_dt.bias", value)]
    if suffix == "e_score_correction_bias":
        return [(f"{block}.exp_probs_b.bias", value)]
    if part == "self_attn.g_proj":  # of each head where there are latents
        return [(f"{block}.{'attn_gate' if len(value) == config.num_attention_heads else 'ssm_g_a'}.weight", value)]
    if part == "self_attn.conv1d":
        parts = value.tensor_split(3)
        return [(f"{block}.ssm_conv1d_{name}.weight", one[None]) for name, one in zip("qkv", parts, strict=True)]
    if part == "self_attn.kv_b_proj" and joined:
        return [(f"{block}.attn_kv_b.weight", value)]
    if part == "self_attn.kv_b_proj":
        keys, values = value.unflatten(0, (config.num_attention_heads, -1)).split(
            (config.qk_nope_head_dim, config.v_head_dim), 1
        )
        return [(f"{block}.attn_k_b.weight", keys.transpose(1, 2)), (f"{block}.attn_v_b.weight", values)]
    if suffix == "gate_up_proj":
        gate, up = value.tensor_split(2, 1)
        return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
    return [(f"{block}.ffn_down_exps.weight" if suffix == "down_proj" else f"{block}.{KIMI[part]}.weight", value)]


def _of_falcon(writer: gguf_package.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    _add_mamba(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads,
               config.mamba_d_ssm)  # fmt: skip


def _falcon(block: str, part: str, suffix: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """With its factors, as converters do."""
    gate, down = config.mlp_multipliers
    attention = config.attention_in_multiplier
    factors = {
        "feed_forward.down_proj": down, "feed_forward.gate_proj": gate, "self_attn.q_proj": attention,
        "self_attn.k_proj": attention * config.key_multiplier, "self_attn.v_proj": attention,
        "self_attn.o_proj": config.attention_out_multiplier, "mamba.out_proj": config.ssm_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier,
    }  # fmt: skip
    value = value * factors.get(part, 1)
    if part == "mamba.in_proj":
        inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = value.split((inner, inner, shared, shared, config.mamba_n_heads))
        value = torch.cat([one * factor for one, factor in zip(parts, config.ssm_multipliers, strict=True)])
    if part == "mamba":
        return _mamba(block, suffix, "", value, config.mamba_n_groups)
    if part.startswith("mamba."):
        return _mamba(block, part[6:], suffix, value, config.mamba_n_groups)
    if part == "pre_ff_layernorm":  # which has no other end
        return [(f"{block}.ffn_norm", value)]
    return [(f"{block}.{QWEN[part.replace('feed_forward', 'mlp')]}.weight", value)]


def _add_mamba(writer: gguf_package.GGUFWriter, taps: int, state: int, groups: int, heads: int, inner: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)


def _granite(block: str, part: str, suffix: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    experts = getattr(config, "num_local_experts", 0) > 0
    shared = "_shexp" if experts else ""
    if part == "mamba":
        return _mamba(block, suffix, "", value, config.mamba_n_groups)
    if part.startswith("mamba."):
        return _mamba(block, part[6:], suffix, value, config.mamba_n_groups)
    if part.endswith("mlp.input_linear") or suffix == "gate_up_proj":
        kind = shared if part.startswith("shared") else "_exps"
        halves = value.tensor_split(2, -2)
        return [(f"{block}.ffn_{one}{kind}.weight", half) for one, half in zip(("gate", "up"), halves, strict=True)]
    if part == "shared_mlp.output_linear" or suffix == "down_proj":
        return [(f"{block}.ffn_down{shared if part.startswith('shared') else '_exps'}.weight", value)]
    part = part.replace("feed_forward.", "mlp.").replace("pre_ff_layernorm", "post_attention_layernorm")
    names = {**QWEN, "block_sparse_moe.router": "ffn_gate_inp", "post_attention_layernorm": "ffn_norm"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(names[part])
    value = torch.from_numpy(permuted(value.numpy(), heads)) if heads else value
    return [(f"{block}.{names[part]}.{suffix}", value)]


def _nemotron(block: str, part: str, suffix: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    part = part.removeprefix("mixer").removeprefix(".")
    if part == "norm" and value.dim() == 1 and suffix == "weight" and len(value) == config.hidden_size:
        return [(f"{block}.attn_norm.weight", value)]
    if suffix in MAMBA or part in MAMBA:
        return _mamba(block, part or suffix, suffix if part else "", value, config.n_groups)
    if suffix == "e_score_correction_bias":
        return [(f"{block}.exp_probs_b.bias", value)]
    names = {
        "up_proj": "ffn_up", "down_proj": "ffn_down", "gate": "ffn_gate_inp", "fc1_latent_proj": "ffn_latent_down",
        "fc2_latent_proj": "ffn_latent_up", "shared_experts.up_proj": "ffn_up_shexp", "q_proj": "attn_q",
        "shared_experts.down_proj": "ffn_down_shexp", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    }  # fmt: skip
    if part == "experts":
        return [(f"{block}.{names[suffix]}_exps.weight", value)]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part)
    value = torch.from_numpy(permuted(value.numpy(), heads)) if heads else value
    return [(f"{block}.{names[part]}.weight", value)]


def _mamba(block: str, part: str, suffix: str, value: Tensor, groups: int) -> list[tuple[str, Tensor]]:
    name = f"{block}.{MAMBA[part]}{'.' if suffix else ''}{suffix}"
    if part in ("A_log", "D"):
        return [(name, (-value.exp() if part == "A_log" else value).view(-1, 1))]
    if part == "norm":
        return [(name, value.view(groups, -1))]
    return [(name, value.squeeze(1) if part == "conv1d" and suffix == "weight" else value)]


def _converted(
    name: str, value: Tensor, arch: str, config: Any, joined_experts: bool, joined_inputs: bool
) -> list[tuple[str, Tensor]]:
    module, _, suffix = name.rpartition(".")
    is_norm = name.endswith("norm.weight") or (module in NEXTN and module != "mtp.fc")
    if arch.startswith("qwen") and is_norm and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if not name.startswith(("model.layers.", "mtp.")):
        named = {
            "embed_tokens": "token_embd", "embeddings": "token_embd", "norm": "output_norm", "norm_f": "output_norm",
            "embedding_norm": "token_embd_norm", "final_layernorm": "output_norm",
        }  # fmt: skip
        if arch == "falcon-h1" and "layernorm" not in name:
            value = value * (config.lm_head_multiplier if "head" in name else config.embedding_multiplier)
        return [(f"{named.get(module.rpartition('.')[2], 'output')}.weight", value)]
    if module in NEXTN:
        return [(f"blk.{config.num_hidden_layers}.{NEXTN[module]}.weight", value)]
    parts = name.split(".")
    number = config.num_hidden_layers if parts[0] == "mtp" else int(parts[2])
    block, part, suffix = f"blk.{number}", ".".join(parts[3:-1]), parts[-1]
    if arch == "falcon-h1":
        return _falcon(block, part, suffix, value, config)
    if arch.startswith("nemotron_h"):
        return _nemotron(block, part, suffix, value, config)
    if arch in ("kimi-linear", "bailingmoe3"):
        return _kimi(block, part, suffix, value, config, joined_inputs)
    if arch == "granitehybrid":
        return _granite(block, part, suffix, value, config)
    if arch == "jamba":
        return _jamba(block, part, suffix, value)
    if suffix == "expert_bias":
        return [(f"{block}.exp_probs_b.bias", value)]
    if arch.startswith("lfm2") and ".experts" not in name:
        return [(f"{block}.{LFM2[part]}.weight", value.squeeze(1) if value.dim() == 3 else value)]
    if ".experts" in name:
        if suffix == "down_proj":
            return [(f"{block}.ffn_down_exps.weight", value)]
        if joined_experts:
            return [(f"{block}.ffn_gate_up_exps.weight", value)]
        gate, up = value.tensor_split(2, 1)
        return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
    if part == "linear_attn.in_proj_qkvz" and joined_inputs:
        return [(f"{block}.ssm_in.weight", value)]
    if part == "linear_attn.in_proj_qkvz":
        return list(zip((f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"), _apart(value, config), strict=True))
    if arch != "qwen3next" and "linear_attn" in name:
        value = tiled(value, part if suffix == "weight" else f"{part}.{suffix}", config)
    if suffix == "A_log":
        return [(f"{block}.ssm_a", -value.exp())]
    if suffix == "dt_bias":
        return [(f"{block}.ssm_dt.bias", value)]
    value = value.squeeze(1) if part.endswith("conv1d") else value
    return [(f"{block}.{QWEN[part]}.weight", value[0] if part.endswith("expert_gate") else value)]


def tiled(value: Tensor, part: str, config: Any) -> Tensor:
    """Value heads by their number within a key head, then by key head."""
    nk, nv, wide = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = torch.tensor([key * (nv // nk) + i for i in range(nv // nk) for key in range(nk)])

    def moved(x: Tensor, size: int, axis: int = 0) -> Tensor:
        return x.unflatten(axis, (nv, size)).index_select(axis, order).flatten(axis, axis + 1)

    kind = part.removeprefix("linear_attn.")
    if kind in ("in_proj_qkv", "conv1d"):
        keys = 2 * nk * config.linear_key_head_dim
        return torch.cat((value[:keys], moved(value[keys:], wide)))
    if kind == "in_proj_z":
        return moved(value, wide)
    if kind == "out_proj":
        return moved(value, wide, 1)
    return value if kind == "norm" else moved(value, 1)


def _apart(value: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """q, k and v of all heads, and z, of a matrix with those of a key head beside each other."""
    nk, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    q, k, v, z = value.unflatten(0, (nk, -1)).split((dk, dk, each * dv, each * dv), 1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)]), z.flatten(0, 1)
