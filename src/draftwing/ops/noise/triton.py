"""The keyed Gumbel noise of `ops.noise.spec` inside Triton kernels: the same integers, and logs to the last bits."""

from __future__ import annotations

import triton
import triton.language as tl

# As in ops.noise.spec, which says what they are.
_SEED_MUL = tl.constexpr(0xD1342543DE82EF95)
_POSITION_MUL = tl.constexpr(0x9E3779B97F4A7C15)
_MIX64_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX64_SECOND = tl.constexpr(0x94D049BB133111EB)
_TOKEN_MUL = tl.constexpr(0x9E3779B1)
_MIX32_FIRST = tl.constexpr(0x7FEB352D)
_MIX32_SECOND = tl.constexpr(0x846CA68B)
_STEP = tl.constexpr(2.0**-31)
_HALF_STEP = tl.constexpr(2.0**-32)


@triton.jit
def position_words(seed: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """seed and position int64, scalars or blocks of one shape -> the two words (uint32, uint32) that key `gumbel`."""
    key = position.to(tl.uint64) * _POSITION_MUL + seed.to(tl.uint64) * _SEED_MUL
    key ^= key >> 30
    key *= _MIX64_FIRST
    key ^= key >> 27
    key *= _MIX64_SECOND
    key ^= key >> 31
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def uniform_bits(word0: tl.tensor, word1: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """31 uniform bits of each token id, int32 >= 0; the words and the ids (integers) broadcast."""
    h = token_ids.to(tl.uint32) * _TOKEN_MUL
    h = (h ^ (h >> 16)) ^ word0
    h = word1 + h * _MIX32_FIRST
    h ^= h >> 15
    h *= _MIX32_SECOND
    folded = h.to(tl.int32, bitcast=True)
    return folded ^ (folded >> 16)  # arithmetic: clears the sign


@triton.jit
def gumbel(word0: tl.tensor, word1: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise, float32, of token ids (integers below 2^31) under the words of a seed and a position."""
    bits = uniform_bits(word0, word1, token_ids)
    # The reference's u is bits * 2^-31 (1 - 2^-24) + 2^-32, rounded after each operation. Its product is the float32
    # below bits, scaled: taken so, it is exact, and a compiler that fuses it with the sum rounds as the reference does.
    below = bits.to(tl.float32).to(tl.int32, bitcast=True) - (bits > 0).to(tl.int32)
    u = below.to(tl.float32, bitcast=True) * _STEP + _HALF_STEP
    # log1p by the log of what is left of 1 - u, corrected for what rounding took from u (Kahan; see Goldberg 1991,
    # theorem 4): no library function that the interpreter lacks, and no sum of products to fuse in one kernel and not
    # in another.
    rest = 1.0 - u
    taken = 1.0 - rest
    exponential = tl.where(taken == 0.0, u, -tl.log(rest) * (u / tl.where(taken == 0.0, 1.0, taken)))
    return -tl.log(exponential)
