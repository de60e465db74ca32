"""Ranks as processes of one machine, joined by torch.distributed."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from draftwing.errors import ConfigError, DraftwingError
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.runtime import PeerSums
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.ranks import NextNorm, Ranks

logger = logging.getLogger("draftwing")

HOST = "127.0.0.1"
# Between the ranks that load fastest and slowest, on a slow disk; one that is gone is noticed before.
PATIENCE = timedelta(minutes=30)
JOINING = timedelta(minutes=5)  # to find each other once all have loaded
HANGING = timedelta(seconds=30)  # that a collective of GPUs takes once all are at work, and no graph has it
LARGE = 4 << 20  # bytes of a rank's part, from which on it pays to move fewer in two rounds
LEAVING = 5.0  # seconds that NCCL has to let go; it waits for graphs with collectives in them
Collectives = Literal["gloo", "NCCL"]  # by which ranks exchange tensors: of a CPU's memory, of GPUs'
NCCL_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast, which adds in no order that is known
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",  # ranks are of one machine, and nobody else is to reach them
}


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

    def join(
        self,
        size: int,
        device: torch.device,
        collectives: Collectives = "gloo",
        expert_parallel: bool = False,
        invariant: bool = False,
    ) -> Group:
        """Makes rank 0 of so many."""
        return Group(self._store, size, 0, device, collectives, expert_parallel, invariant)


def join(
    port: int,
    size: int,
    rank: int,
    device: torch.device,
    collectives: Collectives = "gloo",
    expert_parallel: bool = False,
    invariant: bool = False,
) -> Group:
    """Makes a rank from 1 on."""
    store = dist.TCPStore(HOST, port, None, False, JOINING)
    return Group(store, size, rank, device, collectives, expert_parallel, invariant)


class Group(Ranks):
    """gloo on a CPU; on GPUs NCCL, and for what is not too large `LayerOps.peer_sums`."""

    def __init__(
        self,
        store: dist.Store,
        size: int,
        rank: int,
        device: torch.device,
        collectives: Collectives = "gloo",
        expert_parallel: bool = False,
        invariant: bool = False,
    ) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.expert_parallel, self.invariant = expert_parallel, invariant
        self._backend: Collectives = collectives
        self._store = store
        self._exchanges = 0
        self._released = False
        self._environment: list[str] = []  # variables that are set for NCCL while there is this
        self._peers: PeerSums | str | None = None  # None: nobody has asked for it; a text: why there is none

    @property
    def title(self) -> str:  # type: ignore[override]
        parts = f"gathered by {self._backend}"
        if self._peers is not None and not isinstance(self._peers, str):
            most = "few rows" if self.invariant else "up to 32 MB"
            parts = f"of {most} read from the other GPUs' memory, of more {parts}"
        if self.invariant:
            return f"{parts}, none added: each rank makes some outputs of all inputs, and holds the bits of one alone"
        return f"{parts}, added in the order of the ranks, so that all of them hold the same bits"

    @cached_property
    def _group(self) -> Any:
        """Made with the first thing that passes, which waits for all ranks; until then each can load, or fail."""
        self.exchange(b"")  # which can be released; what makes a group waits for ranks that are gone, too
        if self._backend == "NCCL":
            self._environment = [name for name in NCCL_SETTINGS if name not in os.environ]
            os.environ.update({name: NCCL_SETTINGS[name] for name in self._environment})
        return make_group(self._store, self.size, self.rank, self._backend)

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel():
            options = AllgatherOptions()
            options.asyncOp = False  # on the stream of those who compute
            work = self._group._allgather_base(out, x, options)
            if work is not None:  # NCCL has nothing to wait for there
                work.wait()
        return out.view(self.size, *x.shape)

    def sum_rows(
        self, partial: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, ops: LayerOps = PLAIN
    ) -> Tensor:
        peers = self._peers_of(ops)
        total = None if peers is None else peers(partial, bias, residual)
        if total is not None:
            return total
        if self.size > 2 and partial.nbytes >= LARGE:
            return self.sum_in_shares(partial, bias, residual, ops)
        return super().sum_rows(partial, bias, residual, ops)

    def sum_under(
        self, norm: NextNorm, partial: Tensor, bias: Tensor | None, residual: Tensor, ops: LayerOps
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        peers = self._peers_of(ops)
        found = None if peers is None else peers.under(partial, bias, residual, *norm)
        return super().sum_under(norm, partial, bias, residual, ops) if found is None else found

    def gather_side_by_side(self, x: Tensor, ops: LayerOps = PLAIN) -> Tensor:
        peers = self._peers_of(ops)
        found = None if peers is None else peers.side_by_side(x.contiguous())
        return super().gather_side_by_side(x, ops) if found is None else found

    def _peers_of(self, ops: LayerOps) -> PeerSums | None:
        """All ranks come here for the first time with the first forward, which is in no graph."""
        if self._peers is None:
            self._peers = ops.peer_sums(self.rank, self.size, self.exchange) if ops.peer_sums is not None else ""
            if self._peers and isinstance(self._peers, str):
                logger.warning("sums over ranks go through %s, which is slower: %s", self._backend, self._peers)
        return None if isinstance(self._peers, str) else self._peers

    def swap(self, x: Tensor) -> Tensor:
        out, options = torch.empty_like(x), AllToAllOptions()
        options.asyncOp = False
        work = self._group.alltoall_base(out, x, [], [], options)
        if work is not None:
            work.wait()
        return out

    def exchange(self, mine: bytes) -> list[bytes]:
        """Returns what each rank gives, in their order. Not for the path of a step. Raises DraftwingError where one has
        not come after `PATIENCE`, RuntimeError once it was released."""
        self._exchanges += 1
        places = [f"exchange/{self._exchanges}/{rank}" for rank in range(self.size)]
        self._store.set(places[self.rank], mine.hex())
        until = time.monotonic() + PATIENCE.total_seconds()
        while not self._store.check(places):
            if self._released:
                raise RuntimeError("another rank does not come to where ranks meet")
            if time.monotonic() > until:
                minutes = PATIENCE.total_seconds() / 60
                late = ", ".join(str(rank) for rank, place in enumerate(places) if not self._store.check([place]))
                raise DraftwingError(
                    f"expected all {self.size} ranks where they meet within {minutes:g} minutes of the first, "
                    f"found none of {late}: loading takes longer there, or hangs. Put the checkpoint on a faster disk "
                    "and start again"
                )
            time.sleep(0.001)
        return [bytes.fromhex(self._store.get(place).decode()) for place in places]

    def scalar(self, value: int) -> Tensor:
        return torch.tensor([value], device=self.device)

    def shorten_timeouts(self) -> None:
        if "_group" in self.__dict__ and self._backend == "NCCL":
            self._group._set_default_timeout(HANGING)

    def release(self) -> None:
        """Ends the waiting for a rank that is gone. Raises nothing: who calls it has more to do."""
        self._released = True
        if self._peers is not None and not isinstance(self._peers, str):
            try:
                self._peers.release()
            except Exception as error:  # the device may be lost; whoever waits for NCCL is to be freed yet
                logger.error("kernels that wait for a rank that is gone could not be ended: %s", error)
        if "_group" in self.__dict__ and self._backend == "NCCL":
            self._leave(self._group.abort)

    def close(self) -> None:
        for name in self._environment:  # what this process starts later may be of several machines
            os.environ.pop(name, None)
        self._environment = []
        if "_group" in self.__dict__:
            left = self._leave(self._group.shutdown)
            if left and self._peers is not None and not isinstance(self._peers, str):
                self._peers.close()

    def _leave(self, how: Callable[[], None]) -> bool:
        """Returns whether it did not take too long."""
        thread = threading.Thread(target=how, name="draftwing-leave", daemon=True)
        thread.start()
        thread.join(LEAVING)
        return not thread.is_alive()


def make_group(store: dist.Store, size: int, rank: int, collectives: Collectives) -> Any:
    """Returns the process group, which is not torch's default one: a process may have several engines."""
    if collectives == "NCCL":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = JOINING
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = PATIENCE
    return dist.ProcessGroupGloo(store, rank, size, options)
