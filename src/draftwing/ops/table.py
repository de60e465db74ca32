"""The table of operations: from the name of each to the function that does it on a device.

`TorchOps` is the table of a device without kernels of its own, and `LayerOps` the part of it that layers need. Other
devices are in `ops.cpu.ops` and `ops.triton.ops`. A class like `NormOps` is the specification of its operations, in
torch, in `spec.py` of their folder; a device's class next to it overrides what it does better.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.ops.adapters.spec import AdapterOps
from draftwing.ops.assign.spec import AssignOps
from draftwing.ops.attention.attend import AttnBackend
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.attention.whole import WholeAttention, whole_attention
from draftwing.ops.elementwise.spec import ElementwiseOps
from draftwing.ops.expansion.spec import ExpansionOps
from draftwing.ops.experts.routing import DeviceExpertGemm, MixtureWeights, WholeMixture
from draftwing.ops.experts.spec import ExpertOps
from draftwing.ops.gemm.contract import Gemm, HeadProducts, HeadTopK
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.spec import GemmOps
from draftwing.ops.gemm.stored import BlockRows, MXRows
from draftwing.ops.lm_head.spec import LogitOps
from draftwing.ops.merge.spec import MergeOps
from draftwing.ops.ngram.spec import NGramIndex
from draftwing.ops.norms.spec import NormOps
from draftwing.ops.rope.spec import RopeOps
from draftwing.ops.row_states.spec import StateOps
from draftwing.ops.rows.spec import RowOps
from draftwing.ops.runtime import Runtime
from draftwing.ops.sampling.spec import SamplingOps
from draftwing.ops.suffix.spec import SuffixIndex
from draftwing.ops.tree.spec import TreeOps
from draftwing.ops.whole_layers.contract import LayerWeights, WholeLayers

CPU = torch.device("cpu")
Attention = Callable[[KVPool, bool], AttnBackend]


def torch_attention(pool: KVPool, exact: bool) -> AttnBackend:
    """Returns attention in torch, where on a CPU a query's result has the same bits anyway."""
    return TorchAttention(pool)


class LayerOps(NormOps, ElementwiseOps, RopeOps, RowOps, LogitOps, GemmOps, ExpertOps, AdapterOps):
    """The operations of layers, each as the part of its kind has it. Those in torch are differentiable and take tensors
    of any dtype; those of other devices are for inference. What is None is there on some devices only."""

    # Reads single rows of blocks, of which the others stay in their file: ids [M] int64 -> [M, columns] in a dtype,
    # float32 or bfloat16. None: nothing is better than numpy.
    row_reader: Callable[[BlockRows, torch.dtype], Callable[[Tensor], Tensor] | None] | None = None

    # Of weights [heads * out, in], or the parts of one in blocks, which are copied: products of each head with its own,
    # x and the result in a dtype. None: they are multiplied as those of experts.
    head_products: Callable[[Tensor | Sequence[BlockRows], int, torch.dtype], HeadProducts | None] | None = None

    # GEMMs with the weights [count * out, in] of so many experts. A row has the same bits in any batch if `route` was
    # asked for that.
    expert_gemm: Callable[[Tensor | PackedGroups | MXRows, int], DeviceExpertGemm | None] | None = None

    # A mixture in one call; None for weights that it does not take, as of the next two.
    whole_mixture: Callable[[MixtureWeights], WholeMixture | None] | None = None

    # Decoder layers that follow each other in one call. Second: layers whose outputs the caller wants besides that of
    # the last, counted from 1.
    whole_layers: Callable[[Sequence[LayerWeights], Sequence[int]], WholeLayers | None] | None = None

    # The end of a draft head for few rows in one call: norm, GEMM and the best of its outputs. Of
    # `LinearOp.first_gemm`, a bias, the norm's weight and eps, and what the outputs are called, [outputs] int64.
    head_top_k: (
        Callable[[Gemm | None, Tensor | None, tuple[Tensor, float] | None, Tensor | None], HeadTopK | None] | None
    ) = None

    # Attention within a picture, see there.
    whole_attention: Callable[[Tensor, Tensor, int], WholeAttention] = staticmethod(whole_attention)

    # Patches of an image for which a tower does its work at once. 0: all of them, where none takes long.
    patches_at_once = 768

    def __init__(self, runtime: Runtime, *parts: object) -> None:
        """parts: one of each kind of operations. What its kind names is filled in."""
        self.device = runtime.device
        self.upload_matrix, self.host_matrix = runtime.upload_matrix, runtime.host_matrix
        self.empty_cache = runtime.empty_cache
        self.peer_sums = runtime.peer_sums
        for part in parts:
            kind = next(kind for kind in type(self).__mro__ if isinstance(part, kind))
            for name in vars(kind).keys() | inspect.get_annotations(kind).keys():
                if not name.startswith("_"):
                    setattr(self, name, getattr(part, name))


class TorchOps(LayerOps, TreeOps, AssignOps, MergeOps, SamplingOps, ExpansionOps, StateOps):
    """The operations of one device, made once; see docs/architecture.md."""

    ngram_index: type[NGramIndex] = NGramIndex
    suffix_index: type[SuffixIndex] = SuffixIndex

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        runtime: Runtime | None = None,
        norms: NormOps | None = None,
        elementwise: ElementwiseOps | None = None,
        rope: RopeOps | None = None,
        rows: RowOps | None = None,
        logits: LogitOps | None = None,
        gemms: GemmOps | None = None,
        experts: ExpertOps | None = None,
        adapters: AdapterOps | None = None,
        tree: TreeOps | None = None,
        assign: AssignOps | None = None,
        merge: MergeOps | None = None,
        sampling: SamplingOps | None = None,
        expansion: ExpansionOps | None = None,
        states: StateOps | None = None,
        attention: Attention = torch_attention,
    ) -> None:
        """Fills the table; in torch what is not given."""
        self.runtime = runtime = runtime or Runtime(device)
        norms, sampling = norms or NormOps(), sampling or SamplingOps()
        super().__init__(
            runtime,
            norms,
            elementwise or ElementwiseOps(),
            rope or RopeOps(),
            rows or RowOps(),
            logits or LogitOps(),
            gemms or GemmOps(),
            experts or ExpertOps(norms, reads_routes=device.type == "cpu"),
            adapters or AdapterOps(),
            tree or TreeOps(),
            assign or AssignOps(),
            merge or MergeOps(),
            sampling,
            expansion or ExpansionOps(sampling),
            states or StateOps(),
        )
        self.name, self.title = runtime.name, runtime.title
        self.exact_by_design, self.batch_invariant = runtime.exact_by_design, runtime.batch_invariant
        self.exact_dtype, self.table_dtype = runtime.exact_dtype, runtime.table_dtype
        self.reads_half_pool_in_fp32 = runtime.reads_half_pool_in_fp32
        self.reads_fp8_pool, self.reads_int8_pool = runtime.reads_fp8_pool, runtime.reads_int8_pool
        self.compute_capability, self.attention_bytes = runtime.compute_capability, runtime.attention_bytes
        self._attention, self.round_up_rows = attention, runtime.round_up_rows
        self.pin_threads, self.replay_calls = runtime.pin_threads, runtime.replay_calls
        self.hash_kernels, self.probe_device = runtime.hash_kernels, runtime.probe_device

        own = {name for kind in type(self).__mro__ for name in vars(kind) if not issubclass(TorchOps, kind)}
        if hidden := sorted(own & vars(self).keys()):
            raise TypeError(
                f"{type(self).__name__} defines {', '.join(hidden)}, which the table fills: derive from the class "
                "of the operation's kind, NormOps for rms_norm, and give it to TorchOps, as norms=..."
            )

    def attention(self, pool: KVPool, exact: bool = False) -> AttnBackend:
        """Returns attention over the pool. exact: a query's result has the same bits however it is asked for."""
        return self._attention(pool, exact)

    @property
    def can_record(self) -> bool:
        """Returns whether all that a small step does may be recorded and made again (`ops.cpu.tape`)."""
        return self.replay_calls is not None

    @property
    def active_threads(self) -> float:
        """Returns the share of the host's threads that kernels run in now."""
        return self.runtime.active_threads


PLAIN: LayerOps = TorchOps(experts=ExpertOps(NormOps()))  # what modules use until they are packed
