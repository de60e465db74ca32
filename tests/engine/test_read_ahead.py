"""Blocks' files are read before they are wanted: each is what it is alone, whatever comes between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from distant_device import DistantCpu, LostCpu

from draftwing.engine import read_ahead
from draftwing.engine.read_ahead import ReadAhead
from draftwing.kv.prefix_index import BLOCK, Entry, digest_of, owner_of
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


def right(found: tuple[torch.Tensor, torch.Tensor] | None, digest: bytes) -> bool:
    return found is not None and b"".join(bytes(part.numpy()) for part in found) == content(digest)


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path, digest_of(b"a model"), 10**7)


def test_blocks_come_in_order(store: PrefixStore) -> None:
    digests, ahead = text(store, "text"), ReadAhead(store, DistantCpu(), SIZE)
    for at, digest in enumerate(digests):
        assert right(ahead.read(digests[at:], TAIL), digest)


def test_texts_by_turns(store: PrefixStore) -> None:
    """What was begun for another is let go of; a block may be wanted again."""
    rng, texts, ahead = (
        random.Random(0),
        [text(store, str(at)) for at in range(3)],
        ReadAhead(store, DistantCpu(), SIZE),
    )
    found = 0
    for _ in range(300):
        digests = rng.choice(texts)
        at = rng.randrange(len(digests))
        for begin in range(at, min(at + rng.randrange(1, 5), len(digests))):
            read = ahead.read(digests[begin:], TAIL)
            assert read is None or right(read, digests[begin])  # None: all buffers are on their way
            found += read is not None
    assert found > 400


def test_damaged_files_are_none(store: PrefixStore, tmp_path: Path) -> None:
    digests, ahead = text(store, "text"), ReadAhead(store, DistantCpu(), SIZE)
    for at in (3, 7):
        path = next(tmp_path.rglob(f"{digests[at].hex()}*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    next(tmp_path.rglob(f"{digests[11].hex()}*")).unlink()
    for at, digest in enumerate(digests):
        found = ahead.read(digests[at:], TAIL)
        assert found is None if at in (3, 7, 11) else right(found, digest)


def test_without_buffers_nothing_is_read(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead.os, "cpu_count", lambda: 2)
    digests, ahead = text(store, "text"), ReadAhead(store, LostCpu(), SIZE)
    found = [right(ahead.read(digests[at:], TAIL), digest) for at, digest in enumerate(digests)]
    assert found == [True] * 4 + [False] * 26
