"""Pinned buffers for copies in flight: which one a copy gets, and when it is free again. The links between GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwing.engine.devices import cuda
from draftwing.engine.devices.cuda import CudaDevice, Staging, links_of


class Event:
    """One that happens when the test says so."""

    recorded: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.happened = False

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.happened


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every buffer that was allocated, of ordinary memory: page-locked memory is CUDA's."""
    buffers: list[Tensor] = []
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool, **kwargs: Any) -> Tensor:
        assert pin_memory
        buffers.append(empty(*args, **kwargs))
        return buffers[-1]

    monkeypatch.setattr(cuda.torch, "empty", unpinned)
    monkeypatch.setattr(cuda.torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", [])
    return buffers


@pytest.mark.parametrize("shape", [(480, 640, 3), (3, 5, 3), (1, 1, 1)])
def test_arrays(made: list[Tensor], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any type, and of any place in memory; what is uploaded next waits until the copy has happened."""
    device = object.__new__(CudaDevice)  # no card is asked for
    device.device, device._up = torch.device("cpu"), Staging()
    monkeypatch.setattr(cuda.torch, "empty", lambda size, pin_memory=False, **how: torch.zeros(size, **how))
    pixels = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    for host in (pixels, pixels[::-1].transpose(1, 0, 2), pixels.astype(np.float32), pixels.view(np.bool_)):
        found = device.upload_array(host)
        assert found.shape == host.shape and np.array_equal(found.numpy(), host)
    busy = [buffer for _, buffer in device._up._busy]
    assert len({buffer.data_ptr() for buffer in busy}) == 4 and not device._up._free
    for event in Event.recorded:
        event.happened = True
    device.upload_array(pixels)
    assert len(device._up._busy) == 1 and len(device._up._free) == 3


def test_a_copy_gets_the_smallest_buffer_that_holds_it(made: list[Tensor]) -> None:
    staging = Staging()
    large, small, middle = (staging.take(size) for size in (100_000, 10, 20_000))
    for buffer in (large, middle, small):
        staging.give(buffer)
    assert staging.take(10) is small
    assert staging.take(10) is middle  # the smallest of those that are left
    assert staging.take(100_000) is large
    assert len(made) == 3
    staging.give(small)
    assert staging.take(30_000).numel() >= 30_000 and len(made) == 4, "none of them holds it"


def test_a_buffer_is_used_again_when_its_copy_has_happened(made: list[Tensor]) -> None:
    staging = Staging()
    first, second = staging.take(10), staging.take(10)
    staging.give_after(first)
    staging.give_after(second)
    third = staging.take(10)
    assert third is not first and third is not second and len(made) == 3
    Event.recorded[0].happened = True
    assert staging.take(10) is first
    fourth = staging.take(10)
    assert fourth is not second and len(made) == 4
    Event.recorded[1].happened = True
    assert staging.take(10) is second and len(made) == 4


class Unfit:
    """A graph that the driver does not take, for this reason."""

    why = ""

    def capture_begin(self, **how: Any) -> None:
        pass

    def capture_end(self) -> None:
        raise torch.AcceleratorError(self.why)


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("CUDA error: out of memory", torch.OutOfMemoryError),
        ("CUDA error: an illegal memory access was encountered", torch.AcceleratorError),
    ],
)
def test_a_graph_without_room_in_the_driver_is_one_without_memory(
    why: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unfit, "why", why)
    for name in ("Stream", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(cuda.torch.cuda, name, MagicMock())
    monkeypatch.setattr(cuda.torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(cuda.torch.cuda, "CUDAGraph", Unfit)
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    device.device, device._stream, device._pools = torch.device("cuda"), None, {}
    with pytest.raises(error) as raised:
        device.record(lambda: None)
    assert raised.type is error


# Of nvidia-smi.
TABLE = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tNV4\t0-31
GPU2\tPIX\tNV4\t X \t0-31

Legend:

  X    = Self
"""


def test_links_are_those_of_the_ranks() -> None:
    assert links_of(TABLE, range(2)) == "NV18" and links_of(TABLE, [1, 2]) == "NV4"
    assert links_of(TABLE, range(3)) == "NV18, NV4, PIX"
    assert links_of(TABLE, [0, 3]) == "unknown" and links_of("", [0, 1]) == "unknown"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_branches_of_a_graph_give_what_they_give_in_turn() -> None:
    device = cuda.CudaDevice()
    a, b = torch.randn(2, 1024, 1024, device=device.device).bfloat16()

    def both() -> torch.Tensor:
        x, y = a, b
        for _ in range(20):  # each pair begins with what the one before gave
            x, y = device.beside(lambda x=x, y=y: (x @ y).tanh(), lambda x=x, y=y: (y @ x).tanh())
        return torch.cat((x, y))

    expected = both()
    replay, found = device.record(both)
    for _ in range(3):
        found.zero_()
        replay()
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
def test_an_alias_is_in_the_place_of_a_tensor_and_does_not_hold_it(dtype: torch.dtype) -> None:
    device = cuda.CudaDevice()
    before = torch.cuda.memory_allocated()
    whole = torch.arange(3 << 20, device=device.device).remainder(2).to(dtype).view(3, -1)
    part = whole[1:, 5::7]
    alias = device.alias(part)
    assert alias.dtype == dtype and torch.equal(alias, part)
    whole.fill_(1)
    assert bool((alias == 1).all())
    alias.fill_(0)
    assert not part.any() and bool((whole[0] == 1).all())
    del whole, part
    assert torch.cuda.memory_allocated() == before
    assert device.alias(alias[:0]).shape == (0, alias.shape[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_both_directions_keep_order_with_the_compute_stream() -> None:
    """What is copied out is what was there when it was asked for, whatever the stream gets behind it; what comes in is
    there for all that is launched later."""
    device, size = cuda.CudaDevice(), 1 << 22
    host = device.host_memory(8 * size)
    parts = host.split(size)
    slow = torch.randn(4096, 4096, device="cuda")
    for turn in range(20):
        source = torch.empty(8, size, dtype=torch.uint8, device="cuda")
        for _ in range(4):
            slow = (slow @ slow).tanh()
        source.copy_(torch.arange(8, device="cuda").view(8, 1).add(turn).expand(8, size))
        left = device.copy_out(list(zip(source, parts, strict=True)))
        for _ in range(4):
            slow = (slow @ slow).tanh()
        while not left():
            pass
        del source
        found, done = device.copy_in(parts[::-1])
        assert found.view(8, size).float().mean(1).tolist() == [float(at + turn) for at in range(7, -1, -1)]
        assert done()
        assert [int(part[-1]) for part in parts] == [at + turn for at in range(8)]
