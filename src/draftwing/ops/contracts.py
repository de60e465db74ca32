"""What operations give that only some devices have, and what they get: GEMMs, whole layers, mixtures of experts.

A protocol says what whoever holds such an object may rely on. Who makes it, and where, is a matter of `ops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from draftwing.ops.attention import Attend, AttentionKind, HeadNorms, HeadShape
from draftwing.ops.expert_rows import ExpertRows
from draftwing.ops.types import LogitEditor, NoiseKey

FEW_ROWS = 8  # up to this many the CPU's own GEMMs, which are faster than oneDNN's then, are used
ANY_ROWS = 1 << 30
RECORDED_ROWS = 16  # steps of up to so many are recorded on a CPU


# -- GEMMs -----------------------------------------------------------------------------------------------------------


class Gemm(Protocol):
    """Products with one weight [outputs, inputs], which it holds or reads where it lies."""

    @property
    def max_rows(self) -> int:
        """Returns up to how many rows it is to be asked."""
        ...

    def linear(
        self, x: Any, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor | None:
        """x [M, inputs], `Fp8Rows` where the weight is `Fp8Blocks`, bias [outputs], residual [M, outputs] -> x @
        weight^T + bias + residual [M, outputs], rounded once; None where it has no kernel for so many rows.

        overwrite: the result may be written into `residual`.
        """
        ...

    def gated(self, x: Any, bias: Tensor | None) -> Tensor | None:
        """Returns silu(x @ gate^T) * (x @ up^T) of a weight that has gates and then ups, [M, outputs / 2]; None: the
        caller does it with what `linear` gives."""
        ...


class DenseKernels(Protocol):
    """Kernels that give a row the same bits among any number of rows, for matrices as they are."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once.

        fresh: the weight is the result of an earlier operation, not a constant.
        """
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        ...


class BlockGemm(Gemm, Protocol):
    """The GEMM of a weight in blocks; a row has the same bits among any number."""

    inputs: int
    outputs: int

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows of the weight, [..., inputs]"""
        ...

    def dense(self) -> Tensor:
        """Returns the weight, [outputs, inputs]."""
        ...

    def copy_from(self, other: Self) -> None:
        """Takes the weight of another one of the same parts, in its own memory."""
        ...

    def last(self, outputs: int) -> BlockGemm:
        """Returns the GEMM of the last so many outputs, perhaps of some before them, too: the same bits, in the same
        memory."""
        ...


# -- several operations in one call ----------------------------------------------------------------------------------


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


class HeadTopK(Protocol):
    """The end of a draft head in one call, for up to `FEW_ROWS` rows: norm, GEMM and the best of its outputs."""

    max_topk: int  # outputs of a row that it finds

    def best(
        self, states: Tensor, places: Tensor | None, ids: Tensor, logp: Tensor, noise: NoiseKey | None = None,
        editor: LogitEditor | None = None,
    ) -> None:  # fmt: skip
        """states [.., inputs] -> ids [.., K] int64 and their log probabilities [.., K] float32, best first.

        places [M] int64: the rows of all three that are worked on, None: all. editor, then noise: change the outputs
        before, of B rows of which each has M / B of these side by side.
        """
        ...


@dataclass(frozen=True)
class Routing:
    """How rows choose experts, and what weights these get.

    top_k: experts of a row.  renormalise: whether their weights are made to sum to 1, before `scale`.  sigmoid: whether
    scores are sigmoids of logits in place of their softmax; the choice is by scores and a correction of each expert
    then, weights are scores alone.  groups: of one size that experts lie in.  top_groups: those that a row chooses
    among, which have the largest sums of their two best sigmoids, or the largest best logits.  scale: of weights.
    shared: whether more experts behind all others get every row, as its last choices: with weight 1 (`whole`), or
    with the sigmoid of one more logit behind theirs (`gated`).  shared_count: how many these are.
    """

    top_k: int
    renormalise: bool = True
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "whole", "gated"] = "none"
    shared_count: int = 1

    @property
    def choices(self) -> int:
        """Returns the experts that a row goes to."""
        return self.top_k + self.shared_choices

    @property
    def shared_choices(self) -> int:
        """Returns the experts that every row goes to besides those that it chooses."""
        return 0 if self.shared == "none" else self.shared_count


class MixtureWeights(NamedTuple):
    """What a mixture of experts multiplies with, each expert by itself, in the order of experts."""

    router: Tensor  # [count, hidden], in float32 where logits are not rounded
    router_bias: Tensor | None  # [count]
    correction: Tensor | None  # [count] float32, as `ExpertOps.route` has it
    gate_up: Sequence[Gemm | None]  # [2 * ffn, hidden] each, gates and then ups; None: it has no such GEMM
    down: Sequence[Gemm | None]  # [hidden, ffn] each
    biases: tuple[Tensor | None, Tensor | None]  # of all: [count * 2 * ffn], [count * hidden]
    routing: Routing
    limit: float  # as `ExpertGemm.gated` has it
    scales: Tensor | None = None  # [count] float32: what weights of rows are multiplied with
    gelu: bool = False  # whether gates are GELU's


class WholeMixture(Protocol):
    """A mixture in one call."""

    def __call__(self, x: Tensor, residual: Tensor | None, scatter: Tensor | None, by: Tensor | None = None) -> Tensor:
        """x [M, hidden], residual [M, hidden] -> [M, hidden], all of one dtype; scatter as `ExpertOps.route` has it; by
        [M, hidden]: what the router reads, None: x. A row has the same bits in any batch."""
        ...


# -- experts ---------------------------------------------------------------------------------------------------------


class ExpertTiles(NamedTuple):
    """Pairs in the order of their experts, in tiles of up to `rows`, each of one expert."""

    order: Tensor | None  # [pairs] int32; None: as they are
    tiles: (
        Tensor  # [3, T] int32: the expert, -1 of a tile that is not there; its first pair in `order`; how many it has
    )
    rows: int


class ByExpert(NamedTuple):
    """Pairs in the order of their experts, without those that are left out."""

    order: Tensor  # [<= pairs] int64
    places: Tensor  # [<= pairs] int64: where each pair stands in it; of no use where some are left out
    experts: list[int]  # that were chosen
    counts: list[int]  # of pairs of each


@dataclass(frozen=True)
class Routed:
    """Which experts the rows of a batch go to.

    Of a rank that has some of the experts, these are counted from its first one. The pairs of others have expert -1 and
    weight 0: GEMMs leave their rows out, and sums do not read them.
    """

    experts: Tensor  # [M, top_k] int64, best first
    weights: Tensor  # [M, top_k] float32 or wider
    count: int  # experts that there are here
    tiles: ExpertTiles | None = None  # for kernels that want them
    partial: bool = False  # whether there may be pairs that are left out

    @property
    def pairs(self) -> int:
        return self.experts.numel()

    def choices(self, x: Tensor) -> int:
        """Returns how many pairs read a row of x: x [M, n] has the rows that were routed, x [pairs, n] what came of
        them."""
        assert x.shape[0] in (self.experts.shape[0], self.pairs)
        return self.pairs // max(x.shape[0], 1)

    @cached_property
    def by_expert(self) -> ByExpert:
        """On the host: only where it shares the device's memory."""
        flat = self.experts.flatten()
        order = flat.argsort(stable=True)
        numbers = Counter(flat.tolist())
        order = order[numbers.pop(-1, 0) :]
        chosen = sorted(numbers)
        return ByExpert(order, order.argsort(), chosen, [numbers[expert] for expert in chosen])


@dataclass(frozen=True)
class EveryExpert(Routed):
    """Every row goes to every expert, in their order."""

    @cached_property
    def by_expert(self) -> ByExpert:
        rows = len(self.experts)
        place = torch.arange(self.pairs, device=self.experts.device)
        order, places = place.view(rows, -1).t().flatten(), place.view(-1, rows).t().flatten()
        return ByExpert(order, places, list(range(self.count)) if rows else [], [rows] * self.count if rows else [])


class ExpertGemm(Protocol):
    """GEMMs with the weights of all experts; those that nobody chose are not read."""

    def linear(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
        """x [M or pairs, in], bias [count * out] -> row of a pair @ weight of its expert^T + bias, [pairs, out]. Rows
        by pair are what the last GEMM of these experts gave."""
        ...

    def gated(self, x: Tensor, bias: Tensor | None, routed: Routed, limit: float) -> Tensor | None:
        """silu(gate) * up of the same, [pairs, out / 2], or with a limit other than 0 `ExpertOps.clamped_swiglu`. None:
        the caller does it."""
        ...


class HeadProducts(Protocol):
    """Products of each head with a matrix of its own; a row has the same bits in any batch."""

    @property
    def weight(self) -> Tensor:
        """[heads * out, in], a copy"""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, heads, in], whose rows and heads may be apart -> [M, heads, out]"""
        ...


class DeviceExpertGemm(ExpertGemm, Protocol):
    """The device's kernels."""

    weight: Tensor | ExpertRows  # as it is held from now on


# -- several devices, several streams --------------------------------------------------------------------------------


class SideWork(Protocol):
    """What a device does besides the operations that follow."""

    def start(self, work: Callable[[], object]) -> Any | None:
        """Does this when all that was asked for before is done -> what `join` is given. None: it cannot now, and
        nothing was done."""
        ...

    def join(self, done: Any) -> None:
        """Lets what is asked for from now on wait for it."""
        ...


class PeerSums(Protocol):
    """Sums of few rows over ranks whose devices read each other's memory."""

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor | None:
        """partial [M, n] of this rank, bias [n] and residual [M, n], the same on all -> the bits of `sum_parts` of all
        ranks' parts; None, on all of them, where it takes no such rows. All ranks call it at the same place."""
        ...

    def release(self) -> None:
        """Ends the waiting for ranks that are gone; sums mean nothing from now on. From any thread."""
        ...

    def close(self) -> None:
        """Lets go of the memory, which nothing may use any more."""
        ...
