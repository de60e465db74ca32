"""Top-k, top-p and min-p as one mask, without sorting the vocabulary and without reading anything on the host.

Tokens are ordered by their gap, (largest logit - logit) in float32. A gap is never negative, so its bit pattern read
as an integer sorts the same way, and a threshold on it is found by three rounds of counting: which of 2048 bins of the
pattern's high bits holds it, then which of 1024 within that bin, then the pattern itself. Everything that is summed is
an integer (probability mass as a fixed-point number), hence a row's mask is the same in any batch and any order of
summation, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = ((20, 2048), (10, 1024), (0, 1024))  # (bits below the bin, bins): 11 + 10 + 10 bits of a 31-bit pattern
_CPU_BLOCK = 1 << 16  # logits
_MASS_ONE = 2.0**40  # fixed-point 1.0, the mass of the most probable token; sums stay below 2^63 for vocab < 2^23


def keep_mask(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Finds which tokens a row may sample from.

    logits [M, V] float32; temperature [M] float32 > 0; top_k [M] int64 (<= 0: off); top_p [M] float32 (>= 1: off);
    min_p [M] float32 (0: off). Returns [M, V] bool. With p = softmax(logits / temperature), a token is kept if

    - top-k: its logit is at least the k-th largest;
    - top-p, over p renormalised after top-k: it belongs to the smallest set of most probable tokens whose mass reaches
      top_p. The token that crosses the limit is kept, so the most probable one always is;
    - min-p: p >= min_p * max(p).

    Tokens tied with the last one kept are kept too (equal gaps are ties, see above), so a mask may hold more than k.
    """
    # On the CPU, blocks of rows small enough for the cache and for the allocator to keep at hand.
    rows = logits.shape[0] if logits.is_cuda else max(1, _CPU_BLOCK // logits.shape[-1])
    blocks = zip(*(x.split(rows) for x in (logits, temperature, top_k, top_p, min_p)), strict=True)
    return torch.cat([_keep_block(*block) for block in blocks])


def _keep_block(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    gap = logits.amax(-1, keepdim=True) - logits
    rank = gap.view(torch.int32)
    weight = torch.div(gap, -temperature[:, None]).exp_()  # p / max(p)

    wanted = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    last = _smallest_reaching(rank, torch.ones_like(rank, dtype=torch.int64), wanted[:, None])

    mass = (weight * _MASS_ONE).to(torch.int64)
    kept_mass = mass.mul(rank <= last).sum(-1, keepdim=True)
    wanted = (kept_mass * top_p[:, None].double()).ceil().to(torch.int64)
    crossing = _smallest_reaching(rank, mass, torch.minimum(wanted.clamp(min=1), kept_mass))
    # Tokens too improbable to have any mass would be lost to a top-p that is off.
    last = torch.where(top_p[:, None] < 1, torch.minimum(last, crossing), last)
    return (rank <= last).logical_and_(weight >= min_p[:, None])


def _smallest_reaching(rank: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """Returns the smallest rank r for which the weights of all entries with rank <= r sum to `wanted` or more.

    rank [M, V] int32, >= 0; weight [M, V] int64, >= 0; wanted [M, 1] int64, between 1 and the row's sum.
    Returns [M, 1] int32.
    """
    low = torch.zeros_like(wanted, dtype=torch.int32)  # the answer is in [low, low + 2^(bits still open))
    for shift, bins in _ROUNDS:
        # One more bin on either side gathers what lies outside the interval. The lower one makes the running sum that
        # of the whole row; together they also keep the pattern of a NaN, of either sign, inside the histogram.
        bin_of = (rank - (low - (1 << shift))).bitwise_right_shift_(shift).clamp_(0, bins + 1).to(torch.int64)
        histogram = torch.zeros(rank.shape[0], bins + 2, dtype=torch.int64, device=rank.device)
        reached = histogram.scatter_add_(-1, bin_of, weight).cumsum(-1)
        crossing = (reached < wanted).sum(-1, keepdim=True, dtype=torch.int32).sub_(1).clamp_(0, bins - 1)
        low = low + crossing.bitwise_left_shift_(shift)
    return low
