"""What this process has in memory, and what the C library's allocator keeps of what was freed."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from typing import Any

from draftwing.machine import resident_memory

TIDY_SECONDS = 60.0  # between two times at which freed memory is given back


class _Mallinfo2(ctypes.Structure):
    """glibc's. uordblks, hblkhd: bytes in use, in its heaps and beside them. fordblks: free ones in its heaps."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


@functools.cache
def _libc(name: str) -> Any:
    """Returns a function of the C library, None where it has none of this name."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None and name == "mallinfo2":
        function.restype = _Mallinfo2
    return function


def process_memory() -> dict[str, int]:
    """Returns bytes: `resident`, and of glibc from 2.33 on `allocated`, which may not be resident before it is written,
    and `held`, what is free in its heaps and not given back. And `python_blocks`: how many pieces Python's own
    allocator, which takes memory beside these heaps, has given to objects."""
    found = {"resident": resident_memory(), "python_blocks": sys.getallocatedblocks()}
    mallinfo2 = _libc("mallinfo2")
    if mallinfo2 is not None:
        info = mallinfo2()
        found |= {"allocated": info.uordblks + info.hblkhd, "held": info.fordblks}
    return found


def give_back() -> None:
    """Returns freed memory to the system: glibc keeps it, in pieces, for a next time that may never come. Other C
    libraries do so by themselves, or cannot."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def keep_tidy(seconds: float = TIDY_SECONDS) -> None:
    """Gives memory back from now on, again and again, until the process ends. To get it page by page once more takes
    milliseconds: without it a process grows for hours, as what it frees lies in ever more places."""

    def tidy() -> None:
        while True:
            time.sleep(seconds)
            give_back()

    threading.Thread(target=tidy, name="draftwing-tidy", daemon=True).start()
