"""A stand-in engine that says what a test tells it to, and a server around it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from fake_engine import FakeEngine, byte_tokenizer, local
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.request import GenerationRequest
from draftwing.server.app import create_app
from draftwing.server.telemetry.observer import Watcher
from draftwing.server.worker_pools import WorkerPools
from draftwing.text.tokenizer import Tokenizer
from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call {{ c.id }}>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} by {{ m.name }} for {{ m.tool_call_id }}{% endif %}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WITHOUT_TOOLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


class ScriptedEngine(FakeEngine):
    """Says `script`, whatever the prompt."""

    def __init__(
        self,
        script: str = "",
        reasoning: str | None = None,
        tools: str | None = None,
        template: str = TEMPLATE,
        special: tuple[str, ...] = (),
        api_key: str | None = None,
    ) -> None:
        options = Options(random_seed=7, reasoning_parser=reasoning, tool_call_parser=tools, api_key=api_key)
        super().__init__(options)
        backend = byte_tokenizer().backend
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
        self.tokenizer = Tokenizer(backend, {"eos_token": "<eos>"}, template)
        self.info = dataclasses.replace(self.info, vocab_size=self.tokenizer.vocab_size)
        self.grammars = GrammarCompiler.of(options, self.tokenizer, self.info.vocab_size, self.info.stop_ids)
        self.script = script

    def submit(self, request: GenerationRequest) -> None:
        request = self.info.admit(request)
        self.requests.append(request)
        self.cached.clear()  # it would be of what is said
        said = self.tokenizer.encode(self.script, add_special_tokens=False)
        self._inbox.put(request._replace(prompt_ids=said))

    @property
    def grammar(self) -> str:
        """The kind and the text of the latest request's grammar; empty where it has none."""
        grammar = self.requests[-1].params.grammar
        return "" if grammar is None else f"{grammar.kind}: {grammar.text}"

    @property
    def prompt(self) -> str:
        """The text of the latest prompt."""
        return self.tokenizer.decode(self.requests[-1].prompt_ids, skip_special_tokens=False)


def serving(engine: FakeEngine) -> contextlib.AbstractContextManager[str]:
    """A server around the engine; gives its URL."""
    return listening(create_app(local(engine), engine.tokenizer))


@contextlib.contextmanager
def listening(app: Any, **settings: Any) -> Iterator[str]:
    """An application in a thread, on a port of its own; gives its URL. settings: more of uvicorn's."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1, **settings)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server did not end"


@contextlib.contextmanager
def launched(command: str, seconds: float = 60) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A whole server in processes of its own, once it answers; gives its process and its URL."""
    process, port = launch_server_cmd(f"python -m draftwing.launch_server --num-threads 1 --log-level error {command}")
    try:
        wait_for_server(f"http://127.0.0.1:{port}", timeout=seconds, process=process)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        terminate_process(process)


def client_of(engine: FakeEngine, *watchers: Watcher, **more: Any) -> TestClient:
    """A client of the application around an engine, which runs inside of `with`. more: of `TestClient`."""
    app = create_app(local(engine), engine.tokenizer, 5.0, watchers)
    return TestClient(app, raise_server_exceptions=False, **more)


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def keys_file(folder: Path, keys: str) -> str:
    """A file of API keys that nobody else may read."""
    file = folder / "keys.toml"
    file.write_text(keys)
    file.chmod(0o600)
    return str(file)


def watched_sizes(monkeypatch: pytest.MonkeyPatch, method: str) -> list[int]:
    """The sizes that the pools get from now on. method: of `WorkerPools`."""
    sizes: list[int] = []
    original = getattr(WorkerPools, method)

    def watched(pools: WorkerPools, size: int, work: Any) -> Any:
        sizes.append(size)
        return original(pools, size, work)

    monkeypatch.setattr(WorkerPools, method, watched)
    return sizes


@contextlib.asynccontextmanager
async def asking(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that runs on this event loop."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    lifespan = app.router.lifespan_context(app)
    async with lifespan, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
        yield client


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def events(text: str) -> list[dict[str, Any]]:
    """The data of every event of a stream that ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    return events(client.post(path, json=body | {"stream": True}).text)


def ok(client: TestClient, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def written(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls of functions as Qwen's models write them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}\n</tool_call>'
        for name, given in calls
    )
