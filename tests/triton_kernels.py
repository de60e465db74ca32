"""Kernels that show what functions of Triton's kernels give."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.noise.triton import gumbel, position_words, uniform_bits
from draftwing.ops.triton.common import softplus as _softplus


@triton.jit
def _softplus_kernel(out, x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, _softplus(tl.load(x + at)))


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, ids_ptr, bits_ptr, noise_ptr, positions, count, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1)
    word0, word1 = position_words(tl.load(seed_ptr + row), tl.load(position_ptr + row * positions + column))
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < count, other=0)
    out = (row * positions + column) * count + at
    tl.store(bits_ptr + out, uniform_bits(word0, word1, ids), mask=at < count)
    tl.store(noise_ptr + out, gumbel(word0, word1, ids), mask=at < count)


@triton.jit
def _block_words_kernel(seed_ptr, position_ptr, words_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word0, word1 = position_words(tl.load(seed_ptr + lane), tl.load(position_ptr + lane))
    tl.store(words_ptr + 2 * lane, word0.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 2 * lane + 1, word1.to(tl.int32, bitcast=True))


def softplus(x: Tensor) -> Tensor:
    """x [256]"""
    out = torch.empty_like(x)
    _softplus_kernel[(1,)](out, x, SIZE=256)
    return out


def noise(seed: Tensor, position: Tensor, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """seed [B], position [B, N], ids [K] -> bits and noise [B, N, K], on the CPU"""
    shape = (*position.shape, len(ids))
    bits = torch.full(shape, -7, dtype=torch.int32, device=device)
    values = torch.full(shape, torch.nan, device=device)
    grid = (*position.shape, triton.cdiv(len(ids), 1024))
    _noise_kernel[grid](
        seed.to(device), position.to(device), ids.to(device), bits, values, position.shape[1], len(ids), BLOCK=1024
    )
    return bits.cpu(), values.cpu()


def block_words(seed: Tensor, position: Tensor, device: torch.device) -> Tensor:
    """seed, position [64] -> [64, 2], on the CPU"""
    words = torch.empty(64, 2, dtype=torch.int32, device=device)
    _block_words_kernel[(1,)](seed.to(device), position.to(device), words, BLOCK=64)
    return words.cpu()
