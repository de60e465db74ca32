"""Clients take turns, whatever is put, popped and dropped in between."""

from __future__ import annotations

import random

import pytest

from draftwing.fair_deque import FairDeque


class Plain:
    """The same as lists, searched through."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, list[int]]] = []

    def put(self, client: str, key: int) -> None:
        for name, keys in self.lines:
            if name == client:
                keys.append(key)
                return
        self.lines.append((client, [key]))

    def pop(self, client: str | None) -> int:
        at = 0 if client is None else [name for name, _ in self.lines].index(client)
        name, keys = self.lines.pop(at)
        key = keys.pop(0)
        if keys:
            self.lines.append((name, keys))
        return key

    def drop(self, key: int) -> bool:
        for name, keys in self.lines:
            if key in keys:
                keys.remove(key)
                if not keys:
                    self.lines.remove((name, keys))
                return True
        return False


@pytest.mark.parametrize("seed", range(5))
def test_it_does_as_plain_lists_do(seed: int) -> None:
    draw, queue, plain = random.Random(seed), FairDeque[int, str](), Plain()
    taken = dropped = 0
    for key in range(2000):
        kind = draw.random()
        if kind < 0.5:
            client = draw.choice(["", "a", "b", "c"])
            queue.put(client, key, f"value {key}")
            plain.put(client, key)
        elif kind < 0.75 and len(queue):
            client = draw.choice([None, *queue.clients])
            found = plain.pop(client)
            assert queue.pop(client) == (found, f"value {found}")
            taken += 1
        else:
            one = draw.randrange(max(key, 1))
            there = plain.drop(one)
            assert (one in queue) == there
            assert queue.drop(one) == (f"value {one}" if there else None)
            dropped += there
        assert list(queue.clients) == [name for name, _ in plain.lines]
        assert len(queue) == sum(len(keys) for _, keys in plain.lines)
    assert taken > 100 and dropped > 10


def test_nothing_is_popped_of_nothing() -> None:
    queue = FairDeque[int, str]()
    with pytest.raises(KeyError):
        queue.pop()
    queue.put("a", 1, "one")
    with pytest.raises(KeyError):
        queue.pop("b")
    queue.clear()
    assert not queue and not queue.clients and 1 not in queue
