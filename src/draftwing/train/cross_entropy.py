"""Computes losses of a head's logits, the cross-entropy with the target's distribution among them, without keeping any
of the logits for a backward pass.

The logits of a batch are its largest tensor by far, seven times over, and what the backward pass needs of them is known
as soon as they are: the gradient of -sum p log softmax(z) is softmax(z) sum p - p. So they are made once, a piece at a
time, and each piece goes straight on into the gradients of the hidden states and of the output head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.train.chain_attention import wide
from draftwing.train.kernels import kernels_take

# Logits that exist at a time: what a CPU keeps in its caches, and what fills a GPU (256 MB in float32).
_CPU_ELEMENTS = 1 << 22
_GPU_ELEMENTS = 1 << 26


# Takes the logits of a slice of the rows, and whether the last result is asked for. Returns the loss of each row, other
# facts of each, and the gradient of the sum of the losses, which may be the logits, overwritten.
Terms = Callable[[Tensor, slice, bool], tuple[Tensor, ...]]


def linear_loss(parts: Sequence[tuple[Tensor, Tensor]], terms: Terms) -> tuple[Tensor, ...]:
    """Returns the sum of a loss over rows of logits, the loss of each row, and what else `terms` says of it; only the
    first has gradients.

    parts: (x [rows, .., width], weight [V, width]) of the products whose sum are the logits. Those that `terms` gets
    are [slice of rows * .., V]. Products are in the dtype of autocast where it is on, sums in float32 or wider.
    """
    device = parts[0][0].device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parts[0][0].dtype
    flat = [tensor.to(product) for part in parts for tensor in part]
    if not torch.is_grad_enabled():  # which the function's own forward pass does not know
        flat = [tensor.detach() for tensor in flat]
    found: tuple[Tensor, ...] = _LinearLoss.apply(terms, *flat)
    return found


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> tuple[Tensor, ...]:
        xs, weights, needed = parts[::2], parts[1::2], ctx.needs_input_grad[1:]
        rows, *inner, _ = xs[0].shape
        vocab, exact, found = weights[0].shape[0], wide(xs[0]), []
        to_x = [x.new_empty(x.shape) if need else None for x, need in zip(xs, needed[::2], strict=True)]
        to_weight = [
            torch.zeros_like(weight, dtype=exact) if need else None
            for weight, need in zip(weights, needed[1::2], strict=True)
        ]
        for part in chunks(rows, math.prod(inner) * vocab, xs[0].device):
            here = [x[part].flatten(0, -2) for x in xs]
            logits = here[0] @ weights[0].t()
            for x, weight in zip(here[1:], weights[1:], strict=True):
                logits = torch.addmm(logits, x, weight.t())
            *facts, slope = terms(logits, part, any(needed))
            found.append(facts)
            for i, (x, weight) in enumerate(zip(here, weights, strict=True)):
                if (grad := to_x[i]) is not None:
                    torch.mm(slope, weight, out=grad[part].flatten(0, -2))
                if (total := to_weight[i]) is not None:
                    total += slope.t() @ x
        kept = [None if total is None else total.to(weight.dtype)
                for total, weight in zip(to_weight, weights, strict=True)]  # fmt: skip
        ctx.save_for_backward(*to_x, *kept)
        facts = list(map(torch.cat, zip(*found, strict=True)))
        ctx.mark_non_differentiable(*facts)
        return facts[0].sum(), *facts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by, kept = grads[0], ctx.saved_tensors
        half = len(kept) // 2
        return None, *(
            None if one is None else one * by.to(one.dtype)
            for pair in zip(kept[:half], kept[half:], strict=True)
            for one in pair
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows that count of -sum p log softmax(hidden weight^T), and the index of the largest logit
    in each row.

    hidden [n, width], weight [V, width], probs [n, V] (p, without a gradient), counts [n] bool
    -> a scalar in float32 or wider, [n] int64. Products are in the dtype of autocast where it is on, sums in float32.
    """

    def terms(logits: Tensor, part: slice, sloped: bool) -> tuple[Tensor, ...]:
        return _cross_entropy(logits)(logits, probs[part], counts[part], sloped)

    loss, _, best = linear_loss([(hidden, weight)], terms)
    return loss, best


def _cross_entropy(logits: Tensor) -> Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]:
    """Returns what takes such logits; it may overwrite them."""
    if not kernels_take(logits):
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
    """Cuts so many rows into pieces of about as many elements as the device likes; none into one that is empty."""
    size = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))
