"""A matrix of which single rows are read, in the memory of a GPU or of the host: the same rows."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftwing.engine.devices.put_away import storages_of
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.linear_ops.mapped import MappedFormat
from draftwing.ops.cuda import host_rows
from draftwing.ops.runtime import filled
from draftwing.ops.table import TorchOps

COUNT, SIZE = 70_001, 24  # more bytes than go to a device at a time
GB = 1 << 30


@pytest.mark.parametrize(
    ("size", "memory", "free", "ranks", "alike", "expected"),
    [
        (10 * GB, 80 * GB, 200 * GB, 1, 1, False),  # an eighth of the GPU's
        (10 * GB + 1, 80 * GB, 200 * GB, 1, 1, True),
        (82 * GB, 141 * GB, 128 * GB, 1, 1, True),
        (82 * GB, 141 * GB, 84 * GB, 1, 1, False),  # little would be left of the host's
        (82 * GB, 141 * GB, None, 1, 1, True),
        (82 * GB, 141 * GB, 200 * GB, 2, 1, True),
        (82 * GB, 141 * GB, 100 * GB, 2, 1, True),  # the other rank has its own already
        (82 * GB, 141 * GB, 200 * GB, 3, 1, False),
        (82 * GB, 141 * GB, None, 3, 1, False),
        (5 * GB, 80 * GB, 200 * GB, 1, 2, False),  # all of them together
        (5 * GB + 1, 80 * GB, 200 * GB, 1, 2, True),
        (41 * GB, 141 * GB, 200 * GB, 2, 3, False),
    ],
)
def test_who_holds_it(
    caplog: pytest.LogCaptureFixture, size: int, memory: int, free: int | None, ranks: int, alike: int, expected: bool
) -> None:
    """Of a host of 220 GB."""
    caplog.set_level(logging.WARNING)
    assert host_rows.belongs_on_host(size, memory, free, 220 * GB, ranks, alike) == expected
    assert ("held by the GPU" in caplog.text) == (not expected and size > 40 * GB)


def test_the_gpu_holds_what_the_driver_does_not_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    small = SimpleNamespace(total_memory=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    caplog.set_level(logging.WARNING)
    held = matrix(torch.bfloat16)
    assert host_rows.host_matrix(held.__getitem__, COUNT, torch.device("cpu"), 1, 1) is None
    assert "held by the GPU" in caplog.text


def matrix(dtype: torch.dtype) -> Tensor:
    return torch.randn(COUNT, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)


def linear_of(held: Tensor, parts: int, device: torch.device) -> Linear:
    linear = Linear(SIZE, COUNT, False, torch.bfloat16, torch.device("meta"), MappedFormat())
    for first in range(0, COUNT, -(-COUNT // parts)):
        rows = held[first : first + -(-COUNT // parts)]
        assert linear.op.keep(ParamSlice("weight", first, len(rows)), rows)
    assert not list(linear.parameters())
    return linear


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_device_that_reads_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, parts: int, dtype: torch.dtype
) -> None:
    """It is made once, and no parameter that moves with the others."""
    ops, held, asked = TorchOps(torch.device("cpu")), matrix(dtype), list[int]()

    def host_matrix(rows: object, count: int, ranks: int, alike: int) -> Tensor:
        asked.append(count * ranks * alike)
        return filled(torch.empty(count, SIZE, dtype=torch.bfloat16), rows)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "host_matrix", host_matrix)
    linear = linear_of(held, parts, ops.device)
    linear.op = linear.op.packed(ops, PackMode())
    ids = torch.tensor([[0, COUNT - 1, 5], [30_000, 5, 69_999]])
    assert torch.equal(linear.op.rows(ids), held.to(torch.bfloat16)[ids])
    held.zero_()
    assert linear.op.rows(ids).any() and asked == [COUNT] and not list(linear.parameters())
    assert linear.op.stored is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [1, 3])
def test_both_places_have_the_same_rows(ops: TorchOps, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Also from a graph, whose address stays; the GPU's memory holds none of it."""
    if ops.name != "triton":
        pytest.skip("for the GPU")
    held = matrix(torch.bfloat16)
    ids, found = torch.randint(COUNT, (3, 50), device=ops.device), []
    for share in (1, 1 << 40):
        monkeypatch.setattr(host_rows, "_SHARE", share)
        before, linear = torch.cuda.memory_allocated(), linear_of(held, parts, ops.device)
        linear.op = linear.op.packed(ops, PackMode())
        grown = torch.cuda.memory_allocated() - before
        assert grown >= held.nbytes if share == 1 else grown < 1 << 20
        assert bool(list(linear.parameters())) == (share == 1)

        def read(linear: Linear = linear) -> Tensor:
            return linear.op.rows(ids)

        found.append(read())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                replayed = read()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kept = ids.clone()
        ids.copy_(torch.randint(COUNT, (3, 50), device=ops.device))
        graph.replay()
        assert torch.equal(replayed.cpu(), held[ids.cpu()])
        ids.copy_(kept)
    assert torch.equal(*found) and torch.equal(found[0].cpu(), held[ids.cpu()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_that_sleeps_leaves_it_where_it_is() -> None:
    """As its memory is not the GPU's to give back; it is free again when nobody has it."""
    held, device = matrix(torch.bfloat16), torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):  # pages that are locked cannot be locked again
        found = host_rows.on_device(held, device)
        assert found.is_cuda and torch.equal(found.cpu(), held) and not storages_of([found])
        del found
