"""Copying in chunks by threads: the values, casts, errors, and the bound on what is held; numbers of rows that are
tried before anybody waits, and batches that have them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from draftwing.core import Chunk
from draftwing.ops import upload
from draftwing.ops.attention.batch import Batch, spans_of
from draftwing.ops.upload import STEP, Uploader, even, evens


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


# -- numbers of rows --------------------------------------------------------------------------------------------------


def test_every_number_is_rounded_up_to_one_of_few() -> None:
    known = evens(16384)
    assert known == sorted(set(known)) and len(known) < 40
    for count in range(1, 16385):
        size = even(count)
        assert size == min(one for one in known if one >= count)
        assert size - count < max(16, size // 2) and size - count < STEP


def test_a_padded_batch_is_the_batch_and_chunks_of_the_dummy() -> None:
    length, dummy, lengths = 20, 5, (7, 4)
    chunks = [Chunk(row, 3 * row, size, True) for row, size in enumerate(lengths)]
    count = sum(lengths)
    batch = Batch(
        rows=torch.arange(2), ids=torch.arange(1, count + 1), positions=torch.arange(count),
        write_slots=torch.arange(30, 30 + count), table=torch.zeros(dummy + 1, length, dtype=torch.int64),
        prefix_len=torch.tensor([0, 3]), chunks=spans_of(chunks), bound=9,
    )  # fmt: skip
    assert batch.padded(count, dummy).chunks == batch.chunks
    more = batch.padded(32, dummy)
    assert more.ids.shape == more.positions.shape == more.write_slots.shape == (32,)
    for before, after in zip(batch, more, strict=True):
        if isinstance(before, torch.Tensor) and before is not batch.table:
            assert torch.equal(after[: len(before)], before)
    added = more.chunks[2:]
    assert sum(span.length for span in more.chunks) == 32 and not any(span.final for span in added)
    assert not more.ids[count:].any() and not more.write_slots[count:].any()
    for span in added:
        assert more.rows[span.row] == dummy and more.prefix_len[span.row] == span.start == 0
        here = more.positions[span.offset : span.offset + span.length]
        assert here.tolist() == list(range(span.length)) and span.length < min(length, more.bound + 1)
