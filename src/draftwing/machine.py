"""What this process may use of its machine: processors by affinity, hyperthreads and quotas, memory by limits; what its
memory is made of; and what processes of our own start with.

Everything is read of Linux's files below `root`, which tests replace; where they are missing there is no limit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
TIDY_SECONDS = 60.0  # between two times at which freed memory is given back
_PR_SET_PDEATHSIG = 1
_MADV_DONTNEED = 4
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
# In messages of Python, torch, the dynamic loader and the system, which have no class of their own for it.
_NO_MEMORY = (
    "start new thread", "start a thread", "annot allocate memory", "an't allocate memory", "not enough memory",
    "failed to map segment", "annot map zero-fill pages", "bad_alloc",
    "without setting an exception", "error return without exception set",
)  # fmt: skip
_UNLIMITED = 1 << 60  # bytes: cgroups of version 1 say "no limit" by a number near 2 ** 63


@dataclass(frozen=True)
class Processors:
    """allowed: processors of the affinity mask; cores: of them, hyperthreads counted once; quota: of how many
    processors control groups give the time, None where they do not limit it."""

    allowed: int
    cores: int
    quota: float | None = None

    @property
    def threads(self) -> int:
        """Returns how many threads can compute at the same time without one having to wait for another's processor: a
        quota of 1.5 has time for one."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))

    def __str__(self) -> str:
        words = [f"{self.cores} core{'s' * (self.cores > 1)}"]
        if self.allowed > self.cores:
            words.append(f"{self.allowed} hyperthreads")
        if self.quota is not None:
            words.append(f"a quota of {self.quota:g} processors")
        return ", ".join(words)


def processors(root: Path = ROOT, affinity: set[int] | None = None) -> Processors:
    """Finds what this process may use. affinity: processor numbers, in place of this process's own."""
    if affinity is None:
        has_affinity = hasattr(os, "sched_getaffinity")  # Linux
        affinity = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_text(root / topology.format(number)) or str(number) for number in affinity}
    return Processors(len(affinity), len(cores), _quota(root))


def numbered(text: str) -> tuple[int, ...]:
    """Reads a list of processors such as "0-3,8", each one once. Raises ValueError."""
    parts = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part is not None]
    found = [number for one in ranges for number in one]
    if len(ranges) < len(parts) or not all(ranges) or len(set(found)) < len(found):
        raise ValueError(f"expected processors such as 0-3,8, found {text!r}")
    return tuple(found)


def _quota(root: Path) -> float | None:
    found = []
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        with suppress(ValueError, ZeroDivisionError):  # "max", or nothing
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


# -- memory -----------------------------------------------------------------------------------------------------------


def free_memory(root: Path = ROOT) -> int | None:
    """Returns the bytes that this process may still take: what the machine has, its control groups and `ulimit -v`
    allow. None on a system that does not tell."""
    found = [left for left in (_available(root), *(left for _, left in _limits(root))) if left is not None]
    return max(min(found), 0) if found else None


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that control groups and `ulimit -v` allow this process at most, None without such limits."""
    return min((limit for limit, _ in _limits(root)), default=None)


def resident_memory(root: Path = ROOT) -> int:
    """Returns the bytes that this process has in memory; 0 on a system that does not tell."""
    pages = _text(root / "proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit, and what it leaves. Pages of files are free: they go when others need the room."""
    for folder in _groups(root, "memory"):
        stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
        files = sum(int(stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", 0))) for kind in ("active", "inactive"))
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(ValueError):  # "max", or nothing
                most, used = int(_text(folder / limit)), int(_text(folder / usage))
                if most < _UNLIMITED:
                    yield most, most - used + files
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(root / "proc/self/statm").split()
    if space != resource.RLIM_INFINITY and pages:
        yield space, space - int(pages[0]) * os.sysconf("SC_PAGE_SIZE")


# -- what this process's memory is made of -----------------------------------------------------------------------------


def lacks_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of memory, or of a thread's, that there was no room for."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def drop_pages(address: int, size: int) -> None:
    """Returns whole pages within so many bytes to the system, which are zeros when they are read again. For memory that
    is no file's; where the system has no such call it stays as it is."""
    advise, page = _libc("madvise"), os.sysconf("SC_PAGE_SIZE")
    first, end = -(-address // page) * page, (address + size) // page * page
    if advise is not None and first < end and sys.platform == "linux":
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)


def keep_tidy(seconds: float = TIDY_SECONDS) -> None:
    """Gives memory back from now on, again and again, until the process ends. To get it page by page once more takes
    milliseconds: without it a process grows for hours, as what it frees lies in ever more places."""

    def tidy() -> None:
        while True:
            time.sleep(seconds)
            give_back()

    threading.Thread(target=tidy, name="draftwing-tidy", daemon=True).start()


# -- processes of our own ----------------------------------------------------------------------------------------------


def import_environment() -> dict[str, str]:
    """Returns the environment of a process that finds what it imports where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def yield_processors(nice: int) -> None:
    """Lowers the priority of this process by so much, and that of its session, where the system shares processors out
    among sessions first."""
    level = os.nice(nice)
    with suppress(OSError):  # there are none, or not of our own
        Path("/proc/self/autogroup").write_text(str(level))


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when the thread ends that has started it. Ends it at once where its parent is
    not `parent` any more, a process id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# -- control groups ----------------------------------------------------------------------------------------------------


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups, and of those around them, that have this controller. In a
    container the path is often that of the host, and the container's group is where they are mounted."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names:
            bases = [mounted, mounted / "unified"]  # version 2, alone or beside version 1
        elif controller in names.split(","):
            bases = [mounted / names, mounted / controller]
        else:
            continue
        for base in bases:
            inner = base / path.lstrip("/")
            yield from dict.fromkeys(folder for folder in (inner, *inner.parents) if folder.is_relative_to(base))


def _text(file: Path) -> str:
    """Returns what is in a file; nothing where there is none, or where it may not be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
