"""`CpuOps`: what the C extension has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftwing.kv.pool import KVPool
from draftwing.ops.attention import AttnBackend
from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.attention import POOL_TYPES, NativeAttention
from draftwing.ops.cpu.delta_net import CpuStateOps
from draftwing.ops.cpu.expansion import CpuExpansionOps
from draftwing.ops.cpu.experts import Spare
from draftwing.ops.cpu.extension import chosen_isa, load_extension
from draftwing.ops.cpu.layer_ops import CpuLayerOps
from draftwing.ops.cpu.lookup import CpuNGramIndex, CpuSuffixIndex
from draftwing.ops.cpu.sampling import CpuSamplingOps
from draftwing.ops.cpu.tape import Calls
from draftwing.ops.cpu.tree import CpuTreeOps
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.torch.ops import TorchOps


class CpuOps(
    CpuTreeOps,
    CpuExpansionOps,
    CpuSamplingOps,
    CpuLayerOps,
    CpuStateOps,
    TorchOps,
):
    """Made where the extension was built and the device is a CPU. Takes tensors with data only."""

    name = "cpu"
    can_record = True
    exact_by_design = True
    reads_int8_pool = True
    table_dtype = torch.int64  # C reads these; a CPU's memory is taken as it is written
    ngram_index, suffix_index = CpuNGramIndex, CpuSuffixIndex
    raw: Any  # the extension module; its functions are described in the C files

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.raw = load_extension()
        assert self.raw is not None, "the extension was not built, or is not wanted"
        self.spare, self.workers, self.arena, self.scratches = Spare(), Workers(), Arena(), {}

    def replay_calls(self, calls: Calls) -> None:
        """Calls what was noted (`ops.cpu.tape`), in threads that stay for all of it."""
        self.raw.replay(calls, self.workers.address)

    @property
    def active_threads(self) -> float:  # type: ignore[override]
        return self.workers.active / self.workers.most

    def pin_threads(self, processors: Sequence[int]) -> bool:
        if len(processors) > 1 and not self.raw.has_openmp:
            return False
        self.workers.pin(processors)
        return True

    @property
    def title(self) -> str:
        isa = chosen_isa()
        assert isa is not None
        return f"{self.name}, C for {isa.name}"

    def attention(self, pool: KVPool, exact: bool = False) -> AttnBackend:
        if pool.dtype not in POOL_TYPES:
            return super().attention(pool, exact)
        return NativeAttention(pool, self.raw, self.workers)
