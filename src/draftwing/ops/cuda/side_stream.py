"""A second CUDA stream, for work that leaves room for the kernels of a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class SideStream:
    """`SideWork` of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # a model may be packed where there is no device

    def start(self, work: Callable[[], object]) -> torch.cuda.Event | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        return self._stream.record_event()

    def join(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(done)


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    return SideStream(device)
