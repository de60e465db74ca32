"""The tokenizer's endpoints, as SGLang, vLLM and llama.cpp name them."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import model_validator

from draftwing.errors import RequestError
from draftwing.requests.refusals import check_text
from draftwing.server.chat import Chat, Chats
from draftwing.server.endpoints import read_body, schema, unless_disconnected
from draftwing.server.http import encode, json_response
from draftwing.server.openai.schema import ChatRequest, ChatTool, Message, conversation, offered
from draftwing.server.schema import MAX_PROMPTS, Body, TokenIds
from draftwing.server.service import Service


class TokenizeRequest(Body):
    """Body of /tokenize: one of `prompt`, a text or several, and `messages`, a conversation."""

    model: str | None = None
    prompt: str | list[str] | None = None
    content: str | None = None  # as llama.cpp names the prompt
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # as llama.cpp names it, where a text has none of them by default
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[ChatTool] | None = None

    @model_validator(mode="after")
    def _named(self) -> TokenizeRequest:
        if self.prompt is None:
            self.prompt = self.content
        if self.add_special_tokens is None:
            self.add_special_tokens = bool(self.add_special) if self.content is not None else self.add_special
        return self

    def chat(self) -> Chat:
        """Returns the conversation. Raises RequestError for what it cannot be."""
        return Chat(
            conversation(self.messages or []),
            offered(self.tools or (), None)[0],
            template=self.chat_template_kwargs or {},
            continued=bool(self.continue_final_message),
            prompted=self.add_generation_prompt is not False,
        )

    def prompts(self) -> list[str]:
        every = self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        if len(every) > MAX_PROMPTS or not every:
            raise RequestError(f"prompt takes from 1 to {MAX_PROMPTS} texts; found {len(every)}", "prompt")
        for text in every:
            check_text(text, "prompt")
        return every


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds | list[TokenIds]
    skip_special_tokens: bool | None = None

    def batch(self) -> tuple[list[list[int]], bool]:
        """Lists of token ids, and whether they came as several."""
        batched = bool(self.tokens) and isinstance(self.tokens[0], list)
        every: list[Any] = self.tokens if batched else [self.tokens]
        if len(every) > MAX_PROMPTS:
            raise RequestError(f"tokens takes at most {MAX_PROMPTS} lists; found {len(every)}", "tokens")
        return every, batched


def add_tokenizer_routes(app: FastAPI, service: Service, chats: Chats) -> None:
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
