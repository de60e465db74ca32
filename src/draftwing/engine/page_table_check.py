"""Compares the page table on the device with the scheduler's copy of it, a row now and then.

The host permutes `Req.slots` as the device permutes the row, and frees by its copy. A kernel that did otherwise would
give a request's KV to others, and every count of slots would still be right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from draftwing.core import IntArray
from draftwing.engine.devices.base import Download
from draftwing.engine.row_table import RowTable
from draftwing.errors import DraftwingError
from draftwing.sched.scheduler import Scheduler

EVERY = 4096  # steps between two comparisons: a copy of one row, of 8 bytes a token


class _Copy(NamedTuple):
    """What a row was to be, and the device's own on its way to the host."""

    uid: str
    slots: IntArray
    download: Download


class PageTableCheck:
    """Starts a copy of a row's committed entries after a step, and compares it after the next one."""

    def __init__(self, sched: Scheduler, table: RowTable, every: int = EVERY) -> None:
        """every: steps between two comparisons."""
        self._sched, self._table, self._every = sched, table, every
        self._steps = 0
        self._copy: _Copy | None = None

    def look(self) -> None:
        """Takes note of a step that was launched, and whose predecessor was committed. Raises DraftwingError where the
        device has other slots than the scheduler."""
        if self._copy is not None:
            self._compare(self._copy)
            self._copy = None
        self._steps += 1
        if self._steps % self._every == 0:
            self._copy = self._begin()

    @torch.inference_mode()  # as the executor's steps, whose buffers it shares
    def _begin(self) -> _Copy | None:
        kv = self._sched.kv
        # Entries below the committed length are the same in the step in flight; others may be on their way.
        known = [req for row, req in kv.by_row.items() if req.kv > 0 and not kv.changes(row)]
        if not known:
            return None
        req = known[self._steps // self._every % len(known)]
        entries = self._table.page_table[req.row, : req.kv].unsqueeze(0).long()
        return _Copy(req.request.uid, req.slots[: req.kv].copy(), self._table.device.download(entries))

    def _compare(self, copy: _Copy) -> None:
        found = copy.download.wait()[0]
        if not np.array_equal(found, copy.slots):
            at = int(np.argmax(found != copy.slots))
            raise DraftwingError(
                f"the page table of request {copy.uid} differs from the scheduler's: expected slot {copy.slots[at]} at "
                f"position {at}, found {found[at]}"
            )
