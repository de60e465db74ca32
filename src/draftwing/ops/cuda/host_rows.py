"""A matrix in the host's memory of which a GPU reads single rows, through the bus.

Its pages are locked, so that the driver maps them at an address that kernels may read, which stays the same: graphs
that were captured go on to read from there. For torch it is a tensor of the GPU, and no kernel knows the difference.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from draftwing.machine import free_memory, memory_limit
from draftwing.ops.runtime import filled

logger = logging.getLogger(__name__)
_SHARE = 8  # a model's matrices are held by a GPU if all take no more than this part of its memory
_LEFT = 4 << 30  # bytes of the host that are left for all else


def belongs_on_host(size: int, memory: int, free: int | None, most: int, ranks: int, alike: int) -> bool:
    """size: bytes of a matrix; memory: of the GPU; free: bytes of the host's that may still be taken, None: unknown;
    most: that it has at all, for as many copies as there are ranks; alike: such matrices of the model. -> whether the
    host is to hold it"""
    if size * alike <= memory // _SHARE:
        return False
    if free is not None and size + _LEFT > free:
        _say_who(size, f"the host has {free / 1e9:.2f} GB left")
        return False
    # Others may have taken theirs already, so what is free does not tell.
    if size * alike * ranks + _LEFT > most:
        _say_who(size, f"the host has {most / 1e9:.2f} GB for {alike} such of {ranks} ranks")
        return False
    return True


def _say_who(size: int, why: str) -> None:
    logger.warning("a table of %.2f GB, of which single rows are read, is held by the GPU: %s", size / 1e9, why)


def host_matrix(
    rows: Callable[[Tensor], Tensor], count: int, device: torch.device, ranks: int, alike: int
) -> Tensor | None:
    """Computes what `Runtime.host_matrix` returns, on a GPU."""
    first = rows(torch.zeros(1, dtype=torch.int64))
    size = count * first.nbytes
    memory = torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not belongs_on_host(size, memory, free_memory(), min(memory_limit() or machine, machine), ranks, alike):
        return None
    held = filled(torch.empty(count, first.shape[1], dtype=first.dtype), rows)
    try:
        found = on_device(held, device)
    except NotLocked as error:
        with suppress(RuntimeError):  # CUDA tells of it once more, at the next kernel
            torch.ones(1, device=device)
        _say_who(size, str(error))
        return None
    logger.info("a table of %.2f GB, of which single rows are read, is held by the host's memory", size / 1e9)
    return found


class NotLocked(RuntimeError):
    """Says that the driver did not lock pages."""


def on_device(held: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host's as one of the GPU, in the same memory, whose pages are locked as long as it is
    there."""
    with torch.cuda.device(device):
        found = torch.as_tensor(_Locked(held), device=device)
    assert found.data_ptr() == held.data_ptr()
    return found.view(held.dtype).view(held.shape)


class _Locked:
    """Bytes of a tensor of the host's, as torch takes arrays of a GPU; it keeps this as long as it has a tensor."""

    def __init__(self, held: Tensor) -> None:
        assert held.is_contiguous() and held.nbytes
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(held.data_ptr(), held.nbytes, 0)
        if int(code):
            raise NotLocked(f"cudaHostRegister of {held.nbytes} bytes: CUDA error {int(code)}")
        self.__cuda_array_interface__ = {
            "shape": (held.nbytes,), "typestr": "|u1", "data": (held.data_ptr(), False), "version": 2,
        }  # fmt: skip
        weakref.finalize(self, _unlock, held).atexit = False


def _unlock(held: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(held.data_ptr())
