"""Published configs: one of each way in which `config.json` is written."""

from __future__ import annotations

from typing import Any

LLAMA2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA32_1B: dict[str, Any] = {
    **LLAMA2_7B,
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN25_15B_TRANSFORMERS5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "dtype": "float16",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_V01: dict[str, Any] = {
    **LLAMA2_7B,
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN3_30B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MIXTRAL_8X7B: dict[str, Any] = {
    **MISTRAL_7B_V01,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
GEMMA3_1B: dict[str, Any] = {  # as it was published
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
PHI_2: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
STABLELM2_16B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32, "num_hidden_layers": 24,
    "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_qkv_bias": True, "vocab_size": 100352,
}  # fmt: skip
STARCODER2_7B: dict[str, Any] = {
    "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.018042,
    "intermediate_size": 18432, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default",
    "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "residual_dropout": 0.1, "rope_theta": 1000000,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
PYTHIA_14B: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 16, "num_hidden_layers": 24,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
SOLAR_OPEN: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 10240, "max_position_embeddings": 131072, "model_type": "solar_open",
    "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 196608,
}  # fmt: skip
MINICPM3_4B: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "dim_model_base": 256, "eos_token_id": [2, 73440], "hidden_act": "silu", "hidden_size": 2560,
    "initializer_range": 0.1, "intermediate_size": 6400, "kv_lora_rank": 256, "max_position_embeddings": 32768,
    "model_type": "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40,
    "pad_token_id": 2, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "long_factor": [1.05] * 16, "short_factor": [1.05] * 16,
                     "original_max_position_embeddings": 32768},
    "scale_depth": 1.4, "scale_emb": 12, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 73448,
}  # fmt: skip
EXAONE35_78B: dict[str, Any] = {
    "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "embed_dropout": 0.0, "eos_token_id": 361, "head_dim": 128, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 32768, "model_type": "exaone",
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 32, "pad_token_id": 0,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
    "vocab_size": 102400,
}  # fmt: skip
MINITRON_4B: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2", "hidden_size": 3072, "initializer_range": 0.0134,
    "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "nemotron",
    "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
APERTUS_8B: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "eos_token_id": [68, 72], "hidden_act": "xielu",
    "hidden_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 65536,
    "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"},
    "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 131072,
}  # fmt: skip
AFM_45B: dict[str, Any] = {
    "architectures": ["ArceeForCausalLM"], "attention_bias": False, "eos_token_id": 128001, "head_dim": 128,
    "hidden_act": "relu2", "hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 65536,
    "mlp_bias": False, "model_type": "arcee", "num_attention_heads": 20, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"},
    "torch_dtype": "bfloat16", "vocab_size": 128004,
}  # fmt: skip
GRANITE31_1B_A400M: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
    "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000000.0, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 49155,
}  # fmt: skip
GRANITE_SHARED: dict[str, Any] = {
    **GRANITE31_1B_A400M, "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
    "shared_intermediate_size": 1024,
}  # fmt: skip
ERNIE45_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_bias": False, "use_rmsnorm": True, "vocab_size": 103424,
}  # fmt: skip
LING_MINI2: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"], "embedding_dropout": 0.0, "eos_token_id": 156892,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
    "max_position_embeddings": 32768, "model_type": "bailing_moe", "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512, "n_group": 8,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
    "output_dropout": 0.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 600000, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "torch_dtype": "bfloat16", "use_bias": False, "use_qk_norm": True,
    "use_qkv_bias": False, "use_rmsnorm": True, "vocab_size": 157184,
}  # fmt: skip
SARVAM_30B: dict[str, Any] = {
    "architectures": ["SarvamMoEForCausalLM"], "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "sarvam_moe",
    "moe_intermediate_size": 1024, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts": 128, "num_experts_per_tok": 6, "num_hidden_layers": 19, "num_key_value_heads": 4,
    "num_shared_experts": 1, "rms_norm_eps": 1e-06, "rope_theta": 8000000, "routed_scaling_factor": 2.5,
    "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": True, "use_qkv_bias": False, "vocab_size": 262144,
}  # fmt: skip
HUNYUAN_7B: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 128,
    "cla_share_factor": 2, "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "mlp_bias": False, "model_type": "hunyuan_v1_dense",
    "norm_type": "rms", "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                                            "mscale": 1.0, "mscale_all_dim": 0.0, "type": "dynamic"},
    "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167,
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    **HUNYUAN_7B, "architectures": ["HunYuanMoEV1ForCausalLM"], "intermediate_size": 3072, "model_type": "hunyuan",
    "moe_drop_tokens": False, "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_topk": [8] * 32,
    "norm_topk_prob": True, "num_experts": 64, "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True,
}  # fmt: skip
COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "cache_implementation": "hybrid",
    "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
    "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16", "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "eos_token_id": 255001, "hidden_act": "silu",
    "hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
    "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64,
    "num_hidden_layers": 40, "num_key_value_heads": 64, "rope_theta": 8000000.0, "torch_dtype": "float16",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma4_text", "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_31B: dict[str, Any] = {
    **_GEMMA4, "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "enable_moe_block": False,
    "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10, "max_position_embeddings": 262144,
    "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
}  # fmt: skip
GEMMA4_26B: dict[str, Any] = {
    **GEMMA4_31B, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "top_k_experts": 8,
}  # fmt: skip
GEMMA4_E2B: dict[str, Any] = {  # around its text model there are others
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_token_id": 258881, "dtype": "bfloat16",
    "eos_token_id": [1, 106], "image_token_id": 258880, "model_type": "gemma4", "vision_config": {"hidden_size": 768},
    "text_config": {
        **_GEMMA4, "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "max_position_embeddings": 131072,
        "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 35,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "sliding_window": 512, "use_double_wide_mlp": True,
    },
}  # fmt: skip
GRANITE33_8B: dict[str, Any] = {
    **LLAMA2_7B, "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0, "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "granite", "num_hidden_layers": 40, "num_key_value_heads": 8,
    "residual_multiplier": 0.22, "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49159,
}  # fmt: skip
GRANITE4_TINY: dict[str, Any] = {  # Granite-4.0-H-Tiny
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536,
    "intermediate_size": 512, "layer_types": ["mamba"] * 5 + [*["attention"], *["mamba"] * 9] * 3 + ["attention"]
    + ["mamba"] * 4, "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
    "num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type": "nope", "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_theta": 10000, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip
NEMOTRON3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
    "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": False,
    "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
FALCON_H1_7B: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.4375, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 12288,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.3125], "model_type": "falcon_h1", "num_attention_heads": 12,
    "num_hidden_layers": 44, "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "vocab_size": 130049,
}  # fmt: skip
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
    "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [i for i in range(1, 27) if i % 4],
    }, "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
# Of texts and images: the text model in the middle of it.
QWEN35_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": False, "vision_config": {"depth": 27, "model_type": "qwen3_5"},
}  # fmt: skip
QWEN35_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
# Written from the defaults of transformers 5.24, with embeddings of n-grams and an indexer.
QWEN4_FLASH: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"], "attention_bias": False, "dtype": "bfloat16", "eos_token_id": 248044,
    "hc_count": 4, "hc_lowrank": 320, "head_dim": 256, "heads_per_ngram": 8, "hidden_act": "silu",
    "hidden_size": 2048, "indexer_budget": 2048, "indexer_compress_ratio": 16, "indexer_head_dim": 128,
    "indexer_kv_heads": 1, "indexer_n_heads": 16, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "make_ngram_vocab_size_divisible_by": 128,
    "max_position_embeddings": 262144, "model_type": "qwen4_exp_text", "moe_intermediate_size": 512, "ngram_size": 3,
    "ngram_vocab_size_base": 20000000, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 2, "output_gate_type": "sigmoid",
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 2048, "ple_layer_ids": [2], "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "seed": 1234,
    "shared_expert_intermediate_size": 512, "split_ngram_parts": 512, "tie_word_embeddings": False,
    "vocab_size": 248320,
}  # fmt: skip
GLM45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "glm4_moe",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": True,
    "vocab_size": 151552,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = {
    **DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "auto_map": None,
}  # fmt: skip
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
GLM52: dict[str, Any] = {
    **GLM5, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk_freq": 4,
    "index_topk_pattern": None, "layer_types": ["deepseek_sparse_attention"] * 78, "num_experts": 256,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "mlp_bias": False,
}  # fmt: skip
GLM47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
    "kv_lora_rank": 512, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
LFM2_12B: dict[str, Any] = {  # 1.2B
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_use_swiglu": True,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16",
    "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
QWEN35_TEXT: dict[str, Any] = {**QWEN35_9B["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
LING3_FLASH: dict[str, Any] = {
    "architectures": ["BailingHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 156895, "first_k_dense_replace": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 6144, "kda_lower_bound": -5.0, "kda_safe_gate": True, "kv_lora_rank": 512,
    "layer_group_size": 6, "max_position_embeddings": 262144, "model_type": "bailing_hybrid",
    "moe_intermediate_size": 768, "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 8, "num_hidden_layers": 42, "num_key_value_heads": 32, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 6000000.0, "routed_scaling_factor": 2.5, "short_conv_kernel_size": 4,
    "topk_group": 4, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 157184,
}  # fmt: skip
LLAMA4_MAVERICK: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "llama4_vision_model"},
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
        "attn_temperature_tuning": 4, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576, "model_type": "llama4_text", "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 128, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "use_cache": True, "use_qk_norm": False, "vocab_size": 202048,
    },
}  # fmt: skip
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 128012,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0, "eos_token_id": 199999,
    "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
    "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}  # fmt: skip
OLMO3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip
OLMO2_7B: dict[str, Any] = {
    **{key: value for key, value in OLMO3_7B.items() if key not in ("layer_types", "rope_scaling", "sliding_window")},
    "architectures": ["Olmo2ForCausalLM"], "max_position_embeddings": 4096, "model_type": "olmo2",
}  # fmt: skip
EXAONE4_32B: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "eos_token_id": 361, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "vocab_size": 102400,
}  # fmt: skip
GLM4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
    "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151552,
}  # fmt: skip
ERNIE45_03B: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"], "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "ernie4_5",
    "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_bias": False, "use_cache": False, "vocab_size": 103424,
}  # fmt: skip
SEED_OSS_36B: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
    "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 155136,
}  # fmt: skip
MINISTRAL3_8B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "vocab_size": 131072,
    },
}  # fmt: skip
LFM2_8B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
    "eos_token_id": 7, "hidden_size": 2048, "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"] * 4, "max_position_embeddings": 128000,
    "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
    "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
}  # fmt: skip
QWEN2_57B: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2_moe", "moe_intermediate_size": 2560, "norm_topk_prob": False,
    "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 20480, "sliding_window": 65536, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMOE_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
DOTS1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "eos_token_id": 151645, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768,
    "max_window_layers": 62, "model_type": "dots1", "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
    "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "eos_token_id": 1, "head_dim": 256,
    "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384,
    "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
GLM_9B: dict[str, Any] = {**GLM4_9B, "architectures": ["GlmForCausalLM"], "attention_bias": True, "model_type": "glm"}

# Of encoders, written from the classes of transformers 5.24 and what is known of them.
_ENCODER: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "position_embedding_type": "absolute",
    "use_cache": True,
}
_ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
BGE_LARGE_EN_V15: dict[str, Any] = {
    **_ENCODER,
    **_ONE_LABEL,
    "architectures": ["BertModel"],
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
LABSE: dict[str, Any] = {
    **{key: value for key, value in BGE_LARGE_EN_V15.items() if key not in _ONE_LABEL},
    "directionality": "bidi",
    "gradient_checkpointing": False,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "vocab_size": 501153,
}
MS_MARCO_MINILM_L6_V2: dict[str, Any] = {
    **BGE_LARGE_EN_V15,
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
}
BGE_M3: dict[str, Any] = {
    **_ENCODER,
    "architectures": ["XLMRobertaModel"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
BGE_RERANKER_V2_M3: dict[str, Any] = {
    **BGE_M3,
    **_ONE_LABEL,
    "architectures": ["XLMRobertaForSequenceClassification"],
}
ALL_ROBERTA_LARGE_V1: dict[str, Any] = {
    **BGE_M3,
    "architectures": ["RobertaModel"],
    "gradient_checkpointing": False,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "vocab_size": 50265,
}
STSB_ROBERTA_LARGE: dict[str, Any] = {
    **ALL_ROBERTA_LARGE_V1,
    **_ONE_LABEL,
    "architectures": ["RobertaForSequenceClassification"],
}
