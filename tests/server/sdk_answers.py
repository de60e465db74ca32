"""Random answers of other servers, made from the types of their clients, and histories that hold them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, create_model

WORDS = ("", "a", "né", "the cat", "订单", "😀\n", "<think>", '{"a": [1]}', "x y z", "&", "0")
ASK = {"role": "user", "content": "hi"}


# What servers without a client of their own write: the fields of their sources.
class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str
    type: Literal["function"]
    function: _Function


class _IndexedCall(_Call):
    index: int | None


class LlamaCppMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[_Call] | None


class SGLangMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[_IndexedCall] | None


class OpenRouterDetail(BaseModel):
    type: Literal["reasoning.text", "reasoning.summary", "reasoning.encrypted"]
    text: str | None
    data: str | None
    signature: str | None
    format: str | None
    index: int | None


class CopilotMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_text: str | None
    reasoning_opaque: str | None
    tool_calls: list[_IndexedCall] | None


class OpenRouterMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None
    reasoning_details: list[OpenRouterDetail] | None
    tool_calls: list[_IndexedCall] | None


class _MistralText(BaseModel):
    type: Literal["text"]
    text: str


class _MistralReference(BaseModel):
    type: Literal["reference"]
    reference_ids: list[int]


class _MistralThinking(BaseModel):
    type: Literal["thinking"]
    thinking: list[_MistralText | _MistralReference]


class MistralMessage(BaseModel):
    role: Literal["assistant"]
    content: str | list[_MistralText | _MistralThinking | _MistralReference]
    tool_calls: list[_IndexedCall] | None


class Maker:
    """Makes values of types. Lists have up to three entries, and what is optional is there half of the time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, kind: Any, depth: int = 0) -> Any:
        draw, origin, args = self.random, typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
            return self.of(kind.__value__, depth)
        if origin is typing.Annotated:
            return self.of(args[0], depth)
        if origin in (typing.Union, types.UnionType):
            return self.of(draw.choice(args), depth)
        if origin is Literal:
            return draw.choice(args)
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return self.model(kind, depth)
        if origin in (list, Sequence) or kind is list:
            inner = args[0] if args else object
            return [self.of(inner, depth + 1) for _ in range(draw.randint(0, max(0, 3 - depth)))]
        if origin in (dict, Mapping) or kind is dict:
            return {
                draw.choice(WORDS): draw.choice((1, "v", None, [True], {"k": "v"})) for _ in range(draw.randint(0, 2))
            }
        if kind is type(None):
            return None
        plain: dict[Any, Callable[[], Any]] = {
            str: lambda: draw.choice(WORDS), int: lambda: draw.randint(0, 9), float: lambda: draw.random(),
            bool: lambda: draw.random() < 0.5, bytes: lambda: "aGk=",
        }  # fmt: skip
        return plain.get(kind, lambda: draw.choice((1, "v", None, {"k": [0]})))()

    def model(self, kind: type[BaseModel], depth: int = 0) -> dict[str, Any]:
        made = {field.alias or name: self.of(field.annotation, depth + 1) for name, field in kind.model_fields.items()}
        required = {field.alias or name for name, field in kind.model_fields.items() if field.is_required()}
        # Clients leave what is null out, or do not.
        keeps = self.random.random() < 0.5
        return {name: one for name, one in made.items() if one is not None or name in required or keeps}


def _output(maker: Maker, *kinds: str) -> Any:
    """What a tool gave: a text, parts, null or nothing."""
    parts = [{"type": maker.random.choice(kinds), "text": maker.of(str)} for _ in range(2)]
    return maker.random.choice([maker.of(str), parts, [], None])


def _numbered(calls: Sequence[dict[str, Any]]) -> None:
    for i, call in enumerate(calls):
        call["id"] = f"c{i}"


def chat(kind: type[BaseModel]) -> Callable[[Maker], dict[str, Any]]:
    def history(maker: Maker) -> dict[str, Any]:
        answer = maker.model(kind)
        calls = answer.get("tool_calls") or []
        _numbered(calls)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": _output(maker, "text")} for call in calls]
        for result in results:
            if result["content"] is None and maker.random.random() < 0.5:
                del result["content"]
        if answer.get("function_call"):
            results.append({"role": "function", "name": answer["function_call"]["name"], "content": maker.of(str)})
        return {"model": "m", "messages": [ASK, answer, *results, ASK]}

    return history


def messages(block: Any) -> Callable[[Maker], dict[str, Any]]:
    def history(maker: Maker) -> dict[str, Any]:
        blocks = [maker.of(block) for _ in range(maker.random.randint(1, 4))]
        calls = [one for one in blocks if one["type"] == "tool_use"]
        _numbered(calls)
        results = [{"type": "tool_result", "tool_use_id": call["id"]} for call in calls]
        for result in results:
            if (output := _output(maker, "text")) is not None:
                result["content"] = output
        later = [*results, {"type": "text", "text": "go on"}]
        said = [{"role": "assistant", "content": blocks}, {"role": "user", "content": later}]
        return {"model": "m", "max_tokens": 9, "messages": [ASK, *said]}

    return history


def responses(item: Any) -> Callable[[Maker], dict[str, Any]]:
    def history(maker: Maker) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for i in range(maker.random.randint(1, 4)):
            one = maker.of(item)
            items.append(one)
            if "call_id" in one or one["type"] in ("function_call_output", "local_shell_call_output"):
                one["call_id"] = f"c{i}"
            if one["type"] in CLIENT_RUN:
                kind = CLIENT_RUN[one["type"]]
                output: Any = _output(maker, "input_text", "output_text")
                if kind == "shell_call_output":
                    output = [{"stdout": maker.of(str), "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
                items.append({"type": kind, "call_id": f"c{i}", "output": output})
            elif one["type"] in CLIENT_RUN.values():
                call = next(name for name, kind in CLIENT_RUN.items() if kind == one["type"])
                items[-1:-1] = [{"type": call, "call_id": f"c{i}", "name": "f", "arguments": "{}", "input": "x"}]
                if call not in ("function_call", "custom_tool_call"):
                    items[-2] = {"type": call, "call_id": f"c{i}", "id": f"c{i}", "action": {"type": "exec"}}
                elif call == "function_call":
                    del items[-2]["input"]
                else:
                    del items[-2]["arguments"]
            for tool in one.get("tools") or [] if one["type"] in ("additional_tools", "tool_search_output") else []:
                _usable(tool)
        return {"model": "m", "input": [ASK, *items, ASK]}

    return history


CLIENT_RUN = {f"{name}_call": f"{name}_call_output"
              for name in ("function", "custom_tool", "local_shell", "shell", "apply_patch")}  # fmt: skip


def _usable(tool: dict[str, Any]) -> None:
    """Names tools, which are distinct, and gives a grammar its definition: those of answers are."""
    for i, one in enumerate([tool, *(tool.get("tools") or [])]):
        one["name"] = f"tool{id(one)}_{i}"
        if one.get("parameters") is not None:
            one["parameters"] = {"type": "object", "properties": {}}
        if isinstance(one.get("format"), dict):
            one["format"] = {"type": "text"}
        if one.get("allowed_callers"):
            one["allowed_callers"] = ["direct"]
    if tool["type"] == "namespace":
        tool["tools"] = tool["tools"] or [{"type": "function", "name": f"inner{id(tool)}", "parameters": {}}]


def ollama(kind: type[BaseModel]) -> Callable[[Maker], dict[str, Any]]:
    def history(maker: Maker) -> dict[str, Any]:
        answer = {**maker.model(kind), "role": "assistant", "images": None}
        calls = answer.get("tool_calls") or []
        results = [{"role": "tool", "tool_name": call["function"]["name"], "content": maker.of(str)} for call in calls]
        return {"model": "m", "stream": False, "messages": [ASK, answer, *results, ASK]}

    return history


def histories() -> dict[str, tuple[str, Callable[[Maker], dict[str, Any]]]]:
    """By whose answers they hold: the path, and what makes one."""
    import anthropic.types
    import anthropic.types.beta
    import openai.types.chat
    import openai.types.responses

    completions, answers = "/v1/chat/completions", "/v1/messages"
    found = {
        "openai": (completions, chat(openai.types.chat.ChatCompletionMessage)),
        "responses": ("/v1/responses", responses(openai.types.responses.ResponseOutputItem)),
        "anthropic": (answers, messages(anthropic.types.ContentBlock)),
        "anthropic-beta": (answers, messages(anthropic.types.beta.BetaContentBlock)),
    }
    vllm = create_model("VLLMMessage", __base__=openai.types.chat.ChatCompletionMessage, reasoning=(str | None, ...))
    for kind in (vllm, LlamaCppMessage, SGLangMessage, CopilotMessage, OpenRouterMessage, MistralMessage):
        found[kind.__name__] = completions, chat(kind)
    # It is in `draftwing[clients]`; without it, tests/server/ollama is a package of that name.
    with contextlib.suppress(ImportError, AttributeError):
        found["ollama"] = "/api/chat", ollama(importlib.import_module("ollama").Message)
    return found
