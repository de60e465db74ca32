"""The decoder against transformers on small random checkpoints, one per family and switch."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from block_ops import BlockTorchOps
from dense_cache import DenseCache
from hybrid_models import on_ranks, whole_logits
from reference.step3 import Step3p5ForCausalLM
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_map import canonical, checkpoint_names, stored_tensors
from draftwing.ops import make_ops
from draftwing.ops.gemm.stored import MXRows
from draftwing.parallel.ranks import ALONE, Absent, Alone

SIZES = {
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
EXPERTS = {
    "head_dim": 32, "rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip

BY_TYPE = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": PLAIN | {"rope_theta": 1e4}}
GPT_OSS = {"head_dim": 32, "num_local_experts": 4, "swiglu_limit": 1.5}

GLM = {
    "head_dim": 32, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "attention_bias": True,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip
PHI = {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 20.0, 40.0],
}  # fmt: skip
LATENT = {
    "q_lora_rank": 40, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "num_key_value_heads": 4,
}  # fmt: skip
LLAMA4 = {
    "head_dim": 32, "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size": 32,
    "intermediate_size_mlp": 96,
}  # fmt: skip
MINIMAX = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PLAIN}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama3.2-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32, "rope_parameters": PLAIN}),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 32, "rope_parameters": PLAIN}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "qwen2.5": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": PLAIN}),
    "gemma": ("Gemma", {"head_dim": 32, "rope_parameters": PLAIN}),
    "cohere": ("Cohere", {"rope_parameters": PLAIN, "logit_scale": 0.5, "attention_bias": True}),
    "cohere-defaults": ("Cohere", {}),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "logit_scale": 0.5,
            "layer_norm_eps": 1e-3,
            "rope_parameters": PLAIN,
        },
    ),
    "cohere2-defaults": ("Cohere2", {"sliding_window": 60, "layer_types": MIXED}),
    "olmo": ("Olmo", {"rope_parameters": PLAIN, "attention_bias": True, "clip_qkv": 0.4}),
    "olmo-defaults": ("Olmo", {}),
    "nanochat": ("NanoChat", {"rope_parameters": PLAIN, "attention_bias": True, "final_logit_softcapping": 2.0}),
    "nanochat-defaults": ("NanoChat", {}),
    "cohere2-moe": (
        "Cohere2Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 96,
            "first_k_dense_replace": 1,
            "layer_types": ["full_attention", *MIXED],
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "sliding_window": 20,
            "logit_scale": 0.5,
        },
    ),
    "cohere2-moe-defaults": (
        "Cohere2Moe",
        {"head_dim": 16, "num_hidden_layers": 5, "first_k_dense_replace": 2, "num_shared_experts": 2},
    ),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3, "head_dim": 32, "attention_bias": True}),
    "apertus-defaults": ("Apertus", {"head_dim": 16}),
    "arcee": ("Arcee", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan-defaults": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 32, "num_experts": 4, "moe_topk": 2, "rope_parameters": PLAIN}),
    "ling2": (
        "BailingMoeV2",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "use_qkv_bias": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
    ),
    "sarvam": ("SarvamMoE", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": PLAIN,
        },
    ),
    "gemma2-defaults": ("Gemma2", {"head_dim": 32, "layer_types": MIXED, "sliding_window": 60}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 40,
            "rope_parameters": BY_TYPE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-defaults": ("Gemma3", {"head_dim": 32, "sliding_window": 300, "sliding_window_pattern": 2}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 5.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite-defaults": ("Granite", {}),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "rope_parameters": PLAIN,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "logits_scaling": 3.0,
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "layer_rope_theta": [0, 5e4, 5e4, 0, 5e4],
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
            "rope_parameters": PLAIN,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite-swa-defaults": ("GraniteSWA", {"num_hidden_layers": 5, "sliding_window": 20}),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "sliding_window": 20,
            "layer_rope_theta": [1e6, 1e6, 1e6],
            "attention_multiplier": 0.0625,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": PLAIN}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-raw": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 1}),
    "qwen3-moe-mixed": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3-moe-named": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen2-moe-mixed": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PLAIN}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "flex-olmo-defaults": ("FlexOlmo", {"num_experts_per_tok": 5, "num_experts": 7}),
    "dots1": (
        "Dots1",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "rope_parameters": PLAIN,
        },
    ),
    "gpt-oss": ("GptOss", {**GPT_OSS, "num_experts_per_tok": 2, "sliding_window": 20}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 30}),
    "glm4-moe": ("Glm4Moe", GLM),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            **GLM,
            "first_k_dense_replace": 0,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": False,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "minimax-m2": ("MiniMaxM2", {**MINIMAX, "rotary_dim": 16}),
    "minimax-m2-whole": ("MiniMaxM2", {**MINIMAX, "num_experts_per_tok": 1}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": MIXED,
        },
    ),
    "smollm3": ("SmolLM3", {"rope_parameters": PLAIN, "no_rope_layers": [1, 0, 1]}),
    "smollm3-default": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {**PHI, "sliding_window": 40}),
    "phi3-longrope": ("Phi3", {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-short": (
        "Phi3",
        {
            **PHI,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256, "factor": 4.0},
            "original_max_position_embeddings": 256,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "exaone": ("Exaone", {"head_dim": 32, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "exaone-defaults": ("Exaone", {"tie_word_embeddings": True}),
    "exaone4": ("Exaone4", {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 4, "rope_parameters": LLAMA3}),
    "exaone4-full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": PLAIN},
    ),
    "glm": ("Glm", {"head_dim": 32, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "glm4": ("Glm4", {"head_dim": 32, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32, "use_bias": True, "rope_parameters": PLAIN}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "rope_parameters": PLAIN,
        },
    ),
    "ernie4.5-moe-defaults": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_intermediate_size": 32}),
    "helium": ("Helium", {"head_dim": 16, "rms_norm_eps": 1e-3, "rope_parameters": PLAIN}),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "rope_parameters": PLAIN}),
    "stablelm": (
        "StableLm",
        {"use_qkv_bias": True, "layer_norm_eps": 1e-3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "stablelm-defaults": ("StableLm", {"head_dim": 16}),
    "starcoder2": ("Starcoder2", {"sliding_window": 30, "norm_epsilon": 1e-3, "rope_parameters": PLAIN}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False}),
    "phi": ("Phi", {"layer_norm_eps": 1e-3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    "phi-tied": ("Phi", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "neox": ("GPTNeoX", {"layer_norm_eps": 1e-3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "neox-sequential": (
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        },
    ),
    "neox-defaults": ("GPTNeoX", {}),
    "mimo-v2": (
        "MiMoV2Flash",
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "num_key_value_heads": 2,
        },
    ),
    "gpt2": ("GPT2", {"layer_norm_epsilon": 1e-3}),
    "gpt-bigcode": ("GPTBigCode", {"layer_norm_epsilon": 1e-3, "n_inner": 96}),
    "gpt-bigcode-many": ("GPTBigCode", {"multi_query": False, "n_inner": 96, "tie_word_embeddings": False}),
    "falcon": ("Falcon", {}),
    "falcon-grouped": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "layer_norm_epsilon": 1e-3},
    ),
    "falcon-sequential": ("Falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "nemotron": (
        "Nemotron",
        {"head_dim": 32, "norm_eps": 1e-3, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    ),
    "nemotron-biases": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2", {"rope_parameters": LLAMA3, "head_dim": 32, "layer_norm_eps": 1e-3}),
    "jais2-no-biases": ("Jais2", {"attention_bias": False, "mlp_bias": False}),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "scale_emb": 3,
            "scale_depth": 0.9,
            "dim_model_base": 16,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": PLAIN,
        },
    ),
    "minicpm3-defaults": ("MiniCPM3", {"num_key_value_heads": 4, "dim_model_base": 64}),
    "minicpm3-null": ("MiniCPM3", {**LATENT, "q_lora_rank": None, "scale_depth": None, "dim_model_base": None}),
    "solar": (
        "SolarOpen",
        {
            "head_dim": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "rope_parameters": PLAIN,
        },
    ),
    "solar-defaults": ("SolarOpen", {"head_dim": 16, "n_routed_experts": 8}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": {
                **YARN,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "partial_rotary_factor": 8 / 24,
                "max_position_embeddings": 256,
            },
        },
    ),
    "mistral4-defaults": ("Mistral4", {**LATENT, "n_routed_experts": 6, "moe_intermediate_size": 32}),
    "llama4": (
        "Llama4",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "attention_bias": True,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4-plain": (
        "Llama4",
        {
            **LLAMA4,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "moe_layers": [1],
            "no_rope_layers": [0, 1, 0, 1],
            "layer_types": [*["chunked_attention"] * 3, "full_attention"],
            "attention_chunk_size": 50,
            "rope_parameters": PLAIN,
        },
    ),
    "llama4-defaults": ("Llama4", {**LLAMA4, "floor_scale": 20}),
    "afmoe": (
        "Afmoe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
            "sliding_window": 24,
            "global_attn_every_n_layers": 2,
        },
    ),
    "afmoe-defaults": ("Afmoe", {"head_dim": 16, "moe_intermediate_size": 32, "layer_types": MIXED}),
    "laguna": (
        "Laguna",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "moe_routed_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "gating": "per-element",
            "layer_types": MIXED,
            "sliding_window": 20,
            "num_attention_heads_per_layer": [4, 8, 4],
            "rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": PLAIN},
        },
    ),
    "laguna-defaults": (
        "Laguna",
        {
            "head_dim": 16,
            "num_experts": 12,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": MIXED,
        },
    ),
    "step3": (
        "Step3p5",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "share_expert_dim": 64,
            "moe_layers_enum": "1,2",
            "moe_router_scaling_factor": 1.5,
            "sliding_window": 20,
            "layer_types": MIXED,
            "attention_other_setting": {"num_attention_heads": 8},
            "rope_theta": [5e6, 1e4, 5e6],
            "partial_rotary_factors": [0.5, 1.0, 0.5],
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
            "swiglu_limits": [0.0, 0.2, 0.1],
            "swiglu_limits_shared": [0.3, None, 0.2],
        },
    ),
    "step3-defaults": (
        "Step3p5",
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 12,
            "moe_intermediate_size": 32,
            "share_expert_dim": 48,
            "head_dim": 16,
            "sliding_window": 20,
        },
    ),
    "hunyuan-v3": (
        "HYV3",
        {
            **EXPERTS,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
    "hunyuan-v3-no-shared": ("HYV3", {**EXPERTS, "num_shared_experts": 0}),
    "hunyuan-v3-defaults": ("HYV3", {"head_dim": 16, "num_experts": 12, "moe_intermediate_size": 32}),
    "ministral": ("Ministral", {"head_dim": 32, "sliding_window": 24, "rope_parameters": PLAIN}),
    "cwm": ("Cwm", {"head_dim": 32, "sliding_window": 24, "layer_types": MIXED, "rope_parameters": LLAMA3}),
    "cwm-defaults": ("Cwm", {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 40}),
    "youtu": ("Youtu", {**LATENT, "tie_word_embeddings": False, "rope_parameters": YARN, "attention_bias": True}),
    "youtu-defaults": ("Youtu", {**LATENT, "q_lora_rank": None}),
    "exaone-moe": (
        "ExaoneMoe",
        {
            **EXPERTS,
            "num_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "exaone-moe-defaults": ("ExaoneMoe", {"head_dim": 16, "num_experts": 12, "moe_intermediate_size": 32}),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": PLAIN,
        },
    ),
    "hyperclovax-defaults": ("HyperCLOVAX", {"head_dim": 16}),
    "mellum": (
        "Mellum",
        {
            **EXPERTS,
            "layer_types": MIXED,
            "sliding_window": 20,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "norm_topk_prob": False,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "mellum-defaults": ("Mellum", {"head_dim": 16, "num_experts": 12, "moe_intermediate_size": 32}),
}


CONFIGS = {  # of these classes
    "Gemma3": "Gemma3Text", "Llama4": "Llama4Text", "BailingMoeV2": "SarvamMoE", "Step3p5": "Step3p7Text",
}  # fmt: skip
# Of all families whole sequences are compared; what else is done with a model is a matter of these differences.
DIFFERENT = (
    "llama3.2-tied", "llama-biases", "mistral-window", "gemma3", "qwen3-moe-mixed", "gpt-oss", "mixtral",
    "glm4-moe-groups", "minimax-m2", "qwen3-yarn", "llama4",
)  # fmt: skip
QUICK = ("llama3.2-tied", "gemma3", "qwen3-moe-mixed", "gpt-oss")
WINDOWS = ("mistral-window", "gemma3", "gpt-oss", "qwen3-yarn", "llama4")
of_different = pytest.mark.further(pair=[family for family in FAMILIES if family not in DIFFERENT])


TAKEN_APART = {
    "GptOssForCausalLM", "MiniCPM3ForCausalLM", "Llama4ForCausalLM", "Mistral4ForCausalLM", "YoutuForCausalLM",
}  # fmt: skip


def architecture(prefix: str) -> str:
    return f"{prefix}{'LMHeadModel' if prefix == 'GPT2' else 'ForCausalLM'}"


def random_reference(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    prefix, settings = copy.deepcopy(FAMILIES[family])  # some configs write into their objects
    config = getattr(transformers, f"{CONFIGS.get(prefix, prefix)}Config")(**{**SIZES, **settings, **overrides})
    torch.manual_seed(0)
    made = getattr(transformers, architecture(prefix), None if prefix != "Step3p5" else Step3p5ForCausalLM)
    # Of what transformers has no class of its own, another does, and the checkpoint has the name.
    base = transformers.LlamaForCausalLM if prefix == "Exaone" else transformers.Glm4MoeForCausalLM
    made = made or type(f"{prefix}ForCausalLM", (base,), {})
    model = made(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():  # the default biases and norms of 0 and 1 would test nothing
            if name.endswith("bias"):
                param.normal_(0, 0.05 if "correction" in name else 0.3)
            elif "norm" in name or ".ln_" in name:
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0, 0.15)
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel]:
    reference = random_reference(request.param)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return reference, load_model(folder, torch.float32, "cpu")


def tokens(length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.slower(pair=[family for family in FAMILIES if family not in QUICK])
@torch.inference_mode()
def test_prefill_equals_transformers(pair: tuple[Any, DecoderModel]) -> None:
    reference, model = pair
    ids = tokens(200)  # beyond the 64 positions that the llama3 scaling calls original
    expected = reference(ids[None], output_hidden_states=True)
    layers = model.config.num_layers
    hidden, aux_hidden = model(ids, torch.arange(200), DenseCache(), (0, layers, 2))
    torch.testing.assert_close(model.logits(hidden), expected.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, expected.hidden_states[layers][0], atol=1e-4, rtol=1e-4)
    assert aux_hidden is not None and aux_hidden.shape == (200, 3 * 64)
    torch.testing.assert_close(aux_hidden[:, :64], expected.hidden_states[0][0])
    torch.testing.assert_close(aux_hidden[:, 128:], expected.hidden_states[2][0], atol=1e-4, rtol=1e-4)
    # transformers does not show the stream before the final norm, but norming it must give the result.
    torch.testing.assert_close(model.norm(aux_hidden[:, 64:128]), hidden)


@pytest.mark.slow
@pytest.mark.further(pair=[family for family in FAMILIES if family not in WINDOWS])
@torch.inference_mode()
def test_token_by_token_equals_transformers(pair: tuple[Any, DecoderModel]) -> None:
    reference, model = pair
    ids, cache = tokens(60), DenseCache()
    model.set_max_positions(256, context=60)  # longrope's factors of short contexts
    expected = reference(ids[None]).logits[0]
    rows = []
    for start, stop in [(0, 5), *((i, i + 1) for i in range(5, 60))]:
        hidden, aux_hidden = model(ids[start:stop], torch.arange(start, stop), cache)
        assert aux_hidden is None
        rows.append(model.logits(hidden))
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)
    model.set_max_positions(256)


@pytest.mark.parametrize("length", [63, 64, 65])
@torch.inference_mode()
def test_factors_of_longrope_at_the_original_length(tmp_path: Path, length: int) -> None:
    """transformers chooses them by the text, which here is as long as the context."""
    reference, ids = random_reference("phi3-longrope"), tokens(length)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, "cpu")
    found = []
    for context in (length, 64, 65):
        model.set_max_positions(256, context=context)
        found.append(model.logits(model(ids, torch.arange(length), DenseCache())[0]))
    at_length, short, long = found
    torch.testing.assert_close(at_length, reference(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(at_length, long if length > 64 else short) and (short - long).abs().max() > 0.01


@pytest.mark.slow
@of_different
def test_gradients_equal_transformers(pair: tuple[Any, DecoderModel]) -> None:
    reference, model = pair
    ids = tokens(12)
    model.set_max_positions(256, context=12)  # longrope's factors of short contexts
    reference.zero_grad()
    model.requires_grad_().zero_grad()
    F.cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:]).backward()
    hidden, _ = model(ids, torch.arange(12), DenseCache())
    F.cross_entropy(model.logits(hidden)[:-1], ids[1:]).backward()
    # By the names that they have here.
    parameters, apart = reference.named_parameters(), model.config.family.apart or (lambda name, value: [(name, value)])
    theirs = dict(one for name, value in parameters for one in apart(canonical(name), value))
    found = dict(model.named_parameters(remove_duplicate=False))
    of_layer = r"self_attn\.(q|qkv)_proj|(self_)?attention\.query_key_value|(input|post_attention|attention)_layernorm"
    ends = rf"embed_(tokens|positions)|layers\.0\.({of_layer}|ln_1)"
    table = checkpoint_names(model.config)
    named = [(name, part) for name, part in table.items() if re.fullmatch(rf"model\.({ends})\.weight", name)]
    assert len(named) >= (2 if model.config.norm.bare else 3)
    for name, part in named:
        if name in theirs:
            expected = theirs[name].grad
        else:  # of Ling 2.0 and Sarvam, which transformers joins when it writes a file
            each = [name.replace("attention.query_key_value", f"self_attn.{one}_proj") for one in "qkv"]
            expected = torch.cat([theirs[one].grad for one in each])
        largest, own = float(expected.abs().max()), part._replace(added=0.0)
        # Those of Granite Swash are small: logits are divided by 8, and beside embeddings times 12 layers add little.
        assert largest > 1e-4
        near = min(1e-4, largest / 1000)
        torch.testing.assert_close(own.stored(own.of(found[part.param].grad)), expected, atol=near, rtol=1e-3)
    model.set_max_positions(256)


@pytest.mark.slow
@of_different
def test_saved_checkpoint_is_read_by_transformers(pair: tuple[Any, DecoderModel], tmp_path: Path) -> None:
    reference, model = pair
    taken_apart = type(reference).__name__ in TAKEN_APART
    if taken_apart or model.config.family.apart is not None:
        pytest.skip("its checkpoints have tensors that are taken apart when they are read")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in stored_tensors(model, checkpoint_names(model.config))},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict(), default=str))
    again, info = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, expected), (_, found) in zip(reference.named_parameters(), again.named_parameters(), strict=True):
        stored_less_1 = model.config.norm.offset and "norm" in name
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if stored_less_1 else 0, msg=name)


@pytest.mark.slower(prefix="language_model.model.")
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@torch.inference_mode()
def test_the_language_model_of_a_model_for_images(tmp_path: Path, prefix: str) -> None:
    """Gemma 3's larger checkpoints, in both layouts of tensors, and their configs that leave much out."""
    reference = random_reference("gemma3", num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    text = reference.config.to_dict()
    kept = "hidden_size", "intermediate_size", "num_hidden_layers", "rope_parameters", "sliding_window", "vocab_size"
    inner = {key: text[key] for key in (*kept, "layer_types", "query_pre_attn_scalar", "max_position_embeddings")}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {**inner, "model_type": "gemma3_text"}, "vision_config": {"hidden_size": 32},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {prefix + name.removeprefix("model."): param.clone() for name, param in reference.named_parameters()}
    save_file({**tensors, "vision_tower.x.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, torch.float32, "cpu")
    hidden, _ = model(tokens(40), torch.arange(40), DenseCache())
    torch.testing.assert_close(model.logits(hidden), reference(tokens(40)[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_experts_that_are_quantised_one_by_one(tmp_path: Path) -> None:
    random_reference("qwen3-moe").save_pretrained(tmp_path)
    stored, expected = {}, {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        stored[name] = expected[name] = value
        if "proj" in name:
            scale = value.abs().amax().reshape(1) / 448
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[name.replace("weight", "weight_scale")] = scale
            expected[name] = stored[name].float() * scale
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "gate"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, torch.float32, "cpu")
    found = dict(stored_tensors(model, checkpoint_names(model.config)))
    assert found.keys() == expected.keys() and sum("experts" in name for name in found) == 3 * 6 * 3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def write_gpt_oss(folder: Path, **sizes: Any) -> transformers.PreTrainedModel:
    """A checkpoint with experts in MXFP4, as gpt-oss is published, and the model that it is."""
    reference, generator = (
        random_reference("gpt-oss", **{"intermediate_size": 128} | sizes),
        torch.Generator().manual_seed(0),
    )
    tensors: dict[str, Tensor] = {}
    for name, param in reference.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = param.detach().clone()
            continue
        count, columns, rows = param.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = [MXRows(blocks[i].flatten(1), scales[i]).dense(torch.float32).t() for i in range(count)]
        param.data.copy_(torch.stack(values))
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {**reference.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "blocks", "groups"])
@torch.inference_mode()
def test_experts_in_mxfp4(tmp_path: Path, form: str) -> None:
    reference = write_gpt_oss(tmp_path)
    ops = BlockTorchOps(torch.device("cpu"))
    made: WeightFormat = {"dense": DENSE, "blocks": BlockFormat("Q8_0", ops), "groups": GroupFormat(ops=ops)}[form]
    model = load_model(tmp_path, torch.float32, "cpu", weight_format=made)
    mlp = model.layers[1].mlp
    gate_up = reference.model.layers[1].mlp.experts.gate_up_proj.transpose(1, 2)  # [experts, rows, columns]
    expected = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1).flatten(0, 1)
    model.pack(ops)
    assert torch.equal(mlp.gate_up.op.dense_weight(), expected)  # nothing is rounded in any of them
    ids = tokens(60)
    hidden, _ = model(ids, torch.arange(60), DenseCache())
    theirs, found = reference(ids[None]).logits[0], model.logits(hidden)
    if form == "blocks":  # attention is in 8 bits there, by which some tokens go to other experts
        assert (found - theirs).abs().median() < 0.1 * theirs.std()
    else:
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.inference_mode()
def test_dummy_experts_are_in_mxfp4(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    ops = BlockTorchOps(torch.device("cpu"))
    for form in (DENSE, GroupFormat(ops=ops)):
        model = load_model(tmp_path, torch.float32, "cpu", dummy=True, weight_format=form)
        mlp = model.layers[0].mlp
        assert set(mlp.down.op.sizes) == ({"mxfp4"} if form != DENSE else set())
        model.pack(ops)
        assert abs(float(mlp.down.op.dense_weight().std()) - 128**-0.5) < 0.3 * 128**-0.5


@pytest.mark.slow
def test_ranks_have_experts_whole(tmp_path: Path) -> None:
    """Which a checkpoint has in one tensor; its biases and MXFP4, too."""
    write_gpt_oss(tmp_path)
    ops = BlockTorchOps(torch.device("cpu"))
    for made in (GroupFormat(ops=ops),):
        models = [
            load_model(tmp_path, torch.float32, "cpu", weight_format=made, ranks=ranks)
            for ranks in (ALONE, Absent(2, 0, True), Absent(2, 1, True))
        ]
        for model in models:
            model.pack(ops)
        whole, *shares = (model.layers[0].mlp for model in models)
        for name in ("gate_up", "down"):
            mine, every = [share.get_submodule(name) for share in shares], whole.get_submodule(name)
            joined = torch.cat([part.op.dense_weight() for part in mine])
            assert torch.equal(joined, every.op.dense_weight())
            assert torch.equal(torch.cat([part.bias for part in mine]), every.bias)
        assert all(torch.equal(share.router.dense_weight(), whole.router.dense_weight()) for share in shares)
    ids = tokens(9)
    found = on_ranks(tmp_path, ops, ids, expert_parallel=True)
    whole_model = load_model(tmp_path, torch.float32, "cpu")
    torch.testing.assert_close(found, whole_logits(whole_model, ids), atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="expected a --tp-size of at most the model's 4 experts; found 5"):
        load_config(tmp_path).layers[0].experts.spread(Absent(5, 0, True))


OF_RANKS = [
    "gemma2",
    "cohere2",
    "stablelm",
    "starcoder2",
    "phi",
    "neox",
    "falcon-grouped",
    "gpt2",
    "mimo-v2",
    "nemotron-biases",
    "hunyuan-moe",
    "apertus",
    "arcee",
    "granite-moe-shared",
    "ernie4.5-moe",
    "ling2",
    "llama4",
    "afmoe",
    "laguna",
    "step3",
    "cohere2-moe-defaults",
    "olmo2",
    "olmoe",
    "gpt-oss",
]


@pytest.mark.slow
@pytest.mark.further(
    family=[family for family in OF_RANKS if family not in ("apertus", "phi", "neox", "granite-moe-shared", "ling2")]
)
@pytest.mark.parametrize("family", OF_RANKS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@torch.inference_mode()
def test_a_folder_that_ranks_read(tmp_path: Path, family: str, size: int) -> None:
    """Packed, of tensors that are cut, taken apart or put together."""
    reference, ids = random_reference(family), tokens(40)
    reference.save_pretrained(tmp_path)
    ops = make_ops(torch.device("cpu"))
    for whole_experts in (False, True) if family == "llama4" else (False,):
        found = on_ranks(tmp_path, ops, ids, whole_experts, size)
        torch.testing.assert_close(found, reference(ids[None]).logits[0], atol=2e-4, rtol=1e-4)
    alone = load_model(tmp_path, torch.float32, "cpu", ranks=Alone(invariant=True))
    alone.pack(ops)
    assert torch.equal(on_ranks(tmp_path, ops, ids, size=size, invariant=True), whole_logits(alone, ids))


@pytest.mark.slow
def test_ranks_have_shares_of_every_expert(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    whole = load_model(tmp_path, torch.float32, "cpu").layers[0].mlp
    shares = [load_model(tmp_path, torch.float32, "cpu", ranks=Absent(2, rank)).layers[0].mlp for rank in range(2)]
    count, hidden = 4, 64

    def joined(name: str, *shape: int, axis: int) -> Tensor:
        return torch.cat([share.get_parameter(name).view(shape) for share in shares], axis).flatten()

    assert torch.equal(joined("gate_up.weight", count, 2, -1, hidden, axis=2), whole.gate_up.weight.flatten())
    assert torch.equal(joined("gate_up.bias", count, 2, -1, axis=2), whole.gate_up.bias)
    assert torch.equal(joined("down.weight", count, hidden, -1, axis=2), whole.down.weight.flatten())
    assert all(torch.equal(share.down.bias, whole.down.bias) for share in shares)
    assert all(torch.equal(share.router.weight, whole.router.weight) for share in shares)
