"""Reads a file that a client sends as a form, and writes it to the disk while it comes."""

from __future__ import annotations

import asyncio
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from draftwing.errors import RequestError
from draftwing.files import open_private
from draftwing.requests.refusals import show
from draftwing.server.batches.store import MAX_FILE_BYTES, MAX_LINES, Record, Store

UPLOAD_BYTES = MAX_FILE_BYTES + 65_536  # of a body, its other fields included
_MAX_FIELD = 1024  # bytes of a field that is no file
_MAX_NAME = 255
_PIECE = 2**20  # bytes that are written at once


class _Form:
    """Takes what the parser finds, whose calls may not raise; `refusal` says what is wrong."""

    def __init__(self) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.data = bytearray()  # of the file, which is not written yet
        self.size = self.lines = 0
        self.refusal: RequestError | None = None
        self.complete = False
        self._name, self._is_file = "", False
        self._header, self._value = b"", b""

    def callbacks(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}

    def refuse(self, message: str, field: str) -> None:
        self.refusal = self.refusal or RequestError(message, field)
        self.data.clear()

    def on_part_begin(self) -> None:
        self._name, self._is_file, self._header, self._value = "", False, b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            self._is_file = self._name == "file"
            if self._is_file and self.filename is not None:
                self.refuse("file must be one file; found two", "file")
            elif self._is_file:
                self.filename = options.get(b"filename", b"").decode(errors="replace")[-_MAX_NAME:] or "file.jsonl"
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        if not self._is_file and self._name != "purpose":
            self.refuse(f"{self._name[:100]} is not a known field; expected purpose and file", self._name[:100])

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self.refusal is not None:
            return
        if not self._is_file:
            value = self.fields.get(self._name, b"") + data[start:end]
            self.fields[self._name] = value
            if len(value) > _MAX_FIELD:
                self.refuse(f"{self._name} has at most {_MAX_FIELD} bytes", self._name)
            return
        self.data += data[start:end]
        self.size += end - start
        self.lines += data.count(b"\n", start, end)
        if self.size > MAX_FILE_BYTES:
            self.refuse(f"a file has at most {MAX_FILE_BYTES} bytes; split it", "file")
        elif self.lines > MAX_LINES:
            self.refuse(f"a file has at most {MAX_LINES} lines; split it", "file")

    def on_end(self) -> None:
        self.complete = True


async def receive_file(request: Request, store: Store, owner: str) -> Record:
    """Returns the file of a form with `purpose` and `file`. Raises RequestError when all has come, so that clients that
    only write read why."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        found = show(kind.decode(errors="replace"))
        raise RequestError(f"the content type must be multipart/form-data with a boundary; found {found}")
    partial, form, reserved = store.begin_upload(), _Form(), 0
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
        with open(partial, "xb", opener=open_private) as file:
            async for piece in request.stream():
                if form.refusal is None:
                    parser.write(piece)
                if len(form.data) >= _PIECE:
                    reserved += await _written(file, form, store, owner)
            reserved += await _written(file, form, store, owner)
        if form.refusal is not None:
            raise form.refusal
        if not form.complete:
            raise RequestError("the form ends before its last boundary")
        _check(form)
        assert form.filename is not None
        return await store.add_file(owner, form.filename, "batch", partial)
    except MultipartParseError as error:
        raise RequestError(f"the body is not a form: {str(error)[:200]}") from None
    finally:
        store.reserve(owner, -reserved)
        partial.unlink(missing_ok=True)


async def _written(file: IO[bytes], form: _Form, store: Store, owner: str) -> int:
    """Writes what has come, and returns how many bytes it is."""
    data, form.data = form.data, bytearray()
    try:
        store.reserve(owner, len(data))
    except RequestError as error:
        form.refuse(str(error), "file")
    await asyncio.to_thread(file.write, data)
    return len(data)


def _check(form: _Form) -> None:
    purpose = form.fields.get("purpose", b"").decode(errors="replace")
    if purpose != "batch":
        raise RequestError(f"purpose must be batch, which files are kept for here; found {show(purpose)}", "purpose")
    if form.filename is None:
        raise RequestError("file is missing", "file")
