"""Clients of HTTP/1.0 read streams without chunks, up to the end of their connection."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine, local
from scripted import listening

from draftwing.server.app import create_app
from draftwing.server.edge.connections import LimitedConnection

MESSAGES = [{"role": "user", "content": "abcdefghi"}]
STREAMS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "abcdefghi", "stream": True, "max_tokens": 9},
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True, "max_tokens": 9},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 9},
    "/v1/responses": {"input": "abcdefghi", "stream": True, "max_output_tokens": 9},
    "/api/generate": {"model": "m", "prompt": "abcdefghi", "options": {"num_predict": 9}},
    "/generate": {"text": "abcdefghi", "stream": True, "sampling_params": {"max_new_tokens": 9}},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngine()
    with listening(create_app(local(engine), engine.tokenizer), http=LimitedConnection) as url:
        yield url


def answer(url: str, method: str, path: str, body: object = None, version: str = "1.0", more: str = "") -> bytes:
    """All that comes until the server closes the connection."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{more}"
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=20) as client:
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return b"".join(iter(lambda: client.recv(65536), b""))


def shape(text: bytes) -> list[object]:
    """The lines of a stream that are not alike, with the keys of their objects in place of what differs from one answer
    to the next."""
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line]
    return [*dict.fromkeys(tuple(sorted(json.loads(line))) if line.startswith("{") else line for line in lines)]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("more", ["", "connection: keep-alive\r\n"])
def test_streams_are_those_of_other_clients_without_chunks(url: str, path: str, more: str) -> None:
    head, _, body = answer(url, "POST", path, STREAMS[path], more=more).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower() and b"content-length" not in head.lower()
    assert shape(body) == shape(httpx.post(url + path, json=STREAMS[path]).content)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/none"), ("HEAD", "/health"), ("GET", "/")]
)
def test_what_has_a_length_keeps_it(url: str, method: str, path: str) -> None:
    head, _, body = answer(url, method, path).partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if method == "GET":
        assert int(headers[b"content-length"]) == len(body) > 0
    else:
        assert not body


def test_others_have_chunks_and_their_connection(url: str) -> None:
    client = http.client.HTTPConnection("127.0.0.1", httpx.URL(url).port or 0, timeout=20)
    for _ in range(2):
        client.request("POST", "/v1/completions", json.dumps(STREAMS["/v1/completions"]),
                       {"content-type": "application/json"})  # fmt: skip
        response = client.getresponse()
        assert response.getheader("transfer-encoding") == "chunked" and b"[DONE]" in response.read()
    client.close()
