"""The engine in a process of its own, as its users see it, and the messages that pass.

The worker is started as a new interpreter rather than as a fork: it holds no copy of the server's threads and sockets,
and in a session of its own it does not get the terminal's Ctrl-C. The one connection is a socket pair: when either
process ends, in whatever way, the other one reads its end and knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwing.engine.process.spawn import Failed, end_all, how_it_ended, start_module
from draftwing.errors import DraftwingError

if TYPE_CHECKING:  # the worker starts before what takes time to import is
    from draftwing.config.options import Options
    from draftwing.core import Output
    from draftwing.engine.admission import EngineInfo
    from draftwing.requests.grammar_field import Grammar
    from draftwing.requests.request import GenerationRequest

logger = logging.getLogger("draftwing")
WORKER = "draftwing.engine.process.worker"


class EngineDead(DraftwingError):
    """The engine's process ended; nothing can be generated (HTTP 503)."""


# -- to the engine; besides these, `list[GenerationRequest]` ----------------------------------------------------------


class Abort(NamedTuple):
    uids: tuple[str, ...]


class Ask(NamedTuple):
    """Calls a method of `Engine` by its name. A `Reply` of this number comes back: what it returns, of a Future what
    that gets, or its error."""

    number: int
    method: str
    args: tuple[Any, ...] = ()


class Compile(NamedTuple):
    """A grammar that requests of `client` will have. A `Reply` of this number comes back, even after a `Drop`: None, or
    a RequestError, or a GenerationError that says what else went wrong. text: what a `Translator` has made of it.
    param: the field that it came in."""

    number: int
    grammar: Grammar
    text: str
    param: str | None
    client: str


class Drop(NamedTuple):
    """Nobody waits for the `Compile` of this number any more: it need not begin."""

    number: int


class Close(NamedTuple):
    pass


Message = Abort | Ask | Compile | Drop | Close


# -- from the engine; besides these, `list[Output]`, and `Failed` as its last words -----------------------------------


class Reply(NamedTuple):
    """The answer to the question of this number, or its error."""

    number: int
    value: Any = None
    error: DraftwingError | None = None


class Refused(NamedTuple):
    """A request that passed the server's check but not the engine's: theirs differ, which is a bug, but not fatal."""

    uid: str
    message: str


class Listener(NamedTuple):
    """Receives, on the link's thread, what comes. `died` is called once, and last."""

    outputs: Callable[[list[Output]], None]
    reply: Callable[[Reply], None]
    died: Callable[[str], None]


class EngineLink:
    """The server's end of one worker process. Nothing here blocks but `wait_ready` and `close`."""

    def __init__(self, options: Options, module: str = WORKER) -> None:
        """Starts `python -m module` with the options."""
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.process, (self._conn,) = start_module(module, 1, new_session=True)
        with contextlib.suppress(OSError):  # a worker that is gone already is noticed by `wait_ready`
            self._conn.send(options)

    def wait_ready(self) -> EngineInfo:
        """Blocks until everything is loaded. Raises what the engine's constructor does, or EngineDead."""
        try:
            first = self._conn.recv()
        except (EOFError, OSError):
            raise EngineDead(f"the engine's process ended before it was ready: {how_it_ended(self.process)}") from None
        if isinstance(first, Failed):
            raise first.error(EngineDead)
        info: EngineInfo = first
        return info

    def listen(self, listener: Listener) -> None:
        """Begins to deliver. After `wait_ready`."""
        for name, work in (("receive", lambda: self._receive(listener)), ("send", self._send)):
            thread = threading.Thread(target=work, name=f"draftwing-engine-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: list[GenerationRequest] | Message) -> None:
        """Queues a message; of a dead engine it goes nowhere."""
        # A thread of its own writes: a full pipe must not stop the event loop.
        self._outbox.put(message)

    def close(self, grace: float = 5.0) -> None:
        """Ends the process and waits for it, killing it after `grace` seconds. Safe to call twice."""
        if self.process.poll() is None and grace > 0:
            self.send(Close())
            if not self._threads:  # never listened: nobody empties the outbox
                with contextlib.suppress(OSError):
                    self._conn.send(Close())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with its ranks, one of which may be stopped
        if end_all([self.process], 0):
            logger.error("the engine's process %d does not end, though it was killed", self.process.pid)
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)
        self._conn.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._conn.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))  # which copies no pixels first

    def _receive(self, listener: Listener) -> None:
        from draftwing.core import Output  # late, as above

        cause = ""
        try:
            while True:
                message = self._conn.recv()
                if isinstance(message, list):
                    listener.outputs(message)
                elif isinstance(message, Reply):
                    listener.reply(message)
                elif isinstance(message, Refused):
                    logger.error("the engine refused a request that the server let in: %s", message.message)
                    reason = {"type": "abort", "message": message.message}
                    listener.outputs([Output(message.uid, [], reason)])
                else:
                    assert isinstance(message, Failed)
                    cause = message.message
        except (EOFError, OSError):
            listener.died(cause or how_it_ended(self.process))
