"""Bodies of responses, as OpenAI's clients and `/generate`'s expect them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from draftwing.answer import Answer
from draftwing.server.generation import Generation
from draftwing.server.http import event
from draftwing.server.protocol import OpenAIBody

Kind = Literal["chat", "text"]
_OBJECTS = {"chat": ("chat.completion", "chat.completion.chunk"), "text": ("text_completion", "text_completion")}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _usage(generation: Generation) -> dict[str, Any]:
    return usage(generation.prompt_tokens, generation.completion_tokens)


def _ending(answer: Answer) -> dict[str, Any]:
    reason = answer.finish_reason
    return {"finish_reason": reason and reason["type"], "matched_stop": answer.matched_stop}


def _head(kind: Kind, generation: Generation, model: str, chunk: bool) -> dict[str, Any]:
    return {
        "id": generation.job.id,
        "object": _OBJECTS[kind][chunk],
        "created": int(time.time()),
        "model": model,
    }


def completion(kind: Kind, generation: Generation, model: str) -> dict[str, Any]:
    """The body of a finished `/v1/chat/completions` ("chat") or `/v1/completions` ("text") request."""
    choices = []
    for answer in generation.answers:
        message = {"role": "assistant", "content": answer.text, "reasoning_content": None}
        content: dict[str, Any] = {"message": message} if kind == "chat" else {"text": answer.text}
        choices.append({"index": answer.index, **content, "logprobs": None, **_ending(answer)})
    return {
        **_head(kind, generation, model, chunk=False),
        "choices": choices,
        "usage": _usage(generation),
        "metadata": {"weight_version": "default"},
    }


async def completion_events(kind: Kind, generation: Generation, model: str, body: OpenAIBody) -> AsyncIterator[str]:
    """The same as events: for each answer its role (chat), text as it comes and the finish reason; then usage."""
    head = _head(kind, generation, model, chunk=True)

    def chunk(answer: Answer, content: dict[str, Any], ended: bool = False) -> str:
        ending = _ending(answer) if ended else {"finish_reason": None, "matched_stop": None}
        data = {**head, "choices": [{"index": answer.index, **content, "logprobs": None, **ending}]}
        if body.continuous_usage:
            data["usage"] = usage(answer.prompt_tokens, len(answer.token_ids))
        elif body.include_usage:
            data["usage"] = None
        return event(data)

    greeted: set[int] = set()
    async for answer, text in generation:
        if kind == "chat" and answer.index not in greeted:
            greeted.add(answer.index)
            yield chunk(answer, {"delta": {"role": "assistant", "content": "", "reasoning_content": None}})
        if text:
            yield chunk(
                answer, {"delta": {"content": text, "reasoning_content": None}} if kind == "chat" else {"text": text}
            )
        if answer.finish_reason is not None:
            yield chunk(answer, {"delta": {}} if kind == "chat" else {"text": ""}, ended=True)
    if body.include_usage:
        yield event({**head, "choices": [], "usage": _usage(generation)})


def generated(answer: Answer) -> dict[str, Any]:
    """One answer of `/generate`, finished or as it is now."""
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": answer.meta_info()}


async def generated_events(generation: Generation, batched: bool) -> AsyncIterator[str]:
    """The answers of `/generate` with the text so far; `index` tells those of a batch apart."""
    async for answer, text in generation:
        if text or answer.finish_reason is not None:
            yield event(generated(answer) | ({"index": answer.index} if batched else {}))


def model_card(name: str, created: int, context_length: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "draftwing",
        "root": name,
        "parent": None,
        "max_model_len": context_length,
    }
