"""Merges a head that was trained on traffic with its parent, to draft traffic as the one and general text as the other.

Of a matrix W that was trained and its parent's V, the one whose outputs differ least in the mean square from W's on
traffic, times `weight`, and from V's on general text, is V + (W - V) weight T (weight T + G)^-1, where T and G are the
mean products x x^T of the inputs of both (RegMean, Jin et al. 2023, arXiv 2212.09849). So what was trained is undone
where general text needs it, and stays where traffic alone does: a part of the way back in all directions would cost
traffic as much as it saves. The inputs of a table are tokens: each of its rows goes by how often its token is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from draftwing.layers.embedding import Embedding
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.models.heads.block import BlockHead
from draftwing.train.heads import AnyHead, renew_vocabulary, renewable
from draftwing.train.judge import along
from draftwing.train.store import Part

# Of the mean product, added to each direction, so that those which no text uses can be solved for. Not swept.
RIDGE = 1e-3
# Inputs of a block at most. Those of two blocks are taken to have nothing to do with each other, so that memory grows
# with a head's width, not with its square: moments of an 8B model's head take 0.7 GB in place of 1.9.
BLOCK = 4096
# By the name of a matrix: mean x x^T of its inputs, [blocks, in / blocks, in / blocks]; of a table the share of each
# token, [rows].
Moments = Mapping[str, Tensor]


class _Watched(LinearOp):
    """An operation that adds up the products of its inputs."""

    def __init__(self, layer: Linear, shape: tuple[int, ...]) -> None:
        super().__init__(layer)
        self.op, self.seen = layer.op, 0
        self.total = torch.zeros(shape, device=layer.weight.device)

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        self.see(x)
        return self.op(x, bias, residual, overwrite)

    def see(self, x: Tensor) -> None:
        self.seen += len(x)
        if x.dim() == 1:
            self.total += torch.bincount(x, minlength=len(self.total))
            return
        parts = x.to(self.total.dtype).unflatten(1, self.total.shape[:2]).transpose(0, 1)  # [blocks, n, in / blocks]
        self.total.baddbmm_(parts.transpose(1, 2), parts)

    def dense_weight(self) -> Tensor:
        return self.op.dense_weight()


def moment_shape(inputs: int) -> tuple[int, int, int]:
    """Returns the shape of the moments of so many inputs: as few blocks of one size as there may be."""
    blocks = next(count for count in range(-(-inputs // BLOCK), inputs + 1) if inputs % count == 0)
    return blocks, inputs // blocks, inputs // blocks


def moments_bytes(head: AnyHead) -> int:
    """Returns what `input_moments` takes."""
    return sum(4 * math.prod(shape) for _, shape in _trained_matrices(head).values())


def _trained_matrices(head: AnyHead) -> dict[str, tuple[Linear, tuple[int, ...]]]:
    """Returns layers that drafts are made with, by the name of their weight, and the shapes of their moments."""
    tables = {part.table for part in head.modules() if isinstance(part, Embedding)}
    judging = set() if not isinstance(head, BlockHead) or head.confidence is None else set(head.confidence.modules())
    return {
        f"{name}.weight": (part, (part.out_features,) if part in tables else moment_shape(part.in_features))
        for name, part in head.named_modules()
        if isinstance(part, Linear) and part.weight.requires_grad and part not in judging
    }


@torch.no_grad()
def input_moments(head: AnyHead, part: Part, steps: int, max_length: int) -> Moments:
    """Returns the moments of all matrices that are trained, along texts that are drafted in chains of `steps`. Rows of
    padding count, too: texts of a batch are of like lengths."""
    layers = _trained_matrices(head)
    watched = {name: _Watched(layer, shape) for name, (layer, shape) in layers.items()}
    try:
        for name, (layer, _) in layers.items():
            layer.op = watched[name]
        for _, _, drafts, uncalled in along(head, part, steps, max_length):
            for products in (*drafts, uncalled):
                for x, layer in products:
                    if isinstance(layer.op, _Watched):  # else it is the target's
                        layer.op.see(x)
    finally:
        for name, (layer, _) in layers.items():
            layer.op = watched[name].op
    return {name: one.total / max(one.seen, 1) for name, one in watched.items()}


@torch.no_grad()
def merge(head: AnyHead, parent: AnyHead, traffic: Moments, general: Moments, weight: float) -> None:
    """Merges a head with the one that it was trained on from, which drafts the same tokens afterwards. weight: of
    traffic, where general text has 1. What is no matrix goes that share of the way."""
    if renewable(head):
        assert head.target_ids is not None
        renew_vocabulary(parent, head.target_ids.tolist())
    for (name, mine), theirs in zip(head.named_parameters(), parent.parameters(), strict=True):
        if name in traffic:
            _merge_matrix(mine, theirs, traffic[name], general[name], weight)
        elif mine.requires_grad:
            mine.lerp_(theirs, 1 / (1 + weight))


def _merge_matrix(mine: Tensor, theirs: Tensor, traffic: Tensor, general: Tensor, weight: float) -> None:
    """mine, theirs [out, in]; mine is overwritten. A block of inputs and of outputs at a time, so that little is in
    float64."""
    spread = float(weight * _mean_square(traffic) + _mean_square(general))
    ridge = RIDGE * spread or 1.0  # where no input was seen: it is the parent's again
    if traffic.dim() == 1:
        share = weight * traffic / (weight * traffic + general + ridge)
        mine.copy_(torch.lerp(theirs, mine, share.unsqueeze(1).to(mine.dtype)))
        return
    columns = zip(mine.split(traffic.shape[1], 1), theirs.split(traffic.shape[1], 1), strict=True)
    for (own, before), seen, other in zip(columns, traffic, general, strict=True):
        wanted = weight * seen.double()
        both = wanted + other.double()
        both.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(both)
        # By rounding the smallest directions may have come out below -ridge.
        lu = torch.linalg.lu_factor(both) if failed else None
        for rows, kept in zip(own.split(BLOCK), before.split(BLOCK), strict=True):
            change = wanted @ (rows - kept).double().t()  # [in, out]
            solved = torch.cholesky_solve(change, factor) if lu is None else torch.linalg.lu_solve(*lu, change)
            rows.copy_(kept + solved.t())


def _mean_square(moments: Tensor) -> Tensor:
    return (moments if moments.dim() == 1 else moments.diagonal(dim1=1, dim2=2)).mean().double()
