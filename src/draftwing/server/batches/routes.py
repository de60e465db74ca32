"""OpenAI's /v1/files and /v1/batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse
from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException

from draftwing.config.options import Options
from draftwing.errors import RequestError
from draftwing.server.batches.runner import Runner
from draftwing.server.batches.store import Store, page
from draftwing.server.batches.upload import UPLOAD_BYTES, receive_file
from draftwing.server.edge.keys import Keyring, client_name
from draftwing.server.endpoints import body_refusal, schema
from draftwing.server.http import unmarked
from draftwing.server.schema import Body

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
SHARE = 4  # of the rows of the engine, lines of batches have one part, so that others find a row at once
FILES = "/v1/files"
UPLOADS = {FILES: UPLOAD_BYTES}  # what may be larger than other bodies, as it is not held, and how large
_METHODS = ["DELETE", "GET", "POST"]
_Order = Annotated[Literal["asc", "desc"], Query()]
_FORM = {
    "type": "object", "required": ["purpose", "file"], "additionalProperties": False,
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
}  # fmt: skip
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


class NewBatch(Body, not_built="output_expires_after"):
    """What a batch is made of."""

    input_file_id: Annotated[str, Field(max_length=1024)]
    endpoint: Annotated[str, Field(max_length=1024)]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


def add_batches(
    app: FastAPI, options: Options, keys: Keyring, rows: int, stopping: Callable[[], bool],
    ready: Callable[[], bool] = lambda: True,
) -> Runner | None:  # fmt: skip
    """Adds the routes where the options name a folder, and returns what is to be started and stopped with the server.
    Raises ConfigError for a folder that cannot be used. Others have to be there before.

    rows: requests that the engine runs at once.  stopping, ready: see `Runner`.
    """
    if options.batches_dir is None:
        return None
    store = Store(Path(options.batches_dir).expanduser())

    def key(owner: str) -> str | None:
        return keys.keys[owner].key if owner in keys.keys else None

    runner = Runner(store, app, key, max(rows // SHARE, 1), stopping, ready)
    _add_files(app, store)
    _add_batches(app, store, runner)
    return runner


def refuse_batches(app: FastAPI) -> None:
    """Answers as for routes that are not there, in an application that takes all paths."""

    for path in (FILES, "/v1/batches"):

        @app.api_route(path, methods=_METHODS)
        @app.api_route(path + "/{rest:path}", methods=_METHODS)
        async def refused() -> None:
            raise HTTPException(404)


def _add_files(app: FastAPI, store: Store) -> None:
    @app.post(FILES, openapi_extra=_UPLOAD)
    async def upload(request: Request) -> dict[str, Any]:
        """Keeps a file of JSON lines, the input of a batch."""
        return (await receive_file(request, store, client_name())).shown

    @app.get(FILES)
    async def files(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000, order: _Order = "desc",
        purpose: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Lists files, the newest first."""
        return page(
            store.files, client_name(), after, limit, order, lambda one: purpose in (None, one.shown["purpose"])
        )

    @app.get(FILES + "/{file_id}")
    async def file(file_id: str) -> dict[str, Any]:
        """Says what a file is."""
        return store.file(client_name(), file_id).shown

    @app.get(FILES + "/{file_id}/content", response_class=FileResponse)
    async def content(file_id: str) -> FileResponse:
        """Returns what a file holds."""
        found = store.file(client_name(), file_id)
        return FileResponse(store.content(found.id), media_type="application/octet-stream")

    @app.delete(FILES + "/{file_id}")
    async def delete(file_id: str) -> dict[str, Any]:
        """Removes a file."""
        found = store.file(client_name(), file_id)
        store.delete_file(found)
        return {"id": found.id, "object": "file", "deleted": True}


def _add_batches(app: FastAPI, store: Store, runner: Runner) -> None:
    @app.post("/v1/batches", openapi_extra=schema(NewBatch))
    async def create(request: Request) -> dict[str, Any]:
        """Begins a batch: each line of a file is a request, answered when there is room beside all others."""
        asked, owner = _read(unmarked(await request.body())), client_name()
        if asked.endpoint not in ENDPOINTS:
            found = f"found {asked.endpoint[:100]!r}"
            raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}; {found}", "endpoint")
        batch = await store.add_batch(owner, store.file(owner, asked.input_file_id), asked.endpoint, asked.metadata)
        runner.add(batch)
        return batch.shown

    @app.get("/v1/batches")
    async def batches(after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> dict[str, Any]:
        """Lists batches, the newest first."""
        return page(store.batches, client_name(), after, limit, "desc", lambda one: True)

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> dict[str, Any]:
        """Says how far a batch is, and which files it has."""
        return store.batch(client_name(), batch_id).shown

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> dict[str, Any]:
        """Ends a batch; what is answered is kept."""
        found = store.batch(client_name(), batch_id)
        if found.status in ("validating", "in_progress"):
            await runner.cancel(found)
        elif found.status not in ("cancelling", "cancelled"):
            raise RequestError(f"{found.id} is {found.status}; only one that is not done can be cancelled", "batch_id")
        return found.shown


def _read(body: bytes) -> NewBatch:
    try:
        return NewBatch.model_validate_json(body)
    except ValidationError as error:
        errors: list[Any] = error.errors(include_url=False, include_context=False, include_input=False)
        given = None if errors[0]["type"] == "json_invalid" else json.loads(body)
        raise body_refusal(errors, given, NewBatch) from None
