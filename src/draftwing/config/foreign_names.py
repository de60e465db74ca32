"""Names of options that vLLM, llama.cpp and SGLang have and this server has not, and what to do about each.

Such an option is refused, because its value may be in another unit. `sglang_compat` has SGLang's options whose value is
read.
"""

from __future__ import annotations

OURS = {  # our name of the same thing
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
}

_ADAPTERS = "adapters (LoRA) are not supported; serve a checkpoint into which they are merged"
_IMAGES = "images are not supported; the text model of a checkpoint is served"
_OFFLOAD = "all layers and their KV are on the device that --device names"
_DRAFTS = (
    "each part of it is an option: --speculative-algorithm, --speculative-draft-model-path, --speculative-num-steps"
)
_TOOLS = "a model may always call the tools of a request; --tool-call-parser names the form in which it writes calls"
WITHOUT_COUNTERPART = {  # why there is none, and what to do
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
    "mlock": "how weights are read is not chosen; leave it out",
    "no_mmap": "how weights are read is not chosen; leave it out",
    "pipeline_parallel_size": "a model is split over devices by --tp-size alone",
    "embedding": "embeddings are not supported",
    "is_embedding": "embeddings are not supported",
    "ssl_keyfile": "connections are not encrypted; put a proxy in front that does it",
    "ssl_certfile": "connections are not encrypted; put a proxy in front that does it",
}
