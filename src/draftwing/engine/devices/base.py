"""What a device is: one compute stream, one packed upload and one packed download per step, and its memory.

What is computed there is asked of `Device.ops`. Both know the device; whoever has a `Device` need not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.config.devices import Defaults
from draftwing.core import IntArray
from draftwing.engine.devices.put_away import PutAway
from draftwing.engine.stats import StepTimes
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.table import TorchOps
from draftwing.parallel.group import Collectives

T = TypeVar("T")


class Download(NamedTuple):
    """A tensor on its way to the host. wait: blocks until it is there; once. done: when that is, see `Device.mark`."""

    wait: Callable[[], IntArray]
    done: Any


class Device(ABC):
    """A device with its operations. One from outside is a class derived from this one, or from `CpuDevice`."""

    kind: ClassVar[str]  # what torch calls such devices
    has_own_memory: bool = False  # whether it has memory of its own, which this process may fill and torch counts
    collectives: Collectives = "gloo"
    read_bytes = 256 << 20  # that show how fast memory is read: more than most caches hold
    out_of_memory: type[Exception] = torch.OutOfMemoryError  # what torch raises where there is no room

    def __init__(self, rank: int = 0, ops: TorchOps | None = None) -> None:
        """rank: which of several devices of this kind; ops: other operations than the device's own, for tests."""
        self.device = torch.device(self.kind, rank) if rank else torch.device(self.kind)
        self.ops = self.make_ops() if ops is None else ops

    @classmethod
    def missing(cls) -> str:
        """Says why this machine has no such device; empty where it has one."""
        return ""

    def make_ops(self) -> TorchOps:
        """Makes the operations of `device`; `TorchOps` serves wherever torch runs."""
        return make_ops(self.device)

    @property
    def name(self) -> str:
        """Returns what its maker calls it. Costs of steps are kept by this name."""
        return type(self).__qualname__

    @property
    @abstractmethod
    def defaults(self) -> Defaults:
        """Returns what options have here where they are not given."""

    def default_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        """Returns the type that `--dtype auto` computes in. checkpoint: what the weights were saved in."""
        return torch.float32

    def use(self) -> None:  # noqa: B027
        """Makes it the one of several that the calling thread works on. Done for the thread that makes it."""

    # -- copies -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def upload(self, host: IntArray) -> Tensor:
        """Copies [n] int64 to the device; nobody waits for the copy, and `host` stays as it is."""

    def upload_into(self, out: Tensor, host: IntArray) -> None:
        """Copies [n] int64 into a tensor [n] of the device; the host may change `host` afterwards."""
        out.copy_(torch.from_numpy(host))

    def upload_array(self, host: npt.NDArray[Any]) -> Tensor:
        """Copies an array of any type; nobody waits for the copy, and `host` stays as it is."""
        return torch.from_numpy(host.copy()).to(self.device)

    @abstractmethod
    def download(self, tensor: Tensor) -> Download:
        """Starts the copy of a [B, W] int64 to the host, in order with the compute stream."""

    def host_memory(self, size: int) -> Tensor:
        """Returns [size] uint8 of the host, which `copy_out` and `copy_in` take. Raises RuntimeError where there is no
        room."""
        return torch.empty(size, dtype=torch.uint8)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        """Starts copies of tensors of the device to `host_memory` of the same sizes, behind what the compute stream was
        given and beside what it gets: whoever asks keeps the former until they have arrived. Returns what says whether
        they have."""
        for source, host in pairs:
            host.copy_(source)
        return lambda: True

    def copy_in(self, parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[], bool]]:
        """Starts copies of `host_memory` [n] to one tensor of the device, in order, which the compute stream has when
        it comes to it; they go beside what it was given before. Returns it, and what says whether they have arrived:
        until then the host changes nothing of `parts`."""
        return torch.cat(list(parts)).to(self.device), lambda: True

    # -- time -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def mark(self) -> Any:
        """Returns a point of time in what the device does, which `seconds` knows when it is past."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks, both past."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits until the device has done all that it was given."""

    def step_times(self) -> StepTimes:
        """Returns what times the stages of steps; of some steps only where that takes marks on the device."""
        return StepTimes()

    def timed(self, fn: Callable[[], object], times: int) -> list[float]:
        """Returns the seconds that the device takes for each of so many calls, one right after the other."""
        marks = [self.mark()]
        for _ in range(times):
            fn()
            marks.append(self.mark())
        self.synchronize()
        return [self.seconds(begin, end) for begin, end in pairwise(marks)]

    def read_rate(self) -> float:
        """Measures how many bytes a second the device reads of its memory: the fastest of a few sums. 0 where there is
        no room for what they read."""
        try:
            data = torch.ones(self.read_bytes // 4, device=self.device)
        except self.out_of_memory:
            return 0.0
        rate = data.nbytes / min(self.timed(data.sum, 8))
        del data
        self.trim()
        return rate

    # -- memory -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def free_memory(self) -> int:
        """Returns the bytes that could be allocated now."""

    @abstractmethod
    def total_memory(self) -> int:
        """Returns the bytes that the device has, whoever uses them now."""

    def trim(self) -> None:  # noqa: B027
        """Gives memory that torch keeps for later back to the device."""

    def put_away(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> PutAway:
        """Gives memory of tensors back until they are asked for: of `kept` with what is in them, where the device has
        memory of its own, and of `emptied`, which are zeros then, or as they were. Nothing runs meanwhile, and no graph
        that was captured before may run afterwards. Raises RuntimeError where the host has no room."""
        return PutAway(0, lambda: None)

    def bytes_to_copy(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> int:
        """Returns bytes of host memory that `put_away` takes meanwhile."""
        return 0

    def peak(self, fn: Callable[[], object]) -> int:
        """Returns the bytes that are allocated at most while `fn` runs, beyond those that were before. Only asked of
        devices with `has_own_memory`."""
        raise NotImplementedError

    # -- what some devices have -------------------------------------------------------------------------------------

    def record(self, fn: Callable[[], T], pool: str = "steps") -> tuple[Callable[[], None], T]:
        """Captures what `fn` puts on the device: how to run it, and its tensors, empty as long as it has not run. Only
        asked of devices whose defaults have a `graph_size`.

        `fn` is called before, too, which makes what is made once: compiled kernels, workspaces, constants. Graphs of a
        pool, which is known by its name, share memory: a tensor that is no longer referenced may be overwritten by
        those captured later.
        """
        raise NotImplementedError

    def alias(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the place of another one, whose memory it does not hold: graphs captured later may use
        it."""
        return tensor

    def beside(self, first: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
        """Returns what both functions give, of which neither reads what the other writes: the device may do both at
        once. What they compete for is for `other` first."""
        return first(), other()

    @property
    def count(self) -> int:
        """Returns how many devices of this kind there are for ranks."""
        return 1

    def names(self, count: int) -> list[str]:
        """Returns what makers call the devices of so many ranks."""
        return [self.name] * count

    def links(self, count: int) -> str:
        """Says what is between the devices of so many ranks."""
        return "unknown"

    @property
    def threads(self) -> int:
        """Returns how many threads compute, where the host does."""
        return torch.get_num_threads()

    @property
    def active_threads(self) -> float:
        """Returns the share of the threads that compute now, above 0; see `StepResult`."""
        return 1.0

    def torch_in_active_threads(self) -> AbstractContextManager[None]:
        """Has torch's own operations run in as many threads as kernels do now, where the host computes."""
        return nullcontext()

    def set_threads(self, count: int | None, pinned: Sequence[int] = ()) -> None:
        """Sets how many threads compute, where the host does. None: as many as are best here, or as there are
        processors in `pinned`, on each of which one stays. Raises ConfigError for processors that cannot be had."""
        if pinned:
            raise ConfigError(f"--cpu-affinity: expected --device cpu, found {self.kind}: leave it out")

    def memory_limit(self) -> int:
        """Returns the bytes that weights may take at most, whatever others have taken of them now."""
        return self.total_memory()
