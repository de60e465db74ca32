"""Keyed noise: the same value for the same key, and values that look random in every direction of the key."""

import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.ops import make_ops
from draftwing.ops.torch import noise
from draftwing.ops.torch.noise import _hash, gumbel, gumbel_at


@pytest.fixture(autouse=True, params=["torch", "cpu"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the noise of torch and of C; Triton's is no operation, see test_triton_noise.py."""
    if request.param == "cpu":
        found = make_ops(torch.device("cpu"))
        if found.name != "cpu":
            pytest.skip("the C extension was not built, or is not wanted")
        monkeypatch.setattr(sys.modules[__name__], "gumbel", found.gumbel)
        monkeypatch.setattr(sys.modules[__name__], "gumbel_at", found.gumbel_at)


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


def reference_hash(seed: int, position: int, token: int) -> int:
    """The documented hash in Python's integers."""
    m64, m32 = 2**64 - 1, 2**32 - 1
    key = (position * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95) & m64
    key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & m64
    key = ((key ^ key >> 27) * 0x94D049BB133111EB) & m64
    key ^= key >> 31
    low, high = key & m32, key >> 32
    h = (token * 0x9E3779B1) & m32
    h ^= h >> 16
    h = ((h ^ low) * 0x7FEB352D + high) & m32
    h = ((h ^ h >> 15) * 0x846CA68B) & m32
    sign = h >> 31
    return (h ^ (h >> 16 | (0xFFFF0000 if sign else 0))) & m32


def test_hash_is_the_written_one() -> None:
    positions = torch.tensor([[0, 1, 5, 2**20, 2**33]]).expand(len(SEEDS), -1)
    tokens = torch.tensor([0, 1, 2, 31, 65535, 65536, 151935])
    got = _hash(SEEDS, positions, tokens)
    for b, seed in enumerate(SEEDS.tolist()):
        for p, position in enumerate(positions[b].tolist()):
            want = [reference_hash(seed, position, t) for t in tokens.tolist()]
            assert got[b, p].tolist() == want
            assert all(0 <= w < 2**31 for w in want)


def test_formula() -> None:
    position = torch.arange(20)[None].expand(len(SEEDS), -1)
    u = (_hash(SEEDS, position, torch.arange(1000)).double() + 0.5) * 2.0**-31
    u = u.float().double().clamp(max=1 - 2.0**-24)  # 1 - u has few digits close to 1, in float32
    want = -torch.log(-torch.log1p(-u))
    got = gumbel(SEEDS, position, 1000).double()
    torch.testing.assert_close(got[u < 0.999], want[u < 0.999], rtol=0, atol=1e-4)
    torch.testing.assert_close(got[u < 0.5], want[u < 0.5], rtol=0, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1001, 1024])
@pytest.mark.parametrize("threads", [1, 2])
def test_value_does_not_depend_on_batch_or_vocabulary(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        position = torch.randint(0, 10**6, (len(SEEDS), 5), generator=torch.Generator().manual_seed(0))
        whole = gumbel(SEEDS, position, 33_333)
        assert torch.equal(gumbel(SEEDS, position, vocab), whole[:, :, :vocab])
        for b in (0, 4, 6):
            for p in (0, 3):
                alone = gumbel(SEEDS[b : b + 1], position[b : b + 1, p : p + 1], vocab)
                assert torch.equal(alone[0, 0], whole[b, p, :vocab])
    finally:
        torch.set_num_threads(before)


def test_subsets_get_the_values_of_the_whole() -> None:
    position = torch.arange(3)[None] + SEEDS[:, None] % 100
    whole = gumbel(SEEDS, position, 5000)
    ids = torch.randint(0, 5000, (41,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_at(SEEDS, position, ids), whole[:, :, ids])
    each = torch.randint(0, 5000, (len(SEEDS), 3, 17), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_at(SEEDS, position, each), whole.gather(-1, each))


def key_with(seed: int, bits: int, position: int = 0) -> tuple[int, int]:
    """A position and a token id below 2^31 that hash to these 31 bits: the documented hash backwards."""
    m64, m32 = 2**64 - 1, 2**32 - 1
    key = (position * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95) & m64
    key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & m64
    key = ((key ^ key >> 27) * 0x94D049BB133111EB) & m64
    key ^= key >> 31
    for high in (bits >> 16, bits >> 16 ^ 0xFFFF):  # without and with the sign bit
        h = high << 16 | (bits & 0xFFFF) ^ high
        h = h * pow(0x846CA68B, -1, 2**32) & m32
        h ^= h >> 15 ^ h >> 30
        h = (h - (key >> 32)) * pow(0x7FEB352D, -1, 2**32) & m32
        h ^= key & m32
        token = (h ^ h >> 16) * pow(0x9E3779B1, -1, 2**32) & m32
        if token < 2**31:
            assert reference_hash(seed, position, token) == bits
            return position, token
    return key_with(seed, bits, position + 1)


def test_extreme_bits_stay_finite() -> None:
    found = []
    for bits in (0, 1, 2**31 - 1, 2**31 - 64):
        position, token = key_with(1, bits)
        found.append(gumbel_at(SEEDS[1:2], torch.tensor([[position]]), torch.tensor([token])))
    g = torch.cat(found).flatten()
    assert g[0].item() == pytest.approx(32 * math.log(2), rel=1e-6)  # u = 2^-32
    assert (g[0] - g[1]).item() == pytest.approx(math.log(3.0), rel=1e-5)  # u = 0.5 and 1.5 times 2^-31
    assert g[2].item() == g[3].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-5)


def test_uniform_over_tokens_positions_and_seeds() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    many = torch.arange(2_000)
    samples = {
        "tokens": gumbel(torch.tensor([11]), zero[None], 150_000),
        "positions": gumbel(zero, many[None], 64),
        "seeds": gumbel(many, torch.full((2000, 1), 9), 64),
        "one token": gumbel_at(zero, torch.arange(100_000)[None], torch.tensor([3])),
        "strided positions": gumbel(zero, many[None] * 4096, 64),
    }
    for name, g in samples.items():
        u = uniform(g)
        for bins in (16, 1024):
            assert abs(normal_score(chi_square(u, bins), bins - 1)) < 4, (name, bins)
        # The tail that decides an argmax, and the finer digits of u.
        tail = u[u < 2**-6] * 2**6
        assert abs(normal_score(chi_square(tail, 32), 31)) < 4, name
        assert abs(normal_score(chi_square(u * 2**14 % 1, 128), 127)) < 4, name


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_argmax_has_the_softmax_distribution(vary: str) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 1.5
    n = 40_000
    if vary == "seed":
        g = gumbel(torch.arange(n), torch.full((n, 1), 17), 50)[:, 0]
    else:
        g = gumbel(torch.tensor([5]), torch.arange(n)[None], 50)[0]
    counts = torch.bincount((logits + g).argmax(-1), minlength=50).double()
    expected = logits.double().softmax(-1) * n
    assert expected.min() > 5
    assert normal_score(float(((counts - expected) ** 2 / expected).sum()), 49) < 4


def test_torch_reads_nothing_on_the_host() -> None:
    with FakeTensorMode():
        g = noise.gumbel(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), 100)
        assert g.shape == (2, 3, 100) and g.dtype == torch.float32
