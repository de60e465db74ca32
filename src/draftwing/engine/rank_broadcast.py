"""What rank 0 sends the other ranks of a step, and what every rank keeps beside its steps.

Rank 0 has the host's side: scheduler, grammars, costs. Whatever it has its executor do, it has all executors do: a
call goes out to everybody and is then made here. Of requests only numbers go out. Where the host takes part in a step
(`Guidance`), its answers follow in the order in which the executor asks, which is the same on every rank. Draft heads
are loaded on every rank beside the steps (`LoadedHeads`), until one takes the place of the head that serves."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftwing.core import Admission, IntArray, Plan, StepResult
from draftwing.engine.devices.base import Device
from draftwing.errors import ConfigError
from draftwing.models.heads.base import FeatureHead
from draftwing.requests.request import GenerationRequest
from draftwing.sched.guidance import BoolArray, Guides, Masks
from draftwing.spec.drafter import Drafter

Send = Callable[[Any], None]
Receive = Callable[[], Any]
T = TypeVar("T")
COMPARED_EVERY = 64  # steps whose results ranks have seen


class LoadedHeads:
    """Of one rank, by number. `load` and `drop` belong to one thread, which may be another than that of the steps."""

    def __init__(self, drafter: Drafter | None, device: Device, calibration: Sequence[Tensor]) -> None:
        """calibration: how often drafts were right, of the serving head; now the first guesses."""
        self._drafter, self._device, self._calibration = drafter, device, calibration
        self._guesses = [counts.clone() for counts in calibration]
        self._heads: dict[int, FeatureHead] = {}

    def load(self, number: int, folder: Path | None) -> None:
        """Loads a head for `take`, and changes nothing that is served; see `Drafter.read_head`."""
        if self._drafter is None:
            raise ConfigError("nothing is drafted, so no head can be replaced")
        head = self._drafter.read_head(folder)
        self._device.synchronize()  # the streams of the thread of the steps know nothing of this one's
        self._heads[number] = head

    def drop(self, number: int) -> None:
        """Forgets a head that will not be taken, where it is there."""
        self._heads.pop(number, None)

    @torch.inference_mode()
    def take(self, number: int) -> None:
        """Drafts with this head's values from the next step on; how often drafts were right is learnt anew. Heads that
        were loaded before it are forgotten."""
        assert self._drafter is not None
        self._drafter.take_head(self._heads[number])
        for counts, guesses in zip(self._calibration, self._guesses, strict=True):
            counts.copy_(guesses)
        for loaded in [one for one in list(self._heads) if one <= number]:
            self.drop(loaded)


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
    assert plan.mixed_prefill is None or not plan.mixed_prefill.admits, "they come with the first part"

    def numbers(admit: Admission) -> Admission:
        asked = admit.request
        params = asked.params.replace(stop=(), stop_regex=(), bad_words=(), grammar=None, logits_processor=None)
        request = GenerationRequest(
            "", asked.prompt_ids, params, limits=asked.limits, prediction=asked.prediction, thinking=asked.thinking,
            bad_word_ids=asked.bad_word_ids, images=asked.images,
        )  # fmt: skip
        return admit._replace(request=request)

    return replace(plan, admits=tuple(map(numbers, plan.admits))) if plan.admits else plan


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
