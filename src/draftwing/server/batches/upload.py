"""Reads a file that a client sends as a form, and writes it to the disk while it comes."""

from __future__ import annotations

import asyncio

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from draftwing.errors import RequestError
from draftwing.files import open_private
from draftwing.requests.refusals import show
from draftwing.server.batches.store import MAX_FILE_BYTES, MAX_LINES, Record, Store

UPLOAD_BYTES = MAX_FILE_BYTES + 65_536  # of a body, its other fields included
_MAX_PURPOSE = 100  # bytes
_MAX_NAME = 255  # characters
_PIECE = 2**20  # bytes that are written at once


class _Form:
    """Takes what the parser finds. Raises RequestError for what is not to be there."""

    def __init__(self) -> None:
        self.purpose, self.filename = b"", ""
        self.data = bytearray()  # of the file, which is not written yet
        self.complete = False
        self._size = self._lines = 0
        self._header, self._value, self._name = b"", b"", ""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")[:_MAX_NAME]
            if self._name == "file":
                if self.filename:
                    raise RequestError("file must be one file; found two", "file")
                self.filename = options.get(b"filename", b"").decode(errors="replace")[-_MAX_NAME:] or "file.jsonl"
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        if self._name not in ("file", "purpose"):
            raise RequestError(f"{self._name} is not a known field; expected purpose and file", self._name)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "purpose":
            self.purpose = (self.purpose + data[start:end])[:_MAX_PURPOSE]
            return
        self.data += data[start:end]
        self._size += end - start
        self._lines += data.count(b"\n", start, end)
        if self._size > MAX_FILE_BYTES:
            raise RequestError(f"a file has at most {MAX_FILE_BYTES} bytes; split it", "file")
        if self._lines > MAX_LINES:
            raise RequestError(f"a file has at most {MAX_LINES} lines; split it", "file")

    def on_part_end(self) -> None:
        self._name = ""

    def on_end(self) -> None:
        self.complete = True

    def check(self) -> None:
        """Raises RequestError for a form that has come and is not whole, or for something else."""
        if not self.complete:
            raise RequestError("the form ends before its last boundary")
        if self.purpose != b"batch":
            found = show(self.purpose.decode(errors="replace"))
            raise RequestError(f"purpose must be batch, which files are kept for here; found {found}", "purpose")
        if not self.filename:
            raise RequestError("file is missing", "file")


async def receive_file(request: Request, store: Store, owner: str) -> Record:
    """Returns the file of a form with `purpose` and `file`. Raises RequestError when all has come, so that clients that
    only write read why."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        found = show(kind.decode(errors="replace"))
        raise RequestError(f"the content type must be multipart/form-data with a boundary; found {found}")
    form, partial, reserved = _Form(), store.begin_upload(), 0
    refusal: RequestError | None = None
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
    try:
        with open(partial, "xb", opener=open_private) as file:
            async for piece in request.stream():  # the last one is empty
                if refusal is not None:
                    continue
                try:
                    parser.write(piece)
                    if len(form.data) >= _PIECE or not piece:
                        data, form.data = form.data, bytearray()
                        reserved += len(data)
                        store.reserve(owner, len(data))
                        await asyncio.to_thread(file.write, data)
                except RequestError as error:
                    refusal = error
                except MultipartParseError as error:
                    refusal = RequestError(f"the body is not a form: {str(error)[:200]}")
        if refusal is not None:
            raise refusal
        form.check()
        return await store.add_file(owner, form.filename, "batch", partial)
    finally:
        store.release(owner, reserved)
        partial.unlink(missing_ok=True)
