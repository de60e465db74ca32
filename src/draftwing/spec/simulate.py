"""Acceptance of a chosen length in place of the real one, to measure what a step costs without weights that agree.

Only the target's samples are altered, so that the walk of `TreeOps.commit` takes as many drafts as it should; all else
runs as it always does. The text is worthless, and everything that is reported of such a run says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.torch.tree import FRACTION_BITS, TreeOps
from draftwing.ops.types import Draft, Tree


@dataclass(frozen=True)
class Simulation:
    """mean: tokens that a step commits on average, the target's own included, where the trees are deep enough: one of
    the two whole numbers around it each time.  vocab: the target's."""

    mean: float
    vocab: int

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise ConfigError(f"simulate_accept_length must be at least 1, found {self.mean}")

    def __call__(self, ops: TreeOps, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor) -> Tensor:
        """The samples to give to `TreeOps.commit`: target [B, N] -> [B, N]; rows, kv_len [B], which the choice depends
        on."""
        if tree.path.shape[2] == 1:  # there are no drafts
            return target
        whole = int(self.mean)
        more = round((self.mean - whole) * (1 << FRACTION_BITS))  # of 2^FRACTION_BITS steps
        return ops.simulate(draft, tree, target, rows, kv_len, whole - 1, more, self.vocab)
