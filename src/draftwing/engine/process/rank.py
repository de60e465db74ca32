"""A rank from 1 on: `python -m draftwing.engine.process.rank FD FD FD`, started by `RankProcesses` and by nobody else.

The main thread runs what rank 0 sends. One beats, and ends the process when rank 0 has gone, in the middle of whatever
it does. One loads draft heads beside the steps.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from draftwing.engine.devices.base import Device
from draftwing.engine.process.ranks import PULSE, Loaded, Setup
from draftwing.engine.process.spawn import Failed, joined
from draftwing.engine.rank_broadcast import Digest, LoadedHeads, Receive, ReceivedGuidance, Send
from draftwing.log import configure_logging
from draftwing.pipes import receive

if TYPE_CHECKING:
    from draftwing.engine.executor import Executor
    from draftwing.engine.step_state import InFlight


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


def main(argv: list[str]) -> NoReturn:
    gc.disable()
    plans, heads, pulse = joined(argv)
    threading.Thread(target=_beat, args=(pulse,), name="draftwing-pulse", daemon=True).start()
    try:
        setup = plans.recv()
        assert isinstance(setup, Setup)
        level = setup.options.log_level if setup.options.log_level == "debug" else "error"
        configure_logging(level, setup.options.log_format)  # what rank 0 says need not be said again
        _run(plans, heads, setup)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        failed = Failed.of(error)
        if failed.kind == "bug":
            time.sleep(2 * PULSE)  # a collective may have failed because rank 0 is gone: then nobody gets it
            sys.excepthook(type(error), error, error.__traceback__)
        plans.send(failed)
        os._exit(1)


def _run(plans: Connection, heads: Connection, setup: Setup) -> NoReturn:
    from draftwing.engine.build import build_rank  # after the thread has begun to beat: it imports all of the engine

    executor = build_rank(setup, lambda: plans.send(Loaded()))
    loading = (heads, executor.heads, executor.device)
    threading.Thread(target=_load_heads, args=loading, name="draftwing-heads", daemon=True).start()
    follower = Follower(executor, lambda: pickle.loads(receive(plans)), plans.send)
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        follower.obey()


def _load_heads(connection: Connection, heads: LoadedHeads, device: Device) -> None:
    """Loads heads that rank 0 asks for by number, and answers with it and None, or why it cannot. A number alone is of
    one that is not wanted any more."""
    device.use()
    try:
        while True:
            asked = connection.recv()
            if isinstance(asked, int):
                heads.drop(asked)
                continue
            try:
                heads.load(*asked)
                connection.send((asked[0], None))
            except Exception as error:  # nothing has changed: the rank goes on
                connection.send((asked[0], Failed.of(error)))
    except (EOFError, OSError):
        pass  # rank 0 is gone, which the beating thread sees, too


def _beat(pulse: Connection) -> None:
    try:
        while not pulse.poll(PULSE):
            pulse.send_bytes(b".")
    except OSError:
        pass
    os._exit(0)  # rank 0 never sends anything: its end is closed


if __name__ == "__main__":
    main(sys.argv)
