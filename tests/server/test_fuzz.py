"""Requests made up from the OpenAPI description, right and wrong ones: none may give a 5xx or stop the engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import mutated
import pytest
from fake_engine import FakeEngine, drafting_options, local
from scripted import TEMPLATE, asking, serving, wait_until

from draftwing.config.options import Options
from draftwing.server.app import create_app
from draftwing.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

WORKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/apply-template": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages": {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "/api/generate": {"model": "m", "prompt": "abc"},
    "/api/show": {"model": "m"},
    "/v1/embeddings": {"input": "abc"},
    "/v1/rerank": {"query": "abc", "documents": ["de"]},
    "/v1/score": {"text_1": "abc", "text_2": "de"},
    "/api/embed": {"model": "m", "input": "abc"},
    "/api/embeddings": {"model": "m", "prompt": "abc"},
    "/generate": {"text": "abc"},
    "/abort_request": {"rid": "a"},
    "/delete_traffic": {"client": "a"},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/unload_lora_adapter": {"lora_name": "a"},
}
ENDLESS = "/ui/engine"  # a stream for the page, which takes nothing and is read for 10 s each time


def fuzz(url: str, requests: int) -> Counter[tuple[str, int]]:
    """Status codes by endpoint."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    statuses: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path != ENDLESS]
    bodies = [o for o in operations if o.method.upper() == "POST" and o.body]
    # Endpoints without a body have little to vary.
    few = max(2, requests // 200)
    share = (requests - few * (len(operations) - len(bodies))) // (2 * len(bodies)) + 1

    def hit(operation: Any, mode: GenerationMode, examples: int) -> None:
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
        def call(case: Any, data: Any) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and data.draw(st.booleans()):
                # Many random fields at once are never all in range: some on top of what works get further.
                names = data.draw(st.lists(st.sampled_from(sorted(case.body)), max_size=2)) if case.body else []
                case.body = {**WORKS[case.path], **{name: case.body[name] for name in names}}
            response = case.call(timeout=30)
            statuses[(case.path, response.status_code)] += 1
            assert response.status_code < 500, (case, response.text)

        call()

    for operation in operations:
        if operation in bodies:
            hit(operation, GenerationMode.POSITIVE, share)
            hit(operation, GenerationMode.NEGATIVE, share)
        else:
            hit(operation, GenerationMode.POSITIVE, few)
    return statuses


@pytest.mark.exhaustive
def test_no_request_gives_a_5xx() -> None:
    engine = FakeEngine(drafting_options(5, 4, 8), burst=64)
    with serving(engine) as url:
        statuses = fuzz(url, 600)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc"})
        assert answer.json()["choices"][0]["text"] == "abc"
        wait_until(engine.idle)
    paths = {path for path, _ in statuses}
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/abort_request", "/tokenize"} <= paths
    # It has to get past the checks, and to be stopped by them.
    assert statuses[("/v1/completions", 200)] and statuses[("/v1/completions", 400)]


async def sent(app: Any, draws: random.Random, requests: int) -> Counter[tuple[str, int]]:
    """Status codes by endpoint of bodies with faults, some of them at once."""
    statuses: Counter[tuple[str, int]] = Counter()
    turns = iter(range(requests))

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in turns:
            path, body, headers = mutated.asked(draws)
            try:
                response = await client.post(path, content=body, headers={k: v.encode() for k, v in headers.items()})
            except httpx.HTTPError:
                raise AssertionError((path, body, headers)) from None
            statuses[(path, response.status_code)] += 1
            assert response.status_code < 500 and "internal error" not in response.text, (path, body, response.text)
            if response.status_code >= 400:
                assert response.json()["error"], (path, body)

    async with asking(app) as client:
        await asyncio.gather(*(ask(client) for _ in range(8)))
    return statuses


@pytest.mark.parametrize("requests", [1_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("seed", [1])
async def test_no_mutated_body_gives_a_5xx(seed: int, requests: int) -> None:
    """`mutated.py` makes them up."""
    options = Options(random_seed=7, reasoning_parser="qwen3", tool_call_parser="hermes")
    engine = FakeEngine(options, burst=64, pause=0.0)
    tokenizer = Tokenizer(engine.tokenizer.backend, engine.tokenizer.special_tokens, TEMPLATE)
    statuses = await sent(create_app(local(engine), tokenizer), random.Random(seed), requests)
    assert {path for path, _ in statuses} == {path for path, _ in mutated.BODIES}
    for path, _ in mutated.BODIES:  # each gets past the checks, and is stopped by them
        assert statuses[(path, 200)] and statuses[(path, 400)], (path, statuses)
