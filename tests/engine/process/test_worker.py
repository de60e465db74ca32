"""What the engine's process does while it compiles a grammar."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from draftwing.core import Output
from draftwing.engine.process.link import Abort, Ask, Compile, Drop, Refused, Reply
from draftwing.engine.process.worker import SMALL, GrammarThreads, Worker
from draftwing.errors import ConfigError, GenerationError, RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

A, B = Grammar("regex", "a+"), Grammar("regex", "b+")


class Panic(BaseException):
    """As the library's, which are no exceptions."""


class Grammars:
    """A compiler that waits until it is let go on."""

    def __init__(self) -> None:
        self.known: list[Grammar] = []
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self.known

    def compile(self, grammar: Grammar, param: str | None = None, text: str | None = None) -> None:
        if grammar not in self.known:
            self.began.release()
            assert self.go.acquire(timeout=20)
            if grammar.text == "too much":
                raise Panic("it is too much")
            if grammar.text == "wrong":
                raise RequestError("it is wrong", param)
            self.known.append(grammar)


class Engine:
    def __init__(self) -> None:
        self.grammars, self.said = Grammars(), list[str]()
        self.loads = threading.Semaphore(0)  # heads

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, request: GenerationRequest) -> None:
        if request.params.grammar is not None:
            self.grammars.compile(request.params.grammar)
        self.said.append(request.uid)

    def abort(self, uid: str) -> None:
        self.said.append(f"abort {uid}")

    def swap_draft(self, folder: Path | None, adapter: str = "") -> None:
        assert self.loads.acquire(timeout=20)
        if folder == Path("/heads/another"):
            raise ConfigError("it is of another shape")
        self.said.append(f"swap {folder}")

    def stats(self) -> dict[str, Any]:
        return {"running": 1}

    def sleep(self) -> Future[None]:
        self.asked = Future[None]()
        return self.asked


class Posted(Worker):
    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.engine = Engine()
        self.messages, self._news = list[Any](), threading.Condition()

    def post(self, message: object) -> None:
        with self._news:
            self.messages.append(message)
            self._news.notify()

    def die(self, error: BaseException) -> NoReturn:
        self.post(error)
        raise error

    def does(self, message: Any) -> None:
        self.obey(self.engine, message)  # type: ignore[arg-type]

    def until(self, done: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(done, 20)


@pytest.fixture
def worker() -> Iterator[Posted]:
    made = Posted()
    yield made
    made.engine.grammars.go.release(100)


def request(uid: str, grammar: Grammar | None = None) -> GenerationRequest:
    return GenerationRequest(uid, [1], SamplingParams(max_new_tokens=1).replace(grammar=grammar))


def refusal(reply: Reply) -> tuple[type[BaseException], str]:
    """Its error as the server reads it."""
    error = pickle.loads(pickle.dumps(reply)).error
    return type(error), str(error)


def test_it_goes_on_reading(worker: Posted) -> None:
    grammars = worker.engine.grammars
    worker.does(Compile(1, A, "", None, ""))
    worker.does([request("late", B)])  # of a grammar that was forgotten meanwhile
    assert grammars.began.acquire(timeout=20)
    worker.does([request("plain")])
    worker.does(Ask(2, "stats"))
    assert worker.engine.said == ["plain"] and worker.messages == [Reply(2, {"running": 1})]
    grammars.go.release(2)
    worker.until(lambda: Reply(1, None) in worker.messages)
    worker.does([request("known", A)])
    assert "known" in worker.engine.said  # at once


def test_it_goes_on_reading_while_a_head_is_loaded(worker: Posted) -> None:
    worker.does(Ask(1, "swap_draft", (Path("/heads/2"),)))
    worker.does([request("plain")])
    assert worker.engine.said == ["plain"] and not worker.messages
    worker.engine.loads.release()
    worker.until(lambda: worker.messages == [Reply(1, None)])
    assert worker.engine.said == ["plain", "swap /heads/2"]
    worker.engine.loads.release()
    worker.does(Ask(2, "swap_draft", (Path("/heads/another"),)))
    worker.until(lambda: worker.messages[-1].number == 2)
    assert refusal(worker.messages[-1]) == (ConfigError, "it is of another shape")


def test_refusals_are_told(worker: Posted) -> None:
    wrong = Grammar("regex", "wrong")
    worker.engine.grammars.go.release(2)
    worker.does(Compile(1, wrong, "", "guided_regex", ""))
    worker.until(lambda: bool(worker.messages))
    assert refusal(worker.messages[0]) == (RequestError, "it is wrong")
    assert worker.messages[0].error.param == "guided_regex"
    worker.does([request("x", wrong)])
    worker.until(lambda: Refused("x", "it is wrong") in worker.messages)


@pytest.mark.parametrize("error", [OSError("no such file"), Panic("it is too much"), ConfigError("too large")])
def test_what_a_future_raises_is_told(worker: Posted, error: BaseException) -> None:
    worker.does(Ask(1, "sleep", ()))
    assert not worker.messages
    worker.engine.asked.set_exception(error)
    own = isinstance(error, ConfigError)
    words = "too large" if own else f"there is no answer: {type(error).__name__}: {error}"
    assert refusal(worker.messages[0]) == (type(error) if own else GenerationError, words)


def test_who_leaves_is_not_waited_for(worker: Posted) -> None:
    grammars = worker.engine.grammars
    worker.does([request("begun", A)])
    assert grammars.began.acquire(timeout=20)
    worker.does(Compile(1, B, "", None, ""))
    worker.does([request("waits", B)])
    worker.does(Drop(1))
    worker.does(Abort(("waits",)))
    assert worker.messages == [Reply(1, None), [Output("waits", [], {"type": "abort", "message": "aborted"})]]
    worker.does(Abort(("begun",)))
    grammars.go.release(100)
    worker.does([request("next", B)])
    worker.does(Compile(3, B, "", None, ""))
    worker.until(lambda: Reply(3, None) in worker.messages)
    # The engine hears of an abort after the request, or of it twice.
    assert worker.engine.said == ["abort begun", "begun", "abort begun", "next"]
    assert grammars.known == [A, B]


def failed(uid: str, words: str) -> list[Output]:
    return [Output(uid, [], {"type": "abort", "message": words, "status_code": 500})]


def test_what_a_grammar_raises_is_an_error_of_its_request(worker: Posted, caplog: pytest.LogCaptureFixture) -> None:
    bad, words = Grammar("regex", "too much"), "the grammar could not be compiled: Panic: it is too much"
    worker.engine.grammars.go.release(100)
    worker.does(Compile(1, bad, "", None, ""))
    worker.does([request("x", bad)])
    worker.does(Compile(2, A, "", None, ""))
    worker.until(lambda: len(worker.messages) == 3)
    assert refusal(worker.messages[0]) == (GenerationError, words)
    assert worker.messages[1:] == [failed("x", words), Reply(2, None)]
    assert caplog.text.count("Panic: it is too much") == 2


def test_a_thread_that_cannot_be_started_is_an_error_of_its_request(worker: Posted) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    words = "the grammar could not be compiled: RuntimeError: can't start new thread"
    worker.engine.grammars.go.release(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        worker.does(Compile(1, A, "", None, ""))
        worker.does([request("x", A)])
    assert refusal(worker.messages[0]) == (GenerationError, words) and worker.messages[1:] == [failed("x", words)]
    worker.does(Compile(2, A, "", None, ""))
    worker.until(lambda: worker.messages[2:] == [Reply(2, None)])
    assert not worker.engine.said


def broken(error: BaseException) -> None:
    raise AssertionError(error)


class Blocked:
    """Threads with a large job that waits until it is let go. `done` has the keys of finished work, in order."""

    def __init__(self) -> None:
        self.lanes, self.done = GrammarThreads(broken), list[object]()
        self.hold, self._began, self._all = threading.Event(), threading.Event(), threading.Event()
        self.gone = False
        self.lanes.put(SMALL + 1, "a", "first", self._wait)
        assert self._began.wait(20)

    def _wait(self, gone: Callable[[], bool]) -> None:
        self._began.set()
        self.hold.wait(20)
        self.gone = gone()
        self.done.append("first")

    def put(self, client: str, key: str, size: int = SMALL + 1) -> None:
        self.lanes.put(size, client, key, lambda gone: self.done.append(key))

    def finish(self) -> list[object]:
        self.hold.set()
        self.lanes.put(SMALL + 1, "~", "last", lambda gone: self._all.set())
        assert self._all.wait(20)
        return self.done


def test_clients_take_turns() -> None:
    blocked = Blocked()
    for key in ("a1", "a2", "a3", "b1", "b2", "c1"):
        blocked.put(key[0], key)
    for i in range(2):
        blocked.lanes.put(SMALL + 1, "~", f"wait {i}", lambda gone: None)  # `last` comes after all others
    assert blocked.finish() == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_small_grammars_are_not_behind_large_ones() -> None:
    blocked, small = Blocked(), threading.Event()
    blocked.put("a", "large")
    blocked.lanes.put(SMALL, "a", "small", lambda gone: small.set())
    assert small.wait(20) and not blocked.done
    assert blocked.finish() == ["first", "large"]


def test_what_is_dropped_never_begins_or_is_told() -> None:
    blocked = Blocked()
    for key in ("a1", "a2", "b1"):
        blocked.put(key[0], key)
    assert blocked.lanes.drop("b1") and blocked.lanes.drop("a1")
    assert not blocked.lanes.drop("a1") and not blocked.lanes.drop("nobody") and not blocked.lanes.drop("first")
    assert blocked.finish() == ["first", "a2"]
    assert blocked.gone


class Key:
    """Counts how often keys are compared."""

    compared = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return isinstance(other, Key) and self.number == other.number


def test_a_drop_does_not_look_through_all_that_waits() -> None:
    blocked = Blocked()
    for i in range(1000):
        blocked.lanes.put(SMALL + 1, "a", Key(i), lambda gone: None)
    Key.compared = 0
    assert blocked.lanes.drop(Key(999)) and blocked.lanes.drop(Key(500)) and not blocked.lanes.drop(Key(1000))
    assert Key.compared < 20
    blocked.finish()


def test_it_has_two_threads_however_much_waits() -> None:
    before = threading.active_count()
    blocked = Blocked()
    for i in range(200):
        blocked.put(f"client {i}", f"job {i}", 1 + i % 2 * SMALL)
    assert threading.active_count() <= before + 2
    assert len(blocked.finish()) > 100
