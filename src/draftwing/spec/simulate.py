"""Acceptance of a chosen length in place of the real one, to measure what a step costs without weights that agree.

Only the target's samples are altered, so that the walk of `tree.accept` takes as many drafts as it should; all else
runs as it always does. The text is worthless, and everything that is reported of such a run says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops import use_triton
from draftwing.ops.torch.noise import _position_words
from draftwing.ops.torch.tree import Tree
from draftwing.spec.drafter import Draft

FRACTION_BITS = 24


@dataclass(frozen=True)
class Simulation:
    """mean: tokens that a step commits on average, the target's own included, where the trees are deep enough: one of
    the two whole numbers around it each time.  vocab: the target's."""

    mean: float
    vocab: int

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise ConfigError(f"simulate_accept_length must be at least 1, found {self.mean}")

    @property
    def drafts(self) -> int:
        """Accepted drafts, rounded down."""
        return int(self.mean) - 1

    @property
    def threshold(self) -> int:
        """Returns how many of 2^FRACTION_BITS steps accept one more."""
        return round((self.mean - int(self.mean)) * (1 << FRACTION_BITS))

    def __call__(self, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor) -> Tensor:
        """The samples to give to `accept`: target [B, N] -> [B, N]; rows, kv_len [B], which the choice depends on.

        The walk goes to the first of the deepest alive nodes that are not deeper than wanted. Where the sample there is
        one of its children, a token next to them is put in its place, which ends the walk.
        """
        nodes = target.shape[1]
        if tree.path.shape[-1] == 1:
            return target
        if use_triton(target):
            from draftwing.ops.triton.simulate import simulate

            return simulate(
                draft.tokens, draft.parent, draft.alive, tree.depth, target, rows, kv_len,
                depth_max=tree.path.shape[-1] - 1, drafts=self.drafts, threshold=self.threshold,
                mask=(1 << FRACTION_BITS) - 1, vocab=self.vocab,
            )  # fmt: skip
        wanted = self.drafts + (fraction_bits(rows, kv_len) < self.threshold).long()  # [B]
        node = torch.arange(nodes, device=target.device)
        fits = draft.alive & (tree.depth <= wanted[:, None])
        # Nodes are ranked by depth and then from the first to the last, without a tie.
        best = torch.where(fits, tree.depth * nodes + (nodes - 1 - node), -1).amax(1, keepdim=True)  # [B, 1]
        leaf, depth = nodes - 1 - best % nodes, best // nodes
        path = tree.path.gather(1, leaf[:, :, None].expand(-1, 1, tree.path.shape[-1])).squeeze(1)  # [B, D + 1]

        level = torch.arange(1, path.shape[1], device=target.device)
        where = torch.where(level <= depth, path[:, :-1], nodes)  # past the leaf into a column that is dropped
        altered = torch.cat((target, target[:, :1]), 1).scatter(1, where, draft.tokens.gather(1, path[:, 1:]))

        child = draft.alive & (draft.parent == leaf) & (node > 0)
        last = target.gather(1, leaf)
        hit = (child & (draft.tokens == last)).any(1, keepdim=True)
        above = draft.tokens.where(child, -1).amax(1, keepdim=True) + 1
        below = draft.tokens.where(child, self.vocab).amin(1, keepdim=True) - 1
        # Children with the first and with the last id of a vocabulary are not worth a third case: one draft too many.
        beside = torch.where(above < self.vocab, above, torch.where(below >= 0, below, last))
        return altered.scatter(1, leaf, torch.where(hit, beside, last))[:, :nodes]


def fraction_bits(rows: Tensor, kv_len: Tensor) -> Tensor:
    """Returns [B] int64, uniform below 2^FRACTION_BITS: a hash of a row and the position it has reached."""
    return _position_words(rows, kv_len[:, None])[:, 0, 0].long() & ((1 << FRACTION_BITS) - 1)
