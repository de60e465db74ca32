"""Trains heads while a server has nothing to do: one process of low priority, which stands still while requests run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from resource import RLIM_INFINITY

from draftwing.files import load_json, make_private
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import RUN, TrafficStore
from draftwing.machine import import_environment

logger = logging.getLogger(__name__)
_MODULE = "draftwing.learn.low_priority"
RUN_FILE = "train.json"  # of a run: what it was asked for
NEW = 64  # exchanges since the newest head, for another one to be trained: fewer hardly change it
COSTS = (
    "costs.json"  # in the folder: seconds of steps with 1, 2, .. drafts, as the engine that serves has measured them
)
THREADS = 1  # of the process: those of others are the server's, even while it waits
RETRY_SECONDS = 600.0  # after a run that failed
KILLS = 3  # of a run one after the other, with which it has failed: what finds no memory may be killed each time
LOOK_SECONDS = 30.0  # between looks at whether there is enough to learn


class IdleTraining:
    """The process that trains, from `DIR` in `DIR/training`, and when it runs.

    It goes on after `idle_seconds` without requests and is stopped with the first one. What a kill leaves of a run goes
    on with the next process: each stage finds what is there. Not for several threads at once, but for `left`, `enough`,
    `drop` and `tidy`.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        memory: int,
        idle_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """arguments: of `draftwing train`, besides where from and where to: the model's.  memory: most bytes of the
        process."""
        self.folder, self.out, self._arguments = folder, folder / RUN, list(arguments)
        self._memory, self._idle_seconds, self._clock = memory, idle_seconds, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._running = False  # whether it may, where there is one
        self._whose = ""  # the head that it trains
        self._ended = False  # a run, of which everything is still there
        self._kills = 0  # of the run that is there
        self._idle_since = clock()
        self._not_before = 0.0
        self._begun: dict[str, float] = {}  # when a run was last begun, by whose head it was for

    @property
    def active(self) -> bool:
        """Returns whether a head is being trained right now."""
        return self._process is not None and self._running

    @property
    def whose(self) -> str | None:
        """Returns whose head is being trained, be it that the process stands still, as `left` does."""
        return None if self._process is None else self._whose

    def busy(self) -> None:
        """A request is there: the process stands still until `look` has seen enough idle time."""
        self._idle_since = self._clock()
        if self.active:
            self._signal(signal.SIGSTOP)
            self._running = False

    def due(self) -> bool:
        """Returns whether it is idle, and the folder is to be looked at for something to learn."""
        return self._process is None and self._idle() and self._clock() >= self._not_before

    def left(self) -> str | None:
        """Returns whose head the run is for that is there to go on with: the digest of an adapter, "": the model's;
        None: there is none."""
        self._not_before = self._clock() + LOOK_SECONDS
        try:
            return str(load_json(self.out / RUN_FILE).get("adapter_digest") or "")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError):
            return ""  # `draftwing train` says what is wrong with it

    def next(self, whose: Collection[str]) -> str | None:
        """Returns for whose head there is enough that is new, of the model ("") and adapters by their digests: who has
        waited longest; None: for none."""
        history, store = HeadHistory(self.folder / "heads"), TrafficStore(self.folder)
        since = dict.fromkeys(whose, 0.0)
        for one in history.list():
            if one.adapter in since:
                since[one.adapter] = max(since[one.adapter], float(one.data.get("until", 0.0)))
        ready = [one for one, until in since.items() if store.count(until, one) >= NEW]
        return min(ready, key=lambda one: (self._begun.get(one, 0.0), since[one]), default=None)

    def drop(self) -> None:
        """Ends the process, and removes its run."""
        self.close()
        self._kills = 0
        shutil.rmtree(self.out, ignore_errors=True)

    def start(self, whose: str, more: Sequence[str]) -> None:
        """Starts the process, which begins a run, or goes on with the one that is there. whose: as `next` has it.
        more: arguments of one that begins."""
        words = ["train", "--from", str(self.folder), "--out", str(self.out), *self._arguments]
        if not (self.out / RUN_FILE).exists():
            words += more
        make_private(self.out)
        self._begun[whose] = self._clock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), str(self._memory), *words],
            stdin=subprocess.DEVNULL,
            env=import_environment() | {"OMP_NUM_THREADS": str(THREADS)},
        )
        self._running, self._whose = True, whose
        logger.info("learning: a head is being trained%s", f" for the adapter {whose}" if whose else "")

    def look(self) -> bool:
        """Lets the process run where nothing else does, and takes note of its end. Returns whether a run has been
        completed."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            if not self._running and self._idle():
                self._signal(signal.SIGCONT)
                self._running = True
            return False
        self._process = None
        self._kills = self._kills + 1 if code < 0 else 0
        self._ended = code >= 0 or self._kills == KILLS  # what was killed goes on
        self._kills *= not self._ended
        if code:
            how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
            # Not all that finds no memory says so: libraries end the process.
            limit = "" if self._memory == RLIM_INFINITY else f". It may take {self._memory / 1e6:,.0f} MB of memory"
            logger.warning("learning: training ended %s; its messages are above%s", how, limit)
            self._not_before = self._clock() + RETRY_SECONDS
        return code == 0

    def tidy(self) -> None:
        """Removes what a run that has ended leaves: hidden states of what clients sent, which may be many."""
        if self._ended:
            shutil.rmtree(self.out, ignore_errors=True)
            self._ended = False

    def close(self) -> None:
        """Ends the process. What it has done is on the disk."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _idle(self) -> bool:
        return self._clock() - self._idle_since >= self._idle_seconds

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
