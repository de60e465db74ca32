"""Names of options that SGLang, vLLM, llama.cpp and Ollama have and this server has not, and what to do about each.

Users bring their commands along. An option of SGLang's has no effect, which is logged once, or asks for what this
version cannot give, which is refused with what to do instead. An option of the others is refused, because its value may
be in another unit.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unsupported:
    """kind: of the value, bool for a flag without one.  neutral: values that ask for nothing."""

    kind: type[Any]
    why: str
    neutral: tuple[Any, ...] = ()


_EXACT = "what is accepted is what the target draws, so verification is exact as it is"
_ONE_DTYPE = "the draft uses the target's attention and types"
_OTHER_DRAFTER = "its algorithm is not in this version; --speculative-algorithm lists those that are"
_BLOCK = "the block is as long as the head's config says; --speculative-num-steps is how many of its tokens are drafted"
_LEARNT = "what steps cost and how often drafts are accepted is measured as requests are served"
_LOSSY = "it would change what the model says; leave it out"
_ADAPTS = "drafts are as large as is fastest, up to --speculative-num-draft-tokens; --speculative-fixed-shape pins them"
_ONE_DEVICE = "a server is one replica, with the devices of --tp-size; run several and balance the load in front"

NO_EFFECT = {
    "enable_lora": Unsupported(bool, "adapters are served where --lora-modules or --lora-dir names some"),
    "max_cpu_loras": Unsupported(int, "all adapters that are loaded stay in memory"),
    "lora_backend": Unsupported(str, "there is one way to multiply with adapters on each device"),
    "lora_eviction_policy": Unsupported(str, "the adapter that was not used for longest leaves the device", ("lru",)),
    "lora_target_modules": Unsupported(str, "adapters may change every linear layer of attention and MLP", ("all",)),
    "grammar_backend": Unsupported(str, "grammars are compiled by llguidance", ("llguidance",)),
    "attention_backend": Unsupported(str, "this version has its own attention, chosen by the device"),
    "page_size": Unsupported(int, "the KV pool is handed out by single tokens", (1,)),
    "cuda_graph_max_bs_prefill": Unsupported(int, "prompts of up to 512 tokens run from CUDA graphs"),
    "speculative_use_rejection_sampling": Unsupported(bool, _EXACT),
    "speculative_use_block_verification": Unsupported(bool, _EXACT),
    "speculative_attention_mode": Unsupported(str, _ONE_DTYPE),
    "speculative_draft_attention_backend": Unsupported(str, _ONE_DTYPE),
    "speculative_draft_kv_cache_dtype": Unsupported(str, _ONE_DTYPE),
    "speculative_adaptive": Unsupported(bool, _ADAPTS),
    "speculative_adaptive_config": Unsupported(str, _ADAPTS),
    "speculative_ngram_match_type": Unsupported(str, "matches are ranked by how often they were right", ("BFS",)),
    "speculative_ngram_external_corpus_max_tokens": Unsupported(int, "there is no external corpus"),
    "speculative_moe_runner_backend": Unsupported(str, "there are no mixture-of-experts drafts"),
    "speculative_moe_a2a_backend": Unsupported(str, "there are no mixture-of-experts drafts"),
    "speculative_domino_candidate_pool_size": Unsupported(int, "every token is a candidate", (0,)),
    "speculative_dspark_sps_table_path": Unsupported(str, _LEARNT),
    "speculative_dspark_confidence_sts_path": Unsupported(str, _LEARNT),
    "speculative_dspark_align_verify_tokens_to_graph_tier": Unsupported(bool, _LEARNT),
}

REFUSED = {
    "dp": Unsupported(int, _ONE_DEVICE, (1,)),
    "dp_size": Unsupported(int, _ONE_DEVICE, (1,)),
    "data_parallel_size": Unsupported(int, _ONE_DEVICE, (1,)),
    "enable_dp_attention": Unsupported(
        bool, "attention is not split over devices; run one server per device and balance the load in front"
    ),
    "speculative_accept_threshold_single": Unsupported(float, _LOSSY, (1.0,)),
    "speculative_accept_threshold_acc": Unsupported(float, _LOSSY, (1.0,)),
    "speculative_draft_load_format": Unsupported(str, "weights are read as they are found", ("auto", "safetensors")),
    "speculative_draft_model_quantization": Unsupported(
        str, "draft models are quantised as --quantization says", ("unquant",)
    ),
    "speculative_draft_sink_size": Unsupported(int, "a draft's window has no sinks"),
    "speculative_ngram_external_corpus_path": Unsupported(str, "only prompts and answers are remembered"),
    "speculative_ngram_external_sam_budget": Unsupported(int, "only prompts and answers are remembered", (0,)),
    "speculative_dflash_block_size": Unsupported(int, _BLOCK),
    "speculative_dspark_block_size": Unsupported(int, _BLOCK),
    "enable_multi_layer_eagle": Unsupported(bool, "NEXTN uses all prediction layers of a checkpoint as it is"),
    "uno_lora_path": Unsupported(str, _OTHER_DRAFTER),
}

FOREIGN = NO_EFFECT | REFUSED


def take(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what remains when foreign options are taken out, logged or refused (ConfigError)."""
    for name, value in values.items():
        foreign = FOREIGN.get(name)
        # A flag that is off, like a None, was not asked for.
        if foreign is None or value is None or value is False or value in foreign.neutral:
            continue
        if name in REFUSED:
            raise ConfigError(f"--{name.replace('_', '-')} is not supported: {foreign.why}")
        logger.warning("--%s has no effect: %s", name.replace("_", "-"), foreign.why)
    return {name: value for name, value in values.items() if name not in FOREIGN}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns options that SGLang's environment variables ask for."""
    options: dict[str, Any] = {}
    if _true(environ, "SGLANG_ENABLE_SPEC_V2"):
        logger.warning("SGLANG_ENABLE_SPEC_V2 is read as --enable-overlap; any --speculative-eagle-topk works with it")
        options["enable_overlap"] = True
    if _true(environ, "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"):
        logger.warning(
            "SGLANG_NGRAM_FORCE_GREEDY_VERIFY has no effect: %s. For greedy text, send temperature 0", _EXACT
        )
    length = environ.get("SGLANG_SIMULATE_ACC_LEN", "").strip()
    if length:
        try:
            value = float(length)
        except ValueError:
            raise ConfigError(f"SGLANG_SIMULATE_ACC_LEN: expected a number, found {length!r}") from None
        if value > 0:  # SGLang's default is -1
            logger.warning("SGLANG_SIMULATE_ACC_LEN is read as --simulate-accept-length %s", length)
            options["simulate_accept_length"] = value
    return options


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


def _each(table: Mapping[str, str]) -> dict[str, str]:
    """Returns each of the names with what stands before them."""
    return {name: answer for answer, names in table.items() for name in names.split()}


OURS = _each({  # our name of the same thing
    "context_length": "ctx_size num_ctx",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs parallel num_parallel",
    "chunked_prefill_size": "max_num_batched_tokens batch_size ubatch_size",
    "disable_cuda_graph": "enforce_eager",
    "disable_radix_cache": "no_enable_prefix_caching no_cache_prompt",
    "prefix_cache_dir": "slot_save_path",
    "hicache_size": "enable_hierarchical_cache hicache_ratio kv_offloading_size cache_ram",
    "disable_overlap_schedule": "no_async_scheduling",
    "sampling_defaults": "generation_config override_generation_config",
    "tokenizer_path": "tokenizer",
    "random_seed": "seed",
    "log_level": "uvicorn_log_level verbose verbosity log_verbosity log_level_http",
    "log_requests": "enable_log_requests",
    "logit_processor": "logits_processors",
    "drain_timeout": "shutdown_timeout",
    "max_total_tokens": "num_gpu_blocks_override kv_cache_memory_bytes",
    "enable_torch_compile": "compilation_config",
    "cuda_graph_max_bs": "cuda_graph_sizes max_seq_len_to_capture cuda_graph_bs",
    "allowed_hosts": "allowed_origins origins",
    "model": "hf_config_path",
    "speculative_draft_model_path": "speculative_model",
    "root_path": "fastapi_root_path api_prefix",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_ngram_max_match_window_size": "ngram_prompt_lookup_max",
    "speculative_ngram_min_match_window_size": "ngram_prompt_lookup_min",
    "log_interval": "disable_log_stats decode_log_interval",
    "num_threads": "threads threads_batch num_thread",
    "cpu_affinity": "cpu_range cpu_range_batch",
    "speculative_algorithm": "spec_type spec_replace",
    "speculative_num_draft_tokens": "draft_max spec_draft_n_max draft draft_n",
    "kv_cache_dtype": "cache_type_k cache_type_v cache_type_k_draft cache_type_v_draft kv_cache_type",
    "chat_template": "chat_template_file",
    "served_model_name": "alias",
    "disable_ui": "no_webui no_ui",
    "request_timeout": "timeout",
    "reasoning_parser": "reasoning_format",
    "max_queued_requests": "max_queue",
    "enable_expert_parallel": "ep_size ep expert_parallel_size",
})  # fmt: skip

OF_REQUESTS = _each({  # our name of the same field of a request
    "max_tokens": "n_predict predict num_predict max_tokens",
    "temperature": "temp temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "response_format": "json_schema",
    "ebnf": "grammar",
    "thinking_budget": "reasoning_budget",
    "chat_template_kwargs": "chat_template_kwargs",
})  # fmt: skip

WITHOUT_COUNTERPART = _each({  # why there is none, and what to do
    "an adapter of llama.cpp's is given by name, as --lora-modules name=FILE.gguf": "lora lora_scaled",
    "a prompt may have 64 images, which are prepared as the model's files say": (
        "limit_mm_per_prompt mm_processor_kwargs"
    ),
    "all layers and their KV are on the device that --device names": (
        "n_gpu_layers gpu_layers cpu_offload_gb swap_space n_gpu_layers_draft "
        "gpu_layers_draft no_kv_offload override_tensor cpu_moe n_cpu_moe num_gpu"
    ),
    "each part of it is an option: --speculative-algorithm, --speculative-draft-model-path, --speculative-num-steps": (
        "speculative_config"
    ),
    "a model may always call the tools of a request; --tool-call-parser names the form in which it writes calls": (
        "enable_auto_tool_choice"
    ),
    "chat templates are always rendered; leave it out": "jinja",
    "prefixes are always cached; leave it out": "enable_prefix_caching",
    "prompts are always prefilled in chunks of --chunked-prefill-size; leave it out": "enable_chunked_prefill",
    "the attention is this server's own; leave it out": "flash_attn flash_attention",
    "how weights are read is not chosen; leave it out": "mlock no_mmap mmap",
    "a model is split over devices by --tp-size alone": "pipeline_parallel_size",
    "any model makes embeddings and scores, without an option (docs/embeddings.md); leave it out": (
        "embedding is_embedding task runner embeddings pooling reranking"
    ),
    "connections are not encrypted; put a proxy in front that does it": "ssl_keyfile ssl_certfile",
    "a model is split evenly over devices, by --tp-size": (
        "distributed_executor_backend tensor_split split_mode"
    ),
    "it is read from the checkpoint: change its config.json": (
        "hf_overrides rope_scaling rope_theta rope_freq_base rope_freq_scale"
    ),
    "set the environment variable HF_TOKEN, or log in with `hf auth login`": "hf_token",
    "set the environment variable HF_HOME": "download_dir",
    "requests are logged with --log-requests alone; leave it out": "disable_log_requests",
    "a request says how many log probabilities it wants; leave it out": "max_logprobs",
    "the KV cache is handed out by single tokens; leave it out": "block_size",
    "there is one tokenizer, the checkpoint's; leave it out": "tokenizer_mode",
    "prefill and decoding are not split over servers": "kv_transfer_config",
    "it is --enable-overlap, which is the default on a GPU": "async_scheduling",
    "one process answers all clients; start more servers and balance the load in front": "api_server_count",
    "choose GPUs with the environment variable CUDA_VISIBLE_DEVICES": "main_gpu",
    "give --model a hub id, a folder, or the path of a .gguf file": "model_url",
    "write it behind the repository: --model org/name:FILE.gguf": "hf_file",
    "leave it out: that is always on": "cont_batching metrics slots props webui warmup",
    "the first steps are tried at the start, before anybody waits for them; leave it out": "no_warmup",
    "a draft model has the context of the model that it drafts for; leave it out": "ctx_size_draft",
    "start the server under numactl": "numa",
    "give it to `draftwing chat` as an argument, or send it to a server": "prompt",
    "a system prompt is the first message of a conversation": "system",
    "`draftwing chat` reads a question from standard input, or send it to a server": "file",
    "it is --keep-alive": "keepalive",
    "the form of an answer is a request's: response_format": "format",
    "models of the hub lie where the environment variable HF_HOME says": "models",
    "it is --log-level debug": "debug",
})  # fmt: skip

SHORT = {  # short options of llama.cpp and vLLM, and their long names
    "-c": "ctx_size", "-ngl": "n_gpu_layers", "-t": "threads", "-tb": "threads_batch",
    "-np": "parallel", "-b": "batch_size", "-ub": "ubatch_size", "-fa": "flash_attn", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v", "-hfr": "hf_repo", "-hff": "hf_file", "-hft": "hf_token",
    "-mu": "model_url", "-cd": "ctx_size_draft",
    "-ngld": "n_gpu_layers_draft", "-mg": "main_gpu", "-ts": "tensor_split", "-sm": "split_mode",
    "-a": "alias", "-s": "seed", "-n": "n_predict", "-p": "prompt", "-f": "file", "-sys": "system",
    "-j": "json_schema", "-to": "timeout", "-cb": "cont_batching", "-ot": "override_tensor", "-cmoe": "cpu_moe",
    "-ncmoe": "n_cpu_moe", "-nkvo": "no_kv_offload", "-v": "verbose", "-lv": "verbosity", "-tp": "tp_size",
    "-pp": "pipeline_parallel_size", "-dp": "dp_size", "-q": "quantization", "-O": "compilation_config",
}  # fmt: skip

_FOREGROUND = (
    "there is no service in the background: a server runs where `draftwing serve` was started, answers `curl "
    "http://127.0.0.1:30000/server_info`, and ends by Ctrl-C or SIGTERM"
)
COMMANDS = _each({  # of other programs, and what to do
    _FOREGROUND: "ps stop start restart status logs",
    "it is `draftwing doctor`": "collect-env check-env info",
    "it is `draftwing serve`": "launch-server launch_server server api-server start-server up",
    "it is `draftwing chat`, or /v1/completions of a server": "complete generate prompt ask",
    "it is `draftwing pull`": "download fetch",
    "it is `draftwing list`": "models tags",
    "it is `draftwing rm`": "delete remove",
    "it is `draftwing bench`": "benchmark",
    "a model is a folder, a .gguf file or a hub id; there is none to create or publish": "create push cp copy",
    "log in with `hf auth login`": "login logout signin signout",
    "it is POST /v1/completions with a list of prompts, or `LLM.generate` in Python": "run-batch batch",
})  # fmt: skip

_WORD, _WHOLE = 0.75, 0.93  # how alike a word and its slip are, and names without their dashes

PREFIXES = ("OLLAMA_", "LLAMA_ARG_")  # of environment variables that are options of Ollama's and llama.cpp's servers


def instead(name: str, options: Collection[str], typed: Callable[[str], str] = repr) -> str:
    """Returns what to do about a name that is none of the `options`; empty where that is not known. typed: how options
    are written where the name stood."""
    for ours in (name, OURS.get(name), OF_REQUESTS.get(name)):
        if ours is not None and ours in options:
            return f"here it is {typed(ours)}"
    if name in OF_REQUESTS:
        return f"it is no option of this server but a field of each request, {OF_REQUESTS[name]!r}"
    if name in WITHOUT_COUNTERPART:
        return WITHOUT_COUNTERPART[name]
    meant = slip(name, [option for option in options if option not in FOREIGN])
    return f"the nearest option is {typed(meant)}" if meant else ""


def slip(name: str, options: Collection[str]) -> str | None:
    """Returns the option that was meant by a name with a spelling slip. Another word is none: it may ask for another
    thing."""

    def near(one: str, other: str, least: float) -> bool:
        return difflib.SequenceMatcher(None, one, other).ratio() >= least

    for option in difflib.get_close_matches(name, options, n=3):
        words = zip_longest(name.split("_"), option.split("_"), fillvalue="")
        joined = name.replace("_", ""), option.replace("_", "")
        if all(near(*pair, _WORD) for pair in words) or near(*joined, _WHOLE):
            return option
    return None


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
