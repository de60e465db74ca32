"""What rank 0 has other ranks do to keep their bytes of cached prefixes in host memory (`--hicache-size`).

Rank 0 decides (`engine.host_level`) and says between which steps slots go to which pages, and back
(`RankBroadcast.call`). It gives a page away, or brings one back, when copies of its own have arrived; where those of
another rank have not, that one waits for them.
"""

from __future__ import annotations

from draftwing.core import IntArray
from draftwing.engine.executor import Executor
from draftwing.engine.startup.memory import FLYING
from draftwing.kv.host_share import HostShare, Places
from draftwing.kv.slot_bytes import SlotBytes


def slot_bytes(executor: Executor) -> tuple[SlotBytes, SlotBytes]:
    """Returns what a rank keeps of tokens by slot, and of snapshots of states."""
    states = executor.attn.pool.states
    layers = [] if states is None else states.layers.values()
    return SlotBytes(executor.by_slot), SlotBytes([kept for layer in layers for kept in (layer.state, layer.conv)])


def open_share(executor: Executor, count: int, of_state: int) -> bool:
    """Takes the memory of a rank from 1 on. Returns whether all ranks have theirs."""
    ranks, device, there = executor.model.ranks, executor.device, 1
    if ranks.rank:
        try:
            most = device.total_memory() // FLYING
            executor.host_share = HostShare(device, *slot_bytes(executor), count, of_state, most)
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
