"""The store of responses: its bounds, whose responses go, and when."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftwing.server.openai.responses.store import ResponseStore, Stored

MB = 2**20


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(id: str, size: int = 100, previous: str | None = None, items: int = 1) -> Stored:
    ids = [f"{id}_item{i}" for i in range(items)]
    output = json.dumps([{"id": one} for one in ids]).encode()
    return Stored(id, json.dumps({"id": id, "text": "x" * size}).encode(), b"[]", output, frozenset(ids), previous)


def test_a_client_finds_its_own_alone() -> None:
    store = ResponseStore(MB)
    one = made("a")
    store.put("alice", one)
    assert store.get("alice", "a") is store.holder("alice", "a_item0") is one
    assert store.conversation("alice", "a") == [one]
    for found in (store.get("bob", "a"), store.holder("bob", "a_item0"), store.conversation("bob", "a")):
        assert found is None
    assert not store.delete("bob", "a") and store.delete("alice", "a") and not store.delete("alice", "a")
    assert store.get("alice", "a") is store.holder("alice", "a_item0") is None and store.bytes == len(store) == 0


def test_the_oldest_of_who_holds_most_goes() -> None:
    size = made("b00").size
    store = ResponseStore(6 * size)
    for name in ("a00", "a01"):
        store.put("alice", made(name))
    for i in range(50):
        store.put("bob", made(f"b{i:02}"))
        assert store.bytes <= 6 * size
    assert store.get("alice", "a00") and store.get("alice", "a01")
    assert [i for i in range(50) if store.get("bob", f"b{i:02}")] == [46, 47, 48, 49]
    for i in range(10):  # an equal share is not taken
        store.put("alice", made(f"c{i:02}"))
    assert len([i for i in range(50) if store.get("bob", f"b{i:02}")]) == 3


def test_many_small_ones_take_nothing_from_who_has_few() -> None:
    store = ResponseStore(64 * MB, max_responses=20)
    store.put("alice", made("large", 10 * MB))
    for i in range(100):
        store.put("bob", made(f"b{i}"))
    assert len(store) == 20 and store.get("alice", "large") and not store.get("bob", "b80") and store.get("bob", "b81")


def test_one_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(MB)
    store.put("", made("a", 2 * MB))
    assert store.get("", "a") is None and store.bytes == len(store) == 0
    nothing = ResponseStore(0)
    assert not nothing.keeps


def test_what_is_old_goes_unless_it_is_used() -> None:
    clock = Clock()
    store = ResponseStore(MB, seconds=60, clock=clock)
    for name in ("a", "b", "c", "d"):
        store.put("", made(name))
        clock.now += 10
    clock.now += 15  # a is 55 seconds old
    assert store.conversation("", "a") and store.holder("", "c_item0") and store.get("", "b")  # to look keeps nothing
    clock.now += 40
    assert store.get("", "a") and store.get("", "c") and store.get("", "b") is None is store.get("", "d")
    clock.now += 60
    assert store.get("", "a") is None and store.bytes == len(store) == 0


def test_a_conversation_stays_whole_as_long_as_it_goes_on() -> None:
    clock = Clock()
    store = ResponseStore(MB, max_responses=4, seconds=60, clock=clock)
    previous = None
    for i in range(3):
        if previous is not None:
            assert store.conversation("", previous) is not None
        store.put("", made(f"a{i}", previous=previous))
        previous = f"a{i}"
        store.put("", made(f"other{i}"))
        clock.now += 50
    found = store.conversation("", "a2")
    assert found is not None and [one.id for one in found] == ["a0", "a1", "a2"]
    assert store.get("", "other2") is not None and store.get("", "other1") is None
    assert store.delete("", "a1") and store.conversation("", "a2") is None and store.conversation("", "a0") is not None
    for i in range(3):  # the first ones go first, and those behind them are found no more
        store.put("", made(f"more{i}"))
    assert store.conversation("", "a2") is None


def test_an_item_that_several_responses_have() -> None:
    store = ResponseStore(MB)
    first, second = (Stored(id, b"{}", b"[]", b"[]", frozenset(items)) for id, items in (("a", "i"), ("b", "ij")))
    store.put("", first)
    store.put("", second)
    assert store.holder("", "i") is first
    store.delete("", "a")
    assert store.holder("", "i") is second and store.holder("", "k") is None


def test_an_id_that_is_given_twice() -> None:
    store = ResponseStore(MB)
    store.put("", made("a", 5))
    store.put("", made("a", 50, previous="a"))
    assert len(store) == 1 and store.bytes == made("a", 50).size and store.conversation("", "a") is None


def test_responses_that_are_stored_at_once_are_all_kept() -> None:
    """Bob's comes while alice's, her first, is being stored: when it is asked for the time."""
    bobs = threading.Thread(target=lambda: store.put("bob", made("b")))

    def clock() -> float:
        if bobs.ident is None:
            bobs.start()
            bobs.join(0.3)  # it waits for its turn, or is done long before
        return 1000.0

    store = ResponseStore(MB, clock=clock)
    store.put("alice", made("a"))
    bobs.join()
    assert store.get("alice", "a") and store.get("bob", "b") and len(store) == 2


@pytest.mark.slow
def test_the_bound_is_one_of_memory() -> None:
    store, max_responses = ResponseStore(8 * MB), 0
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]

        def fill(client: int) -> None:
            for i in range(20):
                store.put(f"client{client}", made(f"{client}-{i}", (i % 7) * 2000, items=i % 5))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(fill, range(64)))
        gc.collect()
        max_responses = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * store.bytes < max_responses < 8 * MB and 7 * MB < store.bytes <= 8 * MB
    assert all(any(store.get(f"client{i}", f"{i}-{j}") for j in range(60)) for i in range(64))


async def test_old_ones_go_even_if_nobody_asks() -> None:
    store = ResponseStore(MB, seconds=0.05)
    store.watch()
    store.put("", made("a"))
    await asyncio.sleep(0.02)
    store.put("", made("b"))
    for _ in range(100):
        await asyncio.sleep(0.02)
        if not len(store):
            return
    raise AssertionError("still there")
