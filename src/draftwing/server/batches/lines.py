"""Lines of a batch: what is asked, checked before any of it is answered, and what is answered."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.requests.refusals import show
from draftwing.server.batches.store import MAX_LINES

MAX_ERRORS = 100  # that a batch lists
MAX_ID = 512  # characters of a custom id; they are held while a batch runs
_FIELDS = ("custom_id", "method", "url", "body")


class Line(NamedTuple):
    id: str
    body: dict[str, Any]


class Wrong(Exception):
    """A line that cannot be asked. code: OpenAI's word for it.  param: its field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def check(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Returns how many lines a file of requests has, and what is wrong with them, as a batch lists it."""
    seen: set[str] = set()
    models: list[Any] = []
    errors: list[dict[str, Any]] = []

    def wrong(number: int | None, error: Wrong) -> None:
        errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})

    for number, text in _texts(path):
        try:
            line = _read(text, endpoint)
            if line.id in seen:
                raise Wrong("duplicate_custom_id", f"the custom_id {line.id[:100]!r} is there before", "custom_id")
            seen.add(line.id)
            models = models or [line.body.get("model")]
            if line.body.get("model") != models[0]:
                found = f"found {show(line.body.get('model'))} after {show(models[0])}"
                raise Wrong("mismatched_model", f"all lines must have the same model; {found}", "body.model")
            if len(seen) > MAX_LINES:
                raise Wrong("too_many_tasks", f"a batch has at most {MAX_LINES} lines; split it")
        except Wrong as error:
            wrong(number, error)
            if len(errors) == MAX_ERRORS or error.code == "too_many_tasks":
                break
    if not seen and not errors:
        wrong(None, Wrong("empty_file", "the file has no line; expected a request of JSON in each"))
    return len(seen), errors


def read(path: Path, endpoint: str) -> Iterator[Line]:
    """Yields the requests of a file that was checked."""
    for _, text in _texts(path):
        yield _read(text, endpoint)


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def _read(text: bytes, endpoint: str) -> Line:
    try:
        found = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Wrong("invalid_json_line", f"the line is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Wrong("invalid_json_line", f"the line must be an object with {', '.join(_FIELDS)}; found {show(found)}")
    for name in _FIELDS:
        if name not in found:
            raise Wrong("missing_required_parameter", f"{name} is missing", name)
    id, method, url, body = (found[name] for name in _FIELDS)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID:
        raise Wrong("invalid_custom_id", f"custom_id must be a text of 1 to {MAX_ID} characters", "custom_id")
    if method != "POST":
        raise Wrong("invalid_method", f"method must be POST; found {show(method)}", "method")
    if url != endpoint:
        raise Wrong("invalid_url", f"url must be the batch's endpoint, {endpoint}; found {show(url)}", "url")
    if not isinstance(body, dict):
        raise Wrong("invalid_body", f"body must be an object; found {show(body)}", "body")
    if body.get("stream"):
        raise Wrong("stream_unsupported", "a batch does not stream; leave stream out", "body.stream")
    return Line(id, body)


def answered(id: str, status: int, request_id: str | None, body: bytes) -> bytes:
    """Returns the line of an answer. body: as it was sent, of JSON."""
    if b"\n" in body:
        body = json.dumps(json.loads(body), ensure_ascii=False).encode()
    about = {"status_code": status, "request_id": request_id or f"req_{uuid.uuid4().hex}"}
    head = json.dumps({**_head(id), "response": about})
    return head[:-2].encode() + b', "body": ' + body + b'}, "error": null}\n'


def unanswered(id: str, code: str, message: str) -> bytes:
    """Returns the line of a request that has no answer."""
    return (json.dumps({**_head(id), "response": None, "error": {"code": code, "message": message}}) + "\n").encode()


def _head(id: str) -> dict[str, str]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": id}
