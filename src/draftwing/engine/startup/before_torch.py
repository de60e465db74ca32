"""What a start does before it imports torch: the log's lines of how long each part takes, and what takes a GPU a second
before it computes anything, and needs neither torch nor Python's lock."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

_DRIVER = "libcuda.so.1"
log = logging.getLogger("draftwing")


def has_driver() -> bool:
    """Returns whether there is a driver of GPUs. Calls nothing of it, so that this process may fork afterwards."""
    with suppress(OSError):
        ctypes.CDLL(_DRIVER)
        return True
    return False


def begin() -> threading.Thread | None:
    """Starts a thread that makes the context of the first GPU, which torch finds when it wants one, and the hash that
    Triton has of itself; None where torch or the machine is for CPUs. Where there is no GPU, or it fails, torch says so
    later. Join it before this process forks."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return None
    if not has_driver():
        return None
    thread = threading.Thread(target=_run, name="draftwing-gpu", daemon=True)
    thread.start()
    return thread


def _run() -> None:
    with suppress(OSError, AttributeError):  # no driver, or none that knows of such contexts
        driver, device, context = ctypes.CDLL(_DRIVER), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    with suppress(ImportError, OSError):  # it reads its compiler of 0.4 GB, and keeps what it found
        from triton.runtime.cache import triton_key

        triton_key()


class Laps:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, what: str) -> None:
        """Logs the seconds since the call before, or since this was made."""
        before, self._last = self._last, time.monotonic()
        log.debug("start: %.2f s for %s", self._last - before, what)
