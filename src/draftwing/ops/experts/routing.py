"""How rows choose experts, which they have chosen, and what multiplies with experts' weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from draftwing.ops.experts.rows import ExpertRows
from draftwing.ops.gemm.contract import Gemm


@dataclass(frozen=True)
class Routing:
    """How rows choose experts, and what weights these get.

    top_k: experts of a row.  renormalise: whether their weights are made to sum to 1, before `scale`.  sigmoid: whether
    scores are sigmoids of logits in place of their softmax.  corrected: whether the choice is by scores and a
    correction of each expert, as it always is by sigmoids; weights are scores alone.  groups: of one size that experts
    lie in.  top_groups: those that a row chooses among, which have the largest sums of their two best sigmoids, or the
    largest best logits.  scale: of weights.  shared: whether more experts behind all others get every row, as its last
    choices: with weight 1 (`whole`), or with the sigmoid of one more logit behind theirs (`gated`).  shared_count: how
    many these are.  near: of weights by SparseMixer (arXiv 2409.12136): each expert's is its part of a softmax of those
    not chosen before it whose logits are less than this share below its own; 0: they are not.
    """

    top_k: int
    renormalise: bool = True
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "whole", "gated"] = "none"
    shared_count: int = 1
    corrected: bool = False
    near: float = 0.0

    @property
    def has_correction(self) -> bool:
        """Returns whether there is a correction of each expert."""
        return self.sigmoid or self.corrected

    @property
    def choices(self) -> int:
        """Returns the experts that a row goes to."""
        return self.top_k + self.shared_choices

    @property
    def shared_choices(self) -> int:
        """Returns the experts that every row goes to besides those that it chooses."""
        return 0 if self.shared == "none" else self.shared_count


SMALL_TILE, LARGE_TILE = 16, 64  # pairs of a tile that all kernels take


class MixtureWeights(NamedTuple):
    """What a mixture of experts multiplies with, each expert by itself, in the order of experts."""

    router: Tensor  # [count, size of what it reads], in float32 where logits are not rounded
    router_bias: Tensor | None  # [count]
    correction: Tensor | None  # [count] float32, as `ExpertOps.route` has it
    gate_up: Sequence[Gemm | None]  # [2 * ffn, hidden] each, gates and then ups, or ups; None: it has no such GEMM
    down: Sequence[Gemm | None]  # [hidden, ffn] each
    biases: tuple[Tensor | None, Tensor | None]  # of all: [count * 2 * ffn], [count * hidden]
    routing: Routing
    limit: float  # as `ExpertGemm.gated` has it
    scales: Tensor | None = None  # [count] float32: what weights of rows are multiplied with
    gelu: bool = False  # whether gates are GELU's
    gated: bool = True  # else ups alone are squares of their ReLU


class WholeMixture(Protocol):
    """A mixture in one call."""

    def __call__(self, x: Tensor, residual: Tensor | None, scatter: Tensor | None, by: Tensor | None = None) -> Tensor:
        """x [M, hidden], residual [M, hidden] -> [M, hidden], all of one dtype; scatter as `ExpertOps.route` has it; by
        [M, its size]: what the router reads, None: x. A row has the same bits in any batch."""
        ...

    def routes(self, x: Tensor, scatter: Tensor | None, by: Tensor | None = None) -> Routed:
        """Returns where the rows go in the call, for experts that are multiplied one after the other."""
        ...


class ExpertTiles(NamedTuple):
    """Pairs in the order of their experts, in tiles of up to `rows`, each of one expert."""

    order: Tensor | None  # [pairs] int32; None: as they are
    tiles: (
        Tensor  # [3, T] int32: the expert, -1 of a tile that is not there; its first pair in `order`; how many it has
    )
    rows: int
    exact: bool = False  # whether a pair must have the same bits in any batch


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

    def squared(self, x: Tensor, bias: Tensor | None, routed: Routed) -> Tensor | None:
        """relu(result of `linear`)², to the bit. None: the caller does it."""
        ...


class DeviceExpertGemm(ExpertGemm, Protocol):
    """The device's kernels."""

    weight: Tensor | ExpertRows  # as it is held from now on

    def most_pairs(self, dtype: torch.dtype) -> int:
        """Returns how many pairs tiles may have, with activations of this type, in which a pair has the bits that it
        has in those of fewer: on a device of which that is known at all."""
        ...
