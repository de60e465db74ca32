"""`TritonOps`: what the GPU's kernels have."""

from __future__ import annotations

import torch

from draftwing.kv.pool import KVPool
from draftwing.ops.attention import AttnBackend
from draftwing.ops.even import even
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.triton.assign import TritonAssignOps
from draftwing.ops.triton.attention_backend import PagedAttention
from draftwing.ops.triton.blocks import TritonBlockOps
from draftwing.ops.triton.common import launch_options
from draftwing.ops.triton.draft_extend import TritonExpansionOps
from draftwing.ops.triton.hashes import hash_all
from draftwing.ops.triton.layer_ops import TritonLayerOps
from draftwing.ops.triton.merge import TritonMergeOps
from draftwing.ops.triton.ngram import TritonNGramIndex
from draftwing.ops.triton.row_states import TritonStateOps
from draftwing.ops.triton.sampling import TritonSamplingOps
from draftwing.ops.triton.suffix import TritonSuffixIndex
from draftwing.ops.triton.tree import TritonTreeOps

_FP8 = (8, 9)  # compute capability from which on Triton reads float8_e4m3fn


class TritonOps(
    TritonTreeOps,
    TritonAssignOps,
    TritonMergeOps,
    TritonExpansionOps,
    TritonBlockOps,
    TritonSamplingOps,
    TritonLayerOps,
    TritonStateOps,
    TorchOps,
):
    """Made on CUDA from compute capability 8.0 on, and on the meta device (`engine.startup.precompile`)."""

    name = "triton"
    reads_half_pool_in_fp32 = False
    attention_bytes = 512 << 20
    batch_invariant = True
    exact_by_design = True
    ngram_index, suffix_index = TritonNGramIndex, TritonSuffixIndex

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def reads_fp8_pool(self) -> bool:  # type: ignore[override]
        return (self.compute_capability or _FP8) >= _FP8

    def attention(self, pool: KVPool, exact: bool = False) -> AttnBackend:
        return PagedAttention(pool, exact)

    def round_up_rows(self, count: int) -> int:
        return even(count)

    def probe_device(self) -> None:
        launch_options(self.device)

    def hash_kernels(self) -> None:
        hash_all()
