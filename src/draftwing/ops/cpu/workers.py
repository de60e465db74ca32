"""The threads that the C kernels run in: csrc/threads.c."""

from __future__ import annotations

import ctypes

import torch


class _Fields(ctypes.Structure):
    """C's `Workers`."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("most", "active", "fixed", "since", "pause", "credit", "lost", "tries")
    ]


class Workers:
    """What kernels are told of their threads: an address in place of a number, so that calls which were noted once can
    run in another number of threads later. There are as many as torch has; each number has memory of its own, for what
    was noted has room for the threads of that time."""

    def __init__(self) -> None:
        self._fields: dict[int, _Fields] = {}  # by `most`

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

    @property
    def _now(self) -> _Fields:
        most = torch.get_num_threads()
        fields = self._fields.get(most)
        if fields is None:
            fields = self._fields[most] = _Fields(most, most)
        return fields
