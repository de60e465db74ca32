"""The endpoints beside OpenAI's: /generate, and those of operators."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import uuid
from functools import partial
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import PlainTextResponse, Response

import draftwing
from draftwing.errors import RequestError
from draftwing.process_memory import process_memory
from draftwing.requests.grammar_field import schema_place
from draftwing.requests.refusals import check_text
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import Chats
from draftwing.server.http import json_response, read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.json_encoding import encode
from draftwing.server.native.flushing import Flushing
from draftwing.server.native.probes import add_probes
from draftwing.server.native.rendering import Generated
from draftwing.server.native.schema import (
    AbortRequest,
    DeleteTraffic,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from draftwing.server.openai.schema import ChatRequest
from draftwing.server.schema import split_prompts
from draftwing.server.service import Generation, Service

# Of a model with recurrent layers.
STATE_NUMBERS = ("state_slots", "snapshots", "snapshot_bytes", "snapshot_hits", "snapshot_evictions")


def add_native_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    _add_generate(app, service)
    _add_operations(app, service)
    _add_tokenizer(app, service, chats)


def _add_generate(app: FastAPI, service: Service) -> None:
    @app.put("/generate", include_in_schema=False)
    @app.post("/generate", openapi_extra=schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        async with read_generation(request, GenerateRequest) as body:
            generation, batched = await unless_disconnected(request, _asked(service, body))
            texts = service.texts if body.return_text_in_logprobs else None
        return await respond(request, Generated(generation, batched, texts), body.stream)

    @app.post("/delete_traffic", openapi_extra=schema(DeleteTraffic))
    async def delete_traffic(request: Request) -> dict[str, Any]:
        """Removes what is kept of a client's requests: for training (`--learn`) and for drafts from lookups."""
        body = await read_body(request, DeleteTraffic)
        return await service.delete_traffic(body.client)

    @app.post("/abort_request", openapi_extra=schema(AbortRequest))
    async def abort_request(request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        if body.rid is None and not body.abort_all:
            raise RequestError("give rid, or abort_all: true", "rid")
        service.engine.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)


async def _asked(service: Service, body: GenerateRequest) -> tuple[Generation, bool]:
    """Returns the answers to all prompts, and whether these came as a batch. Raises as `Service.submit`."""
    info, count = service.engine.info, len(split_prompts(*body.prompt())[0])
    names = _names(body.rid, count)
    asked = await service.sampling(body, partial(body.each_sampling, count, info.sampling))
    service.check_room(sum(params.n for params, _ in asked))
    every, batched = await service.encode(*body.prompt())
    await service.check_grammars([(one, _grammar_field(one, body)) for one, _ in asked])
    wanted = body.each_logprobs(len(every), info.hidden_size)
    requests = [
        GenerationRequest(
            "", ids, one if given else one.fit(info.context_length - len(ids)), name=name, logprobs=logprobs
        )
        for ids, (one, given), name, logprobs in zip(every, asked, names, wanted, strict=True)
    ]
    return await service.submit(requests, body), batched


def _add_operations(app: FastAPI, service: Service) -> None:
    engine = service.engine
    add_probes(app, engine)
    flushing = Flushing(engine)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": draftwing.__version__}

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        options, architecture = service.options, engine.info.architecture
        return {
            "model_path": options.model,
            "served_model_name": service.model,
            "tokenizer_path": options.tokenizer_path or options.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": options.load_format,
            "reasoning_parser": options.reasoning_parser,
            "tool_call_parser": options.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "architectures": [architecture],
        }

    @app.get("/props")
    async def props() -> dict[str, Any]:
        """Returns what clients of llama.cpp read of it."""
        options, specials = service.options, service.tokenizer.special_tokens
        return {
            "default_generation_settings": {"n_ctx": engine.info.context_length, "params": engine.info.sampling},
            "total_slots": options.max_running_requests,
            "model_alias": service.model,
            "model_path": options.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": service.tokenizer.chat_template or "",
            "bos_token": specials.get("bos_token", ""),
            "eos_token": specials.get("eos_token", ""),
            "build_info": f"draftwing {draftwing.__version__}",
            "is_sleeping": False,
        }

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return await _server_info(service)

    @app.get("/flush_cache", include_in_schema=False)  # as scripts for SGLang ask; `SiteCheck` refuses browsers
    @app.post("/flush_cache")
    async def flush_cache(
        request: Request, timeout: float = Query(0.0, ge=0, le=3600, allow_inf_nan=False)
    ) -> Response:
        """timeout: seconds to wait for running requests to end."""
        if await unless_disconnected(request, flushing.flush(timeout)):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("The cache is in use: requests are running or waiting.\n", status_code=400)


async def _server_info(service: Service) -> dict[str, Any]:
    stats = await service.engine.stats()
    info = dataclasses.replace(service.engine.info, read_rate=stats["read_rate"])
    options = dataclasses.asdict(info.options)
    # Masked before they are quoted: quotes inside a key would hide it from the search.
    words = sys.argv
    for key in filter(None, (options.pop("api_key"), options.pop("admin_api_key"))):
        words = [word.replace(key, "***") for word in words]
    return {
        **options,
        **info.options.label,
        "model_path": info.options.model,
        "speculative_draft_model_path": service.draft_model_path,
        "served_model_name": service.model,
        "launch_command": shlex.join(words),
        "dtype": info.dtype,
        "device": info.device,
        "capability": dict(info.capability),
        "weight_bytes": dict(info.weight_bytes),
        "floor": _floor(info.read_rate, info.floor, stats["plain_step"]),
        "context_length": info.context_length,
        "max_total_num_tokens": info.max_total_tokens,
        "max_req_input_len": info.context_length - 1,
        "custom_logit_processors": list(info.processors),
        "sampling_defaults": dict(info.defaults),
        "avg_spec_accept_length": stats["accept_length"],
        "speculative": {"explain": stats["explain"]},
        "internal_states": [
            {
                "avg_spec_accept_length": stats["accept_length"],
                "num_running_reqs": stats["running"],
                "num_waiting_reqs": stats["waiting"],
                "memory_usage": {
                    "token_capacity": info.max_total_tokens,
                    "free_tokens": stats["free_tokens"],
                    "cached_tokens": stats["cached_tokens"],
                    **{name: stats[name] for name in STATE_NUMBERS if name in stats},
                },
                "num_verified_rows": stats["verified_rows"],
                "num_committed_tokens": stats["committed_tokens"],
            }
        ],
        "processes": {"engine": stats["memory"], "server": process_memory()},
        "startup_time": service.started,
        "version": draftwing.__version__,
    }


def _floor(rate: float, seconds: float, step: float) -> dict[str, float | None]:
    """rate: bytes that memory gives in a second.  seconds: that reading all weights takes at least.  step: those of a
    step of one request without drafts. All 0 where they are not known."""
    return {
        "memory_gb_s": rate / 1e9 or None,
        "read_ms": 1e3 * seconds or None,
        "plain_step_ms": 1e3 * step or None,
        "share": seconds / step if seconds and step else None,
    }


def _add_tokenizer(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/v1/tokenize", include_in_schema=False)
    @app.post("/tokenize", openapi_extra=schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give exactly one of prompt and messages", "prompt")
        if body.messages is not None:
            size = len(await request.body())
            every = [(await unless_disconnected(request, chats.ids(body.chat, "messages", size)))[0]]
        else:
            asked = service.tokenize(body.prompts(), "prompt", body.add_special_tokens is not False, service.countable)
            every = await unless_disconnected(request, asked)
        batched = isinstance(body.prompt, list)
        found: dict[str, Any] = {
            "tokens": every if batched else every[0],
            "count": [len(ids) for ids in every] if batched else len(every[0]),
            "max_model_len": service.engine.info.context_length,
            "token_strs": None,
        }

        def rendered(large: bool) -> bytes:
            if body.return_token_strs:
                pieces = [[service.tokenizer.piece(token) for token in ids] for ids in every]
                found["token_strs"] = pieces if batched else pieces[0]
            return encode(found, large)

        return json_response(await service.pools.render(sum(map(len, every)), rendered))

    @app.post("/apply-template", openapi_extra=schema(ChatRequest))
    async def apply_template(request: Request) -> Response:
        """Returns the prompt that a chat completion would have, as llama.cpp does."""
        body = await read_body(request, ChatRequest)
        text, _ = await unless_disconnected(request, chats.text(body.chat, len(await request.body())))
        return json_response(await service.pools.render(len(text), partial(encode, {"prompt": text})))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Returns what a client needs that has no tokenizer of its own, by the names of tokenizer_config.json."""
        tokenizer = service.tokenizer
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' for a tokenizer.json
            **tokenizer.special_tokens,
            "model_max_length": service.engine.info.context_length,
            "chat_template": tokenizer.chat_template,
        }

    @app.post("/v1/detokenize", include_in_schema=False)
    @app.post("/detokenize", openapi_extra=schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        every, batched = body.batch()
        asked = service.detokenize(every, "tokens", body.skip_special_tokens is not False)
        texts = await unless_disconnected(request, asked)
        text = texts if batched else texts[0]
        return json_response(encode(dict.fromkeys(("text", "prompt", "content"), text)))  # SGLang, vLLM, llama.cpp


def _names(rid: str | list[str] | None, prompts: int) -> list[str]:
    """Returns the id of each prompt: distinct ones unless the client chose one for all, which is the job's."""
    if isinstance(rid, list) and len(rid) != prompts:
        raise RequestError(f"rid must hold one id per prompt; found {len(rid)} for {prompts}", "rid")
    if isinstance(rid, list):
        return [check_text(name, "rid") for name in rid]
    return [""] * prompts if isinstance(rid, str) else [uuid.uuid4().hex for _ in range(prompts)]


def _grammar_field(params: SamplingParams, body: GenerateRequest) -> str | None:
    given = body.sampling_params
    for field in ("structured_outputs", "guided_decoding"):
        if isinstance(given, dict) and given.get(field) is not None and params.grammar is not None:
            return f"sampling_params.{field}"
    if isinstance(given, dict) and given.get("response_format") is not None:
        return f"sampling_params.response_format{schema_place(given['response_format'])}"
    kind = params.grammar.kind if params.grammar is not None else None
    return kind and f"sampling_params.{'response_format' if kind == 'json_object' else kind}"
