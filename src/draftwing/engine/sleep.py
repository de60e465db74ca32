"""Sleep: an engine without requests gives memory back, and has it again when somebody comes.

What the KV pool and states of recurrent layers hold is written to where prefixes are kept, or forgotten. Graphs and
recorded steps are dropped, and made again. Where the device has memory of its own all else that is there, such as
weights, adapters, features of images and what drafters have learnt, is in host memory meanwhile. On a CPU weights stay
where they are. A text is the same as without: nothing that a later step reads is another.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import FunctionType, ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.engine.build import Parts
from draftwing.engine.executor import Executor
from draftwing.engine.input_queue import InputQueue
from draftwing.engine.saved_prefixes import SavedPrefixes
from draftwing.errors import GenerationError
from draftwing.machine import free_memory, give_back

log = logging.getLogger("draftwing")
LEFT = 1 << 30  # bytes of host memory that sleep leaves to others


class Asked(NamedTuple):
    """asleep: what the engine is to be.  done: when it is."""

    asleep: bool
    done: Future[None]


class Sleep:
    """Of one engine. Any thread may ask; what is asked is done, in this order, by the one that turns the engine."""

    def __init__(
        self,
        parts: Parts,
        inputs: InputQueue,
        loading: threading.Lock,
        drained: Callable[[], bool],
        saved: SavedPrefixes | None,
    ) -> None:
        """loading: held while something else is put on the device.  drained: whether nothing runs or waits but what
        stands apart in `inputs`.  saved: keeps what is cached elsewhere, where that is wanted."""
        self._parts, self._input, self._loading, self._drained, self._saved = parts, inputs, loading, drained, saved
        self.asked: deque[Asked] = deque()
        self.asleep = False

    def ask(self, asleep: bool) -> Future[None]:
        """Asks for the engine to sleep or to be awake. The future has a GenerationError where there is no room."""
        if asleep:
            self._input.hold()  # who comes from now on
        asked = Asked(asleep, Future())
        self.asked.append(asked)
        self._input.wake()
        return asked.done

    def look(self) -> bool:
        """Falls asleep or wakes up, where that is asked for and can be, or a request needs it: one that cannot have it
        is refused. Returns whether the engine is awake."""
        while self.asked:
            asleep, done = self.asked[0]
            try:
                if asleep and not self.asleep:
                    self._input.hold()  # of several that ask, each time
                    if not self._drained():
                        return True
                    self._fall_asleep()
                elif not asleep:
                    self.wake_up()
                done.set_result(None)
            except GenerationError as error:
                done.set_exception(error)
            self.asked.popleft()
            self._input.release()
        if self.asleep and self._input.new:
            try:
                self.wake_up()
            except GenerationError as error:
                for req in self._input.take_new(self._input.new):
                    self._parts.sched.refuse(req, f"the engine cannot wake up: {error}", 500)
        return not self.asleep

    def _fall_asleep(self) -> None:
        """Raises GenerationError where the host has no room for what is on the device: then the engine is awake."""
        parts, started = self._parts, time.monotonic()
        executor = parts.executor
        needed, free = bytes_to_copy(executor) * executor.model.ranks.size, free_memory()
        if free is not None and needed > free - LEFT:
            raise GenerationError(
                f"no room to sleep: expected {(needed + LEFT) / 1e9:.2f} GB of free host memory for what is on the "
                f"device, found {free / 1e9:.2f}; end other programs, or stop the server in place of that"
            )
        if self._saved is not None:
            self._saved.keep_all()
        parts.sched.flush_cache()
        with self._loading:
            try:
                executor.run_on_all_ranks(put_away)
            except RuntimeError as error:
                if executor.model.ranks.size > 1:
                    raise
                self._parts.capture_again()
                raise GenerationError(f"no room to sleep: {str(error).partition(chr(10))[0]}") from None
        self.asleep = True
        give_back()
        assert executor.away is not None
        log.info("asleep: %.2f GB were given back in %.2f s", executor.away.freed / 1e9, time.monotonic() - started)

    def wake_up(self) -> None:
        """Has memory again, where the engine sleeps. Raises GenerationError where there is no room, for graphs neither:
        then it goes on to sleep."""
        if not self.asleep:
            return
        executor, started, lacks = self._parts.executor, time.monotonic(), None
        with self._loading:
            try:
                executor.run_on_all_ranks(put_back)
                self._parts.capture_again()
            except executor.device.out_of_memory as error:
                if executor.model.ranks.size > 1:
                    raise
                lacks = str(error).partition("\n")[0]
            if lacks is not None:  # and the error is gone, whose frames had what graphs were captured with
                if executor.away is None:
                    put_away(executor)
                raise GenerationError(f"others have taken its memory: {lacks}")
            self.asleep = False
        log.info("awake after %.2f s", time.monotonic() - started)


def bytes_to_copy(executor: Executor) -> int:
    """Returns bytes of host memory that `put_away` takes."""
    return executor.device.bytes_to_copy(tensors_of(executor), _emptied(executor))


@torch.inference_mode()
def put_away(executor: Executor) -> None:
    """Gives a rank's memory back."""
    executor.graphs.clear()
    executor.prefills.clear()
    executor.towers.clear()
    executor.away = executor.device.put_away(tensors_of(executor), _emptied(executor))


@torch.inference_mode()
def put_back(executor: Executor) -> None:
    """Has a rank's memory again."""
    assert executor.away is not None
    executor.away.back()
    executor.away = None


def _emptied(executor: Executor) -> list[Tensor]:
    """Returns what only requests and cached prefixes have filled."""
    states = executor.attn.pool.states
    layers = [] if states is None else states.layers.values()
    return [*executor.by_slot, *(part for one in layers for part in (one.state, one.conv, one.inputs, one.gates))]


def tensors_of(executor: Executor) -> list[Tensor]:
    """Returns all tensors that an executor's objects hold, but for what ranks share, which others read by its address,
    and for copies in host memory. One that is not found stays as it is. Objects that engines of a process share, such
    as kernels, hold none."""
    found, todo, seen = list[Tensor](), list[object]([executor]), {id(executor.model.ranks), id(executor.host_share)}
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, FunctionType):  # not what is global to it
            todo += [one.__closure__, one.__defaults__, one.__kwdefaults__]
        else:
            todo += gc.get_referents(one)
    return found
