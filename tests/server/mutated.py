"""Bodies of every route, and what becomes of them when somebody writes them wrong: in a value, a field or a byte."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any, NamedTuple

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/B"}}, "required": ["a"],
          "$defs": {"B": {"enum": [1, "x", None]}}}  # fmt: skip
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["x", "yz"],
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"65": 2.0},
    "ignore_eos": False, "stop_token_ids": [1, 2],
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hé"}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "y"}, {"role": "user", "content": "go"},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "x"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "y"}], "is_error": False}]},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "id": "r", "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "y"},
]  # fmt: skip
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
CHAT_BODY = {
    "model": "m", "messages": CHAT, "max_tokens": 8, "n": 1, "stream": False, "logprobs": True, "top_logprobs": 2,
    "chat_template_kwargs": {"shout": "!"}, "metadata": {"a": "b"}, "user": "u", **SAMPLING,
}  # fmt: skip
PROMPTED = {
    "model": "m", "prompt": ["ab", "cd"], "max_tokens": 8, "n": 2, "echo": True, "logprobs": 2, "stream": False,
    "stream_options": None, **SAMPLING,
}  # fmt: skip
RESPONSE = {
    "model": "m", "input": ITEMS, "instructions": "i", "max_output_tokens": 9, "store": True, "metadata": {},
    "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "temperature": 0.5,
    "text": {"format": {"type": "text"}}, "truncation": "disabled",
}  # fmt: skip
MESSAGE = {
    "model": "m", "max_tokens": 9, "messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "temperature": 0.5,
    "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "stream": False,
}  # fmt: skip
OLLAMA = {
    "model": "m", "stream": False, "keep_alive": "5m", "think": False, "logprobs": True, "top_logprobs": 1,
    "options": {"num_predict": 8, "temperature": 0.5, "seed": 3, "stop": ["x"], "top_k": 5, "num_ctx": 64},
}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT_BODY),
    ("/v1/chat/completions", {"messages": CHAT[-1:], "response_format": JSON_SCHEMA, "max_tokens": 8, "stream": True,
                              "stream_options": {"include_usage": True}, "reasoning_effort": "low",
                              "prediction": {"type": "content", "content": "abc"}}),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}],
                              "tool_choice": "auto", "parallel_tool_calls": True, "max_completion_tokens": 8}),
    ("/v1/chat/completions/input_tokens", CHAT_BODY), ("/apply-template", CHAT_BODY),
    ("/v1/completions", PROMPTED),
    ("/v1/completions", {"prompt": [1, 2, 3], "regex": "a+b?", "max_tokens": 8, "stream": True, "bad_words": ["q"]}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 5}),
    ("/v1/responses", RESPONSE), ("/v1/responses/input_tokens", RESPONSE),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none",
                       "stream": True, "previous_response_id": None}),
    ("/v1/messages", MESSAGE), ("/v1/messages/count_tokens", {"model": "m", "messages": BLOCKS, "system": "s"}),
    ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": BLOCKS[:1], "stream": True,
                      "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "none"},
                      "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/api/chat", {**OLLAMA, "messages": [{"role": "user", "content": "a", "images": []},
                                          {"role": "assistant", "content": "b", "thinking": "t", "tool_calls": [
                                              {"function": {"name": "f", "arguments": {"a": "b"}}}]},
                                          {"role": "tool", "tool_name": "f", "content": "y"}]}),
    ("/api/chat", {**OLLAMA, "messages": CHAT[-1:], "format": SCHEMA, "stream": True}),
    ("/api/generate", {**OLLAMA, "prompt": "a", "system": "s", "raw": False}),
    ("/api/show", {"model": "m", "verbose": True}),
    ("/generate", {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 8, "n": 2, **SAMPLING}, "rid": ["a", "b"],
                   "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [1, 2],
                   "stream": False}),
    ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "json_schema": "{}"},
                   "stream": True}),
    ("/tokenize", {"prompt": ["ab", "c"], "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT[-1:], "add_generation_prompt": True, "chat_template_kwargs": {}}),
    ("/detokenize", {"tokens": [[65, 66], [67]], "skip_special_tokens": True}),
    # `abort_all` would end what the others ask for.
    ("/abort_request", {"rid": "nobody"}), ("/delete_traffic", {"client": "a"}),
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 2, 0.5, -0.5, 1e-320, 1e308, 2**31, -(2**31) - 1, 2**53, 2**63, 2**64, -(2**63),
    10**30, 10**400, "", " ", "a", "auto", "none", "required", "null", "true", "1", "-1", "1e3", "NaN", "é", "\x00",
    "\ud83d", "\U0001f600" * 5, "\u2028", "a" * 5000, "../../etc", "{{ x }}", "{% raise %}", "(" * 50, "(a+)+$", "[",
    "\\", "#/$defs/B", [], [[]], [None], [1, "a"], {}, {"": None}, {"a": {"b": []}}, {"type": "text"},
    {"type": "object"}, {"type": ["string", "null"]}, {"$ref": "#"}, ["x"] * 200, [0] * 3000,
    {"type": "json_schema"}, "<|end|>", "<think>",
]  # fmt: skip
TYPES = (
    "application/json; charset=utf-16", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "",
    "application/vnd.api+json", "application/json;;", "é", "application/JSON",
)  # fmt: skip
BYTES = (
    b"NaN",
    b"Infinity",
    b"-",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b'"',
    b"\\u",
    b"{",
    b"]",
    b",",
    b"//",
    b"1e999",
)


class Asked(NamedTuple):
    path: str
    body: bytes
    headers: dict[str, str]


def asked(draw: random.Random) -> Asked:
    """A request with one to four faults; a few have none."""
    while True:
        with contextlib.suppress(RecursionError):  # Python's limit for what writes it, not for who reads it
            return _asked(draw)


def _asked(draw: random.Random) -> Asked:
    path, body = draw.choice(BODIES)
    body = copy.deepcopy(body)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        body = _changed(draw, body)
    text = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 1, 2))):
        text = _garbled(draw, text)
    headers = {"content-type": "application/json" if draw.random() < 0.95 else draw.choice(TYPES)}
    if draw.random() < 0.02:
        headers["content-encoding"] = draw.choice(("gzip", "identity", "x"))
    if draw.random() < 0.05:
        headers["anthropic-version"] = "2023-06-01"
    return Asked(path, text, headers)


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    """Adds each container with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found.append((value, key))
        _places(inner, found)


def _changed(draw: random.Random, body: Any) -> Any:
    places: list[tuple[Any, Any]] = []
    _places(body, places)
    if not places or draw.random() < 0.01:
        return copy.deepcopy(draw.choice(VALUES))
    holder, key = draw.choice(places)
    other_holder, other_key = draw.choice(places)
    kind = draw.randrange(10)
    if kind < 4:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        holder[key] = copy.deepcopy(other_holder[other_key])
    elif kind == 6:
        holder[key] = draw.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * draw.choice((2, 50))))
    elif kind == 7 and isinstance(holder, dict):
        holder[draw.choice((str(key) + "s", str(key).upper(), "", "x" * 300, "é", "type"))] = holder.pop(key)
    elif kind == 8 and isinstance(holder, dict):
        _, field = draw.choice(places)
        holder[str(field)] = copy.deepcopy(draw.choice(VALUES))
    elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        number = holder[key]
        half = number + 0.5 if abs(number) < 2**53 else 0.5
        holder[key] = draw.choice((-number, half, number * 10**6, str(number)))
    else:
        deep: Any = holder[key]
        for _ in range(draw.choice((3, 30, 100))):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        holder[key] = deep
    return body


def _garbled(draw: random.Random, text: bytes) -> bytes:
    at, kind = draw.randrange(len(text) + 1), draw.randrange(7)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + draw.choice(BYTES) + text[at + draw.randrange(3) :]
    if kind == 2:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if kind == 3:
        return b"\xef\xbb\xbf" + text
    if kind == 4:
        return text.decode("utf-8", "replace").encode("utf-16")
    if kind == 5 and text[:1] == b"{":  # fields twice
        return text[:-1] + b", " + text[1:]
    return text + draw.choice((b" ", b"\n{}", b"x", text[:50]))
