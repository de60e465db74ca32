"""Logits of few tokens in C."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.lm_head.spec import LogitOps


class CpuLogitOps(InC, LogitOps):
    """Takes real tensors in float32 or bfloat16; others go to torch. Ids are not checked."""

    sums_logits = True

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """A logit's bits depend on its row of `hidden` and its id alone."""
        if type(hidden) is not Tensor or hidden.dtype not in DTYPES:
            return super().exact_logits(hidden, weight, ids)
        assert hidden.dtype == weight.dtype and weight.is_contiguous() and hidden.shape[-1] == weight.shape[1]
        assert hidden.shape[:-1] == ids.shape[:-1]
        hidden, ids = hidden.contiguous(), ids.contiguous()
        count, size = ids.shape[-1], weight.shape[1]
        out = torch.empty(ids.shape, dtype=torch.float32)
        self.raw.exact_logits(
            out, hidden, weight, ids, ids.numel() // max(count, 1), count, size, weight.dtype == torch.bfloat16
        )
        return out

    def every_logit(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if type(hidden) is not Tensor or hidden.dtype not in DTYPES or weight.dtype != torch.float32:
            return super().every_logit(hidden, weight)
        assert weight.is_contiguous() and hidden.shape[1:] == weight.shape[1:]
        hidden, (rows, size) = hidden.contiguous(), hidden.shape
        out = torch.empty(rows, len(weight), dtype=torch.float32)
        half = hidden.dtype == torch.bfloat16
        self.raw.every_logit(out, hidden, weight, rows, size, len(weight), half, self.workers.address)
        return out

    def cluster_tokens(self, scores: Tensor, chosen: int, ordering: Tensor) -> Tensor:
        if type(scores) is not Tensor or scores.dtype not in DTYPES:
            return super().cluster_tokens(scores, chosen, ordering)
        scores, (rows, count), each = scores.contiguous(), scores.shape, len(ordering) // scores.shape[1]
        assert 0 < chosen <= count and ordering.is_contiguous() and ordering.dtype == torch.int64
        out, wide = ordering.new_empty(rows, chosen * each), torch.empty(count, dtype=torch.float32)
        self.raw.cluster_tokens(out, scores, scores.dtype == torch.bfloat16, rows, count, chosen, ordering, each, wide)
        return out

    def spread_logits(self, found: Tensor, ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
        if type(found) is not Tensor or dtype not in DTYPES:
            return super().spread_logits(found, ids, vocab, dtype)
        found, ids, (rows, count) = found.contiguous(), ids.contiguous(), found.shape
        assert found.dtype == torch.float32 and ids.shape == found.shape and count
        out = torch.empty(rows, vocab, dtype=dtype)
        self.raw.spread_logits(out, dtype == torch.bfloat16, found, ids, rows, count, vocab)
        return out
