"""How a head is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from draftwing.config.drafters import training
from draftwing.train.factors import RATE
from draftwing.train.losses import BlockLoss
from draftwing.train.optimizer import OptimizerName
from draftwing.train.ttt import Loss

AnyLoss = Loss | BlockLoss
FINAL_RATE = 0.05  # share of the highest learning rate that is left at the end


@dataclass(frozen=True)
class FitConfig:
    """How a head is trained; `train.settings` checks what a user asks for.

    steps: of the optimizer; 0: as many as `epochs` over the samples take.  minutes: of training, in place of both; what
    is trained then depends on the machine's speed.  tokens: of one forward, padding included.
    accumulate: forward passes per step and process.  max_length: tokens of a sequence, beyond which it is cut.
    optimizer: see `HeadOptimizer`.  lr: the highest learning rate, 0: the loss's own.
    warmup: share of the steps in which it rises.
    head_rank: of factors that are trained beside a head, 0: the head itself is.
    clip: largest norm of a gradient.
    precision: bfloat16 computes products in it; "auto" does where it is native.  Parameters are float32 in any case.
    """

    loss: AnyLoss = field(default_factory=Loss)
    steps: int = 0
    epochs: float = 1.0
    minutes: float = 0.0
    tokens: int = 8192
    accumulate: int = 1
    max_length: int = 2048
    optimizer: OptimizerName = "adamw"
    lr: float = 0.0
    warmup: float = 0.02
    head_rank: int = 0
    clip: float = 0.5
    seed: int = 0
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    log_every: int = 20
    eval_every: int = 500
    save_every: int = 500

    def learning_rate(self, step: int, total: int, hidden: int) -> float:
        """Returns the rate of step 0, 1, ..: up in a line, then down in half a cosine."""
        highest, rise = self.lr or self.loss.rate(hidden) * (RATE if self.head_rank else 1), self.warmup * total
        if step < rise:
            return highest * (step + 1) / (rise + 1)
        done = (step - rise) / max(1.0, total - rise)
        return highest * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def recipe(algorithm: str, **changes: Any) -> FitConfig:
    """Returns the config that `algorithm` is trained with by default. Raises ConfigError for an unknown one."""
    how = training(algorithm)
    loss = BlockLoss(**how.loss) if how.block else Loss(**how.loss)
    return FitConfig(**{"loss": loss, **changes})
