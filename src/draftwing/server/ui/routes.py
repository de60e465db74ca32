"""The page at `/`: its files, and the data that it reads besides the API that every client has. `Viewers` who look at
the engine are shown one snapshot for all of them, once a second; nothing runs while nobody looks.

The files hold no data and need no key; what they read does. They are served from memory: no path of a request ever
reaches the file system.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.config.trees import SOURCES
from draftwing.engine.process.link import EngineDead
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import Chats
from draftwing.server.edge.keys import client_name
from draftwing.server.http import EventStream, error_response, event
from draftwing.server.learning import Learning
from draftwing.server.service import Service
from draftwing.server.telemetry.observer import AnswerRecord
from draftwing.text.tokenizer import Tokenizer
from draftwing.version import __version__

logger = logging.getLogger(__name__)
SECONDS = 1.0  # between two snapshots
MAX_VIEWERS = 32  # of all keys together: each makes an event a second
MAX_OF_A_KEY = 8  # viewers with one key

Snapshot = dict[str, Any]


class Viewers:
    """Belongs to the event loop."""

    def __init__(self, look: Callable[[], Awaitable[Snapshot | None]], seconds: float = SECONDS) -> None:
        """look: takes a snapshot; None ends all streams, and so does what it raises, which is logged."""
        self._look, self._seconds = look, seconds
        self._viewers: dict[object, str] = {}  # with the names of their keys
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Snapshot | None]  # the next snapshot, while there is a task

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, client: str = "") -> object | None:
        """Returns one more viewer, who is to `leave` in any case; None where there are too many, or too many of this
        client. client: the name of its key, if it has one."""
        own = list(self._viewers.values()).count(client)
        if len(self) >= MAX_VIEWERS or (client and own >= MAX_OF_A_KEY):
            return None
        viewer = object()
        self._viewers[viewer] = client
        return viewer

    def leave(self, viewer: object) -> None:
        """Forgets a viewer; does nothing for one who has left."""
        self._viewers.pop(viewer, None)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def watch(self, viewer: object) -> AsyncIterator[Snapshot]:
        """Snapshots for one who has entered, until there are no more; then, or closed early, it has left."""
        if self._task is None:
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._run())
        try:
            while (snapshot := await asyncio.shield(self._next)) is not None:
                yield snapshot
        finally:
            self.leave(viewer)

    async def _run(self) -> None:
        while (snapshot := await self._taken()) is not None:
            shown, self._next = self._next, asyncio.get_running_loop().create_future()
            shown.set_result(snapshot)
            await asyncio.sleep(self._seconds)
        self._task = None  # whoever comes now begins anew
        self._next.set_result(None)

    async def _taken(self) -> Snapshot | None:
        try:
            return await self._look()
        except Exception:
            logger.exception("no more snapshots for viewers of the engine")
            return None


MAX_AGE = 0.1  # seconds since the engine gave its numbers, from which on it did not answer this time
MAX_REQUESTS = 32  # the oldest unfinished ones that are listed
MAX_TEXT = 600  # characters of the end of a prompt or an answer
_PROMPT_TOKENS = 160  # of its end that are decoded to show it
_ASKED = {"max_new_tokens": "max_tokens"}  # fields of `SamplingParams` by their names in the page's requests
_SAMPLING = (  # fields of SamplingParams whose defaults the page shows
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
TOTALS = (
    "committed_tokens", "verified_rows", "prefilled_tokens", "queried_tokens", "hit_tokens", "retractions", "steps",
    "step_seconds", "host_seconds", "stage_seconds", "staged_steps",
)  # fmt: skip


def facts(service: Service, knows_effort: bool = False) -> dict[str, Any]:
    """Returns what does not change while the engine lives. knows_effort: whether the chat template reads how much to
    reason."""
    info = service.engine.info
    params = SamplingParams()
    depth, topk, nodes = info.shape.tree
    return {
        "version": __version__,
        "model": service.model,
        "architecture": info.architecture,
        "device": info.device,
        "device_names": list(info.capability.get("devices", ())),
        "kernels": info.capability.get("kernels"),
        "dtype": info.dtype,
        "weight_bytes": dict(info.weight_bytes),
        "model_path": info.options.model,
        "draft_model_path": service.draft_model_path,
        "context_length": info.context_length,
        "images": info.images is not None,
        "max_total_tokens": info.max_total_tokens,
        "algorithm": info.options.drafter if info.speculates else "none",
        "num_steps": depth,
        "topk": topk,
        "num_draft_tokens": nodes,
        "sources": list(dict.fromkeys(SOURCES)),
        "sampling_defaults": {name: getattr(params, name) for name in _SAMPLING}
        | {_ASKED.get(name, name): value for name, value in info.defaults.items()},
        "knows_effort": knows_effort,
        "shows_texts": info.options.ui_show_texts,
        **info.options.label,
    }


class Snapshots:
    """Takes them, one after the other."""

    def __init__(self, service: Service, learning: Learning | None = None) -> None:
        self._service, self._learning = service, learning
        self._stats: Mapping[str, Any] = {}  # the newest numbers
        self._answered = 0.0  # monotonic, when the engine gave them

    async def take(self) -> dict[str, Any] | None:
        """Returns a snapshot; None when the server is about to end."""
        engine = self._service.engine
        if engine.draining:
            return None
        try:
            self._stats = await engine.stats()
            self._answered = time.monotonic() - self._stats["age"]
            state = "busy" if self._stats["age"] > MAX_AGE else "up"
        except EngineDead:
            state = "down"
        answers = engine.observer.unfinished()
        return {
            "time": round(time.time(), 3),
            "engine": state,
            "age": round(time.monotonic() - self._answered, 3) if self._answered else None,
            **self._numbers(),
            **({} if self._learning is None else {"learning": self._learning.facts()}),
            "unfinished": len(answers),
            "requests": self._listed(answers),
        }

    def _numbers(self) -> dict[str, Any]:
        """Returns the engine's newest numbers; nothing before there are any."""
        stats, capacity = self._stats, self._service.engine.info.max_total_tokens
        if not stats:
            return {}
        free, cached = stats["free_tokens"], stats["cached_tokens"]
        return {
            "running": stats["running"],
            "waiting": stats["waiting"],
            "kv": {"capacity": capacity, "used": capacity - free - cached, "cached": cached, "free": free},
            "totals": {name: stats[name] for name in TOTALS if name in stats},
            "drafters": stats.get("drafters", {}),
            "speedup": stats.get("speedup"),
            "explain": stats.get("explain"),
        }

    def _listed(self, answers: Sequence[AnswerRecord]) -> list[dict[str, Any]]:
        now = self._service.engine.observer.clock()
        return [self._one(answer, now) for answer in answers[:MAX_REQUESTS]]

    def _one(self, answer: AnswerRecord, now: float) -> dict[str, Any]:
        """Lists a request: with texts if the server may show them, never with the id by which it could be aborted."""
        request, limits = answer.request, answer.request.limits
        found: dict[str, Any] = {
            "number": answer.number,
            "prompt_tokens": len(request.prompt_ids),
            "tokens": answer.tokens,
            "seconds": round(now - answer.arrived, 3),
            "first_token_seconds": None if answer.first is None else round(answer.first - answer.arrived, 3),
            "drafts": limits is None or limits.depth > 0,
            "grammar": request.params.grammar is not None,
        }
        if self._service.options.ui_show_texts:
            prompt = _end_of(request, self._service.tokenizer)
            text = answer.answer.text if answer.answer is not None else ""
            found |= {"prompt": prompt[-MAX_TEXT:], "text": text[-MAX_TEXT:]}
        return found


def _end_of(request: GenerationRequest, tokenizer: Tokenizer) -> str:
    """Returns the end of a prompt as text, with words in place of each image."""
    end, room, parts = len(request.prompt_ids), _PROMPT_TOKENS, list[str]()
    for image in (*reversed(request.images), None):
        begin = max(image.end if image is not None else 0, end - room)
        parts.append(tokenizer.decode(request.prompt_ids[begin:end], skip_special_tokens=True))
        room -= end - begin
        if image is None or begin > image.end or not room:
            break
        parts.append(f"[image, {image.tokens:,} tokens]")
        end = image.start
    return "".join(reversed(parts))


ASSETS = "/ui/assets/"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but what this server sends, no script or style inside of a page, nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered by 304
    "vary": "accept-encoding",
}


class Asset:
    """A file of the page."""

    def __init__(self, body: bytes, kind: str) -> None:
        self.body, self.type = body, kind
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    @cached_property
    def zipped(self) -> bytes:
        """Returns the body for those who accept gzip; compressed when it is first asked for."""
        return gzip.compress(self.body, mtime=0)


def is_file(path: str) -> bool:
    """Returns whether a path is of the page's files, which need no key."""
    return path == "/" or path.startswith(ASSETS)


@cache
def load_assets() -> dict[str, Asset]:
    """Returns the page's files by their path below `assets`."""
    folder = Path(__file__).with_name("assets")
    served = [file for file in folder.rglob("*") if file.suffix in _TYPES]
    return {file.relative_to(folder).as_posix(): Asset(file.read_bytes(), _TYPES[file.suffix]) for file in served}


def add_page(app: FastAPI) -> None:
    """Adds the page's files."""
    assets = load_assets()

    def send(request: Request, asset: Asset) -> Response:
        headers = {**_HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(asset.body, media_type=asset.type, headers=headers)
        return Response(asset.zipped, media_type=asset.type, headers={**headers, "content-encoding": "gzip"})

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return send(request, assets[_INDEX])

    @app.get(ASSETS + "{name:path}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        found = assets.get(name)
        return send(request, found) if found is not None else error_response(request, 404, "there is no such file")


def add_ui_routes(app: FastAPI, service: Service, chats: Chats, learning: Learning | None = None) -> None:
    add_page(app)

    @app.get("/ui/info")
    async def info() -> dict[str, Any]:
        return facts(service, chats.knows_effort)

    viewers = Viewers(Snapshots(service, learning).take)

    @app.get("/ui/engine")
    async def engine(request: Request) -> Response:
        """Server-sent events, one a second, for as long as the client reads; docs/page.md has their fields."""
        viewer = viewers.enter(client_name())
        if viewer is None:
            limit = f"{MAX_VIEWERS} clients may look at the engine at once, {MAX_OF_A_KEY} with one key"
            return error_response(request, 503, f"{limit}; close a page that does")

        async def events() -> AsyncIterator[str]:
            async for snapshot in viewers.watch(viewer):
                yield event(snapshot)

        return EventStream(request.url.path, events(), lambda: viewers.leave(viewer))
