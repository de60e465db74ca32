"""Blocks' files are read before they are wanted: each is what it is alone, whatever comes between."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from distant_device import DistantCpu, LostCpu

from draftwing.engine import read_ahead
from draftwing.engine.read_ahead import ReadAhead
from draftwing.kv.prefix_index import BLOCK, Entry, Stored, digest_of, owner_of
from draftwing.kv.prefix_store import PrefixStore

SIZE, TAIL = 5000, 64


def text(store: PrefixStore, name: str, blocks: int = 30) -> list[bytes]:
    """Writes one, returns the digests."""
    digests = [digest_of(name.encode(), bytes([at])) for at in range(blocks)]
    for at, digest in enumerate(digests):
        parent = digests[at - 1] if at else digest_of(name.encode())
        assert store.write(Entry(digest, parent, owner_of("alice"), BLOCK * (at + 1)), content(digest))
    return digests


def content(digest: bytes) -> bytes:
    return random.Random(digest).randbytes(SIZE)


def right(found: tuple[torch.Tensor, torch.Tensor] | None, *digests: bytes) -> bool:
    return found is not None and [bytes(row.numpy()) for row in torch.cat(found, 1)] == [*map(content, digests)]


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path, digest_of(b"a model"), 10**7)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, which have 12 files, three of them together."""
    monkeypatch.setattr(read_ahead.os, "cpu_count", lambda: 4)


def never() -> bool:
    return False


def always() -> bool:
    return True


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("most", "together"), [(10 * SIZE, 3), (2 * SIZE + 1, 2), (1, 1)])
def test_blocks_come_in_order(store: PrefixStore, most: int, together: int) -> None:
    digests, ahead, at = text(store, "text"), ReadAhead(store, DistantCpu(), SIZE, most), 0
    while at < len(digests):
        found = ahead.read(digests[at:], TAIL, never)
        assert right(found, *digests[at : at + together])
        at += together


@pytest.mark.usefixtures("threads")
def test_who_is_in_a_hurry_waits_for_one(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has others that are there already."""
    digests, going, load = text(store, "text"), threading.Event(), store.load

    def slow(stored: Stored, into: memoryview) -> bool:
        assert digests.index(stored.entry.digest) < 1 or going.wait(60)
        return load(stored, into)

    monkeypatch.setattr(store, "load", slow)
    ahead = ReadAhead(store, DistantCpu(), SIZE, 10 * SIZE)
    assert right(ahead.read(digests, TAIL, always), digests[0])
    going.set()
    for _, loaded in ahead._begun.values():
        loaded.result()
    assert right(ahead.read(digests[1:], TAIL, always), *digests[1:4])


def test_a_single_file(store: PrefixStore) -> None:
    """Of any size, and of one text at a time; one that is damaged is none."""
    digests, ahead = text(store, "text"), ReadAhead(store, DistantCpu(), 77, 1)
    assert ahead.take_single(digests[0]) is None
    ahead.begin_single(digests[0], SIZE + 1)  # nor is one of another size there
    assert ahead.take_single(digests[0]) is None
    for at in (3, 3, 4):
        ahead.begin_single(digests[at], SIZE)
    assert ahead.take_single(digests[4]) == content(digests[4]) and ahead.take_single(digests[4]) is None
    ahead.begin_single(digests[3], SIZE)
    assert ahead.take_single(digests[4]) is None
    path = next(path for path in store._folder.iterdir() if path.name.startswith(digests[5].hex()))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ahead.begin_single(digests[5], SIZE)
    assert ahead.take_single(digests[5]) is None
    ahead.begin_single(digests[6], SIZE)
    ahead.forget_single()
    assert ahead.take_single(digests[6]) is None


def test_texts_by_turns(store: PrefixStore) -> None:
    """What was begun for another is let go of; a block may be wanted again."""
    rng, texts, ahead = (
        random.Random(0),
        [text(store, str(at)) for at in range(3)],
        ReadAhead(store, DistantCpu(), SIZE, 1),
    )
    found = 0
    for _ in range(300):
        digests = rng.choice(texts)
        at = rng.randrange(len(digests))
        for begin in range(at, min(at + rng.randrange(1, 5), len(digests))):
            read = ahead.read(digests[begin:], TAIL, always)
            assert read is None or right(read, digests[begin])  # None: all buffers are on their way
            found += read is not None
    assert found > 400


@pytest.mark.usefixtures("threads")
def test_damaged_files_are_none(store: PrefixStore, tmp_path: Path) -> None:
    """And end what comes together before them."""
    digests, ahead = text(store, "text"), ReadAhead(store, DistantCpu(), SIZE, 10 * SIZE)
    for at in (3, 7):
        path = next(tmp_path.rglob(f"{digests[at].hex()}*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    next(tmp_path.rglob(f"{digests[11].hex()}*")).unlink()
    groups, at = list[int](), 0
    while at < len(digests):
        found = ahead.read(digests[at:], TAIL, never)
        groups.append(0 if found is None else len(found[0]))
        assert found is None if at in (3, 7, 11) else right(found, *digests[at : at + groups[-1]])
        at += groups[-1] or 1
    assert groups == [3, 0, 3, 0, 3, 0, *[3] * 6]


@pytest.mark.usefixtures("threads")
def test_a_device_without_memory_takes_no_buffers(store: PrefixStore) -> None:
    class Full(DistantCpu):
        full = True

        def copy_in(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], bool]]:
            if self.full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().copy_in(parts)

    device = Full()
    digests, ahead = text(store, "text"), ReadAhead(store, device, SIZE, 10 * SIZE)
    for _ in range(8):
        with pytest.raises(torch.OutOfMemoryError):
            ahead.read(digests, TAIL, never)
    device.full = False
    for at in range(0, len(digests), 3):
        assert right(ahead.read(digests[at:], TAIL, never), *digests[at : at + 3])


def test_without_pages_to_lock_other_memory_serves(store: PrefixStore) -> None:
    class Unlocked(DistantCpu):
        def host_memory(self, size: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    digests, ahead = text(store, "text"), ReadAhead(store, Unlocked(), SIZE, 1)
    assert all(right(ahead.read(digests[at:], TAIL, never), digest) for at, digest in enumerate(digests))


@pytest.mark.usefixtures("threads")
def test_what_is_removed_is_not_served_from_buffers(store: PrefixStore) -> None:
    """Files that are written under the same names later may be other ones."""
    digests, ahead = text(store, "text"), ReadAhead(store, DistantCpu(), SIZE, 10 * SIZE)
    assert right(ahead.read(digests, TAIL, never), *digests[:3])
    ahead.begin_single(digests[4], SIZE)
    assert store.delete() == 30
    ahead.forget()
    other = bytes(SIZE)
    for at, digest in enumerate(digests):
        store.write(Entry(digest, digests[at - 1] if at else digest, owner_of("alice"), BLOCK * (at + 1)), other)
    assert ahead.take_single(digests[4]) is None
    found = ahead.read(digests[3:], TAIL, never)
    assert found is not None and not torch.cat(found, 1).any()


def test_without_buffers_nothing_is_read(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead.os, "cpu_count", lambda: 2)
    digests, ahead = text(store, "text"), ReadAhead(store, LostCpu(), SIZE, SIZE)
    found = [right(ahead.read(digests[at:], TAIL, never), digest) for at, digest in enumerate(digests)]
    assert found == [True] * 6 + [False] * 24


def test_what_is_not_placed_is_bounded(store: PrefixStore) -> None:
    """By `GROUPS` times what goes at once: the device may be busy with a long prefill, and copies come meanwhile."""
    late, soon = (ReadAhead(store, device, SIZE, 2 * SIZE) for device in (LostCpu(), DistantCpu()))
    for _ in range(3):
        for ahead in (late, soon):
            ahead.placed(2 * SIZE)
            assert not ahead.full
    late.placed(2 * SIZE)
    assert late.full and late.full and not soon.full
