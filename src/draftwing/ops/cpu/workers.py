"""The threads that the C kernels run in: csrc/threads.c."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch


class _Fields(ctypes.Structure):
    """C's `Workers`."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("most", "active", "fixed", "since", "pause", "credit", "saved", "pinned")
    ]


class Workers:
    """What kernels are told of their threads: an address in place of a number, so that calls which were noted once can
    run in another number of threads later. There are as many as torch has; each number has memory of its own, for what
    was noted has room for the threads of that time."""

    def __init__(self) -> None:
        self._fields: dict[int, _Fields] = {}  # by `most`
        self._held: int | None = None
        self._pinned: ctypes.Array[ctypes.c_int64] | None = None  # processors

    @property
    def most(self) -> int:
        """Returns how many threads a kernel may run in: what it needs for each thread is there so many times."""
        return torch.get_num_threads()

    @property
    def active(self) -> int:
        """Returns in how many of them kernels run now."""
        return int(self._now.active)

    @property
    def address(self) -> int:
        """Returns what a kernel takes, which lives as long as this object."""
        return ctypes.addressof(self._now)

    def hold(self, threads: int | None) -> None:
        """Has kernels run in so many threads, whatever else the machine does; None: in those that can run."""
        self._held = threads
        for fields in self._fields.values():
            self._begin(fields)

    def pin(self, processors: Sequence[int]) -> None:
        """Has each of torch's threads but the caller stay on the processor of its number, and all of them run."""
        assert len(processors) == self.most
        self._pinned = (ctypes.c_int64 * len(processors))(*processors)
        self.hold(self.most)

    @property
    def _now(self) -> _Fields:
        most = torch.get_num_threads()
        fields = self._fields.get(most)
        if fields is None:
            fields = _Fields(most)
            self._begin(fields)
            fields = self._fields.setdefault(most, fields)  # another thread may have been faster
        return fields

    def _begin(self, fields: _Fields) -> None:
        fields.fixed = self._held is not None
        fields.active = min(self._held or fields.most, fields.most)
        fields.since = time.monotonic_ns()
        fields.pause = fields.credit = fields.saved = 0
        pinned = self._pinned
        fields.pinned = 0 if pinned is None or len(pinned) != fields.most else ctypes.addressof(pinned)
