"""Queues whose clients take turns, so that one client's thousands of values never stand before another's one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, KeysView
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairDeque(Generic[K, V]):
    """Holds values by client and key: clients take turns (round robin), each client's values in order of arrival.

    Every call costs O(1). Not thread-safe, but `len` and `in` may be asked from any thread.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[K, V]] = OrderedDict()  # next client first; no line is empty
        self._owners: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: K) -> bool:
        return key in self._owners

    @property
    def clients(self) -> KeysView[str]:
        """Returns the clients that have values, the one whose turn is next first."""
        return self._lines.keys()

    def put(self, client: str, key: K, value: V) -> None:
        """Appends a value. key: unique among all clients' values that are held."""
        self._lines.setdefault(client, OrderedDict())[key] = value
        self._owners[key] = client

    def pop(self, client: str | None = None) -> tuple[K, V]:
        """Takes the first value of a client, by default of the one whose turn is next, and puts that client behind all
        others. Raises KeyError where there is none."""
        if client is None:
            client = next(iter(self._lines), "")
        key = next(iter(self._lines[client]))
        value = self._take(key)
        if client in self._lines:
            self._lines.move_to_end(client)
        return key, value

    def drop(self, key: K) -> V | None:
        """Takes a value out of its line, whose client keeps its turn; returns None where the key is not held."""
        return self._take(key) if key in self._owners else None

    def clear(self) -> None:
        """Drops all values."""
        self._lines.clear()
        self._owners.clear()

    def _take(self, key: K) -> V:
        client = self._owners.pop(key)
        line = self._lines[client]
        value = line.pop(key)
        if not line:
            del self._lines[client]
        return value
