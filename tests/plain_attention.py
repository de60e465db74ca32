"""Attention by its formula in float64, and tilings that Triton's kernels are tried with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.ops.attention.batch import FULL, AttentionKind
from draftwing.ops.attention.dense import DenseAttend

TILINGS: dict[str, dict[str, int]] = {  # of an interpreter's time: few keys reach many splits
    "lanes": dict(programs=96, context_programs=96, context_rows=0),
    "one lane": dict(programs=1, context_programs=1, context_rows=0),
    "two launches": dict(programs=96, context_programs=96, context_rows=32),
    "two launches, one lane": dict(programs=1, context_programs=1, context_rows=32),
}


def brute_force(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
    """The newest of S tokens: q [heads, dim], k, v [S, kv_heads, dim] -> [heads * dim] float64"""
    heads, dim = q.shape
    seen = (len(k) - 1) % kind.chunk + 1 if kind.chunk else kind.window
    k, v = (x[-seen:].double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("hd,shd->hs", q.double(), k) / math.sqrt(kind.scalar or dim)
    scores = kind.cap * (scores / kind.cap).tanh() if kind.cap else scores
    sinks = scores.new_full((heads,), -torch.inf) if kind.sinks is None else kind.sinks.to(scores)
    weights = torch.cat((scores, sinks[:, None]), 1).softmax(1)[:, :-1]
    return torch.einsum("hs,shd->hd", weights, v).flatten()


class FunctionAttend(DenseAttend):
    """Attention by a function. What is no `FULL` attention is its fifth argument."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        return self._function(layer, q, k, v, *(() if kind.is_full else (kind,)))
