"""What the kinds of heads are trained for: the loss of a batch, and the metrics of what came of it."""

from __future__ import annotations

from draftwing.errors import ConfigError
from draftwing.models.decoder import use_between
from draftwing.models.heads.block import BlockHead
from draftwing.train.block_loss import BlockLoss
from draftwing.train.blocks import BlockObjective
from draftwing.train.heads import AnyHead, TargetHead
from draftwing.train.kernels import kernels_take
from draftwing.train.ttt import Loss, Objective

AnyLoss = Loss | BlockLoss
AnyObjective = Objective | BlockObjective


def make_objective(head: AnyHead, target_head: TargetHead, loss: AnyLoss, max_length: int) -> AnyObjective:
    """The objective of a head; makes its rotary table for texts of up to max_length tokens, and lets the kernels of
    training do its norms and activations where they take them. Raises ConfigError for a loss of the other kind of
    head."""
    if kernels_take(next(head.parameters())):
        from draftwing.train.kernels.layer_ops import TrainingOps

        use_between(head, TrainingOps())
    if isinstance(head, BlockHead) and isinstance(loss, BlockLoss):
        return BlockObjective(head, target_head, loss, max_length)
    if isinstance(head, BlockHead) or isinstance(loss, BlockLoss):
        raise ConfigError(f"loss: expected one of a {type(head).__name__}, found a {type(loss).__name__}")
    return Objective(head, target_head, loss, max_length)
