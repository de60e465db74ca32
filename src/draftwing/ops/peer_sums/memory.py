"""Memory of this GPU that the processes of other GPUs read and write, and theirs: one allocation of each rank, which
the driver lets the others map (CUDA's interprocess communication).

Nothing here uses NVLink's multicast, and no library is asked that might.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

Exchange = Callable[[bytes], list[bytes]]  # what this rank gives -> what each of them gave
_NATIVE_ATOMICS = 3  # CUdevice_P2PAttribute
_ENABLE_PEER_ACCESS = 1  # of cuIpcOpenMemHandle


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class NoPeers(Exception):
    """Why there is no such memory."""


class PeerMemory:
    """addresses: where the memory of each rank is for this one, in the order of the ranks."""

    def __init__(self, size: int, rank: int, ranks: int, exchange: Exchange, device: torch.device) -> None:
        """size: bytes of each rank's, which are zero at first.  device: of this rank; rank r has GPU r. All ranks make
        theirs together. Raises NoPeers, on all of them, where one of them cannot."""
        self._device = torch.device(device.type, rank)
        self._rank = rank
        self._own, self._context = ctypes.c_uint64(), ctypes.c_void_p()
        self.addresses: list[int] = []
        handle, why = b"", ""
        try:
            handle = self._allocate(size, ranks)
        except NoPeers as error:
            why = str(error)
        handles = exchange(handle)
        try:
            if not why and all(handles):
                self._open(handles)
        except NoPeers as error:
            why = str(error)
        reasons = [reason.decode() for reason in exchange(why.encode())]
        if any(reasons):
            self.close()
            raise NoPeers(next(filter(None, reasons)))

    def _allocate(self, size: int, ranks: int) -> bytes:
        """-> the handle by which others map it"""
        value = ctypes.c_int()
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoPeers(f"the driver's library cannot be loaded: {error}") from None
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        if torch.cuda.device_count() < ranks:
            raise NoPeers(f"expected {ranks} GPUs, found {torch.cuda.device_count()}")
        for other in range(ranks):
            if other != self._rank:
                self._ask("cuDeviceGetP2PAttribute", ctypes.byref(value), _NATIVE_ATOMICS, self._rank, other)
                if not value.value:
                    raise NoPeers(f"there is no NVLink between GPU {self._rank} and GPU {other}")
        torch.zeros(1, device=self._device)  # makes the context
        handle = _Handle()
        with torch.cuda.device(self._device):
            self._ask("cuCtxGetCurrent", ctypes.byref(self._context))
            self._ask("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(size))
            self._ask("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            torch.cuda.synchronize(self._device)
            self._ask("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle)

    def _open(self, handles: list[bytes]) -> None:
        for rank, handle in enumerate(handles):
            address = ctypes.c_uint64(self._own.value)
            if rank != self._rank:
                with torch.cuda.device(self._device):
                    self._ask(
                        "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle),
                        _ENABLE_PEER_ACCESS,
                    )  # fmt: skip
            self.addresses.append(address.value)

    def fill(self, size: int) -> None:
        """Fills the first bytes of this rank's with 0x7f, whatever the streams wait for. From any thread."""
        stream = ctypes.c_void_p()
        self._ask("cuCtxSetCurrent", self._context)  # a thread has its own
        self._ask("cuStreamCreate", ctypes.byref(stream), 1)  # which waits for no other one
        self._ask("cuMemsetD8Async", self._own, ctypes.c_ubyte(0x7F), ctypes.c_size_t(size), stream)

    def close(self) -> None:
        """Lets go of the memory, which nothing on the device may use any more."""
        if not self._own.value:
            return
        with torch.cuda.device(self._device):
            for address in self.addresses:
                if address != self._own.value:
                    self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
            self._driver.cuMemFree_v2(self._own)
        self.addresses, self._own = [], ctypes.c_uint64()

    def _ask(self, name: str, *args: object) -> None:
        code = getattr(self._driver, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise NoPeers(f"{name}: {(text.value or b'?').decode()} (error {code})")
