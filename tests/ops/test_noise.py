"""Keyed noise: the same value for the same key, and values that look random in every direction of the key; of Triton's
kernels, too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference.noise import gumbel64

from draftwing.ops.noise import spec
from draftwing.ops.table import TorchOps


@pytest.fixture(params=["torch", "cpu"])
def noise(request: pytest.FixtureRequest) -> TorchOps:
    """What has `gumbel` and `gumbel_at`; Triton's is a part of other kernels."""
    ops: TorchOps = request.getfixturevalue("cpu_ops") if request.param == "cpu" else TorchOps()
    return ops


SEEDS = torch.tensor([0, 1, 2, 7, 2**31, 2**40 + 3, 2**63 - 1])


def uniform(g: torch.Tensor) -> torch.Tensor:
    """Inverts g = -log(-log(1 - u)) in float64."""
    return -torch.expm1(-torch.exp(-g.double()))


def normal_score(statistic: float, freedom: int) -> float:
    """How many standard deviations a chi-square statistic is above its mean (large `freedom`)."""
    return (statistic - freedom) / math.sqrt(2 * freedom)


def chi_square(u: torch.Tensor, bins: int) -> float:
    counts = torch.histc(u.double(), bins, 0.0, 1.0)
    expected = u.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_it_is_the_written_formula(noise: TorchOps) -> None:
    position = torch.tensor([[0, 1, 5, 19, 2**20, 2**33]]).expand(len(SEEDS), -1)
    ids = torch.cat((torch.arange(1000), torch.tensor([65535, 65536, 151935, 2**31 - 1])))
    want = np.stack([gumbel64(SEEDS.numpy(), at.numpy(), ids.numpy()) for at in position.T], 1)
    torch.testing.assert_close(
        noise.gumbel_at(SEEDS, position, ids).double(), torch.from_numpy(want), rtol=1e-6, atol=2e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1001, 1024])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.covering
def test_value_does_not_depend_on_batch_or_vocabulary(noise: TorchOps, vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        position = torch.randint(0, 10**6, (len(SEEDS), 5), generator=torch.Generator().manual_seed(0))
        whole = noise.gumbel(SEEDS, position, 33_333)
        assert torch.equal(noise.gumbel(SEEDS, position, vocab), whole[:, :, :vocab])
        for b in (0, 4, 6):
            for p in (0, 3):
                alone = noise.gumbel(SEEDS[b : b + 1], position[b : b + 1, p : p + 1], vocab)
                assert torch.equal(alone[0, 0], whole[b, p, :vocab])
    finally:
        torch.set_num_threads(before)


def test_subsets_get_the_values_of_the_whole(noise: TorchOps) -> None:
    position = torch.arange(3)[None] + SEEDS[:, None] % 100
    whole = noise.gumbel(SEEDS, position, 5000)
    ids = torch.randint(0, 5000, (41,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.gumbel_at(SEEDS, position, ids), whole[:, :, ids])
    each = torch.randint(0, 5000, (len(SEEDS), 3, 17), generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise.gumbel_at(SEEDS, position, each), whole.gather(-1, each))


def test_extreme_bits_stay_finite(noise: TorchOps) -> None:
    """Tokens of seed 1 at position 0 whose bits are 0, 1, 2^31 - 1 and 2^31 - 64."""
    ids = torch.tensor([583386240, 1043256760, 956409504, 564727650])
    g = noise.gumbel_at(SEEDS[1:2], torch.tensor([[0]]), ids).flatten()
    assert g[0].item() == pytest.approx(32 * math.log(2), rel=1e-6)  # u = 2^-32
    assert (g[0] - g[1]).item() == pytest.approx(math.log(3.0), rel=1e-5)  # u = 0.5 and 1.5 times 2^-31
    assert g[2].item() == g[3].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-5)


def test_uniform_over_tokens_positions_and_seeds(noise: TorchOps) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    many = torch.arange(2_000)
    samples = {
        "tokens": noise.gumbel(torch.tensor([11]), zero[None], 150_000),
        "positions": noise.gumbel(zero, many[None], 64),
        "seeds": noise.gumbel(many, torch.full((2000, 1), 9), 64),
        "one token": noise.gumbel_at(zero, torch.arange(100_000)[None], torch.tensor([3])),
        "strided positions": noise.gumbel(zero, many[None] * 4096, 64),
    }
    for name, g in samples.items():
        u = uniform(g)
        for bins in (16, 1024):
            assert abs(normal_score(chi_square(u, bins), bins - 1)) < 4, (name, bins)
        # The tail that decides an argmax, and the finer digits of u.
        tail = u[u < 2**-6] * 2**6
        assert abs(normal_score(chi_square(tail, 32), 31)) < 4, name
        assert abs(normal_score(chi_square(u * 2**14 % 1, 128), 127)) < 4, name


# -- in Triton's kernels ----------------------------------------------------------------------------------------------

KERNEL_SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 987654321987])
POSITIONS = torch.tensor([0, 1, 131071, 2**31 + 5, 17])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_have_the_same_integers_and_noise(triton_ops: TorchOps, dtype: torch.dtype) -> None:
    import triton_kernels

    position = POSITIONS.expand(len(KERNEL_SEEDS), -1).contiguous()
    ids = torch.cat((torch.arange(1003), torch.tensor([128255, 262143, 2**31 - 1]))).to(dtype)
    bits, values = triton_kernels.noise(KERNEL_SEEDS, position, ids, triton_ops.device)
    assert torch.equal(bits, spec._hash(KERNEL_SEEDS, position, ids))
    torch.testing.assert_close(values, spec.gumbel_at(KERNEL_SEEDS, position, ids), rtol=5e-7, atol=5e-7)
    many = torch.randint(-(2**62), 2**62, (2, 64), generator=torch.Generator().manual_seed(5))
    words = triton_kernels.block_words(*many, triton_ops.device)
    assert torch.equal(words, spec.position_words(many[0], many[1][:, None])[:, 0])


def test_tails_keep_their_precision_in_kernels(triton_ops: TorchOps) -> None:
    """Large noise comes from tiny u, where 1 - u is 1 in float32."""
    import triton_kernels

    ids = torch.arange(1 << 22 if triton_ops.device.type == "cuda" else 1 << 17, dtype=torch.int32)
    bits, values = triton_kernels.noise(torch.tensor([3]), torch.tensor([[9]]), ids, triton_ops.device)
    u = bits.float() * spec._SCALE + spec._HALF_STEP
    exact = -torch.log(-torch.log1p(-u.double()))
    assert bits.min() < 2**16 and bits.max() > 2**31 - 2**16
    assert (values.double() - exact).abs().max() < 2e-6
    assert (values.double() - exact).abs().mean() < 1e-7
