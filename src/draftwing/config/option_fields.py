"""Every option of the engine and its server, once: the command line and `LLM(...)` are both built from the fields.

No torch here: options are checked before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwing.config.adapters import DEFAULT_SLOTS
from draftwing.config.devices import AUTO, DEVICES
from draftwing.config.drafters import CHAIN, LLAMA_TREE, MATCHES, NAMES
from draftwing.config.fields import option
from draftwing.config.trees import MAX_CONFIDENCE, NODES, STEPS, TOPK

# Names that options may have as values. `-` and `_` spellings are those of SGLang's and vLLM's users.
REASONING_PARSERS = (
    "deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "glm45", "interns1", "kimi", "kimi_k2",
    "mimo", "mistral", "qwen3", "qwen3-thinking", "step3",
)  # fmt: skip
TOOL_CALL_PARSERS = ("hermes", "json", "llama3", "llama3_json", "mistral", "qwen", "qwen25", "qwen3")
HARMONY_PARSERS = ("gpt-oss", "openai", "openai_gptoss")  # of reasoning and of calls, which are one format
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
AUX_LAYER_IDS = ("auto", "output", "boundary")

# What other servers' --quantization has for checkpoints that are quantised: here that is read from their config.
OF_CHECKPOINTS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf")

# Other spellings of --dtype, by that which is used here.
DTYPE_SPELLINGS = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip

MODEL, SERVER, MEMORY, SPECULATION = "model", "server", "memory and scheduling", "speculation"
REQUESTS, CUDA, LEARNING = "requests", "CUDA", "learning"
_DEVICES = "{" + ",".join((AUTO, *reversed(DEVICES), "module:Class")) + "}"
_ALGORITHMS = "{" + ",".join((*NAMES, "module:Class")) + "}"


@dataclass(frozen=True)
class OptionFields:
    """What a user can choose, as it was given. `config.options.Options` is that with what follows from it."""

    model: str = option(
        "smollm2", MODEL,
        "an alias (`draftwing list`), hub id (with :Q4_K_M one of its GGUF files), .gguf file, or folder in Hugging "
        "Face's format; may stand without --model",
        aliases=("model_path", "hf_repo"), short=("-m", "-hf"), common=True,
    )  # fmt: skip
    tokenizer_path: str | None = option(None, MODEL, "folder or file of the tokenizer (default: the model's own)")
    revision: str | None = option(None, MODEL, "branch, tag or commit, when the model is a hub id")
    chat_template: str | None = option(
        None, MODEL, "Jinja template in place of the model's own: a file, the text itself, or chatml_tools; that is "
        "one with tools, for models whose messages begin with <|im_start|>", common=True,
    )  # fmt: skip
    trust_remote_code: bool = option(False, MODEL, "no effect: code that comes with a checkpoint is never executed")
    mmproj: str | None = option(
        None, MODEL, "GGUF file of what reads images, of a model in a .gguf file (default: mmproj*.gguf beside it)",
        short=("-mm",),
    )  # fmt: skip
    disable_images: bool = option(
        False, MODEL, "serve a model that reads images without what reads them, which takes memory",
        aliases=("language_model_only", "language_only"),
    )  # fmt: skip
    allow_image_urls: tuple[str, ...] = option(
        (),
        SERVER,
        "hosts from which pictures may be fetched that requests have the addresses of; *: any. Private "
        "networks and this machine never",
    )
    dtype: str = option(
        "auto", MODEL,
        "type of activations and of unquantised weights; auto: on CUDA the checkpoint's 16-bit type, on a CPU bfloat16 "
        "where it is native, else float32. A CPU computes float16, and bfloat16 without AVX-512, in float32",
        choices=("auto", "float32", "bfloat16", "float16"), common=True,
    )  # fmt: skip
    quantization: str = option(
        "auto", MODEL,
        "quantise weights when they are loaded; GPU: fp8 (a scale for each row, or for 16 x 128 values where "
        "activations are fp8, too: see --fp8-activations), w4a16 (4 bits in groups of 128); CPU: q8_0 (fp8 is the "
        "same), q4_0 (w4a16), q4_k, with activations rounded to 8 bits; auto: q8_0 on a CPU with --dtype auto, nothing "
        "on a GPU. A quantised checkpoint stays as it is where there are kernels; none: it is dequantised",
        choices=("auto", "none", "q8_0", "q4_0", "q4_k", "fp8", "w4a16"), common=True,
    )  # fmt: skip
    fp8_activations: str = option(
        "auto", MODEL,
        "GPU of compute capability 9.0: activations in products with weights in fp8, of checkpoints in blocks of "
        "128 x 128 with activation_scheme dynamic, and of --quantization fp8. auto: fp8, quantised by row and 128 "
        "columns, for matrices of 16 million values and more that are no experts; none: 16 bits, slower with many rows",
        choices=("auto", "none"),
    )  # fmt: skip
    load_format: str = option(
        "auto", MODEL, "dummy: random weights from config.json alone, for timing; every output says so",
        choices=("auto", "dummy"),
    )  # fmt: skip
    device: str | type[Any] = option(  # noqa: RUF009
        AUTO, MODEL, "auto: cuda if there is a GPU; module:Class: your own", metavar=_DEVICES,
        common=True,
    )  # fmt: skip
    tp_size: int = option(
        1, MODEL, "GPUs to split the model over; tensor parallel; with --device cpu processes",
        aliases=("tensor_parallel_size", "tp"), minimum=1, maximum=64, common=True,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, MODEL, "each rank of --tp-size has some experts whole, in place of a share of every one",
        aliases=("expert_parallel",),
    )  # fmt: skip
    enable_tp_invariance: bool = option(
        False, MODEL,
        "the same text for each --tp-size that it is given with, also 1: no product is cut along its inputs, which "
        "takes more exchanges between ranks; implies --enable-deterministic-inference",
    )  # fmt: skip
    context_length: int | None = option(
        None, MODEL, "most tokens of prompt and answer (default: the model's)", aliases=("max_model_len",), minimum=2,
        common=True,
    )  # fmt: skip
    lora_modules: tuple[str, ...] = option(
        (), MODEL,
        "adapters (LoRA) by name: name=folder of PEFT's files, or .gguf file; a request has one by its name as `model`",
        aliases=("lora_paths",), metavar="NAME=PATH",
    )  # fmt: skip
    lora_dir: str | None = option(
        None, MODEL, "folder below which /v1/load_lora_adapter finds adapters (default: none are loaded while serving)"
    )
    max_loras: int = option(
        DEFAULT_SLOTS, MODEL, "adapters on the device at once, in requests that run; others are in memory and wait",
        aliases=("max_loras_per_batch",), minimum=1, maximum=256,
    )  # fmt: skip
    max_cpu_loras: int | None = option(
        None, MODEL, "adapters in the host's memory; others are read again from their files, which must not change "
        "(default: all that are loaded)", aliases=("max_loaded_loras",), minimum=1,
    )  # fmt: skip
    max_lora_rank: int | None = option(
        None, MODEL, "largest rank of an adapter (default: that of --lora-modules, 16 at least)", minimum=1,
        maximum=256,
    )  # fmt: skip
    max_lora_head_rank: int | None = option(
        None, MODEL, "largest rank of a draft head of an adapter's own; 0: the model's drafts for all of them "
        "(default: that of --lora-modules, with --learn 32 at least)", minimum=0, maximum=256,
    )  # fmt: skip
    random_seed: int | None = option(
        None, MODEL, "seed of requests that give none of their own (default: random)", minimum=0, maximum=2**63 - 1
    )

    served_model_name: tuple[str, ...] = option(
        (),
        SERVER,
        "names in /v1/models; an answer has the one that was asked for, or the first (default: the model as given)",
        common=True,
    )
    root_path: str | None = option(
        None, SERVER, "path such as /llm under which a proxy publishes the server, whether it strips it or not"
    )
    strict_model_name: bool = option(
        False, SERVER, "refuse requests for other models with 404 model_not_found; else the model there is answers them"
    )
    host: str = option("127.0.0.1", SERVER, "address to listen on; 0.0.0.0: every interface", common=True)
    port: int = option(30000, SERVER, "port to listen on; 0 picks a free one", minimum=0, maximum=65535, common=True)
    log_level: str = option("info", SERVER, "least severe messages to log", choices=LOG_LEVELS)
    log_format: str = option(
        "text", SERVER, "json: one object per line, with time, level, logger, message and fields", choices=LOG_FORMATS
    )
    log_interval: float = option(
        10.0, SERVER, "seconds between lines of the log about running requests; 0: no such lines", minimum=0,
        maximum=86400,
    )  # fmt: skip
    api_key: str | None = option(
        None, SERVER, "key that clients must send, as a bearer token (default: no key)", common=True
    )
    admin_api_key: str | None = option(
        None,
        SERVER,
        "only this key may use /abort_request, /flush_cache, /delete_traffic, /sleep and /wake_up, and load adapters "
        "(default: the one of --api-key)",
    )
    api_key_file: str | None = option(
        None, SERVER, "TOML file of several keys, with names and limits of requests and tokens per minute"
    )
    public_endpoints: str = option(
        "none", SERVER, "what may be read without a key, in addition to /health and the files of the page",
        choices=("none", "metrics", "docs", "all"),
    )  # fmt: skip
    allowed_hosts: str | None = option(
        None, SERVER, "hosts, separated by commas, whose pages may call the server from a browser (CORS), and names "
        "under which a server without a key on a loopback address answers; *: any",
    )  # fmt: skip
    max_body_size: int | None = option(
        None, SERVER, "most bytes of a request's body (default: 4 MiB, 32 MiB where the model reads images)",
        minimum=1024, maximum=2**31 - 1,
    )  # fmt: skip
    max_connections: int = option(1024, SERVER, "most connections of clients at once", minimum=1, maximum=2**20)
    max_queued_requests: int = option(
        8192, SERVER, "most requests that wait for their first token; further ones get HTTP 503", minimum=1,
        maximum=2**20,
    )  # fmt: skip
    max_queued_requests_per_key: int = option(
        2048, SERVER, "the same for each key of --api-key-file; further ones get HTTP 429", minimum=1, maximum=2**20
    )
    response_store_size: int = option(
        64 * 2**20, SERVER, "most bytes of answers of /v1/responses, with their requests, that are kept for an hour "
        "for previous_response_id; 0: keep nothing", minimum=0, maximum=2**40,
    )  # fmt: skip
    batches_dir: str | None = option(
        None, SERVER, "folder that keeps files and batches of /v1/files and /v1/batches (default: there are none)",
        metavar="DIR",
    )  # fmt: skip
    allow_auto_truncate: bool = option(
        False, SERVER, "cut a max_tokens above what the context leaves, in place of an HTTP 400; a prompt never is"
    )
    request_timeout: float | None = option(
        None, SERVER, "seconds after which a request is aborted (default: never)", minimum=0.001
    )
    drain_timeout: float = option(
        30.0, SERVER, "seconds that running requests have after SIGTERM before they are aborted", minimum=0,
        maximum=86400,
    )  # fmt: skip

    models_dir: str | None = option(
        None, SERVER, "folder of models that requests name; .gguf files and folders in Hugging Face's format, each "
        "started by the first request that names it", common=True,
    )  # fmt: skip
    models_cache: bool = option(
        False,
        SERVER,
        "requests name the models in the caches that `draftwing pull` fetches into, too: by hub id or alias",
    )
    models_max: int | None = option(
        None, SERVER, "most models that are loaded at once (default: as many as memory has room for; on a GPU 1)",
        minimum=1, maximum=1024,
    )  # fmt: skip
    models_memory: float | None = option(
        None, SERVER, "GB of memory that loaded models may take together (default: what is free)", minimum=0.001
    )
    keep_alive: str | int = option(
        "5m", SERVER, "time without a request after which a model is stopped, such as 300 or 1h30m; -1: never. A "
        "request of Ollama's API may name another one",
    )  # fmt: skip
    load_timeout: float = option(
        600.0, SERVER, "most seconds that a request waits for its model, for room or a start; then it gets HTTP 503. A "
        "start that takes longer is given up", minimum=0.001, maximum=86400,
    )  # fmt: skip

    watchdog_timeout: float = option(
        300.0, SERVER,
        "most seconds of one engine step, without compilation; a hung engine process is restarted, and one without "
        "any sign of life after at most 20 s", minimum=0.1, maximum=86400,
    )  # fmt: skip
    disable_ui: bool = option(False, SERVER, "serve no page at /")
    ui_show_texts: bool = option(
        False,
        SERVER,
        "show the texts of all requests to everybody who opens the page's engine view, and in traces drafts from "
        "earlier answers",
    )

    enable_metrics: bool = option(False, SERVER, "no effect: /metrics is always there")
    log_requests: bool = option(False, SERVER, "log one line of JSON per request")
    log_requests_level: int = option(
        0, SERVER, "0: sizes and times; 1: also parameters; 2: also the beginning of texts; 3: also all texts",
        minimum=0, maximum=3,
    )  # fmt: skip
    otlp_traces_endpoint: str | None = option(
        None, SERVER, "address to which one OpenTelemetry span per request is sent (install draftwing[otel])"
    )

    sampling_defaults: str = option(
        "model", REQUESTS,
        "defaults of sampling fields that a request does not set: the model's (generation_config.json, the metadata of "
        "a .gguf file, or the alias), or OpenAI's (temperature 1, no limits)", choices=("model", "openai"),
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, REQUESTS, "how the model marks its reasoning; it then has a field of its own",
        choices=(*REASONING_PARSERS, *HARMONY_PARSERS), common=True,
    )  # fmt: skip
    tool_call_parser: str | None = option(
        None, REQUESTS, "how the model writes its tool calls", choices=(*TOOL_CALL_PARSERS, *HARMONY_PARSERS),
        common=True,
    )  # fmt: skip
    logit_processor: str | None = option(
        None, REQUESTS, "module:attribute of a logits processor that requests may name; several with commas"
    )
    constrained_json_whitespace_pattern: str | None = option(
        None,
        REQUESTS,
        r"regular expression of the white space allowed between tokens of JSON (default: one blank, or one or two line "
        r"ends and up to 20 blanks and tabs); '[ \t\n\r]*' is any",
    )
    constrained_json_disable_any_whitespace: bool = option(
        False, REQUESTS, "allow no white space between tokens of JSON"
    )

    mem_fraction_static: float | None = option(
        None, MEMORY,
        "share of memory for weights and KV cache; without it most of a GPU's, on a CPU for the KV cache the smaller "
        "of 2 GiB and a quarter of free memory", aliases=("mem_fraction",), minimum=0.01, maximum=0.99, common=True,
    )  # fmt: skip
    max_total_tokens: int | None = option(
        None, MEMORY, "tokens in the KV cache, in place of a share of the memory", minimum=2
    )
    state_memory_fraction: float = option(
        0.5, MEMORY,
        "of a model with recurrent layers: share of the memory for the KV cache that their states take, two for each "
        "running request and the others for cached prefixes", minimum=0.01, maximum=0.99,
    )  # fmt: skip
    max_running_requests: int | None = option(
        None, MEMORY, "requests that run at once; others wait (default: CPU 64; CUDA 64 to 256, by its memory)",
        minimum=1, maximum=65536, common=True,
    )  # fmt: skip
    chunked_prefill_size: int | None = option(
        None, MEMORY,
        "most prompt tokens of one step; -1: no limit (default: 512 on a CPU, 2048 to 8192 on CUDA, by its memory)",
        minimum=-1,
    )  # fmt: skip
    enable_mixed_chunk: bool = option(
        False, MEMORY,
        "run parts of prompts in the same forward as the requests that decode (default on CUDA with graphs)",
    )  # fmt: skip
    disable_mixed_chunk: bool = option(
        False, MEMORY, "let parts of prompts and the requests that decode take turns; a start captures fewer graphs"
    )
    kv_cache_dtype: str = option(
        "auto", MEMORY,
        "type of keys and values; auto: the model's, and bfloat16 on a CPU with block-quantised weights; fp8_e4m3 "
        "(CUDA) and int8 (CPU): twice the tokens", choices=("auto", "float32", "bfloat16", "fp8_e4m3", "int8"),
    )  # fmt: skip
    disable_radix_cache: bool = option(False, MEMORY, "do not reuse the KV of common prefixes")
    prefix_cache_dir: str | None = option(
        None, MEMORY,
        "folder that keeps the KV of prompts and answers, so that conversations go on after a restart without their "
        "prefill (default: it is forgotten)", metavar="DIR",
    )  # fmt: skip
    prefix_cache_size: float = option(
        16.0, MEMORY, "most GB of --prefix-cache-dir; what saves fewest tokens and was used longest ago goes first",
        minimum=0.001, maximum=2**20,
    )  # fmt: skip
    hicache_size: float = option(
        0.0, MEMORY,
        "GB of host memory for cached prefixes that a GPU's KV cache has no room for: they are copied back in place of "
        "a prefill (default: they are forgotten)",
        minimum=0.0, maximum=2**20,
    )  # fmt: skip
    disable_overlap_schedule: bool = option(False, MEMORY, "wait for every step's result before planning the next")
    enable_overlap: bool = option(False, MEMORY, "plan a step while the one before runs (default on CUDA only)")
    num_threads: int | None = option(
        None, MEMORY, "CPU threads of a forward pass (default: the cores that the process may use)", minimum=1
    )
    cpu_affinity: str | None = option(
        None, MEMORY,
        "processors such as 0-3,8 for the threads of a forward pass, one each: there they stay, however busy these are "
        "(default: where the system puts them, and fewer threads while other programs keep processors busy)",
    )  # fmt: skip

    cuda_graph_max_bs: int | None = option(
        None, CUDA,
        "largest batch that decodes from CUDA graphs; a smaller one starts faster (default: 32 to 128, by the device's "
        "memory)", aliases=("cuda_graph_max_bs_decode",), minimum=1, maximum=65536,
    )  # fmt: skip
    disable_cuda_graph: bool = option(False, CUDA, "launch every kernel of every step, without graphs")
    enable_torch_compile: bool = option(False, CUDA, "run small batches of target and draft with torch.compile")
    torch_compile_max_bs: int = option(32, CUDA, "largest batch that is compiled", minimum=1, maximum=65536)
    enable_deterministic_inference: bool = option(
        False, CUDA,
        "refuse to start where a request's text could depend on the other requests of a batch, or on speculation "
        "(default: it does not, and where device or weights do not allow that, a warning says so)",
    )  # fmt: skip
    fast_numerics: bool = option(
        False, CUDA,
        "sum in whatever order is fastest on a GPU: a request's text may then depend on the other requests of a batch, "
        "and on speculation",
    )  # fmt: skip

    speculative_algorithm: str | type[Any] | None = option(  # noqa: RUF009
        None,
        SPECULATION,
        "what drafts tokens; two together: EAGLE3+NGRAM; module:Class: your own; none: no speculation (default: for an "
        "alias the first of its heads, else NEXTN where the checkpoint has prediction layers, else none)",
        aliases=("speculative_algo",),
        metavar=_ALGORITHMS,
        common=True,
    )
    speculative_draft_model_path: str | None = option(
        None, SPECULATION,
        "draft model or head, given like --model (default: the head of an alias; EAGLE and NEXTN: the model's own "
        "prediction layers)", aliases=("speculative_draft_model", "model_draft", "hf_repo_draft"),
        short=("-md", "-hfd"), common=True,
    )  # fmt: skip
    speculative_second_draft_model_path: str | None = option(
        None, SPECULATION,
        "head of the second drafter of a --speculative-algorithm such as EAGLE3+DFLASH2+SUFFIX (default: the target's "
        "own prediction layers, or the head that comes with the model)",
    )  # fmt: skip
    speculative_draft_model_revision: str | None = option(
        None, SPECULATION, "branch, tag or commit, when the draft model is a hub id"
    )
    speculative_token_map: str | None = option(
        None, SPECULATION,
        "tokens that EAGLE and NEXTN may draft (FR-Spec): a .pt, JSON or text list, org/repo/file of the hub, a count: "
        "so many, the first of the vocabulary, or all (default: the head's list, else all; on a CPU 32768 of more than "
        "100000)",
    )  # fmt: skip
    speculative_aux_layer_ids: str = option(
        "auto", SPECULATION,
        "what the layer ids of an EAGLE-3 config count: outputs of layers, or boundaries between them",
        choices=AUX_LAYER_IDS,
    )  # fmt: skip
    speculative_draft_window_size: int | None = option(
        None, SPECULATION,
        "tokens that a head's or a prediction layer's own attention sees, the newest among them, 0: all; verification "
        "sees all (default: as the head's config says, mostly all, or 1024 where that accepts more in long texts)",
        minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    speculative_lm_head_quantization: str = option(
        "auto", SPECULATION,
        "GPU: type of a copy of the lm_head, the target's or a head's own, that drafts of few rows multiply with: int8 "
        "(a scale for each row), w4a16 (4 bits in groups of 128; the lm_head computes the best 16 logits again); "
        "none: no copy; auto: w4a16 of a large one where there is room", choices=("auto", "none", "int8", "w4a16"),
    )  # fmt: skip
    speculative_num_steps: int | None = option(
        None, SPECULATION,
        f"depth of the draft tree; NGRAM: draft tokens - 1 (default: the head's, else {CHAIN.depth}, on Llama "
        f"{LLAMA_TREE.depth})",
        minimum=STEPS[0], maximum=STEPS[1], common=True,
    )  # fmt: skip
    speculative_eagle_topk: int | None = option(
        None, SPECULATION,
        f"branches of the draft tree; NGRAM: max bfs breadth (default: the head's, else {CHAIN.topk}, on Llama "
        f"{LLAMA_TREE.topk})",
        minimum=TOPK[0], maximum=TOPK[1], common=True,
    )  # fmt: skip
    speculative_num_draft_tokens: int | None = option(
        None, SPECULATION,
        f"most tokens verified in a step; the root is one of them (default: the head's, else {CHAIN.nodes}, on Llama "
        f"{LLAMA_TREE.nodes}; NGRAM: {MATCHES.nodes})", minimum=NODES[0], maximum=NODES[1], common=True,
    )  # fmt: skip
    speculative_fixed_shape: bool = option(
        False, SPECULATION,
        "draft the whole tree at every step (default: smaller trees, or nothing, where that is faster)",
    )  # fmt: skip
    speculative_explain: bool = option(
        False, SPECULATION,
        "log every ten seconds what is drafted and why: the cost and the gain of drafts (also in /server_info)",
    )  # fmt: skip
    replay_interval: int = option(
        0, SPECULATION,
        "replay one of so many answers without drafts while there are no requests, count those that differ in /metrics "
        "and log their receipts; 0: none", minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    speculative_memory: str | None = option(
        None, SPECULATION,
        "file that keeps the answers NGRAM and SUFFIX draft from, by client, for the next start (default: they are "
        "forgotten)", metavar="FILE",
    )  # fmt: skip
    speculative_ngram_min_match_window_size: int = option(
        1, SPECULATION, "fewest last tokens that must match", minimum=1, maximum=MAX_CONFIDENCE
    )
    speculative_ngram_max_match_window_size: int = option(
        12, SPECULATION, "most last tokens that are matched", minimum=1, maximum=MAX_CONFIDENCE
    )
    speculative_ngram_min_bfs_breadth: int = option(1, SPECULATION, "least breadth of a draft", minimum=1, maximum=64)
    speculative_ngram_max_bfs_breadth: int = option(10, SPECULATION, "most breadth of a draft", minimum=1, maximum=64)
    speculative_ngram_branch_length: int = option(
        18, SPECULATION, "most tokens of one remembered continuation", aliases=("speculative_ngram_max_trie_depth",),
        minimum=1, maximum=256,
    )  # fmt: skip
    speculative_ngram_capacity: int = option(
        10_000_000, SPECULATION, "tokens that the shared memory keeps", minimum=1024, maximum=2**31 - 1
    )

    speculative_suffix_max_depth: int = option(
        24, SPECULATION, "most last tokens that SUFFIX matches", minimum=1, maximum=32
    )
    speculative_suffix_min_prob: float = option(
        0.005, SPECULATION, "least estimated probability of what SUFFIX proposes", minimum=0.0001, maximum=1
    )
    speculative_suffix_capacity: int = option(
        1_000_000, SPECULATION, "tokens of prompts and answers that SUFFIX remembers", minimum=1024, maximum=2**28
    )

    simulate_accept_length: float | None = option(
        None, SPECULATION,
        "for timing: accept drafts at random, with the largest tree this many tokens per step on average, the target's "
        "own included; the text is worthless, and every output says so", minimum=1,
    )  # fmt: skip

    learn: str | None = option(
        None, LEARNING,
        "folder that keeps token ids of prompts and answers, for draft heads to be trained with, and these heads "
        "(default: nothing is kept)", metavar="DIR",
    )  # fmt: skip
    learn_size: int = option(
        256 * 2**20, LEARNING, "most bytes of prompts and answers; the oldest of the client that has most go first",
        minimum=2**20, maximum=2**40,
    )  # fmt: skip
    learn_age: float = option(30.0, LEARNING, "days after which they go in any case", minimum=0.001, maximum=36500)
    learn_while_idle: bool = option(
        False, LEARNING, "train the draft head on the traffic that --learn keeps, in a process of low priority that "
        "stands still while requests run, and swap it for a better one"
    )  # fmt: skip
