"""benchmarks/waves.py against a server that only counts."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def waves() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        return importlib.import_module("waves")


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and what it was asked. Prompts of 3 tokens are refused."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            refused = len(body["input_ids"]) == 3
            tokens = body["sampling_params"]["max_new_tokens"]
            answer = {"error": "too short"} if refused else {"meta_info": {"completion_tokens": tokens}}
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", asked
    listening.shutdown()
    listening.server_close()


def test_waves_have_prompts_of_their_own(
    waves: ModuleType, server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    url, asked = server
    words = [
        "--url",
        url,
        "--vocab",
        "5000",
        "--waves",
        "1",
        "4@0.5",
        "--prompt",
        "6",
        "--tokens",
        "9",
        "--rounds",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["waves.py", *words])
    waves.main()
    counted = [body for body in asked if body["sampling_params"]["max_new_tokens"] == 9]
    assert len({tuple(body["input_ids"]) for body in asked}) == len(asked), "none was cached by those before"
    assert len(counted) == 2 * (1 + 4) and len({tuple(body["input_ids"]) for body in counted}) == len(counted)
    assert sorted(body["sampling_params"]["temperature"] for body in counted) == [0.0] * 2 + [0.5] * 8
    assert all(1000 <= token < 4000 for body in counted for token in body["input_ids"])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["wave"] for line in lines[:2]] == ["1", "4 at 0.5"] and lines[2] == "| | 1 | 4 at 0.5 |"


def test_a_refusal_is_told(waves: ModuleType, server: tuple[str, list[dict[str, Any]]]) -> None:
    with pytest.raises(RuntimeError, match=r"status 400, .*too short"):
        waves.ask(server[0], [1, 2, 3], 4, 0.0)
