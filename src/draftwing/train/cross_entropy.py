"""Computes the cross-entropy of a head's logits with the target's distribution, without keeping either's gradient
graph.

The logits of a batch are its largest tensor by far, seven times over, and what the backward pass needs of them is known
as soon as they are: the gradient of -sum p log softmax(z) is softmax(z) sum p - p. So they are made once, a piece at a
time, and each piece goes straight on into the gradients of the hidden states and of the output head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from draftwing.train.chain_attention import wide
from draftwing.train.kernels import kernels_take

# Logits that exist at a time: what a CPU keeps in its caches, and what fills a GPU (256 MB in float32).
_CPU_ELEMENTS = 1 << 22
_GPU_ELEMENTS = 1 << 26


def linear_cross_entropy(hidden: Tensor, weight: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows that count of -sum p log softmax(hidden weight^T), and the index of the largest logit
    in each row.

    hidden [n, width], weight [V, width], probs [n, V] (p, without a gradient), counts [n] bool
    -> a scalar in float32 or wider, [n] int64. Products are in the dtype of autocast where it is on, sums in float32.
    """
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if not torch.is_grad_enabled():  # which the function's own forward pass does not know
        hidden, weight = hidden.detach(), weight.detach()
    loss, best = _LinearCrossEntropy.apply(hidden.to(product), weight.to(product), probs, counts)
    return loss, best


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        exact, vocab = wide(hidden), weight.shape[0]
        loss = hidden.new_zeros((), dtype=exact)
        best = counts.new_empty(counts.shape, dtype=torch.int64)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        sloped = to_hidden is not None or to_weight is not None
        cross_entropy = _cross_entropy(hidden)
        for part in chunks(hidden.shape[0], vocab, hidden.device):
            x = hidden[part]
            cross, best[part], slope = cross_entropy(x @ weight.t(), probs[part], counts[part], sloped)
            loss += cross.sum()
            if to_hidden is not None:
                torch.mm(slope, weight, out=to_hidden[part])
            if to_weight is not None:
                to_weight += slope.t() @ x
        ctx.save_for_backward(to_hidden, None if to_weight is None else to_weight.to(weight.dtype))
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by = grads[0]
        to_hidden, to_weight = ctx.saved_tensors
        return (
            None if to_hidden is None else to_hidden * by.to(to_hidden.dtype),
            None if to_weight is None else to_weight * by.to(to_weight.dtype),
            None,
            None,
        )


def _cross_entropy(hidden: Tensor) -> Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]:
    """Returns what takes the logits of such states; it may overwrite them."""
    if not kernels_take(hidden):
        return _in_torch
    from draftwing.train.kernels.cross_entropy import cross_entropy

    return cross_entropy


def _in_torch(logits: Tensor, probs: Tensor, counts: Tensor, sloped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`train.kernels.cross_entropy.cross_entropy` of any device and floating dtype."""
    exact, counted = wide(logits), counts.unsqueeze(1)
    z = logits.to(exact)
    row_max, best = z.max(-1)
    z.sub_(row_max.unsqueeze(1))
    likely = z.exp()
    norm, mass = likely.sum(-1, keepdim=True), probs.sum(-1, keepdim=True, dtype=exact)
    # -sum p log q = log(sum exp z) sum p - sum p z
    cross = norm.log().mul_(mass).sub_(z.mul_(probs).sum(-1, keepdim=True))
    if sloped:
        likely = likely.mul_(mass / norm).sub_(probs).mul_(counted)
    return (cross * counted).squeeze(1), best, likely.to(logits.dtype) if sloped else logits


def chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Cuts so many rows into pieces of about as many elements as the device likes."""
    size = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
