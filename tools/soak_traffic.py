"""Random requests of all dialects, and clients that send them: what a soak asks of a server.

Some clients leave in the middle of an answer, others do not read it. `Outcome` has what they saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = [
    "river", "stone", "light", "paper", "window", "seven", "green", "music", "number", "winter", "garden", "letter",
    "road", "engine", "cloud", "simple",
]  # fmt: skip
SAMPLE = 24  # answers that are asked for again
GRAMMARS = {"regex", "ebnf", "json_schema"}
PROMPTS = ("messages", "prompt", "text", "input", "prediction")
PATHS = [
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}


@dataclass
class Asked:
    """One request: where it goes, and whether its answer is the same each time."""

    path: str
    body: dict[str, Any]
    repeats: bool = True


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    sample: list[tuple[Asked, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def text(generator: random.Random, most: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))


Wish = Callable[[random.Random], dict[str, Any]]
# What a request may ask for beside its prompt, in the words of all of these dialects.
WISHES: dict[str, Wish] = {
    "plain": lambda generator: {},
    "salts": lambda generator: {"cache_salt": generator.choice(WORDS)},
    "priorities": lambda generator: {"priority": generator.randint(-2, 2)},
    "no drafts": lambda generator: {"speculative": "off"},
    "filters": lambda generator: {"top_k": 20, "min_p": 0.05},
    "penalties": lambda generator: {"frequency_penalty": 0.4, "logit_bias": {"17": -5}},
    "stops": lambda generator: {"stop": generator.choices(WORDS, k=3)},
    "stop_regex": lambda generator: {"stop_regex": f"{generator.choice(WORDS)[:3]}|[0-9]{{{generator.randint(2, 5)}}}"},
    "regex": lambda generator: {"regex": f"(yes|no|{generator.choice(WORDS)}) [a-z]{{1,{generator.randint(2, 30)}}}"},
    "ebnf": lambda generator: {
        "ebnf": 'root ::= part ("," part)* \npart ::= [a-z]+ | "' + generator.choice(WORDS) + '"'
    },
    "schemas": lambda generator: {"json_schema": json.dumps(schema(generator))},
}
# Kinds of requests to /v1/completions, or to the path that is named; "left": by clients that leave.
KINDS: dict[str, Wish] = WISHES | {
    "long": lambda generator: {},
    "streams": lambda generator: {"stream": True},
    "left": lambda generator: {"stream": True, "max_tokens": 200},
    "n": lambda generator: {"n": generator.randint(5, 40)},
    "logprobs": lambda generator: {"logprobs": 3, "echo": True},
    "tools": lambda generator: {"path": "/v1/chat/completions", "tools": [TOOL]},
    "predictions": lambda generator: {
        "path": "/v1/chat/completions", "prediction": {"type": "content", "content": text(generator, 20)},
    },
    "responses": lambda generator: {"path": "/v1/responses"},
    "messages": lambda generator: {"path": "/v1/messages"},
}  # fmt: skip


async def many(
    client: httpx.AsyncClient, kind: str, count: int, clients: int, longest: int, generator: random.Random
) -> None:
    """Sends so many requests of one kind, short ones but for "long"; longest: words of their prompts."""
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            body = {"temperature": 0.7, "max_tokens": 16, "prompt": text(generator, longest if kind == "long" else 6)}
            body |= KINDS[kind](generator)
            path = body.pop("path", "/v1/completions")
            if path != "/v1/completions":
                body = {"model": "soak", "messages": [{"role": "user", "content": body.pop("prompt")}], **body}
            if path == "/v1/responses":
                body = {"model": "soak", "input": body["messages"], "max_output_tokens": 16}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(generator.uniform(0.05, 0.5) if kind == "left" else 180):
                    (await client.post(path, json=body)).raise_for_status()

    await asyncio.gather(*[one() for _ in range(clients)])


def options(generator: random.Random) -> dict[str, Any]:
    """Two of all wishes, or one where they exclude each other, and perhaps several answers."""
    chosen: dict[str, Any] = {"temperature": generator.choice((0, 0.7, 1.3)), "seed": generator.getrandbits(30)}
    for wish in [make(generator) for make in generator.sample([*WISHES.values()], 2)]:
        if not (GRAMMARS & wish.keys() and GRAMMARS & chosen.keys()):
            chosen |= wish
    if generator.random() < 0.15:
        chosen["n"] = generator.choice((2, 3, 4, 4, generator.randint(5, 40)))
    return chosen


def schema(generator: random.Random) -> dict[str, Any]:
    names = generator.sample(WORDS, 3)
    kinds = [{"type": "string", "maxLength": 12}, {"type": "integer"}, {"enum": generator.sample(WORDS, 4)}]
    properties = dict(zip(names, generator.sample(kinds, 3), strict=True))
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def request(generator: random.Random, longest: int, tools: bool) -> Asked:
    """One of all kinds. longest: words of a prompt.  tools: whether the model's template knows any."""
    path = generator.choice(PATHS)
    tokens, prompt = generator.randint(1, 96), text(generator, generator.choice((4, longest // 5, longest)))
    chosen = options(generator)
    messages = [{"role": "user", "content": prompt}]
    stream = {"stream": generator.random() < 0.6}
    if path == "/generate":
        extra = {name: chosen.pop(name) for name in ("cache_salt", "priority", "speculative") if name in chosen}
        seed = {"sampling_seed": chosen.pop("seed")}
        params = chosen | seed | {"max_new_tokens": tokens}
        if generator.random() < 0.2:
            extra |= {"return_logprob": True, "top_logprobs_num": 2}
        return Asked(path, {"text": prompt, "sampling_params": params, **extra, **stream})
    if path == "/v1/completions":
        return Asked(path, {"prompt": prompt, "max_tokens": tokens, **chosen, **stream})
    if path == "/v1/chat/completions":
        more: dict[str, Any] = {}
        if generator.random() < 0.2:
            more = {"logprobs": True, "top_logprobs": 3}
        elif generator.random() < 0.2 and not GRAMMARS & chosen.keys() and tools:
            more = {"tools": [TOOL]}
        elif generator.random() < 0.2 and "speculative" not in chosen:
            more = {"prediction": {"type": "content", "content": prompt[:80]}}
        return Asked(path, {"messages": messages, "max_tokens": tokens, **chosen, **more, **stream})
    body = {"model": "soak", "temperature": min(chosen["temperature"], 1.0), **stream}  # without a seed
    if path == "/v1/messages":
        return Asked(path, {"messages": messages, "max_tokens": tokens, **body}, body["temperature"] == 0)
    return Asked(path, {"input": prompt, "max_output_tokens": max(tokens, 16), **body}, body["temperature"] == 0)


def short(asked: Asked) -> str:
    """Without the prompt."""
    return f"{asked.path} { {name: value for name, value in asked.body.items() if name not in PROMPTS} }"


def answer_of(path: str, body: Any) -> str:
    """What an answer says, without ids and times."""
    if path == "/generate":
        return json.dumps([one["text"] for one in (body if isinstance(body, list) else [body])])
    if path == "/v1/messages":
        return json.dumps(body["content"])
    if path == "/v1/responses":
        return json.dumps([part.get("text") for item in body["output"] for part in item.get("content", [])])
    return json.dumps([one.get("text", (one.get("message") or {}).get("content")) for one in body["choices"]])


def done_by_name(asked: Asked) -> bool:
    """Whether its stream ends with [DONE]."""
    return asked.body["stream"] and asked.path.startswith(("/generate", "/v1/c"))


async def one_request(client: httpx.AsyncClient, asked: Asked, generator: random.Random, out: Outcome) -> None:
    fate = generator.random()
    if not asked.body["stream"] and fate >= 0.1:
        response = await client.post(asked.path, json=asked.body)
        out.counts[f"{response.status_code}"] += 1
        if response.status_code == 200 and asked.repeats and len(out.sample) < SAMPLE and generator.random() < 0.2:
            out.sample.append((asked, answer_of(asked.path, response.json())))
        elif response.status_code not in (200, 503):
            out.problems.append(f"{response.status_code}: {response.text[:300]} for {short(asked)}")
        return
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(generator.uniform(0.05, 1.0) if fate < 0.25 else 120),
            client.stream("POST", asked.path, json=asked.body) as response,
        ):
            last = ""
            async for line in response.aiter_lines():
                last = line or last
                if 0.25 < fate < 0.3:
                    await asyncio.sleep(0.05)  # a slow reader
            out.counts[f"stream {response.status_code}"] += 1
            if response.status_code not in (200, 503):
                out.problems.append(f"{response.status_code}: {last[:300]} for {short(asked)}")
            elif response.status_code == 200 and done_by_name(asked) and last != "data: [DONE]":
                out.problems.append(f"a stream of {asked.path} ended with {last[:200]!r}")
            return
    out.counts["left"] += 1


async def one_client(
    url: str, ended: Callable[[], bool], longest: int, tools: bool, end: float, out: Outcome, seed: int
) -> None:
    """ended: whether the server has."""
    generator = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:
        while time.monotonic() < end and not ended():
            try:
                await one_request(client, request(generator, longest, tools), generator, out)
            except httpx.HTTPError as error:
                out.problems.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(generator.expovariate(4))
