"""Copying in chunks by threads: the values, casts, errors, and the bound on what is held."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from draftwing.ops import upload
from draftwing.ops.upload import Uploader


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float16),
    ],
)
def test_values_and_casts(threads: int, source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 100), (1,), (3, 33), (64, 16), (5, 0)]
    given = [torch.randn(size, generator=generator, dtype=torch.float64).to(source) for size in sizes]
    given.append(torch.randn(40, 20, generator=generator).to(source).t())  # not contiguous
    whole = torch.full((200, 10), float("nan"), dtype=target, device=device)
    found = [torch.full(tensor.shape, float("nan"), dtype=target, device=device) for tensor in given]
    with Uploader(device, threads, chunk_bytes=256) as uploader:
        for left, right in zip(found, given, strict=True):
            uploader.copy(left, right)
        uploader.copy(whole[20:60], given[0].new_full((40, 10), 3.0))
    for left, right in zip(found, given, strict=True):
        assert torch.equal(left.cpu(), right.to(target))
    assert (whole[20:60] == 3).all() and whole[:20].isnan().all() and whole[60:].isnan().all()


@pytest.mark.slow
def test_an_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the bus fell off")

    monkeypatch.setattr(upload.ctypes, "memmove", broken)
    source, target = torch.ones(4096), torch.ones(4096, device=device)
    with pytest.raises(RuntimeError, match="the bus fell off"), Uploader(device, 2, chunk_bytes=256) as uploader:
        for _ in range(100):
            uploader.copy(target, source)


def test_an_error_of_the_caller_ends_the_threads(device: torch.device) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Uploader(device, 3, chunk_bytes=256) as uploader:
        uploader.copy(torch.ones(4096, device=device), torch.ones(4096))
        raise KeyError
    assert threading.active_count() == before


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    waited: list[int] = []
    monkeypatch.setattr(upload, "WAITING_BYTES", 1024)
    source, target = torch.ones(1 << 14), torch.zeros(1 << 14, device=device)
    with Uploader(device, 1, chunk_bytes=256) as uploader:
        real = uploader._send

        def slow(*args: Any) -> None:
            waited.append(uploader._waiting)
            real(*args)

        monkeypatch.setattr(uploader, "_send", slow)
        uploader.copy(target, source)
    assert (target == 1).all() and 0 < max(waited) <= 1024
