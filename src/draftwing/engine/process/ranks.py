"""The ranks from 1 on, as rank 0 sees them: it starts them, sends them what to run, and notices when one is gone.

Each is a process of its own with three connections. One carries what is to be run; a process reads it in order, and
once it is ready answers `compare` alone. Another one carries draft heads to load beside that, and whether they were, by
a thread of the rank. The third carries a pulse, by threads on both ends: a rank that is stopped has none, one that has
ended closes it. What the ranks compute together goes by none of them, see `draftwing.parallel`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

from draftwing.config.options import Options
from draftwing.engine.devices.base import Device
from draftwing.engine.process.spawn import Failed, end_all, how_it_ended, start_module
from draftwing.engine.rank_broadcast import Digest, LoadedHeads, RemoteBroadcast
from draftwing.errors import DraftwingError
from draftwing.parallel.group import Rendezvous

logger = logging.getLogger("draftwing")
RANK = "draftwing.engine.process.rank"
PULSE = 0.25  # seconds between two beats
LOOK = 1.0  # seconds between two looks
RELEASED = 5.0  # seconds in which a start that waits for no rank any more says why it failed
SILENT = 3  # looks without a beat; they are counted, for where the whole machine stood still nobody hung


class RankDied(DraftwingError):
    """A rank ended or hangs: nothing can be computed any more."""


class Setup(NamedTuple):
    """What a rank makes its share of the engine from."""

    options: Options  # `for_engine`
    path: Path  # of the target
    draft_path: Path | None
    token_ids: list[int] | None  # that may be drafted
    rank: int
    port: int


class Loaded(NamedTuple):
    """A rank has read its weights, and will wait for the others from now on."""


class RankProcesses(RemoteBroadcast):
    """All ranks but 0, which has this."""

    digest: Digest

    def __init__(self, setup: Setup, device: Device, failed: Callable[[BaseException], None] | None) -> None:
        """setup: of any rank, without a port.  failed: called, by a thread, for a rank that ended or hangs, by when all
        are killed: once `watch` was called, or where the start of the engine does not notice. Raises ConfigError where
        ranks cannot meet."""
        self._failed, self._armed, self._loaded, self._failure = failed, False, False, ""
        self._closing = threading.Event()
        self._over = threading.Event()  # a failure is known
        self._reading = threading.Lock()  # of `_plans`, by two threads
        self._why: DraftwingError | None = None  # what a rank that failed has said
        self.digest = Digest()
        meeting, size = Rendezvous(), setup.options.tp_size
        self._processes, self._plans, self._heads, self._pulses = [], *(list[Connection]() for _ in range(3))
        for rank in range(1, size):
            process, (plans, heads, pulse) = start_module(RANK, 3, new_session=False)
            self._processes.append(process)
            self._plans.append(plans)
            self._heads.append(heads)
            self._pulses.append(pulse)
            with contextlib.suppress(OSError):  # one that is gone already is noticed by `wait_loaded`
                plans.send(setup._replace(rank=rank, port=meeting.port))
        kinds = setup.options.enable_expert_parallel, setup.options.enable_tp_invariance
        self.ranks = meeting.join(size, device.device, device.collectives, *kinds)
        threading.Thread(target=self._watch, name="draftwing-ranks", daemon=True).start()

    def wait_loaded(self) -> None:
        """Waits until every rank has its weights. Raises what one of them has raised, or RankDied."""
        for rank, plans in enumerate(self._plans, 1):
            try:
                found = plans.recv()
            except (EOFError, OSError):
                self._over.wait(2 * LOOK)  # who watches knows which rank ended first, and has killed the others
                ended = self._failure or f"rank {rank} of the engine ended"
                raise self._said() or RankDied(f"{ended}, while weights were loaded") from None
            if isinstance(found, Failed):
                raise found.error(RankDied, f"rank {rank}: ")
        self._loaded = True

    def watch(self) -> None:
        """Notices ranks that hang, from now on, as those that end always are."""
        self._armed = True

    def send(self, message: Any) -> None:
        if self._over.is_set():  # what waited for that rank was released, and may have given anything
            raise RankDied(self._failure)
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for plans in self._plans:
            plans.send_bytes(packed)

    def load_head(self, heads: LoadedHeads, number: int, folder: Path | None) -> None:
        try:
            failure = self._load_on_all_ranks(heads, number, folder)
        except (EOFError, OSError):
            heads.drop(number)
            self._over.wait(2 * LOOK)  # who watches knows which rank ended
            raise RankDied(self._failure or "a rank of the engine ended, while a head was loaded") from None
        if failure is not None:
            raise failure

    def _load_on_all_ranks(self, heads: LoadedHeads, number: int, folder: Path | None) -> Exception | None:
        """Returns what the first rank has raised that cannot load it, after which no rank has it."""
        failures = list[Exception]()
        self._send_heads((number, folder))
        try:
            heads.load(number, folder)
        except Exception as error:  # the others answer in any case
            failures.append(error)
        for rank, connection in enumerate(self._heads, 1):
            answered, found = connection.recv()
            while answered != number:  # of one that was interrupted
                answered, found = connection.recv()
            if found is not None:
                failures.append(found.error(DraftwingError, f"rank {rank}: "))
        if not failures:
            return None
        heads.drop(number)
        self._send_heads(number)
        return failures[0]

    def _send_heads(self, message: tuple[int, Path | None] | int) -> None:
        """A number and a folder to load, or the number of what is not wanted any more."""
        for connection in self._heads:
            connection.send(message)

    def check(self) -> None:
        due = self.digest.due
        if len(due) < 2:  # the others have not come to the newest yet, or have just sent it
            return
        self._compare(due.popleft())

    def compare(self) -> None:
        self.send((Digest, ()))
        while self.digest.due:
            self._compare(self.digest.due.popleft())
        self._compare(self.digest.now)

    def _compare(self, expected: tuple[int, int]) -> None:
        """Takes the next that each rank sends of what it has drawn, and waits for it. Raises why it failed."""
        for rank, plans in enumerate(self._plans, 1):
            try:
                with self._reading:
                    found = plans.recv()
            except (EOFError, OSError):
                self._over.wait(2 * LOOK)  # who watches knows how it ended
                raise self._why or RankDied(self._failure or f"rank {rank} of the engine ended") from None
            if isinstance(found, Failed):
                raise found.error(RankDied, f"rank {rank}: ")
            if found != expected:
                raise RankDied(f"rank {rank} of the engine drew other tokens than rank 0: they computed different bits")

    def blame(self, error: BaseException) -> BaseException:
        """Returns what is to be raised in place of an error of this rank, which may be that another one is gone."""
        if isinstance(error, DraftwingError) or not isinstance(error, (RuntimeError, OSError, EOFError)):
            return error
        said = self._said()
        if said is not None:
            return said
        what = self._failure if self._over.wait(2 * LOOK) else f"rank 0: {Failed.of(error).message}"
        return RankDied(what)

    def _said(self) -> DraftwingError | None:
        """Returns why another rank has failed, where it said so."""
        with self._reading:
            for rank, plans in enumerate(self._plans, 1):
                with contextlib.suppress(EOFError, OSError):
                    while self._why is None and plans.poll():
                        if isinstance(found := plans.recv(), Failed):
                            self._why = found.error(RankDied, f"rank {rank}: ")
            return self._why

    def close(self) -> None:
        self._closing.set()
        for connection in (*self._plans, *self._heads, *self._pulses):
            with contextlib.suppress(OSError):
                connection.close()
        for pid in end_all(self._processes, 5.0):
            logger.error("the process %d of a rank does not end, though it was killed", pid)
        with contextlib.suppress(RuntimeError):
            self.ranks.close()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _watch(self) -> None:
        silent = dict.fromkeys(self._pulses, 0)
        while not self._closing.is_set():
            until, heard = time.monotonic() + LOOK, set[Connection]()
            while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
                ended = self._listen(left, heard)
                if ended is not None:
                    if not self._closing.is_set():
                        self._fail(self._pulses.index(ended), "ended")
                    return
            for place, pulse in enumerate(self._pulses):
                silent[pulse] = 0 if pulse in heard else silent[pulse] + 1
                if self._armed and silent[pulse] >= SILENT:
                    self._fail(place, "hangs")
                    return

    def _listen(self, seconds: float, heard: set[Connection]) -> Connection | None:
        """Adds to `heard` whose beat comes within so many seconds; returns one that was closed."""
        pulse = self._pulses[0]
        try:
            for pulse in cast(list[Connection], wait(self._pulses, seconds)):
                pulse.recv_bytes()
                heard.add(pulse)
        except (EOFError, OSError):
            return pulse
        return None

    def _fail(self, place: int, what: str) -> None:
        process = self._processes[place]
        why = f": {how_it_ended(process)}" if what == "ended" else f": nothing was heard of it for {SILENT * LOOK:g} s"
        self.kill()
        self._failure = f"rank {place + 1} of the engine {what}{why}"
        self._over.set()
        error = self._said() or RankDied(self._failure)  # what it said before it ended tells more
        logger.error("%s", error)
        if self._failed is not None and self._armed:
            self._failed(error)
        self.ranks.release()  # on GPUs whoever waits for a rank would wait for ever
        if self._failed is not None and self._loaded and not self._closing.wait(RELEASED):
            self._failed(self._said() or RankDied(self._failure))
