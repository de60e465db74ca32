"""A device as operations see it: what it is, what it is good at, and memory and threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.gemm import onednn

_UPLOADED = 64 << 20  # bytes of a matrix that are on their way to a device together


class Runtime:
    """Any device that torch has."""

    name = "torch"
    exact_by_design = False  # whether a row has the same bits in any batch, else it has to be tried
    reads_half_pool_in_fp32 = True  # whether attention in float32 reads a pool of a half type
    reads_fp8_pool = False  # whether attention in 16 bits reads a pool in fp8
    reads_int8_pool = False
    # Of page tables and the tokens of rows, which are there for all rows and positions; what they hold is below 2^31.
    table_dtype = torch.int32
    attention_bytes = 0  # of partial results that attention makes over long contexts
    active_threads = 1.0  # share of the host's threads that kernels run in now
    compute_capability: tuple[int, int] | None = None  # of the GPU for which kernels are compiled
    # Makes calls again that were noted (`ops.cpu.tape`); None: what a small step does may not be recorded.
    replay_calls: Callable[[Any], None] | None = None
    # Makes what sums few rows over ranks: this rank, how many there are, and what gives each rank's bytes to all. A
    # text says why there is no such thing; all ranks ask together, and get the same. None: the device has none.
    peer_sums: Callable[[int, int, Callable[[bytes], list[bytes]]], PeerSums | str] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def title(self) -> str:
        """Returns what the log calls the device's operations."""
        return self.name

    @property
    def batch_invariant(self) -> bool:
        """Returns whether there is a way to give a row the same bits in any batch."""
        return self.device.type == "cpu"

    def exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type to compute in where this one is asked for: on a CPU float32 for one in which the order of a
        row's sums is torch's to choose, and depends on the batch."""
        known = self.device.type != "cpu" or onednn.takes(torch.empty(0, dtype=dtype))
        return dtype if known else torch.float32

    def pin_threads(self, processors: Sequence[int]) -> bool:
        """Has each of the host's threads stay on a processor; returns whether there is a way to."""
        return False

    def upload_matrix(self, rows: Callable[[Tensor], Tensor], count: int) -> Tensor | None:
        """Returns a matrix [count, n] of which `rows` gives the rows of ids [M], on the device, for `take_rows`; None
        where the device shares the host's memory, and rows are read from where they are."""
        if self.device.type == "cpu":
            return None
        first = rows(torch.zeros(1, dtype=torch.int64))
        return filled(torch.empty(count, first.shape[1], dtype=first.dtype, device=self.device), rows)

    def host_matrix(self, rows: Callable[[Tensor], Tensor], count: int, ranks: int, alike: int) -> Tensor | None:
        """Returns the same matrix in the host's memory, as a tensor of the device, which reads it from there; None
        where it is better held by the device. ranks: of this host, which ask for one each.  alike: such matrices of the
        model."""
        return None

    def round_up_rows(self, count: int) -> int:
        """Returns as how many rows so many of a prompt are best multiplied outside of graphs."""
        return count

    def empty_cache(self) -> None:
        """Gives the device what no tensor holds any more."""

    def hash_kernels(self) -> None:
        """Names kernels as the process does that compiles them ahead, which may be another one."""

    def probe_device(self) -> None:
        """Finds out what kernels ask of the device, for a compiler that traces their launches must not do so."""


def filled(out: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns out [count, n], into which it has put what `rows` gives, a part at a time."""
    for ids in torch.arange(len(out)).split(max(_UPLOADED // (out.shape[1] * out.itemsize), 1)):
        out[ids[0] : ids[0] + len(ids)].copy_(rows(ids))
    return out


RECORDED_ROWS = 16  # steps of up to so many are recorded on a CPU


class PeerSums(Protocol):
    """Sums of few rows over ranks whose devices read each other's memory, and what all of them have of a row."""

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor | None:
        """partial [M, n] of this rank, bias [n] and residual [M, n], the same on all -> the bits of `sum_parts` of all
        ranks' parts; None, on all of them, where it takes no such rows. All ranks call it at the same place."""
        ...

    def under(
        self, partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, quantises: bool
    ) -> tuple[Tensor, Tensor | Fp8Rows] | None:
        """Returns the sum, and its norm with these weights [n] as `rms_norm` gives it, or `rms_norm_fp8`; None as for
        sums."""
        ...

    def side_by_side(self, x: Tensor) -> Tensor | None:
        """x [M, n] of this rank -> [M, ranks * n], that of each rank behind that of the one before; None as for
        sums."""
        ...

    def release(self) -> None:
        """Ends the waiting for ranks that are gone; sums mean nothing from now on. From any thread."""
        ...

    def close(self) -> None:
        """Lets go of the memory, which nothing may use any more."""
        ...
