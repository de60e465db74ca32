"""Gumbel noise as a function of (seed, absolute position, token id): no generator, no state.

The value of a token does not depend on the batch it is drawn in, on how far the vocabulary is padded, on which subset
of ids is asked for, or (up to the last bit of `log`) on the device. So a request's tokens can be reproduced whatever
ran with it, after a preemption, and with or without speculation; and a drafter that adds the same noise before its
top-k picks the target's token more often than one that does not (arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int, bits: int) -> int:
    """Returns the value of an unsigned constant in two's complement, which is what torch's integer tensors hold."""
    return word - (1 << bits) if word >> (bits - 1) else word


# Odd multipliers. The linear key seed * _SEED_MUL + position * _POSITION_MUL is distinct for seeds and positions that
# are both small, as users' are; the two finalisers are SplitMix64's (Steele et al. 2014) and "lowbias32" (C. Wellons).
_SEED_MUL = _signed(0xD1342543DE82EF95, 64)
_POSITION_MUL = _signed(0x9E3779B97F4A7C15, 64)
_MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_TOKEN_MUL = _signed(0x9E3779B1, 32)
_MIX32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))

# The float32 below 2^-31: the largest 31-bit integer rounds to 2^31 as a float32 and must still give u < 1.
_SCALE = 2.0**-31 * (1.0 - 2.0**-24)
_HALF_STEP = 2.0**-32


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Returns standard Gumbel noise for the token ids 0 .. vocab - 1.

    seed [B] int64; position [B, P] int64, where the sampled token will stand. Returns [B, P, vocab] float32.
    """
    return gumbel_at(seed, position, torch.arange(vocab, dtype=torch.int32, device=position.device))


def gumbel_at(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the noise of chosen token ids: the same values `gumbel` gives them.

    seed [B] int64; position [B, P] int64; token_ids [..., K] integers below 2^31, broadcast against [B, P, K] (a
    drafter with a vocabulary of its own passes its table of target ids as [K]). Returns [B, P, K] float32,
    g = -log(-log1p(-u)) with u in [2^-32, 1 - 2^-24].
    """
    bits = _hash(seed, position, token_ids)  # [B, P, K] int32, uniform on 0 .. 2^31 - 1
    # u -> 0 is the tail of large noise that decides the argmax: the integer is scaled without an offset that would
    # cost precision there, and log1p keeps all of it.
    noise = torch.empty(bits.shape, dtype=torch.float32, device=bits.device)
    torch.mul(bits, -_SCALE, out=noise)
    return noise.sub_(_HALF_STEP).log1p_().neg_().log_().neg_()


def _hash(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """31 uniform bits for each (seed, position, token id): [B, P, K] int32, non-negative."""
    words = position_words(seed, position)  # [B, P, 2]
    ids = token_ids.to(torch.int32) * _TOKEN_MUL
    ids ^= (ids >> 16) & 0xFFFF  # linear over xor, so it may precede the key and run once for all positions
    h = ids ^ words[..., :1]
    h = torch.add(words[..., 1:], h, alpha=_MIX32[0])  # the second word enters where nothing linear can cancel it
    shifted = h >> 15
    h ^= shifted.bitwise_and_(0x1FFFF)
    h *= _MIX32[1]
    # The arithmetic shift repeats the sign bit, which clears it in h: what is left is h's xorshift, folded two to one
    # onto 31 bits, still uniform.
    h ^= torch.bitwise_right_shift(h, 16, out=shifted)
    return h


def position_words(seed: Tensor, position: Tensor) -> Tensor:
    """Returns two words for each seed [B] and position [B, P]: [B, P, 2] int32. Products wrap modulo 2^64."""
    key = position * _POSITION_MUL + (seed * _SEED_MUL)[:, None]
    key ^= (key >> 30) & ((1 << 34) - 1)
    key *= _MIX64[0]
    key ^= (key >> 27) & ((1 << 37) - 1)
    key *= _MIX64[1]
    key ^= (key >> 31) & ((1 << 33) - 1)
    return key[..., None].view(torch.int32)
