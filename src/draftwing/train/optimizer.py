"""Optimizers of heads."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from draftwing.engine.devices.cpu import has_native_bfloat16

OptimizerName = Literal["adamw", "muon"]
BETAS = (0.9, 0.95)  # of AdamW
# In names of matrices whose rows are no directions.
_TABLES = ("lm_head", "markov.above", "markov.out", "confidence", "selector.before", "selector.after")


def trains_in_half(device: torch.device) -> bool:
    """Tells whether products are in bfloat16 where nothing else is asked for."""
    return device.type == "cuda" or has_native_bfloat16()


class StackedMuon(torch.optim.Muon):
    """torch's Muon, its state and its update, with the iteration done for all matrices of one shape at once: a head has
    a few shapes and several matrices of each, which are too small to fill a GPU one by one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            rate, momentum = group["lr"], group["momentum"]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
            alike: dict[torch.Size, list[int]] = {}
            for i, param in enumerate(params):
                alike.setdefault(param.shape, []).append(i)
            for shape, members in alike.items():
                stack = torch.stack([updates[i] for i in members])
                ortho = _orthogonal(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                steps = ortho.to(params[members[0]].dtype).unbind()
                # As "match_rms_adamw" (Liu et al. 2025).
                torch._foreach_add_([params[i] for i in members], steps, alpha=-rate * 0.2 * math.sqrt(max(shape)))


def _orthogonal(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """[n, rows, columns] -> of each matrix about its nearest orthogonal one, by Newton and Schulz's iteration
    (Jordan et al. 2024): in bfloat16 as there, but where that is slower than float32."""
    a, b, c = coefficients
    x, tall = stack.bfloat16() if trains_in_half(stack.device) else stack, stack.shape[1] > stack.shape[2]
    if tall:
        x = x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class HeadOptimizer:
    """AdamW for all parameters, or Muon (Jordan et al. 2024) for the matrices of the layer and AdamW for the others.

    Muon steps along the nearest orthogonal matrix of the momentum. Norms, biases and tables such as output heads, whose
    rows are tokens and not directions, are AdamW's in any case. Muon's steps are scaled to the size that AdamW's have
    (0.2 times the learning rate in the mean square, Liu et al. 2025, arXiv 2502.16982), so one learning rate serves
    both.
    """

    def __init__(self, head: nn.Module, name: OptimizerName) -> None:
        named = [(key, param) for key, param in head.named_parameters() if param.requires_grad]
        matrices = [
            param for key, param in named
            if name == "muon" and param.dim() == 2 and not any(table in key for table in _TABLES)
        ]  # fmt: skip
        taken = {id(param) for param in matrices}
        others = [param for _, param in named if id(param) not in taken]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(StackedMuon(matrices, weight_decay=0))
        if others:
            fused = others[0].device.type == "cuda"
            self._parts.append(torch.optim.AdamW(others, betas=BETAS, weight_decay=0, fused=fused))

    def step(self, rate: float) -> None:
        """Takes a step. rate: its learning rate. Gradients are gone afterwards."""
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
