"""The table of a CPU: what the C extension has."""

from __future__ import annotations

from functools import partial

import torch

from draftwing.ops.adapters.cpu import CpuAdapterOps
from draftwing.ops.assign.cpu import CpuAssignOps
from draftwing.ops.attention.cpu import native_attention
from draftwing.ops.attention.whole_cpu import native_whole
from draftwing.ops.cpu.runtime import CpuRuntime
from draftwing.ops.elementwise.cpu import CpuElementwiseOps
from draftwing.ops.expansion.cpu import CpuExpansionOps
from draftwing.ops.experts.cpu import CpuExpertOps
from draftwing.ops.gemm.cpu import CpuGemmOps
from draftwing.ops.lm_head.cpu import CpuLogitOps
from draftwing.ops.merge.cpu import CpuMergeOps
from draftwing.ops.ngram.cpu import CpuNGramIndex
from draftwing.ops.norms.cpu import CpuNormOps
from draftwing.ops.rope.cpu import CpuRopeOps
from draftwing.ops.row_states.cpu import CpuStateOps
from draftwing.ops.rows.cpu import CpuRowOps
from draftwing.ops.sampling.cpu import CpuSamplingOps
from draftwing.ops.suffix.cpu import CpuSuffixIndex
from draftwing.ops.table import TorchOps
from draftwing.ops.tree.cpu import CpuTreeOps
from draftwing.ops.whole_layers.cpu import native_layers


class CpuOps(TorchOps):
    """Made where the extension was built and the device is a CPU. Takes tensors with data only."""

    ngram_index, suffix_index = CpuNGramIndex, CpuSuffixIndex

    def __init__(self, device: torch.device) -> None:
        runtime = CpuRuntime(device)
        rows = CpuRowOps(runtime)
        elementwise = CpuElementwiseOps(runtime, rows)
        norms = CpuNormOps(runtime, rows, elementwise)
        gemms, experts = CpuGemmOps(runtime, rows), CpuExpertOps(runtime, norms)
        sampling = CpuSamplingOps(runtime)
        expansion = CpuExpansionOps(runtime, sampling, rows)
        super().__init__(
            device,
            runtime=runtime,
            norms=norms,
            elementwise=elementwise,
            rope=CpuRopeOps(runtime),
            rows=rows,
            logits=CpuLogitOps(runtime),
            gemms=gemms,
            experts=experts,
            adapters=CpuAdapterOps(runtime),
            tree=CpuTreeOps(runtime),
            assign=CpuAssignOps(runtime),
            merge=CpuMergeOps(runtime),
            sampling=sampling,
            expansion=expansion,
            states=CpuStateOps(runtime),
            attention=partial(native_attention, runtime),
        )
        self.row_reader, self.head_products, self.head_top_k = gemms.row_reader, gemms.head_products, gemms.head_top_k
        self.whole_mixture, self.whole_attention = experts.whole_mixture, partial(native_whole, runtime)
        self.whole_layers = partial(native_layers, rows.take_rows)
        self.candidates, self.top_tokens = sampling.candidates, expansion.top_tokens
        self.workers = runtime.workers
