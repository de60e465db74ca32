"""The number of threads that kernels run in: what it is, and that bits do not depend on it.

A process with one processor and two threads is one of whose threads one always waits for the other's processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from timed import succeeds

from draftwing.engine.devices.cpu import CpuDevice
from draftwing.errors import ConfigError
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers

KERNELS = load_extension()
pytestmark = pytest.mark.skipif(
    KERNELS is None or not hasattr(os, "sched_setaffinity"), reason="the C extension was not built"
)
STARVED = """
import os, sys, time, torch
from draftwing.ops.cpu.ops import CpuOps

processors = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, processors[:1])
torch.set_num_threads(2)
ops = CpuOps(torch.device("cpu"))
weight, x = (torch.randn(size, 1024, generator=torch.Generator().manual_seed(size)) for size in (2048, 64))
gemm, expected = ops.block_gemm([ops.quantize(weight, "Q8_0")], torch.float32), None


end = time.monotonic() + 40


def until(active, seconds=0.0):
    global expected
    start = time.monotonic()
    while ops.workers.active != active or time.monotonic() < start + seconds:
        if time.monotonic() > end:  # another program has the processor
            print("inf")
            sys.exit()
        found = gemm.linear(x, None, None)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)


def allow(some):
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), some)


until(1)
assert ops.active_threads == 0.5
seconds = []
for _ in range(5 if len(processors) > 1 else 0):
    allow(processors)
    start = time.monotonic()
    until(2)
    seconds.append(time.monotonic() - start)
    until(2, 0.3)
    allow(processors[:1])
    until(1)
print(min(seconds, default=0.0))
"""


def printed(script: str) -> str:
    found = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120).strip()
    print(found)  # for whoever reads of a failure
    return found


@pytest.mark.timing
@pytest.mark.skipif(KERNELS is not None and not KERNELS.can_adapt, reason="clocks of threads go by ticks here")
def test_a_team_goes_on_with_fewer_and_comes_back() -> None:
    """Soon, as the team was fast before: 80 times the loss would be 0.35 s. Other programs add to it, so the shortest
    time counts, and it is measured again where they had both processors."""
    assert succeeds(lambda: float(printed(STARVED)) < 0.2, times=3)


def test_there_are_as_many_as_torch_has() -> None:
    before, workers = torch.get_num_threads(), Workers()
    try:
        addresses = []
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            assert workers.most == workers.active == threads
            addresses.append(workers.address)
    finally:
        torch.set_num_threads(before)
    assert addresses[0] == addresses[2] != addresses[1]  # what was noted for three has room for three


STAGES = """
import sys, threading, time, torch
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.tape import record

torch.set_num_threads(2)
ops = CpuOps(torch.device("cpu"))
weight, x = (torch.randn(size, 1024, generator=torch.Generator().manual_seed(size)) for size in (1024, 64))
gemm = ops.block_gemm([ops.quantize(weight, "Q8_0")], torch.float32)
stage, _ = record(lambda: [gemm.linear(x, None, None) for _ in range(40)], ops.replay_calls)


def loop():
    while True:
        pass


sys.setswitchinterval(0.1)  # so long others keep the lock, once they have it
threading.Thread(target=loop, daemon=True).start()
end, active, seconds = time.monotonic() + 20, 0, 0.0
while not (active == 2 and seconds > 0.1):  # this machine may do something else, too
    if time.monotonic() > end:
        print(active, seconds)
        sys.exit()
    ops.workers.hold(None)
    start = time.monotonic()
    stage.replay()
    active, seconds = ops.workers.active, time.monotonic() - start
print("done")
"""


@pytest.mark.timing
@pytest.mark.skipif(KERNELS is not None and not KERNELS.can_adapt, reason="clocks of threads go by ticks here")
def test_a_stage_beside_another_thread_of_python() -> None:
    """It waits for Python's lock without a loss of threads."""
    assert succeeds(lambda: printed(STAGES) == "done")


FORKED = """
import os, signal, torch
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.tape import record

torch.set_num_threads(2)
ops = CpuOps(torch.device("cpu"))
weight, x = (torch.randn(size, 512, generator=torch.Generator().manual_seed(size)) for size in (512, 8))
gemm = ops.block_gemm([ops.quantize(weight, "Q8_0")], torch.float32)
stage, out = record(lambda: [gemm.linear(x, None, None) for _ in range(10)][-1], ops.replay_calls)
stage.replay()
expected = out.clone()
child = os.fork()
if not child:
    signal.alarm(30)
    out.zero_()
    stage.replay()
    os._exit(not torch.equal(out, expected) or not torch.equal(gemm.linear(x, None, None), expected))
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_forked_process_computes_the_same() -> None:
    """It has none of the threads that its parent has."""
    assert printed(FORKED) == "0"


PINNED = """
import os, torch
from draftwing.engine.devices.cpu import CpuDevice

processors = sorted(os.sched_getaffinity(0))
device = CpuDevice()
device.set_threads(None, processors[::-1])
weight, x = torch.ones(4096, 512), torch.ones(64, 512)
gemm = device.ops.block_gemm([device.ops.quantize(weight, "Q8_0")], torch.float32)
assert torch.allclose(gemm.linear(x, None, None), torch.full((64, 4096), 512.0), rtol=0.01)
found = sorted(min(one) for t in os.listdir("/proc/self/task") if len(one := os.sched_getaffinity(int(t))) == 1)
assert found == processors[:-1] or len(processors) == 1, (found, processors)  # the last one is the caller's
assert sorted(os.sched_getaffinity(0)) == processors, "threads that are made from now on may run on all of these"
device.set_threads(None, processors[:1])
assert os.sched_getaffinity(0) == {processors[0]}
assert device.threads == 1 and device.active_threads == 1
print("done")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(KERNELS is not None and not KERNELS.has_openmp, reason="torch brings no GNU OpenMP")
def test_threads_stay_on_their_processors() -> None:
    assert printed(PINNED) == "done"


def test_processors_that_cannot_be_had_are_refused() -> None:
    device, before = CpuDevice(), torch.get_num_threads()
    try:
        with pytest.raises(ConfigError, match="expected some of the processors"):
            device.set_threads(None, [10**6])
        with pytest.raises(ConfigError, match="expected a processor for each of 3 threads"):
            device.set_threads(3, sorted(os.sched_getaffinity(0))[:1])
    finally:
        torch.set_num_threads(before)
