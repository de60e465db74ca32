"""Names of options that vLLM, llama.cpp, Ollama and SGLang have and this server has not, and what to do about each.

Such an option is refused, because its value may be in another unit. `sglang_compat` has SGLang's options whose value is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    "num_gpu_blocks_override": "max_total_tokens",
    "kv_cache_memory_bytes": "max_total_tokens",
    "compilation_config": "enable_torch_compile",
    "cuda_graph_sizes": "cuda_graph_max_bs",
    "max_seq_len_to_capture": "cuda_graph_max_bs",
    "override_generation_config": "sampling_defaults",
    "allowed_origins": "allowed_hosts",
    "hf_config_path": "model",
    "speculative_model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
    "ngram_prompt_lookup_max": "speculative_ngram_max_match_window_size",
    "ngram_prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "disable_log_stats": "log_interval",
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
    "threads_batch": "num_threads",
    "draft": "speculative_num_draft_tokens",
    "draft_n": "speculative_num_draft_tokens",
    "hf_repo_draft": "speculative_draft_model_path",
    "spec_replace": "speculative_algorithm",
    "cache_type_k_draft": "kv_cache_dtype",
    "cache_type_v_draft": "kv_cache_dtype",
    "reasoning_format": "reasoning_parser",
    "verbose": "log_level",
    "verbosity": "log_level",
    "log_verbosity": "log_level",
    "no_cache_prompt": "disable_radix_cache",
    "no_ui": "disable_ui",
    # Ollama
    "num_ctx": "context_length",
    "num_parallel": "max_running_requests",
    "max_queue": "max_queued_requests",
    "num_thread": "num_threads",
    "kv_cache_type": "kv_cache_dtype",
    "origins": "allowed_hosts",
    # SGLang
    "cuda_graph_bs": "cuda_graph_max_bs",
    "log_level_http": "log_level",
    "decode_log_interval": "log_interval",
}

OF_REQUESTS = {  # our name of the same field of a request
    "n_predict": "max_tokens",
    "predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "temperature": "temperature",
    "max_tokens": "max_tokens",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "json_schema": "response_format",
    "grammar": "ebnf",
    "reasoning_budget": "thinking_budget",
    "chat_template_kwargs": "chat_template_kwargs",
}

_ADAPTERS = "adapters (LoRA) are not supported; serve a checkpoint into which they are merged"
_IMAGES = "images are not supported; the text model of a checkpoint is served"
_OFFLOAD = "all layers and their KV are on the device that --device names"
_DRAFTS = (
    "each part of it is an option: --speculative-algorithm, --speculative-draft-model-path, --speculative-num-steps"
)
_CONFIG = "it is read from the checkpoint: change its config.json"
_TEXT = "only text is generated: there are no embeddings and no scores"
_HUB = "set the environment variable HF_TOKEN, or log in with `hf auth login`"
_GPU = "choose GPUs with the environment variable CUDA_VISIBLE_DEVICES"
_SPLIT = "a model is split evenly over devices, by --tp-size"
_LEAVE = "leave it out: that is always on"
_TLS = "connections are not encrypted; put a proxy in front that does it"
_PATH = "give --model a hub id, a folder, or the path of a .gguf file"
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
    "embedding": _TEXT,
    "is_embedding": _TEXT,
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    # more of vLLM's
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "mm_processor_kwargs": _IMAGES,
    "kv_offloading_size": _OFFLOAD,
    "distributed_executor_backend": _SPLIT,
    "enable_expert_parallel": _SPLIT,
    "hf_overrides": _CONFIG,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "hf_token": _HUB,
    "download_dir": "set the environment variable HF_HOME",
    "task": _TEXT,
    "runner": _TEXT,
    "disable_log_requests": "requests are logged with --log-requests alone; leave it out",
    "max_logprobs": "a request says how many log probabilities it wants; leave it out",
    "block_size": "the KV cache is handed out by single tokens; leave it out",
    "tokenizer_mode": "there is one tokenizer, the checkpoint's; leave it out",
    "kv_transfer_config": "prefill and decoding are not split over servers",
    "async_scheduling": "it is --enable-overlap, which is the default on a GPU",
    "api_server_count": "one process answers all clients; start more servers and balance the load in front",
    # more of llama.cpp's
    "lora_scaled": _ADAPTERS,
    "n_gpu_layers_draft": _OFFLOAD,
    "gpu_layers_draft": _OFFLOAD,
    "no_kv_offload": _OFFLOAD,
    "override_tensor": _OFFLOAD,
    "cpu_moe": _OFFLOAD,
    "n_cpu_moe": _OFFLOAD,
    "main_gpu": _GPU,
    "tensor_split": _SPLIT,
    "split_mode": _SPLIT,
    "rope_freq_base": _CONFIG,
    "rope_freq_scale": _CONFIG,
    "embeddings": _TEXT,
    "pooling": _TEXT,
    "reranking": _TEXT,
    "model_url": _PATH,
    "hf_file": _PATH,
    "cont_batching": _LEAVE,
    "metrics": _LEAVE,
    "slots": _LEAVE,
    "props": _LEAVE,
    "webui": _LEAVE,
    "warmup": _LEAVE,
    "mmap": "how weights are read is not chosen; leave it out",
    "no_warmup": "the first steps are tried at the start, before anybody waits for them; leave it out",
    "ctx_size_draft": "a draft model has the context of the model that it drafts for; leave it out",
    "numa": "start the server under numactl",
    "prompt": "give it to `draftwing chat` as an argument, or send it to a server",
    "system": "a system prompt is the first message of a conversation",
    "file": "`draftwing chat` reads a question from standard input, or send it to a server",
    # Ollama's
    "num_gpu": _OFFLOAD,
    "keepalive": "the model stays loaded until the server ends; leave it out",
    "keep_alive": "the model stays loaded until the server ends; leave it out",
    "format": "the form of an answer is a request's: response_format",
    "flash_attention": "the attention is this server's own; leave it out",
    "models": "models of the hub lie where the environment variable HF_HOME says",
    "debug": "it is --log-level debug",
}

SHORT = {  # short options of llama.cpp and vLLM, and their long names
    "-m": "model",
    "-c": "ctx_size",
    "-ngl": "n_gpu_layers",
    "-t": "threads",
    "-tb": "threads_batch",
    "-np": "parallel",
    "-b": "batch_size",
    "-ub": "ubatch_size",
    "-fa": "flash_attn",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-hf": "hf_repo",
    "-hfr": "hf_repo",
    "-hff": "hf_file",
    "-hft": "hf_token",
    "-hfd": "hf_repo_draft",
    "-mu": "model_url",
    "-md": "model_draft",
    "-cd": "ctx_size_draft",
    "-ngld": "n_gpu_layers_draft",
    "-mg": "main_gpu",
    "-ts": "tensor_split",
    "-sm": "split_mode",
    "-mm": "mmproj",
    "-a": "alias",
    "-s": "seed",
    "-n": "n_predict",
    "-p": "prompt",
    "-f": "file",
    "-sys": "system",
    "-j": "json_schema",
    "-to": "timeout",
    "-cb": "cont_batching",
    "-ot": "override_tensor",
    "-cmoe": "cpu_moe",
    "-ncmoe": "n_cpu_moe",
    "-nkvo": "no_kv_offload",
    "-v": "verbose",
    "-lv": "verbosity",
    "-tp": "tp_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "dp_size",
    "-q": "quantization",
    "-O": "compilation_config",
}

PREFIXES = ("OLLAMA_", "LLAMA_ARG_")  # of environment variables that are options of Ollama's and llama.cpp's servers


def of_others(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, str]:
    """Returns environment variables that other servers read, and the name of our option for each. options: ours."""
    known, found = set(options), {}
    for variable in environ:
        for prefix in PREFIXES:
            name = variable.removeprefix(prefix).lower()
            ours = OURS.get(name, name)
            if variable.startswith(prefix) and ours in known:
                found[variable] = ours
    return found
