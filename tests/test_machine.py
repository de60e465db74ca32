"""What a process may use, of files as Linux, Docker and systemd have them."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from draftwing.machine import Processors, free_memory, memory_limit, numbered, processors

GB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def siblings(*groups: str) -> dict[str, str]:
    """Topology files; each group names the hyperthreads of a core."""
    found = {}
    for group in groups:
        for number in group.split(","):
            found[f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"] = group + "\n"
    return found


def quota(path: str, text: str, group: str = "/") -> dict[str, str]:
    """A control group of version 2 at `path`, as a process of `group` sees it."""
    return {"proc/self/cgroup": f"0::{group}\n", f"sys/fs/cgroup/{path}cpu.max": text}


@pytest.mark.parametrize(
    ("files", "affinity", "expected", "threads"),
    [
        ({}, {0, 1, 2}, Processors(3, 3), 3),  # no Linux, or nothing that may be read
        (siblings("0,4", "1,5", "2,6", "3,7"), set(range(8)), Processors(8, 4), 4),
        (siblings("0,4", "1,5", "2,6", "3,7"), {0, 4, 5}, Processors(3, 2), 2),  # taskset
        (quota("", "max 100000\n"), {0, 1}, Processors(2, 2), 2),
        (quota("", "150000 100000\n"), {0, 1, 2, 3}, Processors(4, 4, 1.5), 1),
        (quota("", "50000 100000\n"), {0, 1}, Processors(2, 2, 0.5), 1),
        (quota("", "600000 100000\n"), {0, 1, 2, 3}, Processors(4, 4, 6.0), 4),
        # The least of all groups around it; in a container the path is perhaps one that only the host has.
        (
            quota("a/", "300000 100000\n", "/a/b") | quota("a/b/", "max 100000\n", "/a/b"),
            set(range(8)), Processors(8, 8, 3.0), 3,
        ),
        (quota("", "200000 100000\n", "/docker/0123"), set(range(8)), Processors(8, 8, 2.0), 2),
        # Version 1, under either name of the mount.
        (
            {
                "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/0123\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            {0, 1, 2, 3}, Processors(4, 4, 2.5), 2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/job\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "50000\n",
            },
            {0, 1, 2, 3}, Processors(4, 4, 2.0), 2,
        ),
    ],
)  # fmt: skip
def test_processors(
    tmp_path: Path, files: dict[str, str], affinity: set[int], expected: Processors, threads: int
) -> None:
    found = processors(write(tmp_path, files), affinity)
    assert found == expected and found.threads == threads


def test_what_the_log_says() -> None:
    assert str(Processors(1, 1)) == "1 core"
    assert str(Processors(8, 4, 1.5)) == "4 cores, 8 hyperthreads, a quota of 1.5 processors"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has affinity")
def test_affinity_of_this_process_counts() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from draftwing.machine import processors; print(processors().allowed)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"


MACHINE = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GB),
        # Of version 2: pages of files go when room is needed, and what is high only slows down.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * GB}",
                "sys/fs/cgroup/memory.high": f"{3 * GB}",
                "sys/fs/cgroup/memory.current": f"{2 * GB}",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GB // 4}\nactive_file {GB // 4}\n",
            },
            2 * GB + GB // 2,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/memory.high": "max",
                "sys/fs/cgroup/memory.current": f"{2 * GB}",
            },
            8 * GB,
        ),
        # Of version 1: 2 ** 63 less a page is no limit.
        (
            {
                "proc/self/cgroup": "3:memory:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}",
                "sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes": f"{GB}",
                "sys/fs/cgroup/memory/docker/0123/memory.usage_in_bytes": f"{GB // 2}",
                "sys/fs/cgroup/memory/docker/0123/memory.stat": f"total_inactive_file {GB // 4}",
            },
            GB // 4 + GB // 2,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GB}",
                "sys/fs/cgroup/memory.current": f"{2 * GB}",  # lowered while more is used
            },
            0,
        ),
    ],
)  # fmt: skip
def test_free_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory(write(tmp_path, MACHINE | files)) == expected


def test_nothing_is_known_of_memory(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_a_limit_of_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GB, resource.RLIM_INFINITY))
    pages = GB // os.sysconf("SC_PAGE_SIZE")
    root = write(tmp_path, MACHINE | {"proc/self/statm": f"{pages} 5 5 5 0 5 0\n"})
    assert free_memory(root) == 2 * GB and memory_limit(root) == 3 * GB


def test_what_is_taken_of_a_limit_does_not_lower_it(tmp_path: Path) -> None:
    group = {"memory.max": f"{4 * GB}", "memory.current": f"{3 * GB}", "memory.high": f"{GB}"}
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    root = write(tmp_path, MACHINE | {"proc/self/cgroup": "0::/\n"} | files)
    assert memory_limit(root) == 4 * GB and free_memory(root) == GB
    assert memory_limit(write(tmp_path / "free", MACHINE)) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("8,0-1", (8, 0, 1)), ("2-2,5", (2, 5))]
)
def test_processors_by_number(text: str, expected: tuple[int, ...]) -> None:
    assert numbered(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "0,0", "-1", "0-2,1", "0-99999999999", "٣"])
def test_no_processors(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        numbered(text)


PIECES = """
import sys, time
from draftwing.machine import give_back, keep_tidy, process_memory
size, count = int(sys.argv[1]), int(sys.argv[2])
before = process_memory()
pieces = [bytearray(b"1") * size for _ in range(count)]
full = process_memory()
del pieces[::2], pieces[-1:]
kept = pieces[1:]  # the newest of them keeps what lies below from going back by itself
freed = process_memory()
{how}
after = process_memory()
for one in (before, full, freed, after):
    print(one["resident"], one["allocated"], one["held"])
"""
ENDS = (
    "give_back()",
    "keep_tidy(0.01); end = time.monotonic() + 30\nwhile process_memory()['resident'] > \
freed['resident'] - size * count // 4 and time.monotonic() < end: time.sleep(0.01)",
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell")
@pytest.mark.parametrize("how", ENDS, ids=["give back", "keep tidy"])
@pytest.mark.parametrize(("size", "count"), [(25_000, 2_400), (100_000, 600)])
def test_freed_pieces_go_back(size: int, count: int, how: str) -> None:
    """In a process of its own: another one has holes of its own."""
    command = [sys.executable, "-c", PIECES.replace("{how}", how), str(size), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    before, full, freed, after = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    half = size * count / 2
    assert full[1] - before[1] == pytest.approx(2 * half, rel=0.1)
    assert full[1] - freed[1] == pytest.approx(half, rel=0.1) and freed[2] - full[2] == pytest.approx(half, rel=0.1)
    assert freed[0] > full[0] - half / 4, "the C library kept it"
    assert after[0] < freed[0] - half / 2 and after[1] == pytest.approx(freed[1], abs=half / 10)
