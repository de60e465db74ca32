"""Two ranks as threads of the tests' process: the same models, executors and messages, without processes to start."""

from __future__ import annotations

import pickle
import queue
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.engine.process.rank import Follower
from draftwing.engine.rank_broadcast import RemoteBroadcast
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import fill_parameters
from draftwing.models.weight_map import checkpoint_names, is_elsewhere, own_experts, stored_tensors
from draftwing.parallel.ranks import Ranks

SECONDS = 60.0  # that a rank waits for another one


class Meeting:
    def __init__(self, size: int) -> None:
        self.barrier, self.brought = threading.Barrier(size), [torch.empty(0)] * size


class ThreadRanks(Ranks):
    def __init__(self, meeting: Meeting, rank: int, expert_parallel: bool, invariant: bool = False) -> None:
        self.size, self.rank, self._meeting = len(meeting.brought), rank, meeting
        self.expert_parallel, self.invariant = expert_parallel, invariant

    def gather(self, x: Tensor) -> Tensor:
        self._meeting.brought[self.rank] = x
        self._meeting.barrier.wait(SECONDS)
        found = torch.stack(self._meeting.brought)
        self._meeting.barrier.wait(SECONDS)
        return found


def meet(size: int = 2, expert_parallel: bool = False, invariant: bool = False) -> list[Ranks]:
    meeting = Meeting(size)
    return [ThreadRanks(meeting, rank, expert_parallel, invariant) for rank in range(size)]


def shares_of(model: DecoderModel, ops: Any, size: int = 2, expert_parallel: bool = False) -> list[DecoderModel]:
    """A model's shares, packed: of every rank. Each knows the `whole`."""
    shares = []
    for ranks in meet(size, expert_parallel):
        share, table = DecoderModel(model.config, torch.float32, "cpu", ranks), checkpoint_names(model.config, ranks)
        cuts, own = {name: part.cut for name, part in table.items()}, own_experts(model.config, ranks)
        tensors = (
            (name, tensor if cuts[name] is None else cuts[name].of(name, tensor))
            for name, tensor in stored_tensors(model, checkpoint_names(model.config))
            if not is_elsewhere(name, model.config, own)
        )
        fill_parameters(share, table, tensors, "cpu")
        share.pack(ops)
        shares.append(share.requires_grad_(False).eval())
    return shares


class Recorder(Follower):
    """A rank from 1 on that keeps what its steps gave."""

    def __init__(self, executor: Any, receive: Any) -> None:
        super().__init__(executor, receive)
        self.landings: list[Any] = []

    def on_result(self, flying: Any) -> None:
        self.landings.append(flying.wait())


class Threads(RemoteBroadcast):
    """The other ranks of a rig, each turned by a thread."""

    def __init__(self, executors: list[Any]) -> None:
        self._inboxes: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in executors]
        self.failed: list[BaseException] = []
        self.others = [
            Recorder(executor, lambda inbox=inbox: self._next(inbox))
            for executor, inbox in zip(executors, self._inboxes, strict=True)
        ]
        for other in self.others:
            threading.Thread(target=_turn, args=(weakref.ref(other), self.failed), daemon=True).start()

    def send(self, message: Any) -> None:
        assert not self.failed, self.failed
        packed = pickle.dumps(message)
        for inbox in self._inboxes:
            inbox.put(packed)

    @staticmethod
    def _next(inbox: queue.SimpleQueue[bytes | None]) -> Any:
        packed = inbox.get()
        if packed is None:
            raise EOFError
        return pickle.loads(packed)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)


def _turn(follower: Any, failed: list[BaseException]) -> None:
    other = follower()
    try:
        while True:
            other.obey()
    except EOFError:
        pass
    except BaseException as error:
        failed.append(error)
        other.executor.model.ranks._meeting.barrier.abort()
        raise


def lead(rig: Any, others: list[Any]) -> Any:
    """Has the executors of other ranks' rigs do what that of `rig` does. `rig.agree()` compares all results so far:
    there are some, or one alone, which others look at with the next."""
    threads = rig.executor.broadcast = Threads([other.executor for other in others])
    own: list[Any] = []
    commit = rig.executor.commit

    def committed(pending: Any) -> Any:
        flying = commit(pending)
        own.extend(flying.parts)
        return flying

    def agree() -> bool:
        end = time.monotonic() + 20.0  # their threads may be behind; the newest step lands there with the next
        landed = [other.landings for other in threads.others]
        while own and min(map(len, landed)) < max(len(own) - 2, 1) and time.monotonic() < end:
            time.sleep(0.001)
        known = min(len(own), *map(len, landed))
        for flying, *every in zip(own[:known], *(landings[:known] for landings in landed), strict=True):
            mine = flying.wait()
            for theirs in every:
                for part in ("tokens", "count", "order", "mark", "confidence"):
                    assert np.array_equal(getattr(mine, part), getattr(theirs, part)), part
                assert mine.logprobs == theirs.logprobs and mine.prompt_logprobs == theirs.prompt_logprobs
        for landings in (own, *landed):
            del landings[:known]
        return bool(known) or len(own) < 2

    rig.executor.commit, rig.agree = committed, agree
    weakref.finalize(rig, threads.close)
    return rig
