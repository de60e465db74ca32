"""Attention of the training-time test: many chains of drafts at once, one from every position of a text.

In step k the row at index t of a sequence stands for the k-th draft of the chain that starts after the text up to t.
What it may see is what the same row sees in serving: the committed rows 0 .. t, which are those of step 0, and the
rows of its own chain, which are those of steps 1 .. k at the same index t. The first part is ordinary causal
attention, for which there are fast kernels; the second is k scores a row. Both are joined by their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from draftwing.layers.rope import rotate
from draftwing.ops.attention import FULL, Attend, AttentionKind, HeadNorms
from draftwing.train.kernels import kernels_take

KeyValue = tuple[Tensor, Tensor]  # [B, heads or kv_heads, T, head_dim] each


class ChainAttention(Attend):
    """Attention of all steps, one after the other, and of all layers of a head; keeps the keys and values of the steps
    so far.

    Queries come flat, M = B * T rows of B sequences of equal length T; a shorter sequence is padded at its end, where
    no row of it looks. After step 0 there may be fewer.
    """

    def __init__(self, sequences: int, length: int, kv_heads: int, rows: Tensor | None = None) -> None:
        """rows: of the B * T that steps 1, 2, .. have, int64; None: all."""
        self._shape, self._kv_heads, self._rows = (sequences, length), kv_heads, rows
        self._seen: dict[int, list[KeyValue]] = {}  # layer -> keys and values of steps 0, 1, ..

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        """q [M, heads, head_dim], k, v [M, kv_heads, head_dim] of the layer's next step -> [M, heads * head_dim]"""
        assert kind.is_full and not kind.reads, "draft heads see everything, by keys of their own"
        seen = self._seen.setdefault(layer, [])
        rows = self._rows if seen else None
        if rows is not None:  # the others' zeros are seen by nobody else
            q, k, v = (x.new_zeros(math.prod(self._shape), *x.shape[1:]).index_copy(0, rows, x) for x in (q, k, v))
        # Rotary tables are in float32 while a product under autocast is not: the kernels want one dtype.
        q, k, v = (
            x.to(v.dtype).unflatten(0, self._shape).transpose(1, 2) for x in (q, k, v)
        )  # [B, heads, T, head_dim]
        group = q.shape[1] // k.shape[1]
        if group > 1 and _own_kernels(v) is None:  # the GPU's kernels read a shared key from where it is
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        seen.append((k, v))
        out = attend_chains(q, seen).transpose(1, 2).flatten(2).flatten(0, 1)
        return out if rows is None else out.index_select(0, rows)

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor:
        kv, turned = self._kv_heads, qkv.shape[1] - self._kv_heads
        if kernels_take(qkv):
            from draftwing.train.kernels.rope_backward import turn

            q, k, v = turn(qkv, cos, sin, turned).split([turned - kv, kv, kv], 1)
        else:
            (q, k), v = rotate(qkv[:, :turned], cos, sin).split([turned - kv, kv], 1), qkv[:, turned:]
        return self(layer, q, k, v, kind)


def attend_chains(q: Tensor, seen: list[KeyValue]) -> Tensor:
    """q [B, heads, T, head_dim] of the newest step, keys and values of all steps -> [B, heads, T, head_dim]

    Of keys and values there may be fewer heads where `_own_kernels` has some."""
    flat = [tensor for pair in seen for tensor in pair]
    out: Tensor = _ChainAttention.apply(q, *flat)
    return out


class _ChainAttention(torch.autograd.Function):
    """softmax over (scores of step 0's keys up to t, scores of the own row of steps 1 ..), written by hand.

    The causal part's kernel returns its output and log-sum-exp but takes no gradient of the latter. It needs none: its
    backward pass computes probabilities as exp(score - lse) and the softmax's inner term from (output, its gradient),
    so that given the joint output and the joint log-sum-exp it gives just its share of the joint gradient (the same
    step makes blockwise attention differentiable, Liu et al. 2023, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *seen: Tensor) -> Tensor:
        k0, v0, *own = seen
        out, lse, ctx.rest = _causal(q, k0, v0)
        if not own:
            ctx.save_for_backward(q, k0, v0, out, lse)
            return out
        kernels = _own_kernels(q)
        if kernels is not None:
            mixed, joint = kernels.join_own(out, lse, q, torch.stack(own[::2]), torch.stack(own[1::2]))
        else:
            mixed, joint = _join_own(out, lse, q, own[::2], own[1::2])
        ctx.save_for_backward(q, k0, v0, mixed, joint, *own)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        kernels, grad = _own_kernels(q), grads[0]
        if kernels is None or grad.stride(-1) != 1:
            grad = grad.contiguous()
        grad_q, grad_k0, grad_v0 = _causal_backward(grad, q, k0, v0, out, lse, ctx.rest)
        others: list[Tensor] = []
        if own and kernels is not None:
            keys, values = torch.stack(own[::2]), torch.stack(own[1::2])
            to_own = kernels.own_gradients(grad_q, grad, out, lse, q, keys, values)
            others = [x for pair in zip(*to_own, strict=True) for x in pair]
        elif own:
            grad_q, others = _own_gradients(grad_q, grad, out, lse, q, own[::2], own[1::2])
        return grad_q, grad_k0, grad_v0, *others


# ---- the own rows ----------------------------------------------------------------------------------------------------


def _own_kernels(q: Tensor) -> ModuleType | None:
    """Returns kernels that do what follows in a pass or two, where a kernel does the causal part that takes shared keys
    too."""
    if _kernel(q) != "flash" or not kernels_take(q):
        return None
    from draftwing.train.kernels import chain_attention

    return chain_attention


def _join_own(
    out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`train.kernels.chain_attention.join_own`; keys and values one tensor a step"""
    scores = torch.stack([_own_scores(q, k) for k in keys])  # [k, B, heads, T]
    joint = torch.logsumexp(torch.cat((lse.unsqueeze(0), scores)), 0)
    mixed = out * (lse - joint).exp().unsqueeze(-1)  # in lse's dtype
    for score, v in zip(scores, values, strict=True):
        mixed = torch.addcmul(mixed, (score - joint).exp().unsqueeze(-1), v.to(mixed.dtype))
    return mixed.to(q.dtype), joint


def _own_gradients(
    grad_q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """grad_q of the causal part -> that of q, and those of each step's keys and values in turn"""
    exact, scale = lse.dtype, FULL.scale(q.shape[-1])
    inner = (grad.to(exact) * out.to(exact)).sum(-1)  # [B, heads, T]
    total, others = grad_q.to(exact), []
    for k, v in zip(keys, values, strict=True):
        prob = (_own_scores(q, k) - lse).exp()  # probability of the own row
        slope = (prob * ((grad.to(exact) * v.to(exact)).sum(-1) - inner) * scale).unsqueeze(-1)
        total = torch.addcmul(total, slope, k.to(exact))
        others += [(slope * q).to(k.dtype), (prob.unsqueeze(-1) * grad).to(v.dtype)]
    return total.to(q.dtype), others


def _own_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns scores [B, heads, T], float32 or wider."""
    return (q.to(wide(q)) * k.to(wide(q))).sum(-1) * FULL.scale(q.shape[-1])


# ---- causal attention that returns its log-sum-exp -------------------------------------------------------------------
# torch's public attention keeps it to itself, so its kernels are called by their own names.


def _kernel(q: Tensor) -> Literal["cpu", "flash", "dense"]:
    """dense: what the flash kernels do not take, float32 on a GPU among it; its memory grows with T squared."""
    if q.device.type == "cpu":
        return "cpu"
    half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return "flash" if q.is_cuda and half and size % 8 == 0 and size <= 256 else "dense"


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Sequence[Any]]:
    """Returns the output [B, heads, T, head_dim], the log-sum-exp of the scores [B, heads, T], and what else the
    kernel's backward pass takes: lengths, dropout and its random state."""
    rest: Sequence[Any] = ()
    ops, kernel = torch.ops.aten, _kernel(q)
    if kernel == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    elif kernel == "flash":
        out, lse, *rest = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    else:
        scores = _dense_scores(q, k)
        lse = scores.logsumexp(-1)
        out = ((scores - lse.unsqueeze(-1)).exp().to(v.dtype)) @ v
    return out, lse, rest


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    ops, kernel = torch.ops.aten, _kernel(q)
    if kernel == "cpu":
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    elif kernel == "flash":
        ends_q, ends_k, max_q, max_k, seed, offset = rest[:6]
        grads = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, 0.0, True, seed, offset
        )
    else:
        probs = (_dense_scores(q, k) - lse.unsqueeze(-1)).exp()  # [B, heads, T, T]
        exact = probs.dtype
        inner = (grad.to(exact) * out.to(exact)).sum(-1, keepdim=True)
        slopes = (probs * ((grad @ v.transpose(-1, -2)).to(exact) - inner) * FULL.scale(q.shape[-1])).to(q.dtype)
        grads = slopes @ k, slopes.transpose(-1, -2) @ q, probs.to(grad.dtype).transpose(-1, -2) @ grad
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, grad_v


def _dense_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns scores [B, heads, T, T], float32 or wider; minus infinity where a key comes after the query."""
    scores = (q @ k.transpose(-1, -2)).to(wide(q)) * FULL.scale(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
