"""The noise of Triton kernels against sampling.noise and against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from draftwing.ops.torch import noise
from draftwing.ops.triton.noise import gumbel, position_words, uniform_bits

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 987654321987]
POSITIONS = [0, 1, 131071, 2**31 + 5, 17]


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


def _run(
    seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*position.shape, len(ids))
    bits = torch.full(shape, -7, dtype=torch.int32, device=device)
    values = torch.full(shape, torch.nan, device=device)
    grid = (*position.shape, triton.cdiv(len(ids), 1024))
    _noise_kernel[grid](
        seed.to(device), position.to(device), ids.to(device), bits, values, position.shape[1], len(ids), BLOCK=1024
    )
    return bits.cpu(), values.cpu()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_same_integers_and_noise_as_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    seed = torch.tensor(SEEDS)
    position = torch.tensor(POSITIONS).expand(len(SEEDS), -1).contiguous()
    ids = torch.cat((torch.arange(1003), torch.tensor([128255, 262143, 2**31 - 1]))).to(dtype)
    bits, values = _run(seed, position, ids, device)
    assert torch.equal(bits, noise._hash(seed, position, ids))
    torch.testing.assert_close(values, noise.gumbel_at(seed, position, ids), rtol=5e-7, atol=5e-7)


def test_words_of_a_block(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    seed, position = torch.randint(-(2**62), 2**62, (2, 64), generator=generator)
    words = torch.empty(64, 2, dtype=torch.int32, device=device)
    _block_words_kernel[(1,)](seed.to(device), position.to(device), words, BLOCK=64)
    assert torch.equal(words.cpu(), noise.position_words(seed, position[:, None])[:, 0])


def test_tails_keep_their_precision(device: torch.device) -> None:
    """Large noise comes from tiny u, where 1 - u is 1 in float32."""
    count = 1 << 22 if device.type == "cuda" else 1 << 17
    ids = torch.arange(count, dtype=torch.int32)
    bits, values = _run(torch.tensor([3]), torch.tensor([[9]]), ids, device)
    u = bits.float() * noise._SCALE + noise._HALF_STEP
    exact = -torch.log(-torch.log1p(-u.double()))
    assert bits.min() < 2**16 and bits.max() > 2**31 - 2**16
    assert (values.double() - exact).abs().max() < 2e-6
    assert (values.double() - exact).abs().mean() < 1e-7
