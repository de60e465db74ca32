"""A rank from 1 on: `python -m draftwing.engine.process.rank FD FD`, started by `RankProcesses` and by nobody else.

The main thread runs what rank 0 sends. Another one beats, and ends the process when rank 0 has gone, in the middle of
whatever it does.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NoReturn

from draftwing.engine.process.ranks import PULSE, Failed, Loaded, Setup
from draftwing.engine.process.spawn import joined
from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.log import configure_logging


def main(argv: list[str]) -> NoReturn:
    gc.disable()
    plans, pulse = joined(argv)
    threading.Thread(target=_beat, args=(pulse,), name="draftwing-pulse", daemon=True).start()
    try:
        setup = plans.recv()
        assert isinstance(setup, Setup)
        level = setup.options.log_level
        configure_logging(level if level == "debug" else "error")  # what rank 0 says need not be said again
        _run(plans, setup)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        kinds: dict[type[BaseException], str] = {ConfigError: "config", CheckpointError: "checkpoint"}
        kind = kinds.get(type(error), "rank" if isinstance(error, DraftwingError) else "bug")
        if kind == "bug":
            time.sleep(2 * PULSE)  # a collective may have failed because rank 0 is gone: then nobody gets it
            sys.excepthook(type(error), error, error.__traceback__)
        plans.send(Failed(kind, str(error) if kind != "bug" else f"{type(error).__name__}: {error}"))
        os._exit(1)


def _run(plans: Connection, setup: Setup) -> NoReturn:
    from draftwing.engine.build import build_rank  # after the thread has begun to beat: it imports torch
    from draftwing.engine.rank_broadcast import Follower

    executor = build_rank(setup, lambda: plans.send(Loaded()))
    follower = Follower(executor, lambda: pickle.loads(plans.recv_bytes()), plans.send)
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        follower.obey()


def _beat(pulse: Connection) -> None:
    try:
        while not pulse.poll(PULSE):
            pulse.send_bytes(b".")
    except OSError:
        pass
    os._exit(0)  # rank 0 never sends anything: its end is closed


if __name__ == "__main__":
    main(sys.argv)
