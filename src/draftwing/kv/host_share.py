"""What a rank from 1 on keeps in host memory (`--hicache-size`): its own bytes of what rank 0 keeps, in pages of the
same numbers (`engine.host_share` says when)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftwing.core import IntArray
from draftwing.kv.host_prefixes import HostCopies, HostPages
from draftwing.kv.prefix_index import BLOCK
from draftwing.kv.slot_bytes import SlotBytes

Places = Sequence[Sequence[int]]  # of each part its pages
POLL = 0.0002  # seconds


class Uploads(HostCopies, Protocol):
    """What a device has of it, too."""

    def upload(self, host: IntArray) -> Tensor:
        """Returns a copy on the device."""


class _Flight(NamedTuple):
    """done: whether copies have arrived, of these pages.  held: what has to stay on the device meanwhile."""

    done: Callable[[], bool]
    pages: frozenset[int]
    held: Tensor | None


class HostShare:
    """The pages, and copies from and to them."""

    def __init__(
        self, device: Uploads, slots: SlotBytes, states: SlotBytes, count: int, of_state: int, most: int
    ) -> None:
        """count: of pages.  of_state: that a snapshot takes.  most: bytes on their way to the host from which on others
        wait. Raises RuntimeError where the memory cannot be had."""
        self._device, self.slots, self.states, self._most = device, slots, states, most
        size = max(self.slots.each * BLOCK, -(-self.states.each // max(of_state, 1)))
        self._pages = HostPages(device, size, count)
        self._flights = list[_Flight]()

    @torch.inference_mode()
    def keep(self, kept: SlotBytes, slots: IntArray, places: Places) -> None:
        """Starts to copy slots [parts * n] to the host. Rank 0 waits for copies of its own alone, so this one waits
        where its memory would be full of what has not left."""
        self.settle(places)
        self._wait(lambda: sum(one.held.nbytes for one in self._flights if one.held is not None) >= self._most)
        rows = kept.gather(self._device.upload(slots), len(places))
        done = self._pages.copy_out(rows, places)
        self._flights.append(_Flight(done, _numbers(places), rows))

    @torch.inference_mode()
    def bring(self, kept: SlotBytes, slots: IntArray, places: Places, first: int) -> None:
        """Starts to copy parts to slots: of the first part what is behind `first`."""
        self.settle(places)
        size = kept.each * (BLOCK if kept is self.slots else 1)
        stored, done = self._pages.copy_in(places, size)
        kept.scatter(self._device.upload(slots), stored, first)
        self._flights.append(_Flight(done, _numbers(places), None))

    def settle(self, places: Places | None = None) -> None:
        """Waits until all copies from and to these pages have arrived; None: any page."""
        wanted = None if places is None else _numbers(places)
        self._wait(lambda: any(wanted is None or flight.pages & wanted for flight in self._flights))

    def _wait(self, too_early: Callable[[], bool]) -> None:
        """Waits for copies as long as that is so."""
        self._flights = [flight for flight in self._flights if not flight.done()]
        while too_early():
            time.sleep(POLL)
            self._flights = [flight for flight in self._flights if not flight.done()]


def _numbers(places: Places) -> frozenset[int]:
    return frozenset(page for pages in places for page in pages)
