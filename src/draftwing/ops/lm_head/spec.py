"""Logits of few tokens, and the best of many."""

from __future__ import annotations

import torch
from torch import Tensor


class LogitOps:
    """Logits of chosen ids in float32, and which of many are the largest."""

    sums_logits = False  # whether `every_logit` is as quick as a product of matrices where the weight is small

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """hidden [..., size], weight [vocab, size], ids [..., K] int64 -> hidden @ weight[ids], [..., K] float32."""
        return (weight[ids].float() * hidden.unsqueeze(-2).float()).sum(-1)

    def every_logit(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Computes `exact_logits` of all rows of the weight, [M, vocab] float32. hidden [M, size]"""
        every = torch.arange(len(weight), device=hidden.device)
        return self.exact_logits(hidden, weight, every.expand(len(hidden), -1))

    def share_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor, begin: int) -> Tensor:
        """Computes `exact_logits` of a whole whose rows [begin, begin + vocab) `weight` has; 0 for others."""
        own = ids - begin
        mine = (own >= 0) & (own < len(weight))
        return torch.where(mine, self.exact_logits(hidden, weight, own.clamp(0, len(weight) - 1)), 0)

    def largest(self, logits: Tensor, count: int) -> Tensor:
        """logits [M, vocab] -> ids of a row's largest, descending, [M, count] int64. Of at most 128 neighbours an
        operation may take the largest alone, so that it finds the largest of so many groups."""
        return logits.topk(count, 1).indices

    def cluster_tokens(self, scores: Tensor, chosen: int, ordering: Tensor) -> Tensor:
        """scores [M, C], ordering [V] int64, the tokens of C clusters one after the other -> those of each row's
        `chosen` clusters with the best scores, [M, chosen * V / C]"""
        return ordering.view(scores.shape[1], -1)[scores.topk(chosen, -1).indices].flatten(1)

    def spread_logits(self, found: Tensor, ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
        """found [M, n] float32, the logits of tokens ids [M, n] -> [M, vocab] in dtype: 1 below a row's smallest logit
        for all others"""
        found = found.to(dtype)
        return (found.amin(1, keepdim=True) - 1).expand(-1, vocab).scatter(1, ids, found)
