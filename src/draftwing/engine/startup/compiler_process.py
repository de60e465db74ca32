"""The process that compiles a GPU's kernels while the engine's loads weights, seen from the engine's.

Triton and NVRTC keep what they compiled in folders of the user's; `precompile` fills them in a process of its own, and
says when all that a stage of the start launches is there. Where it fails, or misses a kernel, that is compiled when it
is first launched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing import ops
from draftwing.config.option_fields import SERVER
from draftwing.config.options import Options
from draftwing.engine.startup import before_torch
from draftwing.ops.gemm.shapes import user_folder
from draftwing.version import __version__

log = logging.getLogger("draftwing")

PATIENCE = 60.0  # seconds that an engine which has loaded waits for the kernels of a stage
STAGES = ("memory", "graphs", "prompts")  # of a start, in this order, before each of which it waits for its kernels
FAILED = "failed"  # what the process says in place of a stage
_MODULE = "draftwing.engine.startup.precompile"


class Job(NamedTuple):
    options: Options  # resolved, for the device
    path: Path  # of the target
    draft_path: Path | None
    token_ids: Tensor | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    capability: tuple[int, int]  # of the device
    memory: int  # bytes of the device


class Compiler:
    """A process that waits for a job at the other end of `connection`."""

    def __init__(self, pid: int, connection: Connection, join: Callable[[], int]) -> None:
        """join: waits until it has ended, and returns its exit code; below 0: the signal that ended it."""
        self.connection = connection
        self._pid, self._join = pid, join

    @classmethod
    def start(cls) -> Compiler:
        """Starts a new interpreter. Raises OSError."""
        ours, theirs = Pipe()
        with theirs:
            run = f"from {_MODULE} import main; main({theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", run],  # -P: nothing is imported from the current folder
                stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        return cls(process.pid, ours, process.wait)

    @classmethod
    def ready_for(cls, options: Options) -> Compiler | None:
        """Returns a `fork` where an engine of these options may have something to compile, as far as is known without
        a look at devices; None, too, where there is no room for another process."""
        if options.device == "cpu" or torch.version.cuda is None or not before_torch.has_driver():
            return None
        with suppress(OSError, ImportError):
            import draftwing.ops.triton.ops  # noqa: F401 (once, and not in both processes)

            return cls.fork()
        return None

    @classmethod
    def fork(cls) -> Compiler:
        """Forks this process, to spare the other one seconds of imports. For one in which torch has used no GPU yet,
        though its context may be there, and whose other threads do nothing but wait for a connection.
        Raises OSError."""
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            try:
                _leave_parent(theirs.fileno())
                import_module(_MODULE).main(theirs.fileno())  # it imports the engine, which imports this module
            finally:
                os._exit(0)
        theirs.close()
        return cls(pid, ours, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def stop(self) -> None:
        """Ends it, with the processes that it started."""
        pid = self._pid  # which another thread's `reap` makes 0 meanwhile: that would be this process's own group
        if pid:
            for kill in (os.killpg, os.kill):  # one that was just forked leads no group yet
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends it, and waits until it has ended."""
        self.stop()
        self.reap()

    def reap(self) -> int:
        """Waits until it has ended, and returns its exit code. Its number may be another's then."""
        code = self._join()
        self._pid = 0
        self.connection.close()
        return code


def _leave_parent(connection: int) -> None:
    """Lets go of all files that a fork has from its parent, but for a connection. Their numbers stay taken: objects of
    the parent's would close another file of the same number."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (connection, nothing):
            os.dup2(nothing, number)


class Precompilation:
    """A job that is compiled, unless it was to its end before."""

    def __init__(self, job: Job, compiler: Compiler | None = None) -> None:
        """compiler: that has not got a job yet; None starts one. Raises OSError, and what pickle does."""
        from triton import knobs

        job = job._replace(options=_engine_options(job.options))
        packed = pickle.dumps(job)
        self._done = Path(knobs.cache.dir) / f"draftwing-{_digest(job)}"
        self._ready = {stage: threading.Event() for stage in STAGES}
        self._talking: threading.Thread | None = None
        self._stopped = False
        if not self._done.exists():
            self._compiler = compiler or Compiler.start()
            self._talking = threading.Thread(target=self._talk, args=(packed,), name="draftwing-kernels", daemon=True)
            self._talking.start()
            return
        for ready in self._ready.values():
            ready.set()
        if compiler is not None:
            compiler.end()

    def _talk(self, job: bytes) -> None:
        """Sends the job, for which the other process may not have room before it reads it, and hears what is ready."""
        connection, why = self._compiler.connection, ""
        with suppress(EOFError, OSError):
            connection.send_bytes(job)
            connection.send(self._done)
            while True:
                stage, words = connection.recv()
                if stage == FAILED:
                    why = words
                else:
                    log.debug("start: kernels for %s: %s", stage, words)
                    self._ready[stage].set()
        missed = not (self._stopped or self._ready[STAGES[-1]].is_set())
        for ready in self._ready.values():
            ready.set()
        code = self._compiler.reap()
        if missed:
            why = why or f"its process ended {f'by signal {-code}' if code < 0 else f'with exit code {code}'}"
            log.warning("kernels were not compiled ahead, which makes the start slower: %s", why)

    def wait(self, stage: str) -> None:
        """Waits until all is compiled that a stage of the start launches; never raises because of it."""
        ready, started = self._ready[stage], time.monotonic()
        if ready.is_set():
            return
        if ready.wait(PATIENCE):
            log.info("waited %.1f s for kernels to be compiled", time.monotonic() - started)
        else:
            self.stop()
            log.warning("kernels that were not compiled within %.0f s make the start slower", PATIENCE)

    def stop(self, grace: float = 0.0) -> None:
        """Ends the process. grace: seconds in which it may end by itself."""
        self._stopped = True
        if self._talking is not None:
            self._talking.join(grace)
            self._compiler.stop()
            self._talking.join()


def precompile(job: Job, compiler: Compiler | None = None) -> Precompilation | None:
    """Starts to compile for the job; None where it cannot. compiler: as `Precompilation` has it."""
    try:
        return Precompilation(job, compiler)
    except (OSError, ImportError, AttributeError, pickle.PicklingError) as error:
        log.warning("kernels are not compiled ahead, which makes the start slower: %s", error)
        if compiler is not None:
            compiler.end()
        return None


def _engine_options(options: Options) -> Options:
    """Returns the options that kernels may depend on, and all others at their defaults: a port makes no other job."""
    found: dict[str, Any] = {"random_seed": 0}
    found |= {spec.name: spec.default for spec in dataclasses.fields(options) if spec.metadata["group"] == SERVER}
    return dataclasses.replace(options, **found)


def _digest(job: Job) -> str:
    import triton

    # Triton's files name their folder: a copy of it at another place is compiled anew.
    found = hashlib.sha256(f"{__version__} {triton.__version__} {triton.knobs.cache.dir} ".encode())
    found.update(pickle.dumps(job._replace(token_ids=None)))
    if job.token_ids is not None:  # of a tensor pickle notes an address
        found.update(job.token_ids.numpy().tobytes())
    for file in sorted((*Path(ops.__file__).parent.rglob("*"), *user_folder().glob("*.json"))):
        if file.suffix in (".py", ".cu", ".json"):
            found.update(file.read_bytes())
    return found.hexdigest()[:32]
