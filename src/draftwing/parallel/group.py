"""Ranks as processes of one machine, joined by torch.distributed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.parallel.ranks import Ranks

HOST = "127.0.0.1"
# Who watches the ranks notices one that hangs long before; this bounds a start on a slow disk.
PATIENCE = timedelta(minutes=30)
JOINING = timedelta(minutes=5)
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Rendezvous:
    """Where ranks find each other: a port of this machine that the system picks, and that others cannot reach."""

    def __init__(self) -> None:
        """Raises ConfigError where there is none to be had."""
        try:
            listening = socket.create_server((HOST, 0))  # left to itself the store listens on every interface
            self.port: int = listening.getsockname()[1]
            self._store = dist.TCPStore(
                HOST, self.port, None, True, JOINING, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--tp-size: no port of {HOST} is free for the ranks to meet at: {error}") from None

    def join(self, size: int, device: torch.device) -> Group:
        """Rank 0 of so many."""
        return Group(self._store, size, 0, device)


def join(port: int, size: int, rank: int, device: torch.device) -> Group:
    """A rank from 1 on."""
    return Group(dist.TCPStore(HOST, port, None, False, JOINING), size, rank, device)


class Group(Ranks):
    """gloo on a CPU, NCCL on GPUs."""

    def __init__(self, store: dist.Store, size: int, rank: int, device: torch.device) -> None:
        self.size, self.rank, self.device = size, rank, device
        backend = "NCCL" if device.type == "cuda" else "gloo"
        self.title = f"gathered by {backend}, added in the order of the ranks, so that all of them hold the same bits"
        self._store = store

    @cached_property
    def _group(self) -> Any:
        """Made with the first thing that passes, which waits for all ranks; until then each can load, or fail."""
        return make_group(self._store, self.size, self.rank, self.device)

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel():
            self._group._allgather_base(out, x).wait()
        return out.view(self.size, *x.shape)

    def scalar(self, value: int) -> Tensor:
        return torch.tensor([value], device=self.device)

    def close(self) -> None:
        if "_group" in self.__dict__:
            self._group.shutdown()


def make_group(store: dist.Store, size: int, rank: int, device: torch.device) -> Any:
    """The process group, which is not torch's default one: a process may have several engines."""
    if device.type == "cuda":
        for name, value in WITHOUT_MULTICAST.items():  # which adds in no order that is known
            os.environ.setdefault(name, value)
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = PATIENCE
    return dist.ProcessGroupGloo(store, rank, size, options)
