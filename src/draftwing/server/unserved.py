"""Routes of other servers that this one does not have, with what there is instead. The table makes the answers, a page
(docs/routes.md) and the tests; without torch and FastAPI, as tools read it."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Unserved(NamedTuple):
    """whose: API.  paths: separated by spaces; `*` is a part of one or more characters, and `/**` whatever follows, if
    anything.  instead: a sentence."""

    whose: str
    paths: str
    instead: str


_EMBEDS = "this server generates text; run one of an embedding or reranking model, such as llama.cpp or vLLM, beside it"
_MEDIA = "this server reads and writes text alone"
_STORES = "nothing is stored here but responses for an hour; send what the model is to read in the request itself"
_TRAINS = "train a draft head offline with `draftwing train`; the target model is never changed"
_LOADED = "the model is loaded when the server starts, with --model, and stays so"
_WEIGHTS = "weights stay as they were loaded; start a server with --model for others"
_HEADS = (
    "GET /health says whether the engine lives; /readiness whether requests are taken, /liveness whether to restart"
)
_ONE_BY_ONE = "send the requests one by one, at once: the engine batches them by itself"
_CHAT = "POST /v1/chat/completions is the nearest"

UNSERVED = (
    Unserved("OpenAI, llama.cpp, vLLM", "/v1/embeddings /embeddings /embedding /v1/embed /v2/embed", _EMBEDS),
    Unserved("Jina, Cohere, vLLM, llama.cpp", "/v1/rerank /v2/rerank /rerank /v1/reranking /reranking", _EMBEDS),
    Unserved(
        "vLLM, SGLang",
        "/v1/score /score /pooling /v1/pooling /classify /v1/classify /v1/classifications /encode",
        _EMBEDS,
    ),
    Unserved("OpenAI", "/v1/images/** /v1/videos/** /images/generations", _MEDIA),
    Unserved("OpenAI, llama.cpp", "/v1/audio/** /audio/** /v1/realtime/** /v1/live/** /v1/ocr", _MEDIA),
    Unserved("OpenAI, Anthropic", "/v1/files/** /v1/uploads/** /v1/vector_stores/**", _STORES),
    Unserved("OpenAI", "/v1/batches/** /v1/chat/completions/batch", _ONE_BY_ONE),
    Unserved(
        "OpenAI", "/v1/moderations", "there is no model for it; ask the served one for a verdict, with a JSON schema"
    ),
    Unserved(
        "OpenAI",
        "/v1/assistants/** /v1/threads/** /v1/conversations/**",
        "POST /v1/responses goes on from earlier ones by previous_response_id; agents run in the client",
    ),
    Unserved("OpenAI", "/v1/fine_tuning/** /v1/fine-tunes/** /v1/evals/**", _TRAINS),
    Unserved(
        "OpenAI, Anthropic",
        "/v1/containers/** /v1/skills/** /v1/agents/** /v1/sessions/** /v1/environments/** /v1/vaults/** "
        "/v1/tunnels/** "
        "/v1/memory_stores/** /v1/deployments/** /v1/deployment_runs/** /v1/dreams/** /v1/chatkit/** /v1/decisions/** "
        "/v1/user_profiles/**",
        "agents and their tools run in the client; POST /v1/responses and /v1/messages are their two sides here",
    ),
    Unserved(
        "OpenAI, Anthropic",
        "/v1/organization/** /v1/organizations/** /v1/projects/** /v1/safety/** /v1/compliance/** "
        "/v1/webhook_endpoints/** "
        "/v1/webhook_event_types/** /v1/content_provenance_checks/** /v1/usage /v1/dashboard/**",
        "there are no accounts; --api-key-file has keys and their limits, /metrics what was used",
    ),
    Unserved("OpenAI", "/v1/edits /v1/engines/**", f"OpenAI has ended it; {_CHAT}"),
    Unserved(
        "OpenAI",
        "/v1/responses/compact /responses/compact",
        "a conversation is not shortened here; send fewer items, or ask for a summary by POST /v1/responses",
    ),
    Unserved(
        "OpenAI",
        "/v1/responses/*/cancel /responses/*/cancel",
        "background is not supported, so nothing runs on without its client: end the connection to cancel",
    ),
    Unserved(
        "OpenAI",
        "/v1/chat/completions/chatcmpl* /v1/chat/completions/chatcmpl*/messages",
        "chat completions are not stored; POST /v1/responses stores its answers for an hour",
    ),
    Unserved("Anthropic", "/v1/messages/batches/**", _ONE_BY_ONE.replace("requests", "messages")),
    Unserved("Anthropic", "/v1/complete", "POST /v1/messages is what took its place"),
    Unserved("Ollama", "/api/embed /api/embeddings", _EMBEDS),
    Unserved(
        "Ollama",
        "/api/pull /api/push /api/create /api/copy /api/delete /api/blobs/**",
        f"{_LOADED}; `draftwing pull` and `draftwing rm` change what is on the disk",
    ),
    Unserved("Ollama", "/api/me /api/signout /api/user/**", "there are no accounts; --api-key-file has keys"),
    Unserved("Ollama", "/api/web_search /api/web_fetch /api/experimental/**", "tools run in the client"),
    Unserved(
        "llama.cpp",
        "/completion",
        "POST /v1/completions takes the same prompt and samplers; max_tokens is its n_predict",
    ),
    Unserved(
        "llama.cpp, Mistral", "/infill /v1/fim/completions", "put the model's own markers into POST /v1/completions"
    ),
    Unserved(
        "llama.cpp", "/slots/**", "GET /v1/loads says how many requests run and wait; prefixes are cached by themselves"
    ),
    Unserved(
        "llama.cpp, vLLM, SGLang",
        "/lora-adapters /v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter "
        "/unload_lora_adapter /load_lora_adapter_from_tensors",
        "merge the adapter into the weights, and serve these",
    ),
    Unserved("llama.cpp", "/models/load /models/unload /models/sse", _LOADED),
    Unserved(
        "llama.cpp", "/v1/stream/** /v1/streams /v1/chat/completions/control", "a stream ends with its connection"
    ),
    Unserved(
        "llama.cpp", "/tools /cors-proxy", "tools run in the client; --allowed-hosts lets pages of other hosts ask"
    ),
    Unserved(
        "vLLM, SGLang", "/sleep /wake_up /is_sleeping /release_memory_occupation /resume_memory_occupation", _LOADED
    ),
    Unserved(
        "vLLM, SGLang",
        "/pause /resume /is_paused /pause_generation /continue_generation",
        "POST /abort_request ends requests; the server drains by itself when it is to end",
    ),
    Unserved("vLLM", "/abort_requests", "POST /abort_request, with rid or abort_all"),
    Unserved("vLLM", "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache", "POST /flush_cache"),
    Unserved("vLLM", "/load", "GET /v1/loads"),
    Unserved("vLLM", "/inference/v1/generate", "POST /generate takes and gives token ids"),
    Unserved(
        "vLLM",
        "/v1/chat/completions/render /v1/completions/render",
        "POST /apply-template gives the prompt, POST /tokenize its tokens",
    ),
    Unserved(
        "vLLM",
        "/collective_rpc /scale_elastic_ep /is_scaling_elastic_ep /get_world_size",
        "the engine has no such commands while it runs",
    ),
    Unserved(
        "vLLM, SGLang",
        "/start_profile /stop_profile /configure_logging /freeze_gc /slow_down /set_internal_state "
        "/set_trace_level /start_expert_distribution_record /stop_expert_distribution_record "
        "/dump_expert_distribution_record",
        "/metrics, --log-level and traces tell what the engine does: docs/observability.md",
    ),
    Unserved(
        "SGLang",
        "/update_weights* /init_weights_update_group /destroy_weights_update_group /get_weights_by_name "
        "/weights_checker /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance "
        "/update_weight_version",
        _WEIGHTS,
    ),
    Unserved("vLLM", "/init_weight_transfer_engine /start_weight_update /finish_weight_update", _WEIGHTS),
    Unserved("SGLang", "/open_session /close_session", "prompts that begin alike share a cache by themselves"),
    Unserved("SGLang", "/parse_function_call /separate_reasoning", "POST /v1/chat/completions does it for its answers"),
    Unserved(
        "SGLang", "/clear_hicache_storage_backend /hicache/**", "the cache is in memory; POST /flush_cache empties it"
    ),
    Unserved("SGLang", "/get_load", "GET /v1/loads"),
    Unserved("SGLang", "/generate_from_file /vertex_generate", "POST /generate"),
    Unserved("TGI", "/generate_stream", 'POST /generate with text in place of inputs and "stream": true'),
    Unserved("TGI", "/info", "GET /model_info and GET /server_info"),
    Unserved("TGI", "/chat_tokenize", "POST /tokenize takes messages"),
    Unserved("SageMaker, Vertex AI", "/invocations /predict", f"{_CHAT}"),
    Unserved(
        "SageMaker, Kubernetes, TGI",
        "/ping /healthz /livez /readyz /ready /live /startup /status /v1/health /v2/health/** /health/*",
        _HEADS,
    ),
    Unserved("KServe", "/v2/models/**", "GET /v1/models, POST /v1/chat/completions"),
    Unserved("LM Studio", "/api/v0/models/**", "GET /v1/models"),
    Unserved(
        "LM Studio",
        "/api/v0/chat/completions /api/v0/completions /api/v1/chat",
        "POST /v1/chat/completions and /v1/completions",
    ),
    Unserved("LM Studio", "/api/v0/embeddings", _EMBEDS),
    Unserved("LM Studio", "/api/v1/models/load /api/v1/models/unload /api/v1/models/download/**", _LOADED),
    Unserved(
        "OpenRouter",
        "/api/v1/credits /api/v1/key /api/v1/keys/** /api/v1/generation /v1/credits /v1/key",
        "there are no accounts; --api-key-file has keys and their limits",
    ),
    Unserved(
        "KoboldCpp",
        "/api/v1/generate /api/latest/** /api/extra/** /api/v1/model /api/v1/info/** /api/v1/config/**",
        "POST /v1/completions, or POST /api/generate as Ollama has it",
    ),
    Unserved("KoboldCpp", "/sdapi/**", _MEDIA),
    Unserved("text-generation-webui", "/v1/internal/**", "GET /model_info, POST /tokenize and /detokenize"),
    Unserved("Azure", "/openai/deployments/**", "use OpenAI's client, with a base address that ends in /v1"),
    Unserved(
        "Gemini",
        "/v1beta/** /v1/models/*:generateContent /v1/models/*:streamGenerateContent",
        f"{_CHAT}; Gemini's API is not spoken",
    ),
    Unserved("Cohere", "/v1/chat /v2/chat /v1/generate", _CHAT),
    Unserved(
        "DeepSeek, LiteLLM",
        "/user/balance /key/** /spend/** /model/info",
        "there are no accounts; GET /model_info tells of the model",
    ),
)


@cache
def _patterns() -> list[tuple[re.Pattern[str], Unserved]]:
    return [(re.compile(_expression(path)), row) for row in UNSERVED for path in row.paths.split()]


def _expression(path: str) -> str:
    escaped = re.escape(path)
    return escaped.replace(r"/\*\*", "(?:/.*)?").replace(r"\*", "[^/]+")


def unserved(path: str) -> Unserved | None:
    """Returns the row of the first pattern that a path has."""
    return next((row for pattern, row in _patterns() if pattern.fullmatch(path)), None)
