"""What runs decoder layers that follow each other in one call, and what it is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import AttentionKind, HeadNorms, HeadShape
from draftwing.ops.gemm.contract import Gemm


class LayerWeights(NamedTuple):
    """What `whole_layers` gets of a decoder layer."""

    pool_layer: int  # counted from the model's first
    shape: HeadShape
    attn_norm: Tensor | None  # [hidden]; None where the caller norms what attention reads
    mlp_norm: Tensor  # [hidden]
    head_norms: HeadNorms | None  # of queries and keys
    kind: AttentionKind
    eps: float
    gemms: Sequence[Gemm | None]  # of qkv, o, gate_up and down
    biases: Sequence[Tensor | None]
    adapters: Sequence[AdapterWeights | None] = ()  # of the GEMMs
    queries: QueryAdapters | None = None  # where there are adapters: of the forward that calls


class WholeLayers(Protocol):
    """Decoder layers that follow each other, as one call."""

    last: int  # where the output of the last one stands in what the call gives
    max_rows: int  # that a call takes

    def __call__(self, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor | None:
        """x [M, hidden] -> [1 + kept, M, hidden], or None where the call takes no such rows or attention.

        normed [M, inputs]: what attention of a single layer reads, None for x under the layer's own norm.
        cos, sin [M, 1, head_dim].
        """
        ...

    def joined(self, outs: Tensor) -> Tensor | None:
        """Returns what a call gave -> the kept outputs concatenated, [M, kept * hidden]; None where none are kept."""
        ...
