"""Parts in host memory: what comes back is what was copied, in a budget, whatever is on its way."""

from __future__ import annotations

import random

import pytest
import torch
from distant_device import DistantCpu, LostCpu
from torch import Tensor

from draftwing.kv.host_prefixes import HostPrefixes
from draftwing.kv.prefix_index import BLOCK, Entry, digest_of, owner_of
from draftwing.kv.slot_bytes import SlotBytes

PAGE = 1000


def chain(name: str, blocks: int, owner: str = "alice") -> list[Entry]:
    """The blocks of a text."""
    digests = [digest_of(name.encode(), bytes([at])) for at in range(blocks)]
    parents = [digest_of(name.encode()), *digests]
    return [
        Entry(digest, parent, owner_of(owner), BLOCK * (at + 1))
        for at, (digest, parent) in enumerate(zip(digests, parents, strict=False))
    ]


def content(entries: list[Entry], size: int = PAGE) -> Tensor:
    return torch.stack(
        [torch.tensor(list(random.Random(entry.digest).randbytes(size)), dtype=torch.uint8) for entry in entries]
    )


def arrived(store: HostPrefixes) -> HostPrefixes:
    while store.leaving or store.returning or store.resting:
        store.poll()
        store.check_integrity()
    return store


def test_parts_of_any_size_come_back() -> None:
    store = HostPrefixes(DistantCpu(), PAGE, 20 * PAGE + 7)
    text, state = chain("text", 6), chain("state", 1)
    assert store.write(text, content(text), notes=list("abcdef")) == 6
    assert store.write(state, content(state, 3 * PAGE + 11)) == 1
    assert not any(entry.digest in store for entry in text) and all(store.knows(entry.digest) for entry in text)
    arrived(store)
    assert store.size == 10 * PAGE and len(store) == 7
    assert torch.equal(store.read([entry.digest for entry in text[2:5]]), content(text[2:5]))
    assert torch.equal(store.read([state[0].digest]), content(state, 3 * PAGE + 11))
    assert [store.note(entry.digest) for entry in text] == list("abcdef")


def test_what_saves_least_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a short text before that of a long one, and one that was used before one that was not."""
    now = [1e6]
    monkeypatch.setattr("time.time", lambda: now[0])
    store = HostPrefixes(DistantCpu(), PAGE, 20 * PAGE)
    long, short, new = chain("long", 10), chain("short", 8), chain("new", 6)
    for text in (long, short):
        store.write(text, content(text))
        arrived(store)
    now[0] += 1000
    store.use([entry.digest for entry in long])
    assert store.write(new, content(new), {entry.digest for entry in new}) == 6
    arrived(store)
    assert all(entry.digest in store for entry in [*long, *new])
    there = [entry.digest in store for entry in short]
    assert there == sorted(there, reverse=True) and 0 < sum(there) < 5, "its beginning stays"
    assert store.size <= 20 * PAGE


def test_a_text_larger_than_the_budget_keeps_its_beginning() -> None:
    store = HostPrefixes(DistantCpu(), PAGE, 4 * PAGE)
    text = chain("text", 6)
    assert store.write(text, content(text), {entry.digest for entry in text}) == 4
    assert [entry.digest in arrived(store) for entry in text] == [True] * 4 + [False] * 2


def test_random_orders_keep_all_bits() -> None:
    """Parts are written, read and removed while others are on their way: `DistantCpu` sees who writes too early."""
    rng, found = random.Random(0), 0
    store = HostPrefixes(DistantCpu(), PAGE, 24 * PAGE)
    texts = [chain(str(at), 5, owner) for at in range(8) for owner in ("alice", "bob")]
    for _ in range(600):
        text = rng.choice(texts)
        done = rng.randrange(12)
        if done < 6:
            lacking = [entry for entry in text if not store.knows(entry.digest)]
            if lacking:
                store.write(lacking, content(lacking), {entry.digest for entry in text})
        elif done < 10:
            there = [entry for entry in text if entry.digest in store]
            if there:
                found += len(there)
                assert torch.equal(store.read([entry.digest for entry in there]), content(there))
        elif rng.random() < 0.1:
            store.delete(rng.choice([None, owner_of("alice"), owner_of("bob")]))
        if rng.random() < 0.7:
            store.poll()
        store.check_integrity()
    assert found > 100
    arrived(store).delete()
    assert store.size == 0 and not len(store)


def test_removed_parts_are_not_there_when_they_arrive() -> None:
    store = HostPrefixes(DistantCpu(), PAGE, 8 * PAGE)
    text = chain("text", 3)
    store.write(text, content(text))
    store.delete(owner_of("bob"))
    assert all(store.knows(entry.digest) for entry in text)
    store.delete(owner_of("alice"))
    assert not any(entry.digest in arrived(store) for entry in text)


def test_what_never_arrives_is_not_there() -> None:
    store = HostPrefixes(LostCpu(), PAGE, 4 * PAGE)
    text = chain("text", 4)
    assert store.write(text, content(text)) == 4
    for _ in range(100):
        store.poll()
    assert not any(entry.digest in store for entry in text) and store.leaving == 4 * PAGE


def test_what_could_not_be_copied_is_copied_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, text = HostPrefixes(DistantCpu(), PAGE, 4 * PAGE), chain("text", 4)

    def fail(*args: object) -> object:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(DistantCpu, "copy_out", fail)
        with pytest.raises(torch.OutOfMemoryError):
            store.write(text, content(text))
    assert not any(store.knows(entry.digest) for entry in text)
    assert store.write(text, content(text)) == 4
    assert all(entry.digest in arrived(store) for entry in text)


def test_the_host_reads_nothing_of_the_device() -> None:
    """Tensors without data go out and come back: a read of them would fail."""

    class Meta(DistantCpu):
        def copy_out(self, pairs):  # type: ignore[no-untyped-def]
            assert all(source.device.type == "meta" and source.shape == host.shape for source, host in pairs)
            return lambda: True

        def copy_in(self, parts):  # type: ignore[no-untyped-def]
            return torch.empty(sum(map(len, parts)), dtype=torch.uint8, device="meta"), lambda: True

    layers = [torch.empty(400, 2, 2, 8, device="meta"), torch.empty(400, 5, dtype=torch.bfloat16, device="meta")]
    slots, text = SlotBytes(layers), chain("text", 4)
    store = HostPrefixes(Meta(), slots.each * BLOCK, 8 * slots.each * BLOCK)
    at = torch.empty(4 * BLOCK, dtype=torch.int64, device="meta")
    assert store.write(text, slots.gather(at, 4)) == 4
    store.poll()
    slots.scatter(at, store.read([entry.digest for entry in text]))


def test_little_is_taken_beyond_the_budget() -> None:
    """Page-locked memory comes in powers of two."""
    sizes = list[int]()

    class Counted(DistantCpu):
        def host_memory(self, size: int) -> Tensor:
            sizes.append(1 << (size - 1).bit_length())
            return torch.empty(size, dtype=torch.uint8, device="meta")

    for page in (20 << 20, 36 << 20, 96 << 20):
        sizes.clear()
        HostPrefixes(Counted(), page, 40 << 30)
        assert sum(sizes) < 1.07 * (40 << 30) and len(sizes) < 64
