"""The C kernels that draw tokens against the formula in float64, and against themselves in other company."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.noise import gumbel64
from torch import Tensor

from draftwing.core import NOT_FINITE, TOKEN
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.torch.sampling import SamplingOps
from draftwing.ops.types import SamplingRows

if load_extension() is None:
    pytest.skip("the C kernels were not built", allow_module_level=True)

NONE = torch.empty(0, dtype=torch.int64)
DTYPES = [torch.float32, torch.bfloat16]
TEMPERATURES = [0.01, 0.3, 0.8, 1.0, 2.0, 5.0]
Doubles = npt.NDArray[np.float64]


@pytest.fixture
def kernels() -> CpuOps:
    return CpuOps(torch.device("cpu"))


def noise64(seed: Tensor, position: Tensor, vocab: int) -> Doubles:
    return gumbel64(seed.numpy(), position.numpy(), np.arange(vocab))


def params(temperature: Tensor, seed: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    rows = temperature.shape[0]
    zero = torch.zeros(rows, dtype=torch.int64)
    return SamplingRows(
        seed, temperature, zero + top_k, torch.full((rows,), top_p), torch.full((rows,), min_p), zero, zero[:, None]
    )


def random_rows(
    rows: int, vocab: int, dtype: torch.dtype, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Generator]:
    """logits [rows, 1, vocab] with some -inf, positions [rows, 1], seeds and temperatures [rows]."""
    generator = torch.Generator().manual_seed(number)
    scale = torch.tensor([0.1, 1.0, 4.0])[torch.randint(0, 3, (rows, 1, 1), generator=generator)]
    logits = torch.randn(rows, 1, vocab, generator=generator) * scale
    logits[::3, 0, torch.randint(0, vocab, (4,), generator=generator)] += 12.0
    logits[1::5, 0, : vocab // 3] = -math.inf
    positions = torch.randint(0, 2**20, (rows, 1), generator=generator)
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    chosen = torch.randint(0, len(TEMPERATURES), (rows,), generator=generator)
    return logits.to(dtype), positions, seed, torch.tensor(TEMPERATURES)[chosen], generator


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "rows"), [(5, 500), (64, 500), (1000, 1500), (1061, 700), (49_152, 24)])
def test_the_best_are_those_of_float64(kernels: CpuOps, dtype: torch.dtype, vocab: int, rows: int) -> None:
    """Wherever float64 puts more between two tokens than `epsilon`, a few roundings of the noise and of the sum."""
    logits, positions, seed, temperature, _ = random_rows(rows, vocab, dtype, vocab)
    count = min(8, vocab - 1)
    ids, added = kernels.candidates(logits, positions, positions * 0, params(temperature, seed), NONE, count)
    only, _ = kernels.candidates(logits, positions, positions * 0, params(temperature, seed), NONE, 1)
    noise = noise64(seed, positions[:, 0] + 1, vocab) * temperature[:, None].double().numpy()
    z = logits[:, 0].double().numpy() + noise
    epsilon = 4e-6 * temperature.numpy() + 2e-7 * np.nanmax(np.abs(np.where(np.isinf(z), np.nan, z)), 1)
    order = np.argsort(-z, 1, kind="stable")
    ranked = np.take_along_axis(z, order, 1)
    with np.errstate(invalid="ignore"):
        clear = ranked[:, count - 1] - ranked[:, count] > epsilon
        clear_best = ranked[:, 0] - ranked[:, 1] > epsilon
    assert clear_best.mean() > 0.98 and clear.mean() > (0.9 if vocab > 5 else 0.5)
    assert np.array_equal(ids[clear, 0].numpy(), np.sort(order[clear, :count], 1))
    assert np.array_equal(only[clear_best, 0, 0].numpy(), order[clear_best, 0])
    assert (ids.diff(dim=-1) > 0).all()
    at = ids[:, 0].numpy()
    expected = np.where(np.isinf(np.take_along_axis(z, at, 1)), -np.inf, np.take_along_axis(noise, at, 1))
    np.testing.assert_allclose(added[:, 0].numpy(), expected, rtol=2e-6, atol=5e-6)


def test_noise_of_one_function_is_that_of_the_other(kernels: CpuOps) -> None:
    _, positions, seed, _, _ = random_rows(60, 700, torch.float32, 0)
    nothing = torch.zeros(60, 1, 700)
    ids, added = kernels.candidates(nothing, positions, positions * 0, params(torch.ones(60), seed), NONE, 16)
    assert torch.equal(added, kernels.gumbel(seed, positions + 1, 700).gather(-1, ids))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("same_threads")
def test_a_row_does_not_see_the_others(kernels: CpuOps, dtype: torch.dtype, top_p: float) -> None:
    logits, positions, seed, temperature, generator = random_rows(40, 5003, dtype, 7)
    temperature[::4] = 0.0
    own = params(temperature, seed, top_p=top_p)
    filtered = torch.arange(40) if top_p < 1 else NONE
    torch.set_num_threads(1)
    alone = [
        kernels.candidates(
            logits[i : i + 1], positions[i : i + 1], positions[i : i + 1] * 0,
            SamplingRows(*(field[i : i + 1] for field in own)), filtered[:1], 8,
        )
        for i in range(40)
    ]  # fmt: skip
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        order = torch.randperm(40, generator=generator)
        shuffled = SamplingRows(*(field[order] for field in own))
        ids, added = kernels.candidates(logits[order], positions[order], positions * 0, shuffled, filtered, 8)
        assert torch.equal(ids, torch.cat([alone[i][0] for i in order]))
        assert torch.equal(added, torch.cat([alone[i][1] for i in order]))
    # As nodes of trees: node n of row b stands depth further than its root.
    depth = torch.tensor([[0, 1, 1, 3]]).expand(10, 4)
    first = SamplingRows(*(field[:10] for field in own))
    ids, _ = kernels.candidates(logits.view(10, 4, -1), positions[:10] + depth, depth, first, filtered[:10], 8)
    for n in range(4):
        one, _ = kernels.candidates(
            logits.view(10, 4, -1)[:, n : n + 1], positions[:10] + depth[:, n : n + 1], depth[:, :1] * 0, first,
            filtered[:10], 8,
        )  # fmt: skip
        assert torch.equal(ids[:, n], one[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [8, 17, 64, 100, 129, 2000])
def test_ties_go_to_the_lowest_ids(kernels: CpuOps, dtype: torch.dtype, vocab: int) -> None:
    """Greedy rows with few different logits."""
    x = torch.randint(-2, 3, (50, 2, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    x[3], x[4, 0] = 0.0, -0.0
    x[5, 0, -1] = 99.0
    zero = torch.zeros(50, 2, dtype=torch.int64)
    ids, added = kernels.candidates(x, zero, zero, None, NONE, 8)
    want = x.double().sort(dim=-1, descending=True, stable=True).indices[..., :8].sort(-1).values
    assert torch.equal(ids, want) and not added.any()
    assert torch.equal(kernels.candidates(x, zero, zero, None, NONE, 1)[0].squeeze(-1), x.double().argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.5, 0.1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinities(
    kernels: CpuOps, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    x = torch.zeros(6, 1, 200, dtype=dtype)
    x[:4] = -math.inf
    x[1, 0, 150] = -3.0  # the only one
    x[2, 0, [9, 190]] = 2.0
    x[3, 0, 7] = math.inf
    x[4, 0, 100:] = math.nan
    x[5, 0, 77] = math.inf
    own = params(torch.full((6,), temperature), torch.arange(6), top_k, top_p, min_p)
    zero = torch.zeros(6, 1, dtype=torch.int64)
    ids, added = kernels.candidates(x, zero, zero, own, torch.arange(6), 8)
    assert ids[0, 0].tolist() == list(range(8)) and added[0].eq(-math.inf).all()
    assert ids[1, 0].tolist() == [*range(7), 150] and added[1, 0].isfinite().tolist() == [False] * 7 + [True]
    assert ids[2, 0].tolist() == [*range(6), 9, 190] and added[2, 0].isfinite().sum() <= 2
    one = kernels.candidates(x, zero, zero, own, torch.arange(6), 1)[0].flatten().tolist()
    assert one[:2] == [NOT_FINITE, 150] and one[2] in (9, 190) and one[3] == 7 | NOT_FINITE
    assert one[4] < 100 and one[5] == 77 | NOT_FINITE


def test_the_heaviest_candidate(kernels: CpuOps) -> None:
    """The first of equals, as torch chooses; of NaN, too."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 10**6, (40, 5, 8), generator=generator)
    noise, logits = torch.randint(-3, 3, (2, 40, 5, 8), generator=generator).float()
    noise[torch.rand(noise.shape, generator=generator) < 0.2] = -math.inf
    noise[0] = -math.inf
    logits[1, :, 3:5] = math.nan
    best = (noise + logits).max(-1)
    wanted = ids.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1) + ~best.values.isfinite() * NOT_FINITE
    assert torch.equal(kernels.best_candidate(ids, noise, logits), wanted)
    first = kernels.best_candidate(ids[..., :1], noise[..., :1], logits[..., :1])
    assert torch.equal(first & TOKEN, ids[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_zeros_are_one_logit(kernels: CpuOps, dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 100), -9.0).index_fill_(2, torch.arange(0, 4), 0.0)
    x[0, 0, [0, 2]] = -0.0
    x[0, 0, 4:20] = -torch.arange(1.0, 17.0)
    for top_k in (3, 4):
        own = params(torch.ones(1), torch.zeros(1, dtype=torch.int64), top_k)
        zero = torch.zeros(1, 1, dtype=torch.int64)
        _, added = kernels.candidates(x.to(dtype), zero, zero, own, torch.arange(1), 16)
        assert added.isfinite().sum() == 4  # equals of the last one stay


FILTERS = {
    "k": (7, 1.0, 0.0), "k of all": (10**6, 1.0, 0.0), "large k": (700, 1.0, 0.0), "p": (0, 0.9, 0.0),
    "small p": (0, 1e-6, 0.0), "large p": (0, 0.999999, 0.0), "min p": (0, 1.0, 0.05), "min p 1": (0, 1.0, 1.0),
    "all": (60, 0.95, 0.02), "none": (0, 1.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_torch(kernels: CpuOps, dtype: torch.dtype, name: str) -> None:
    """A thousand mixed rows; the two differ in the last bits, so one in a thousand may be another token."""
    logits, positions, seed, temperature, generator = random_rows(1000, 777, dtype, 5)
    temperature[::7] = 0.0
    noisy = (temperature > 0).nonzero().flatten()
    filtered = noisy[torch.rand(len(noisy), generator=generator) < 0.5] if name != "none" else NONE
    own = params(temperature, seed, *FILTERS[name])
    depth = torch.arange(2).expand(500, 2)
    half = SamplingRows(*(field[:500] for field in own))
    args = (positions[:500] + depth, depth, 1, half, noisy[noisy < 500], filtered[filtered < 500], NONE)
    native = kernels.sample(logits.view(500, 2, -1), *args)
    assert (native != SamplingOps().sample(logits.view(500, 2, -1), *args)).sum() <= 1
