"""What rank 0 sends the other ranks of a step, and how they run it with the same executor.

Rank 0 has the host's side: scheduler, grammars, costs. Whatever it has its executor do, it has all executors do: a
call goes out to everybody and is then made here. Of requests only numbers go out. Where the host takes part in a step
(`Guidance`), its answers follow in the order in which the executor asks, which is the same on every rank.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from draftwing.core import Admission, IntArray, Plan, StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.sched.guidance import BoolArray, Guides, Masks

if TYPE_CHECKING:
    from draftwing.engine.executor import Executor
    from draftwing.engine.loaded_heads import LoadedHeads
    from draftwing.engine.step_state import InFlight

Send = Callable[[Any], None]
Receive = Callable[[], Any]
T = TypeVar("T")
COMPARED_EVERY = 64  # steps whose results ranks have seen


class RankBroadcast:
    """Stands for it in an engine with one rank: nothing is sent."""

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Has every other rank call the function of a module, or the method of a class, with its executor first."""

    def step(self, plan: Plan, guidance: Sequence[Guides | None]) -> Sequence[Guides | None]:
        """Has every other rank run the step. guidance: of each of `Plan.parts`. Returns what this one is to ask in
        place of it."""
        return guidance

    def wait_loaded(self) -> None:
        """Waits until every other rank has its weights. Raises what one of them has raised."""

    def load_head(self, heads: LoadedHeads, number: int, folder: Path | None) -> None:
        """Has every rank load a draft head while it goes on with its steps. heads: of this one.  folder: as of
        `Drafter.read_head`. Raises what one of them has raised: then none keeps it. Not for several threads at once."""
        heads.load(number, folder)

    digest: Digest | None = None  # of this rank, where ranks are compared

    def watch(self) -> None:
        """Notes that the engine is ready: from now on a rank that hangs is noticed."""

    def blame(self, error: BaseException) -> BaseException:
        """Returns what is to be raised in place of an error of this rank, which may be that another one is gone."""
        return error

    def compare(self) -> None:
        """Raises DraftwingError where ranks have not drawn the same tokens so far. Nothing may run. What happens on the
        way, every `COMPARED_EVERY` steps, is noticed by `step`."""

    def close(self) -> None:
        """Ends the other ranks."""


class Digest:
    """A hash of all tokens that a rank's steps have committed, in their order."""

    def __init__(self) -> None:
        self.value = self.steps = 0
        self.due: deque[tuple[int, int]] = deque()  # (steps, value) at every `COMPARED_EVERY` steps

    def add(self, result: StepResult) -> None:
        there = np.arange(result.tokens.shape[1]) < result.count[:, None]
        tokens = np.where(there, result.tokens, -1)  # what lies past the count means nothing
        self.value = zlib.crc32(tokens.tobytes(), self.value)
        self.steps += 1
        if self.steps % COMPARED_EVERY == 0:
            self.due.append(self.now)

    @property
    def now(self) -> tuple[int, int]:
        return self.steps, self.value


SINGLE_RANK = RankBroadcast()


class RemoteBroadcast(RankBroadcast, ABC):
    """A `RankBroadcast` with other ranks."""

    @abstractmethod
    def send(self, message: Any) -> None:
        """Sends to all other ranks, in order."""

    def check(self) -> None:
        """Raises DraftwingError where it is known by now that ranks have drawn other tokens. Waits for nothing."""

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.send((function, args))

    def step(self, plan: Plan, guidance: Sequence[Guides | None]) -> Sequence[Guides | None]:
        self.check()
        self.send((None, (numbers_of(plan), [None if one is None else one.processed for one in guidance])))
        return [None if one is None else SharedGuidance(one, self.send) for one in guidance]


def numbers_of(plan: Plan) -> Plan:
    """Returns the plan without what of a request is no number, which no device needs."""
    admits = tuple(map(_numbers_of, plan.admits))
    assert plan.beside is None or not plan.beside.admits, "they come with the first part"
    return replace(plan, admits=admits) if admits else plan


def _numbers_of(admit: Admission) -> Admission:
    asked = admit.request
    params = asked.params.replace(stop=(), stop_regex=(), bad_words=(), grammar=None, logits_processor=None)
    request = GenerationRequest(
        "", asked.prompt_ids, params, limits=asked.limits, prediction=asked.prediction, thinking=asked.thinking
    )
    return admit._replace(request=request)


class SharedGuidance:
    """The host's part in a step, whose answers the other ranks get, too."""

    def __init__(self, guidance: Guides, send: Send) -> None:
        self._guidance, self._send = guidance, send
        self.processed = guidance.processed

    def roots(self) -> Masks | None:
        return self._shared(self._guidance.roots())

    def fit(
        self, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        return self._shared(self._guidance.fit(tokens, parent, alive, max_depth))

    def masks(self) -> Masks | None:
        return self._shared(self._guidance.masks())

    def process(self, row: int, logits: Any) -> None:
        self._guidance.process(row, logits)
        self._send(logits.numpy())

    def _shared(self, answer: T) -> T:
        self._send(answer)
        return answer


class ReceivedGuidance:
    """The guidance of a step on another rank, as rank 0 sent it."""

    def __init__(self, processed: list[int], receive: Receive) -> None:
        self.processed, self._receive = processed, receive

    def roots(self) -> Masks | None:
        return self._receive()

    def fit(
        self, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        return self._receive()

    def masks(self) -> Masks | None:
        return self.roots()

    def process(self, row: int, logits: Any) -> None:
        logits.copy_(torch.from_numpy(self._receive()))


class Follower:
    """A rank from 1 on: runs what rank 0 sends."""

    def __init__(self, executor: Executor, receive: Receive, answer: Send | None = None) -> None:
        """answer: sends rank 0 what was drawn, every `COMPARED_EVERY` steps, and when `RankBroadcast.compare` asks."""
        self.executor, self._receive, self._answer = executor, receive, answer
        self._flying: InFlight | None = None
        self._digest = Digest()
        executor.on_result = self._digest.add

    def obey(self) -> None:
        """Waits for one message and does what it says."""
        function, args = self._receive()
        if function is Digest:
            self._land()
            assert self._answer is not None
            self._answer(self._digest.now)
            return
        if function is not None:
            function(self.executor, *args)
            return
        plan, processed = args
        guidance = [None if one is None else ReceivedGuidance(one, self._receive) for one in processed]
        flying = self.executor.commit(self.executor.launch(plan, *guidance))
        self._land()
        self._flying = flying

    def _land(self) -> None:
        if self._flying is not None:
            for part in self._flying.parts:
                self.on_result(part)
            self._flying = None
            while self._digest.due:
                known = self._digest.due.popleft()
                if self._answer is not None:
                    self._answer(known)

    def on_result(self, flying: InFlight) -> None:
        """Drops a step's result, which is nobody's here, but what it came in is used again."""
        flying.wait()
