"""What a rank from 1 on keeps in host memory (`--hicache-size`): its own bytes of what rank 0 keeps, in pages of the
same numbers.

Rank 0 decides (`engine.host_level`) and says between which steps slots go to which pages, and back
(`RankBroadcast.call`). It gives a page away, or brings one back, when copies of its own have arrived; where those of
another rank have not, that one waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from draftwing.core import IntArray
from draftwing.kv.host_prefixes import HostPages
from draftwing.kv.prefix_index import BLOCK
from draftwing.kv.slot_bytes import SlotBytes

if TYPE_CHECKING:
    from draftwing.engine.executor import Executor

Places = Sequence[Sequence[int]]  # of each part its pages
POLL = 0.0002  # seconds


class _Flight(NamedTuple):
    """done: whether copies have arrived, of these pages.  held: what has to stay meanwhile."""

    done: Callable[[], bool]
    pages: frozenset[int]
    held: object


def slot_bytes(executor: Executor) -> tuple[SlotBytes, SlotBytes]:
    """Returns what a rank keeps of tokens by slot, and of snapshots of states."""
    states = executor.attn.pool.states
    layers = [] if states is None else states.layers.values()
    return SlotBytes(executor.by_slot), SlotBytes([kept for layer in layers for kept in (layer.state, layer.conv)])


class HostShare:
    """The pages, and copies from and to them."""

    def __init__(self, executor: Executor, count: int, of_state: int) -> None:
        """count: of pages.  of_state: that a snapshot takes. Raises RuntimeError where the memory cannot be had."""
        self._device = executor.device
        self.slots, self.states = slot_bytes(executor)
        size = max(self.slots.each * BLOCK, -(-self.states.each // max(of_state, 1)))
        self._pages = HostPages(executor.device, size, count)
        self._flights = list[_Flight]()

    @torch.inference_mode()
    def keep(self, kept: SlotBytes, slots: IntArray, places: Places) -> None:
        """Starts to copy slots [parts * n] to the host."""
        self.settle(places)
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
        left = [flight for flight in self._flights if not flight.done()]
        while any(wanted is None or flight.pages & wanted for flight in left):
            time.sleep(POLL)
            left = [flight for flight in left if not flight.done()]
        self._flights = left


def _numbers(places: Places) -> frozenset[int]:
    return frozenset(page for pages in places for page in pages)


# ---- what rank 0 has other ranks do ----------------------------------------------------------------------------------


def open_share(executor: Executor, count: int, of_state: int) -> bool:
    """Takes the memory of a rank from 1 on. Returns whether all ranks have theirs."""
    ranks, there = executor.model.ranks, 1
    if ranks.rank:
        try:
            executor.host_share = HostShare(executor, count, of_state)
        except RuntimeError:
            there = 0
    return ranks.least(there) > 0


def keep_parts(executor: Executor, of_state: bool, slots: IntArray, places: Places) -> None:
    """Does as `HostShare.keep`."""
    share = _share_of(executor)
    share.keep(share.states if of_state else share.slots, slots, places)


def bring_parts(executor: Executor, of_state: bool, slots: IntArray, places: Places, first: int = 0) -> None:
    """Does as `HostShare.bring`."""
    share = _share_of(executor)
    share.bring(share.states if of_state else share.slots, slots, places, first)


def settle_parts(executor: Executor) -> None:
    """Waits for what is on its way."""
    _share_of(executor).settle()


def _share_of(executor: Executor) -> HostShare:
    assert executor.host_share is not None
    return executor.host_share
