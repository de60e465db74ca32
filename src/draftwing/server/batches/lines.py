"""Lines of a batch: what is asked, checked before any of it is answered, and what is answered."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.batches.store import MAX_LINES

MAX_ERRORS = 100  # that a batch lists
MAX_ID = 512  # characters of a custom id; they are held while a batch runs
_FIELDS = ("custom_id", "method", "url", "body")


class Line(NamedTuple):
    id: str
    body: dict[str, Any]


def check(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Returns how many lines a file of requests has, and what is wrong with them, as a batch lists it."""
    seen: set[str] = set()
    models: list[Any] = []
    errors: list[dict[str, Any]] = []

    def wrong(number: int | None, error: RequestError) -> None:
        errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})

    for number, text in _texts(path):
        try:
            line = _read(text, endpoint)
            if line.id in seen:
                raise RequestError(
                    f"the custom_id {line.id[:100]!r} is there before", "custom_id", "duplicate_custom_id"
                )
            seen.add(line.id)
            models = models or [line.body.get("model")]
            if line.body.get("model") != models[0]:
                found = f"found {show(line.body.get('model'))} after {show(models[0])}"
                raise RequestError(f"all lines must have the same model; {found}", "body.model", "mismatched_model")
            if len(seen) > MAX_LINES:
                raise RequestError(f"a batch has at most {MAX_LINES} lines; split it", None, "too_many_tasks")
        except RequestError as error:
            wrong(number, error)
            if len(errors) == MAX_ERRORS or error.code == "too_many_tasks":
                break
    if not seen and not errors:
        wrong(None, RequestError("the file has no line; expected a request of JSON in each", None, "empty_file"))
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
        raise RequestError(f"the line is not JSON: {str(error)[:200]}", None, "invalid_json_line") from None
    if not isinstance(found, dict):
        raise RequestError(
            f"the line must be an object with {', '.join(_FIELDS)}; found {show(found)}", None, "invalid_json_line"
        )
    for name in _FIELDS:
        if name not in found:
            raise RequestError(f"{name} is missing", name, "missing_required_parameter")
    id, method, url, body = (found[name] for name in _FIELDS)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID:
        raise RequestError(f"custom_id must be a text of 1 to {MAX_ID} characters", "custom_id", "invalid_custom_id")
    if method != "POST":
        raise RequestError(f"method must be POST; found {show(method)}", "method", "invalid_method")
    if url != endpoint:
        raise RequestError(f"url must be the batch's endpoint, {endpoint}; found {show(url)}", "url", "invalid_url")
    if not isinstance(body, dict):
        raise RequestError(f"body must be an object; found {show(body)}", "body", "invalid_body")
    if body.get("stream"):
        raise RequestError("a batch does not stream; leave stream out", "body.stream", "stream_unsupported")
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
