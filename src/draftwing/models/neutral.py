"""Keys of a config for which there is no code here, and the values at which they change nothing.

What nobody reads and is not here is refused: a key that is ignored would give fluent but wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.models.fields import Fields
from draftwing.requests.refusals import show

Values = tuple[Any, ...] | None  # None: any

# Of training, generation, files and tools: any value, for all architectures.
BOOKKEEPING = {
    "architectures", "auto_map", "custom_pipelines", "dtype", "model_type", "name_or_path", "torch_dtype",
    "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "mergekit",
    "axolotl_version", "peft_version", "is_llama_config", "internal_version", "model_name", "model_max_length",
    "tokenizer_class", "tokenizer_model_max_length", "architectures_details", "pretraining_tp", "ep_size",
    "initializer_range", "initializer_factor", "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout",
    "hidden_dropout_prob", "embd_pdrop", "resid_pdrop", "attn_pdrop", "ffn_dropout", "embedding_dropout", "dropout",
    "classifier_dropout", "gradient_checkpointing", "use_gradient_checkpointing", "output_router_logits",
    "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "aux_loss_alpha", "aux_loss_coef", "seq_aux",
    "moe_aux_loss_coeff", "loss_type", "use_cache", "cache_implementation", "use_flash_attn", "use_flash_attention_2",
    "flash_attention", "attn_implementation", "fuse_cross_entropy", "fused_linear_cross_entropy", "return_dict",
    "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "tie_encoder_decoder", "encoder_no_repeat_ngram_size", "finetuning_task",
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "prefix", "bos_token_id",
    "pad_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
    "generation_config", "max_sequence_length", "seq_length", "max_seq_len", "max_window_layers",
    "original_max_position_embeddings", "num_nextn_predict_layers", "num_nextn_layers", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "mtp_mlp_layer_types", "mtp_transformer_layers", "num_mtp_layers",
    "num_mtp_modules", "use_mtp", "mtp_loss_scaling_factor", "vision_config", "audio_config", "image_token_id",
    "image_token_index", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    "base_model_name_or_path", "keys_to_ignore_at_inference", "gradient_checkpointing_kwargs", "neftune_noise_alpha",
    "bos_token", "eos_token", "pad_token", "unk_token", "padding_side", "tokenizer_padding_side", "trust_remote_code",
    "attn_dropout", "embd_dropout", "embed_dropout", "resid_dropout", "residual_dropout",
}  # fmt: skip
TOOLS = ("_", "unsloth_", "mergekit_", "axolotl_", "quark_version")  # how keys of tools begin

# For all architectures: what a key of the arithmetic is where a model is as it would be without it.
EVERYWHERE: dict[str, Values] = {
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
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "layer_types": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_only_layers": ([],),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "q_lora_rank": (),
    "qk_norm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "shared_expert_intermediate_size": (0,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

_QWEN3: dict[str, Values] = {"use_qk_norm": (True,), "qk_norm": (True,), "qkv_bias": (False,)}
_QWEN_HYBRID: dict[str, Values] = {
    **_QWEN3,
    "mamba_ssm_dtype": ("float32",),  # as states are here
    "output_gate_type": ("swish", "silu"),
    "mlp_only_layers": ([],),
}
_LATENT: dict[str, Values] = {
    "qk_head_dim": None,  # the sum of both parts
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": None,  # beside `mlp_layer_types`
}
# What an architecture does anyway, or what its own code in transformers does not look at.
OF: dict[str, Mapping[str, Values]] = {
    "LlamaForCausalLM": {"qkv_bias": (False,)},
    "MistralForCausalLM": {"qkv_bias": (False,)},
    "MixtralForCausalLM": {"qkv_bias": (False,)},
    "Qwen2ForCausalLM": {"qkv_bias": (True,)},
    "MiMoForCausalLM": {"qkv_bias": (True,)},
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3,
    "Qwen3NextForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForCausalLM": _QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Glm4MoeForCausalLM": {"first_k_dense_replace": None},
    "GptOssForCausalLM": {"experts_per_token": None, "initial_context_length": None},
    "MiniMaxM2ForCausalLM": {"mlp_intermediate_size": None, "shared_moe_mode": None},
    "Gemma3ForCausalLM": {"sliding_window_pattern": None},  # beside `layer_types`
    "Gemma4ForCausalLM": {
        "num_experts": None,  # these four without `enable_moe_block`, and without layers that share keys
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "use_double_wide_mlp": None,
        "vocab_size_per_layer_input": None,
        "num_global_key_value_heads": None,
        "global_head_dim": None,
    },
    "Lfm2ForCausalLM": {
        **dict.fromkeys(
            ("block_dim", "block_ffn_dim_multiplier", "block_mlp_init_scale", "block_multiple_of", "block_norm_eps",
             "block_out_init_scale", "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
             "num_heads", "theta", "intermediate_size", "full_attn_idxs")
        ),
        "block_use_swiglu": (True,),
        "use_pos_enc": (True,),
    },
}  # fmt: skip

# Of an object that says how positions are turned: what other kinds of rotary embeddings read, and what is so of text
# alone, whose three positions are one.
IN_ROPE = {
    "type", "rope_type", "rope_theta", "factor", "alpha", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "finetuned", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
}  # fmt: skip


# Metadata of GGUF files below `<architecture>.`, as `EVERYWHERE` has keys of a config.
METADATA: dict[str, Values] = {
    **dict.fromkeys((
        "vocab_size", "tensor_data_layout", "block_count", "feed_forward_length", "nextn_predict_layers",
        "leading_dense_block_count", "full_attention_interval", "moe_every_n_layers", "expert_feed_forward_length",
        "expert_shared_count", "expert_shared_feed_forward_length", "embedding_length_out",
        "attention.layer_norm_epsilon", "attention.recurrent_layers", "attention.value_length",
        "attention.key_length", "attention.key_length_mla", "attention.value_length_mla", "rope.dimension_sections",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
        "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    )),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}  # fmt: skip


def refuse_unread_metadata(fields: Fields) -> None:
    """Does what `refuse_unread` does with the metadata of a GGUF file."""
    for key, value in fields.unread():
        if key not in METADATA:
            raise unknown(fields, fields.prefix + key, value, "take it out of the file")
        if not _is_one(value, METADATA[key]):
            raise fields.unsupported(key, value)


def refuse_unread(fields: Fields, architecture: str, known_alone: bool = False) -> None:
    """Raises CheckpointError for a key that nobody asked for, where it may change the arithmetic. known_alone: of those
    that stand here; others are as they may be."""
    own = OF.get(architecture, {})
    for path, value in fields.unread():
        outer, _, key = path.rpartition(".")
        if outer.startswith("quantization_config"):  # whose reader knows them
            continue
        if outer.startswith(("rope_parameters", "rope_scaling")):
            if key in IN_ROPE or (key == "llama_4_scaling_beta" and value == 0):
                continue
        elif path in BOOKKEEPING or path.startswith(TOOLS) or (known_alone and path not in EVERYWHERE):
            continue
        elif path in own or path in EVERYWHERE:
            if _is_one(value, own[path] if path in own else EVERYWHERE[path]):
                continue
            raise fields.unsupported(path, value)
        if not known_alone:
            raise unknown(fields, path, value, "take it out of config.json")


def unknown(fields: Fields, path: str, value: Any, instead: str) -> CheckpointError:
    """Returns the error of a key that nobody reads here, and of which nobody knows what it does."""
    return CheckpointError(
        f"{fields.where}: {path[:80]!r} = {show(value)} is not supported: nothing here reads this key, and it may "
        f"change what the model computes; if you know that it does not, {instead}"
    )


def _is_one(value: Any, values: Values) -> bool:
    return values is None or (not isinstance(value, np.ndarray) and value in values)
