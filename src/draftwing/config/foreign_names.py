"""Names of options that vLLM, SGLang, llama.cpp and Ollama have and this server has not, and what to do about each.

Such an option is refused: its value may be in another unit. The error names ours. `sglang_compat` has SGLang's options
whose value is read.
"""

from __future__ import annotations

OURS = {
    # vLLM
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "no_enable_prefix_caching": "disable_radix_cache",
    "no_async_scheduling": "disable_overlap_schedule",
    "generation_config": "sampling_defaults",
    "tokenizer": "tokenizer_path",
    "seed": "random_seed",
    "uvicorn_log_level": "log_level",
    "enable_log_requests": "log_requests",
    "logits_processors": "logit_processor",
    "shutdown_timeout": "drain_timeout",
    # llama.cpp
    "ctx_size": "context_length",
    "parallel": "max_running_requests",
    "threads": "num_threads",
    "batch_size": "chunked_prefill_size",
    "ubatch_size": "chunked_prefill_size",
    "model_draft": "speculative_draft_model_path",
    "spec_type": "speculative_algorithm",
    "draft_max": "speculative_num_draft_tokens",
    "spec_draft_n_max": "speculative_num_draft_tokens",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "chat_template_file": "chat_template",
    "alias": "served_model_name",
    "hf_repo": "model",
    "no_webui": "disable_ui",
    "timeout": "request_timeout",
    # SGLang
    "cuda_graph_bs": "cuda_graph_max_bs",
    "log_level_http": "log_level",
    # Ollama
    "num_ctx": "context_length",
    "num_parallel": "max_running_requests",
    "origins": "allowed_hosts",
}

_ADAPTERS = "adapters (LoRA) are not supported; serve a checkpoint into which they are merged"
_IMAGES = "images are not supported; the text model of a checkpoint is served"
_OFFLOAD = "all layers and their KV are on the device that --device names"
_DRAFTS = (
    "each part of it is an option: --speculative-algorithm, --speculative-draft-model-path, --speculative-num-steps"
)
_TOOLS = "tools are called wherever --tool-call-parser is given"
NONE = {
    "enable_lora": _ADAPTERS,
    "lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    "lora_paths": _ADAPTERS,
    "mmproj": _IMAGES,
    "limit_mm_per_prompt": _IMAGES,
    "n_gpu_layers": _OFFLOAD,
    "gpu_layers": _OFFLOAD,
    "cpu_offload_gb": _OFFLOAD,
    "swap_space": _OFFLOAD,
    "speculative_config": _DRAFTS,
    "enable_auto_tool_choice": _TOOLS,
    "jinja": "chat templates are always rendered; leave it out",
    "enable_prefix_caching": "prefixes are always cached; leave it out",
    "enable_chunked_prefill": "prompts are always prefilled in chunks of --chunked-prefill-size; leave it out",
    "flash_attn": "the attention is this server's own; leave it out",
    "mlock": "weights are mapped from their file; leave it out",
    "no_mmap": "weights are mapped from their file; leave it out",
    "pipeline_parallel_size": "a model is split over devices by --tp-size alone",
    "embedding": "embeddings are not supported",
    "is_embedding": "embeddings are not supported",
    "ssl_keyfile": "connections are not encrypted; put a proxy in front that does it",
    "ssl_certfile": "connections are not encrypted; put a proxy in front that does it",
}


def explain(name: str) -> str | None:
    """Returns what to do about an option of another server, as a clause; None for a name that none of them has.

    name: with `_`, without leading dashes.
    """
    if name in OURS:
        return f"here it is --{OURS[name].replace('_', '-')}"
    return NONE.get(name)
