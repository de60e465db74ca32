"""The engine's process: `python -m draftwing.engine.process.worker FD`, started by `EngineLink` and by nobody else.

The main thread turns the engine, another one reads what the server sends, and further ones compile grammars, so that
whoever reads what the server sends never does. When the server's end of the connection closes, the process ends at
once, in the middle of whatever it does."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from draftwing.config.devices import AUTO
from draftwing.config.options import Options
from draftwing.core import Output
from draftwing.engine.process.link import Abort, Ask, Close, Compile, Drop, Message, Refused, Reply
from draftwing.engine.process.spawn import Failed, joined
from draftwing.engine.startup import before_torch
from draftwing.engine.startup.before_torch import Laps
from draftwing.errors import DraftwingError, GenerationError, NotFound, RequestError
from draftwing.fair_deque import FairDeque
from draftwing.log import configure_logging
from draftwing.machine import keep_tidy
from draftwing.pipes import receive
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

SMALL = 16_384  # characters of a grammar
# Of methods that take a while: the thread that calls them, one after the other, and what is said of an error of theirs
# that nobody raised on purpose. Nothing has changed before it, so the engine goes on. Adapters share a thread, for
# their names may be the same.
LANES = {
    "swap_draft": ("draftwing-swap", "a head could not be loaded"),
    "load_adapter": ("draftwing-adapters", "an adapter could not be loaded"),
    "unload_adapter": ("draftwing-adapters", "an adapter could not be unloaded"),
    "act_on_slot": ("draftwing-slots", "a slot could not be used"),
}
Work = Callable[[Callable[[], bool]], None]
logger = logging.getLogger("draftwing")


class OneByOne:
    """Does one thing after the other, in a thread that is there while there is something to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._todo: deque[Callable[[], None]] = deque()
        self._working = False

    def put(self, work: Callable[[], None]) -> None:
        """Queues work, which raises nothing."""
        with self._lock:
            self._todo.append(work)
            if not self._working:
                self._working = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._working = False
                    return
                work = self._todo.popleft()
            work()


class GrammarThreads:
    """Two lanes, for small grammars and large ones. Each does one thing after the other, and clients take turns."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """failed: called with what work raises, which it should not."""
        self._lanes = [_GrammarThread(name, failed) for name in ("draftwing-compile-small", "draftwing-compile-large")]

    def put(self, size: int, client: str, key: Hashable, work: Work) -> None:
        """Queues `work`, which is given a function that says whether it was dropped meanwhile. size: of the grammar,
        in characters.  key: to drop it by, not None; no two are the same.  Raises RuntimeError where no thread can be
        started."""
        self._lanes[size > SMALL].put(client, key, work)

    def drop(self, key: Hashable) -> bool:
        """Drops what nobody wants any more. Returns whether it had not begun, and never will; unknown keys are
        ignored."""
        return any(lane.drop(key) for lane in self._lanes)


class _GrammarThread:
    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name, self._failed = name, failed
        self._waiting: FairDeque[Hashable, Work] = FairDeque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._now: Hashable = None  # the key of what runs
        self._dropped = False  # whether what runs was

    def put(self, client: str, key: Hashable, work: Work) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.put(client, key, work)
            self._changed.notify()

    def drop(self, key: Hashable) -> bool:
        with self._changed:
            if self._now == key:
                self._dropped = True
            return self._waiting.drop(key) is not None

    def _run(self) -> None:
        try:
            while True:
                self._next()(lambda: self._dropped)
                with self._changed:
                    self._now = None
        except BaseException as error:
            self._failed(error)

    def _next(self) -> Work:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            (self._now, work), self._dropped = self._waiting.pop(), False
            return work


def main(argv: list[str]) -> int:
    gc.disable()  # what is imported and loaded stays: to look through it again and again takes a tenth of the time
    (conn,) = joined(argv)
    try:
        options = conn.recv()
    except EOFError:
        return 1
    assert isinstance(options, Options)
    configure_logging(options.log_level, options.log_format)
    worker = Worker(conn)
    try:
        worker.run(options)
    except BaseException as error:
        worker.die(error)
    return 0


class Worker:
    """All threads post; `Connection` is not made for that, so a lock is."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._posting = threading.Lock()
        self._early: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        self._compiling = GrammarThreads(self.die)
        self._lanes = {name: OneByOne(name) for name, _ in LANES.values()}
        self._closing = False

    def run(self, options: Options) -> None:
        """Loads the engine and turns it until the server says Close."""
        # It reads from the start, to see a server that goes away while the engine loads.
        threading.Thread(target=self._read, name="draftwing-commands", daemon=True).start()
        preparing = before_torch.begin() if options.device in (AUTO, "cuda") else None
        lap = Laps()
        from draftwing.engine.engine import Engine
        from draftwing.engine.startup.compiler_process import Compiler

        lap("imports")
        if preparing is not None:
            preparing.join()
            lap("the GPU, imports aside")
        engine = Engine(options, self.die, Compiler.ready_for(options))
        lap("the engine")
        gc.collect()
        gc.freeze()  # a collection of all that an engine is would make a step wait for 0.1 s
        gc.enable()
        keep_tidy()
        self.post(engine.info)
        self._early.put(engine)
        while not self._closing:
            outputs = engine.step(block=True)
            if outputs:
                self.post(outputs)
        engine.close()

    def post(self, message: object) -> None:
        with self._posting:
            try:
                self._conn.send(message)
            except OSError:
                os._exit(1)  # the server is gone

    def die(self, error: BaseException) -> NoReturn:
        """Says why and ends the process at once: threads and destructors could keep it for long."""
        failed = Failed.of(error)
        if failed.kind not in ("config", "checkpoint"):
            logger.error("the engine stopped by an exception", exc_info=error)
        self.post(failed)
        os._exit(1)

    def _read(self) -> None:
        engine: Engine | None = None
        try:
            while True:
                message = pickle.loads(receive(self._conn))
                if isinstance(message, Close):
                    if engine is None:
                        os._exit(0)
                    self._closing = True
                    engine.wake()
                    return
                # The server sends nothing else before it has heard that the engine is ready.
                engine = engine or self._early.get()
                self.obey(engine, message)
        except (EOFError, OSError):
            os._exit(1)
        except BaseException as error:
            self.die(error)

    def obey(self, engine: Engine, message: list[GenerationRequest] | Message) -> None:
        """Does what the server sent, or sees to it that it is done."""
        if isinstance(message, list):
            with engine.together():
                for request in message:
                    self._let_in(engine, request)
        elif isinstance(message, Abort):
            for uid in message.uids:
                if self._compiling.drop(uid):
                    self.post([Output(uid, [], {"type": "abort", "message": "aborted"})])
                else:
                    engine.abort(uid)
        elif isinstance(message, Compile):

            def compiled() -> None:
                engine.grammars.compile(message.grammar, message.param, message.text)

            self._later(
                message.grammar, message.client, message.number,
                lambda gone: self._answer(message.number, compiled),
                lambda words: self.post(Reply(message.number, error=GenerationError(words))),
            )  # fmt: skip
        elif isinstance(message, Drop):
            if self._compiling.drop(message.number):
                self.post(Reply(message.number))  # it is compiled no more
        elif isinstance(message, Ask):
            lane, failed = LANES.get(message.method, ("", ""))
            answer = partial(
                self._answer, message.number, lambda: getattr(engine, message.method)(*message.args), failed
            )
            if lane:
                self._lanes[lane].put(answer)
            else:  # one at a time, on this thread: flushing waits for the step that runs
                answer()

    def _answer(self, number: int, call: Callable[[], Any], failed: str = "") -> None:
        """Replies to a question. failed: what is said of an error that nobody raised on purpose; without it, such an
        error is raised."""
        value: Any = None
        error: DraftwingError | None = None
        try:
            value = call()
        except (RequestError, GenerationError) as refused:
            error = refused
        except BaseException as other:  # a future may have any
            if not failed:
                raise
            if isinstance(other, DraftwingError):
                error = other
            else:
                logger.error("%s", failed, exc_info=other)
                error = GenerationError(f"{failed}: {type(other).__name__}: {other}")
        if isinstance(value, Future):
            # What is raised in a callback nobody sees.
            value.add_done_callback(lambda done: self._answer(number, done.result, failed or "there is no answer"))
        else:
            self.post(Reply(number, value, error))

    def _let_in(self, engine: Engine, request: GenerationRequest) -> None:
        grammar = request.params.grammar
        if grammar is None or engine.grammars.knows(grammar):
            self._submit(engine, request)
            return

        def submit(gone: Callable[[], bool]) -> None:
            self._submit(engine, request)
            if gone():
                engine.abort(request.uid)

        def fail(words: str) -> None:
            self.post([Output(request.uid, [], {"type": "abort", "message": words, "status_code": 500})])

        self._later(grammar, request.client, request.uid, submit, fail)

    def _later(self, grammar: Grammar, client: str, key: object, work: Work, fail: Callable[[str], None]) -> None:
        """Has a lane do `work`, which compiles a grammar. What it raises is of this grammar alone: the engine goes on,
        and `fail` answers whoever asked."""

        def failed(error: BaseException) -> None:
            logger.error("a grammar could not be compiled", exc_info=error)
            fail(f"the grammar could not be compiled: {type(error).__name__}: {error}")

        def guarded(gone: Callable[[], bool]) -> None:
            try:
                work(gone)
            except BaseException as error:  # a panic of the library is no Exception
                failed(error)

        try:
            self._compiling.put(len(grammar.text), client, key, guarded)
        except RuntimeError as error:  # no thread can be started
            failed(error)

    def _submit(self, engine: Engine, request: GenerationRequest) -> None:
        try:
            engine.submit(request)
        except NotFound as error:  # an adapter that was unloaded while the request was on its way
            self.post([Output(request.uid, [], {"type": "abort", "message": str(error), "status_code": 404})])
        except RequestError as error:
            self.post(Refused(request.uid, str(error)))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
