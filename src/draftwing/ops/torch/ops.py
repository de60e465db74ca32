"""`TorchOps`: every operation in torch. The device's own classes derive from it and override what they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.kv.row_states import RowStates
from draftwing.ops.attention import AttnBackend
from draftwing.ops.reference.assign import AssignOps
from draftwing.ops.reference.merge import MergeOps
from draftwing.ops.reference.ngram import NGramOps
from draftwing.ops.reference.suffix import SuffixOps
from draftwing.ops.reference.tree import TreeOps
from draftwing.ops.torch import onednn
from draftwing.ops.torch.attention import TorchAttention
from draftwing.ops.torch.expansion import ExpansionOps
from draftwing.ops.torch.layer_ops import LayerOps

_UPLOADED = 64 << 20  # bytes of a matrix that are on their way to a device together


class TorchOps(TreeOps, AssignOps, MergeOps, ExpansionOps, NGramOps, SuffixOps, LayerOps):
    """The operations of one device, made once; see docs/architecture.md."""

    name = "torch"
    can_record = False  # whether all that a small step does may be recorded and made again (`ops.cpu.tape`)
    replay_calls: Callable[[Any], None]  # where it may: makes what was noted
    exact_by_design = False  # whether a row has the same bits in any batch, else it has to be tried
    reads_half_pool_in_fp32 = True  # whether attention in float32 reads a pool of a half type
    reads_fp8_pool = False  # whether attention in 16 bits reads a pool in fp8
    reads_int8_pool = False
    lazy_states = False  # whether every second plain step leaves states as they are, see `kv.row_states`
    # Of page tables and the tokens of rows, which are there for all rows and positions; what they hold is below 2^31.
    table_dtype = torch.int32
    attention_bytes = 0  # of partial results that attention makes over long contexts

    active_threads = 1.0  # share of the host's threads that kernels run in now

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin_threads(self, processors: Sequence[int]) -> bool:
        """Has each of the host's threads stay on a processor; returns whether there is a way to."""
        return False

    @property
    def reads_routes(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    def upload_matrix(self, rows: Callable[[Tensor], Tensor], count: int) -> Tensor | None:
        if self.device.type == "cpu":
            return None
        first = rows(torch.zeros(1, dtype=torch.int64))
        out = torch.empty(count, first.shape[1], dtype=first.dtype, device=self.device)
        for ids in torch.arange(count).split(max(_UPLOADED // first.nbytes, 1)):
            out[ids[0] : ids[0] + len(ids)].copy_(rows(ids))
        return out

    def round_up_rows(self, count: int) -> int:
        """As how many rows so many of a prompt are best multiplied outside of graphs."""
        return count

    @property
    def title(self) -> str:
        """Returns what the log calls them."""
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

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Returns that of the GPU for which kernels are compiled, None where none are."""
        return None

    def attention(self, pool: KVPool, exact: bool = False) -> AttnBackend:
        """Returns attention over the pool. exact: a query's result has the same bits however it is asked for, which on
        a CPU is so anyway."""
        return TorchAttention(pool)

    def advance_states(self, states: RowStates, rows: Tensor, prefix_len: Tensor, nodes: int = 0) -> None:
        """Makes what a step of trees wrote of rows [B] what the next one reads: the states after their roots.
        prefix_len [B]: tokens before these; of a prefill's chunk, all but its last. nodes: of each tree; 0: of
        chunks."""
        states.advance(rows, prefix_len + 1, nodes)

    def hash_kernels(self) -> None:
        """Names kernels as the process does that compiles them ahead, which may be another one."""

    def probe_device(self) -> None:
        """Finds out what kernels ask of the device, for a compiler that traces their launches must not do so."""
