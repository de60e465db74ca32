"""Asking an engine: from prompts and what is asked for them to requests, and from its outputs to answers.

`prepare` serves every caller; the server then hands the requests to another process, all others drive an engine in
their own thread by a `Session`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from draftwing.core import Output
from draftwing.engine.admission import EngineInfo
from draftwing.engine.provenance import Digests
from draftwing.engine.receipts import make_receipt
from draftwing.requests.request import GenerationRequest, speculation
from draftwing.requests.stop_regex import Searches
from draftwing.text.answer import Answer
from draftwing.text.tokenizer import bad_word_ids

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine
    from draftwing.text.tokenizer import Tokenizer


def prepare(
    info: EngineInfo, tokenizer: Tokenizer, asked: Sequence[GenerationRequest], speculative: Any, draw: random.Random
) -> Iterator[Answer]:
    """Answers to begin with, n for each request, in order; each has a request of its own that the engine lets in. One
    by one, as they are taken: thousands of them take a while.

    asked: with any `uid`, and n of their parameters.  speculative: as `speculation` takes it.  draw: gives seeds to
    those without one.  Raises RequestError for a request that can never run.
    """
    predicted = any(request.prediction for request in asked)
    found = speculation(speculative, *info.drafting(predicted))
    drafts = found.used if speculative is not None or predicted or info.speculates else None
    index, searches = itertools.count(), Searches()
    for request in asked:
        request = request._replace(bad_word_ids=bad_word_ids(tokenizer, request))
        admitted = info.admit(request._replace(limits=found.limits) if found.limits is not None else request)
        for params in request.params.answers(draw):
            one = admitted._replace(uid=os.urandom(16).hex(), params=params)
            yield Answer(one, tokenizer, next(index), info.options.label, drafts, searches)


@contextmanager
def on_host() -> Iterator[None]:
    """Has tensors of which nobody says where they are be on the host, whatever the program around has chosen as torch's
    default device."""
    import torch  # which whoever has an engine has imported

    host = torch.device("cpu")
    with host if torch.get_default_device() != host else nullcontext():
        yield


class Session:
    """Drives an engine that lives in the calling thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._draw = random.Random(engine.info.options.random_seed)
        self._running: set[str] = set()
        self._digests = Digests()

    def prepare(self, asked: Sequence[GenerationRequest], speculative: Any = None) -> list[Answer]:
        """Makes requests as the function `prepare` does."""
        return list(prepare(self.engine.info, self.engine.tokenizer, asked, speculative, self._draw))

    def stream(self, answers: Sequence[Answer]) -> Generator[tuple[Answer, str], None, None]:
        """Yields each answer that made progress, with its new text (empty while a character or stop string is
        incomplete). One that is complete and waits for its receipt lets the others go first."""
        info, held, left = self.engine.info, list[tuple[Answer, str]](), len(answers)
        wanted = any(answer.request.receipt for answer in answers)
        digests = self._digests.begin(info.provenance) if wanted else None
        by_uid = {answer.request.uid: answer for answer in answers}
        for output in self.run(answer.request for answer in answers):
            answer = by_uid[output.uid]
            text = answer.push(output)
            left -= output.finish_reason is not None
            if answer.wants_receipt:
                held.append((answer, text))
            else:
                yield answer, text
            if held and digests is not None and (digests.done() or not left):
                for answer, text in held:
                    answer.receipt = make_receipt(info, digests.result(), answer)
                    yield answer, text
                held.clear()

    def run(self, requests: Iterable[GenerationRequest], at_once: int | None = None) -> Generator[Output, None, None]:
        """Outputs of the requests, as they come, until all of them are finished.

        at_once: most requests that run at a time; the next one is taken from `requests` when there is room for it.
        What is unfinished when the iteration ends early is aborted. Raises RuntimeError while another run is iterated.
        """
        todo, engine, running = iter(requests), self.engine, self._running
        self._check_unused()
        try:
            while True:
                for request in islice(todo, None if at_once is None else max(at_once - len(running), 0)):
                    self.submit(request)
                if not running:
                    return
                with _uninterrupted(), on_host():
                    outputs = engine.step()
                for output in outputs:
                    if output.finish_reason is not None:
                        running.discard(output.uid)
                    yield output
        finally:
            # Leaves an engine with nothing to do, whose next outputs are new ones.
            try:
                with _uninterrupted(), on_host():
                    for uid in running:
                        engine.abort(uid)
                    while running and not engine.idle():
                        engine.step()
            finally:
                running.clear()

    def until(self, ask: Callable[[], Future[None]]) -> None:
        """Asks something of the engine and turns it until that is done. Raises what the future has, and RuntimeError
        while a run is iterated."""
        self._check_unused()
        done = ask()
        while not done.done():
            with _uninterrupted(), on_host():
                self.engine.step()
        done.result()

    def _check_unused(self) -> None:
        if self._running:
            raise RuntimeError("the engine is streaming another answer: read it to its end or close it first")

    def submit(self, request: GenerationRequest) -> None:
        """Adds a request to the `run` that is being iterated. Raises RequestError if it can never run."""
        self.engine.submit(request)
        self._running.add(request.uid)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the end: in the middle of a step the scheduler's books are open, and an engine that was
    left there could not be used again. A second one ends the step all the same."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever has a handler of its own decides
        return
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
