"""Acceptance of a chosen length in place of the real one, to measure what a step costs without weights that agree.

Only the target's samples are altered, so that the walk of `TreeOps.commit` takes as many drafts as it should; all else
runs as it always does. The text is worthless, and everything that is reported of such a run says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.reference.tree import FRACTION_BITS, TreeOps
from draftwing.ops.types import Draft, Tree


@dataclass(frozen=True)
class Simulation:
    """mean: tokens that a step commits on average with trees of `depth` levels, the target's own included. Each level's
    draft is accepted with the same chance where that of the level before was, so trees that are less deep bring less.
    vocab: the target's. topk: siblings of a level, of which one may be accepted."""

    mean: float
    depth: int
    vocab: int
    topk: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.depth + 1:
            raise ConfigError(f"simulate_accept_length must be from 1 to {self.depth + 1}, found {self.mean}")

    @cached_property
    def chance(self) -> int:
        """Returns a draft's chance, out of 2^FRACTION_BITS: the largest with 1 + p + p^2 + ... + p^depth <= mean."""
        low, high, one = 0, (1 << FRACTION_BITS) + 1, 1 << FRACTION_BITS
        while high - low > 1:
            middle = (low + high) // 2
            length = sum((middle / one) ** level for level in range(self.depth + 1))
            low, high = (middle, high) if length <= self.mean else (low, middle)
        return low

    @property
    def share(self) -> float:
        """Returns the share of drafts that are accepted where their parent is."""
        return self.chance / (1 << FRACTION_BITS) / self.topk

    def __call__(self, ops: TreeOps, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor) -> Tensor:
        """The samples to give to `TreeOps.commit`: target [B, N] -> [B, N]; rows, kv_len [B], which the choice depends
        on."""
        if tree.path.shape[2] == 1:  # there are no drafts
            return target
        return ops.simulate(draft, tree, target, rows, kv_len, self.chance, self.vocab)
