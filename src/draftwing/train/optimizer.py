"""Combines the optimizers that a head is trained with into one."""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

OptimizerName = Literal["adamw", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "muon")
_TABLES = ("lm_head", "markov.above", "markov.out", "confidence")  # in names of matrices whose rows are no directions


class HeadOptimizer:
    """AdamW for all parameters, or Muon (Jordan et al. 2024) for the matrices of the layer and AdamW for the others.

    Muon steps along the nearest orthogonal matrix of the momentum. Norms, biases and tables such as output heads, whose
    rows are tokens and not directions, are AdamW's in any case. Muon's steps are scaled to the size that AdamW's have
    (0.2 times the learning rate in the mean square, Liu et al. 2025, arXiv 2502.16982), so one learning rate serves
    both.
    """

    def __init__(self, head: nn.Module, name: OptimizerName, betas: tuple[float, float], weight_decay: float) -> None:
        named = [(key, param) for key, param in head.named_parameters() if param.requires_grad]
        matrices = [
            param for key, param in named
            if name == "muon" and param.dim() == 2 and not any(table in key for table in _TABLES)
        ]  # fmt: skip
        taken = {id(param) for param in matrices}
        others = [param for _, param in named if id(param) not in taken]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            fused = others[0].device.type == "cuda"
            self._parts.append(torch.optim.AdamW(others, betas=betas, weight_decay=weight_decay, fused=fused))

    def step(self, rate: float) -> None:
        """rate: the learning rate of this step. Gradients are gone afterwards."""
        for group in chain.from_iterable(part.param_groups for part in self._parts):
            group["lr"] = rate
        for part in self._parts:
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)
