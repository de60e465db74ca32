"""Runs batches: each line is a request to the application itself, as a client would send it, behind all others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from draftwing.server.batches.lines import Line, answered, check, read, unanswered
from draftwing.server.batches.store import Record, Results, Store
from draftwing.server.endpoints import LOWEST_PRIORITY, PRIORITY_HEADER

logger = logging.getLogger(__name__)
TRIES = 5  # for a line whose engine or model ends, which may be the line's own fault
MAX_WAIT = 30.0  # seconds between two of them, and until a line is sent again for which there was no room
READY_SECONDS = 0.5  # between looks whether there is an engine


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes
    complete: bool

    @property
    def busy(self) -> float | None:
        """Returns the seconds after which there may be room for the request; None: there was."""
        after = self.headers.get("retry-after", "") if self.status in (429, 503) else ""
        return min(max(float(after), 0.5), MAX_WAIT) if after.isdigit() else None

    @property
    def broken(self) -> bool:
        """Returns whether whoever answered has ended."""
        return not self.complete or self.status == 503


class KeyRemoved(Exception):
    """The key that a batch was made with is not there any more."""


class Runner:
    """Belongs to the running event loop from `start` on."""

    def __init__(
        self, store: Store, app: ASGIApp, key: Callable[[str], str | None], at_once: int,
        stopping: Callable[[], bool], ready: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """key: of an owner.  at_once: lines that are asked at the same time, of all batches.  stopping: whether the
        server ends, and aborts what runs.  ready: whether requests can be answered now."""
        self._store, self._app, self._key = store, app, key
        self._stopping, self._ready = stopping, ready
        self._slots = asyncio.Semaphore(at_once)  # first come, first served: batches take turns
        self._checking = asyncio.Lock()
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Goes on with batches that have not ended."""
        for batch in sorted(self._store.batches.values(), key=lambda one: one.made):
            if not batch.ended:
                self.add(batch)

    async def stop(self) -> None:
        """Leaves batches as they are, to go on later."""
        tasks = list(self._batches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    def add(self, batch: Record) -> None:
        task = self._batches[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._batches.pop(batch.id, None))

    async def cancel(self, batch: Record) -> None:
        """Ends a batch that waits or runs; what is answered is kept."""
        if batch.id in self._work:
            self._work[batch.id].cancel()
        await self._store.save(batch, "cancelling")

    async def _run(self, batch: Record) -> None:
        try:
            await self._through(batch)
        except KeyRemoved:
            await self._end_early(batch, "invalid_api_key", "the key that it was made with was removed")
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            why = error.strerror if isinstance(error, OSError) else "an internal error, which the server's log has"
            await self._end_early(batch, "server_error", why)

    async def _end_early(self, batch: Record, code: str, why: str | None) -> None:
        message = f"the batch could not go on: {why}; what was answered is kept, send the other lines once more"
        await self._fail(batch, [{"code": code, "line": None, "message": message, "param": None}])

    async def _fail(self, batch: Record, errors: list[dict[str, Any]]) -> None:
        batch.shown["errors"] = {"object": "list", "data": errors}
        with contextlib.suppress(OSError):
            await self._keep_results(batch)
        with contextlib.suppress(OSError):
            await self._store.save(batch, "failed")

    async def _through(self, batch: Record) -> None:
        """Takes a batch from whatever state it is in to its end."""
        if batch.status == "validating" and not await self._work_on(batch, self._check(batch)):
            return
        results = await asyncio.to_thread(Results, *map(self._store.content, batch.outputs))
        try:
            self._count(batch, results)
            if batch.status != "cancelling":
                left = batch.shown["expires_at"] - time.time()
                if not await self._work_on(batch, self._answer(batch, results), left):
                    return
            if batch.shown["expired_at"] is not None:
                await asyncio.to_thread(self._expire, batch, results)
            self._count(batch, results)
        finally:
            results.close()
        await self._finish(batch)

    async def _work_on(self, batch: Record, work: Any, seconds: float | None = None) -> bool:
        """Returns whether a batch goes on when some work is done: not where it failed, or the server ends. One that
        takes longer than it may is ended, and so is that of a batch that is cancelled."""
        task = self._work[batch.id] = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(seconds, 0))
            if not done:
                batch.shown["expired_at"] = int(time.time())
                await self._store.save(batch)
        finally:
            del self._work[batch.id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()
        return not batch.ended and not self._stopping()

    async def _check(self, batch: Record) -> None:
        async with self._checking:  # one at a time: it takes the interpreter's lock again and again
            path, endpoint = self._store.content(batch.shown["input_file_id"]), batch.shown["endpoint"]
            total, errors = await asyncio.to_thread(check, path, endpoint)
        if errors:
            await self._fail(batch, errors)
        else:
            batch.shown["request_counts"]["total"] = total
            await self._store.save(batch, "in_progress")

    def _count(self, batch: Record, results: Results) -> None:
        batch.shown["request_counts"] |= {"completed": results.counts[0], "failed": results.counts[1]}

    def _missing(self, batch: Record, results: Results) -> Iterator[Line]:
        """Yields the lines that have no result. It blocks."""
        path = self._store.content(batch.shown["input_file_id"])
        return (line for line in read(path, batch.shown["endpoint"]) if line.id not in results.done)

    async def _answer(self, batch: Record, results: Results) -> None:
        lines = self._missing(batch, results)
        try:
            async with asyncio.TaskGroup() as group:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    await self._slots.acquire()
                    if self._stopping():
                        self._slots.release()
                        return
                    task = group.create_task(self._answer_line(batch, results, line))
                    task.add_done_callback(lambda _: self._slots.release())  # also where it is cancelled before it runs
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer_line(self, batch: Record, results: Results, line: Line) -> None:
        tries = 0
        while True:
            while not self._ready():
                await asyncio.sleep(READY_SECONDS)
            answer = await self._ask(batch, line)
            if self._stopping():  # it may have been aborted: it is asked again by the next server
                return
            if answer.busy is not None:
                await asyncio.sleep(answer.busy)
                continue
            refused = answer.status == 401
            if refused and self._key(batch.owner) is None:
                raise KeyRemoved
            tries += 1
            if not (answer.broken or refused) or tries == TRIES:  # a model's server may read a new key a moment later
                break
            await asyncio.sleep(min(2.0**tries, MAX_WAIT))
        if answer.complete:
            text = answered(line.id, answer.status, answer.headers.get("x-request-id"), answer.body)
        else:
            text = unanswered(line.id, "server_error", f"there was no whole answer; its status is {answer.status}")
        failed = not (answer.complete and 200 <= answer.status < 300)
        while not _added(results, line.id, text, failed):
            await asyncio.sleep(MAX_WAIT)
        self._count(batch, results)

    async def _ask(self, batch: Record, line: Line) -> Answer:
        """Sends a line to the application."""
        path, key = batch.shown["endpoint"], self._key(batch.owner)
        headers = {
            b"host": b"localhost", b"content-type": b"application/json",
            PRIORITY_HEADER.encode(): b"%d" % LOWEST_PRIORITY,
            **({b"authorization": b"Bearer " + key.encode()} if key else {}),
        }  # fmt: skip
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": [*headers.items()], "client": None, "server": None,
        }  # fmt: skip
        body: Message | None = None
        sent: list[Message] = []

        async def receive() -> Message:
            nonlocal body
            message, body = body, None
            if message is None:
                await asyncio.Event().wait()  # the client stays
            assert message is not None
            return message

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            body = {"type": "http.request", "body": json.dumps(line.body).encode()}  # too deep a one raises
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a line of batch %s ended by an exception", batch.id)
        if not sent:
            return Answer(500, Headers(), b"", False)
        content = b"".join(message.get("body", b"") for message in sent)
        found = Headers(raw=sent[0]["headers"])
        complete = len(sent) > 1 and not sent[-1].get("more_body", False) and "json" in found.get("content-type", "")
        return Answer(sent[0]["status"], found, content, complete)

    def _expire(self, batch: Record, results: Results) -> None:
        message = f"the batch had {batch.shown['completion_window']}, which were over before this line was answered"
        for line in self._missing(batch, results):
            results.add(line.id, unanswered(line.id, "batch_expired", message), True)

    async def _finish(self, batch: Record) -> None:
        """Makes the files known, and then says that the batch has ended."""
        if batch.status == "in_progress":
            await self._store.save(batch, "finalizing")
        await self._keep_results(batch)
        expired, cancelled = batch.shown["expired_at"], batch.shown["cancelling_at"]
        await self._store.save(batch, "cancelled" if cancelled else "expired" if expired else "completed")

    async def _keep_results(self, batch: Record) -> None:
        """Makes the files of a batch known that have a line."""
        for kind, id in zip(("output", "error"), batch.outputs, strict=True):
            path = self._store.content(id)
            if path.is_file() and path.stat().st_size:
                await self._store.add_file(batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", id=id)
                batch.shown[f"{kind}_file_id"] = id
            else:
                path.unlink(missing_ok=True)


def _added(results: Results, id: str, text: bytes, failed: bool) -> bool:
    """Returns whether a result was written; where the disk is full it waits for room."""
    try:
        results.add(id, text, failed)
    except OSError as error:
        logger.error("a result of a batch cannot be written, and is tried again: %s", error)
        return False
    return True
