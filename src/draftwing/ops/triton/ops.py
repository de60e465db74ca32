"""The table of a GPU: what Triton's kernels and those in CUDA have."""

from __future__ import annotations

import torch

from draftwing.ops.adapters.triton import TritonAdapterOps
from draftwing.ops.assign.triton import TritonAssignOps
from draftwing.ops.attention.triton import PagedAttention
from draftwing.ops.attention.whole_cuda import hopper_whole
from draftwing.ops.elementwise.triton import TritonElementwiseOps
from draftwing.ops.expansion.triton_extend import TritonExpansionOps
from draftwing.ops.experts.triton import TritonExpertOps
from draftwing.ops.experts.triton_gemm import expert_gemm
from draftwing.ops.gemm.gpu import GpuGemmOps
from draftwing.ops.lm_head.triton import TritonLogitOps
from draftwing.ops.merge.triton import TritonMergeOps
from draftwing.ops.ngram.triton import TritonNGramIndex
from draftwing.ops.norms.triton import TritonNormOps
from draftwing.ops.rope.triton import TritonRopeOps
from draftwing.ops.row_states.triton import TritonStateOps
from draftwing.ops.rows.triton import TritonRowOps
from draftwing.ops.sampling.triton import TritonSamplingOps
from draftwing.ops.suffix.triton import TritonSuffixIndex
from draftwing.ops.table import TorchOps
from draftwing.ops.tree.triton import TritonTreeOps
from draftwing.ops.triton.runtime import TritonRuntime


class TritonOps(TorchOps):
    """Made on CUDA from compute capability 8.0 on, and on the meta device (`engine.startup.precompile`)."""

    ngram_index, suffix_index = TritonNGramIndex, TritonSuffixIndex
    patches_at_once = 0

    def __init__(self, device: torch.device) -> None:
        norms, gemms, sampling = TritonNormOps(), GpuGemmOps(device), TritonSamplingOps()
        super().__init__(
            device,
            runtime=TritonRuntime(device),
            norms=norms,
            elementwise=TritonElementwiseOps(),
            rope=TritonRopeOps(),
            rows=TritonRowOps(),
            logits=TritonLogitOps(),
            gemms=gemms,
            experts=TritonExpertOps(norms),
            adapters=TritonAdapterOps(),
            tree=TritonTreeOps(),
            assign=TritonAssignOps(),
            merge=TritonMergeOps(),
            sampling=sampling,
            expansion=TritonExpansionOps(sampling),
            states=TritonStateOps(),
            attention=PagedAttention,
        )
        self.expert_gemm, self.head_products = expert_gemm, gemms.head_products
        self.whole_attention = hopper_whole
