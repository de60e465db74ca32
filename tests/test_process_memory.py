"""What was freed goes back to the system, and is told apart from what is in use."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell")
PIECES = """
import sys, time
from draftwing.process_memory import give_back, keep_tidy, process_memory
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


@pytest.mark.parametrize("how", ENDS, ids=["give back", "keep tidy"])
@pytest.mark.parametrize(("size", "count"), [(25_000, 2_400), (60_000, 1_000), (100_000, 600)])
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
