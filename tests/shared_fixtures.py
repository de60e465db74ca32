"""Fixtures that several test folders share."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from forked_scripts import Forks
from tiny_checkpoint import write_checkpoint
from triton_interpreter import mended

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before any test module is

from draftwing import plugins
from draftwing.config import devices
from draftwing.files import cache_folder
from draftwing.models.hub import fetch_default_model
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.table import TorchOps
from draftwing.spec import build


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup, also by processes that the test starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tests' tensors are tiny: a second thread only waits, and on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def little_is_measured(one_thread: None) -> Iterator[None]:
    """Each benchmark reads 256 MB to see how fast memory is, which takes it half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwing.engine.devices.base.Device.read_bytes", 1 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def engines_start_soon() -> Iterator[None]:
    """Hundreds of engines start. Each would look for installed packages several times, and zero 150 MB where text is
    looked up: texts here fill no more than a hundredth of that."""
    drafter = build.NGramDrafter

    def small(*args: Any, capacity: int, **more: Any) -> Any:
        return drafter(*args, capacity=min(capacity, 100_000), **more)

    with pytest.MonkeyPatch.context() as patch:
        for module in (plugins, devices):
            patch.setattr(module, "entry_points", functools.cache(module.entry_points))
        patch.setattr(build, "NGramDrafter", small)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each `httpx.post` reads those of all authorities, which takes 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", read, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def answers_may_take_long() -> Iterator[None]:
    """Who says nothing else waits 5 s for them, in which a busy machine does not start some engines."""
    with pytest.MonkeyPatch.context() as patch:
        for what in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, what, 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prices of steps that tests measure are not the user's. What was downloaded and compiled is."""
    users, home = cache_folder(), tmp_path_factory.mktemp("cache")
    (home / "draftwing").mkdir()
    for part in ("smollm2", "kernels"):
        (users / part).mkdir(parents=True, exist_ok=True)
        (home / "draftwing" / part).symlink_to(users / part)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(home)
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, downloaded on first use."""
    return fetch_default_model()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model of two small layers and a tokenizer."""
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def own_log() -> tuple[int, bool, list[logging.Handler]]:
    """The package's log before any command configured it: its level, whether it propagates, its handlers."""
    logger = logging.getLogger("draftwing")
    return logger.level, logger.propagate, [*logger.handlers]


@pytest.fixture(autouse=True)
def log_level(own_log: tuple[int, bool, list[logging.Handler]]) -> Iterator[None]:
    """Commands configure the package's log, which other tests read; fixtures of modules run some, too."""
    yield
    logger = logging.getLogger("draftwing")
    level, logger.propagate, handlers = own_log
    logger.setLevel(level)
    logger.handlers = [*handlers]


@pytest.fixture(scope="session")
def mended_interpreter() -> Iterator[None]:
    """Triton's interpreter where kernels run in it; on a GPU they are compiled, by a compiler that shares its code."""
    with mended() if "TRITON_INTERPRET" in os.environ else nullcontext():
        yield


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Runs scripts that compile kernels."""
    own = Forks()
    with own.process:
        yield own
        own.process.kill()


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run: on the GPU where there is one, else in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def triton_ops(device: torch.device, mended_interpreter: None) -> TorchOps:
    """Triton's kernels, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    return TritonOps(device)


@pytest.fixture(params=["torch", "cpu", "triton"])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    """The operations of every implementation that this machine has."""
    if request.param == "torch":
        return TorchOps(torch.device("cpu"))
    if request.param == "cpu":
        if load_extension() is None:
            pytest.skip("the C extension was not built, or is not wanted")
        from draftwing.ops.cpu.ops import CpuOps

        return CpuOps(torch.device("cpu"))
    made: TorchOps = request.getfixturevalue("triton_ops")
    return made
