"""llama.cpp's `/slots`: a conversation is saved under a name, and is there again when it is needed.

A client's slot holds the text of its last request with that `id_slot`. What is saved are blocks of the folder of
`--prefix-cache-dir`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import Field

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.edge.keys import client_name
from draftwing.server.endpoints import read_body, schema, unless_disconnected
from draftwing.server.http import encode, json_response
from draftwing.server.quotas import QueueFull
from draftwing.server.schema import Body
from draftwing.server.service import Service

ACTIONS = ("save", "restore", "erase")
MAX_WAITING = 32  # actions, which are done one after the other; of clients that have gone away, too


class SlotRequest(Body):
    """Body of /slots/{id_slot}. filename: to save to and restore from, no path; with erase, what was saved under it is
    erased, and without, what the slot holds."""

    model: str | None = None
    filename: Annotated[str, Field(min_length=1, max_length=255)] | None = None


def add_slot_routes(app: FastAPI, service: Service) -> None:
    engine, options = service.engine, service.options
    waiting = set[asyncio.Task[tuple[int, int]]]()

    async def done(action: str, slot: int, filename: str) -> tuple[int, int]:
        """Returns tokens and bytes. What has begun is done to its end, though its client goes away."""
        if len(waiting) >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} actions on slots, the most there may be, wait", own=False, when="when one is done"
            )
        task = asyncio.ensure_future(engine.act_on_slot(action, client_name(), slot, filename))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody asks any more
        return await asyncio.shield(task)

    @app.get("/slots")
    async def slots(fail_on_no_slot: bool = False) -> Response:
        """Lists as many slots as requests can run at once, and says of as many as run that they are busy."""
        running, count = (await engine.stats())["running"], options.max_running_requests or 1
        if fail_on_no_slot and running >= count:
            busy = {"error": {"message": f"all {count} slots are busy"}}
            return json_response(encode(busy), 503)
        about = {"n_ctx": engine.info.context_length, "speculative": engine.info.speculates}
        return json_response(encode([{"id": at, "is_processing": at < running, **about} for at in range(count)]))

    @app.post("/slots/{id_slot}", openapi_extra=schema(SlotRequest))
    async def act(request: Request, id_slot: str, action: str = Query("")) -> dict[str, Any]:
        """Saves a conversation, restores one, or erases it."""
        if action not in ACTIONS:
            raise RequestError(f"action must be save, restore or erase; found {show(action)}", "action")
        slot = _number(id_slot)
        body = await read_body(request, SlotRequest) if await request.body() else SlotRequest()
        if body.filename is None and action != "erase":
            raise RequestError("filename is missing", "filename")
        began = time.perf_counter()
        tokens, size = await unless_disconnected(request, done(action, slot, body.filename or ""))
        if action == "erase":
            return {"id_slot": slot, "n_erased": tokens}
        known = {"id_slot": slot, "filename": body.filename}
        timings = {f"{action}_ms": (time.perf_counter() - began) * 1e3}
        if action == "save":
            return {**known, "n_saved": tokens, "n_written": size, "timings": timings}
        return {**known, "n_restored": tokens, "n_read": size, "timings": timings}


def _number(text: str) -> int:
    """Raises RequestError for what is no number of a slot."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise RequestError(f"id_slot must be a number from 0 to {10**9 - 1}; found {show(text)}", "id_slot")
    return int(text)
