"""A hub on a port of this machine: one repository, files with ranges, and connections that break off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
_LARGE = (".safetensors", ".gguf")


class FakeHub(ThreadingHTTPServer):
    """files: of the repository; those that end with .safetensors or .gguf are large ones.  asked: (file, Range) of each
    GET.  broken: how often connections still break off in the middle of a large file.  pause: bytes of a large file
    behind which it waits for `go`; then `paused` is set."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.broken = dict(files), 0
        self.pause: int | None = None
        self.paused, self.go = threading.Event(), threading.Event()
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running(files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(files) as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield hub
        hub.shutdown()


def connect(monkeypatch: pytest.MonkeyPatch, url: str, cache: object) -> None:
    """Has the hub's client ask this address and use this cache."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            self._json([{"type": "file", "path": name, **self._entry(name, "oid")} for name in self.server.files])
        elif path.startswith(f"/api/models/{REPO}"):
            files = [{"rfilename": name, **self._entry(name, "sha256")} for name in self.server.files]
            self._json({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": files})
        elif path.startswith(f"/{REPO}/resolve/") and (name := unquote(path.split("/", 5)[5])) in self.server.files:
            self._file(name, body)
        else:
            self._start(404, {"X-Error-Code": "RepoNotFound", "Content-Length": "0"})

    def _entry(self, name: str, digest: str) -> dict[str, Any]:
        content = self.server.files[name]
        large = {digest: _sha256(content), "size": len(content), "pointerSize": 1}
        found = {"size": len(content), "oid": "1" * 40, "blobId": "1" * 40}
        return found | ({"lfs": large} if name.endswith(_LARGE) else {})

    def _file(self, name: str, body: bool) -> None:
        content, ranged = self.server.files[name], self.headers.get("Range")
        large = name.endswith(_LARGE)
        start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha256(content)}"', "Accept-Ranges": "bytes"}
        headers["Content-Length"] = str(len(content) - start)
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._start(206 if ranged else 200, headers)
        if not body:
            return
        self.server.asked.append((name, ranged))
        if large and self.server.broken:
            self.server.broken -= 1
            self.wfile.write(content[start : (start + len(content)) // 2])
            self.close_connection = True
            return
        if large and (pause := self.server.pause) is not None:
            self.wfile.write(content[start:pause])
            self.server.paused.set()
            self.server.go.wait(60)
            start = max(start, pause)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[start:])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self._start(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
