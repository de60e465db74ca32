"""Tokens that are drawn: their distribution, which of them filters keep, and the C kernels against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.noise import gumbel64
from torch import Tensor

from draftwing.core import NOT_FINITE, TOKEN
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.runtime import CpuRuntime
from draftwing.ops.sampling.cpu import CpuSamplingOps
from draftwing.ops.sampling.spec import first_argmax, keep_mask, top_candidates
from draftwing.ops.table import TorchOps
from draftwing.ops.types import SamplingRows


@pytest.fixture
def sample(ops: TorchOps) -> Callable[..., Tensor]:
    """`TorchOps.sample` of the implementations that have one of their own."""
    if ops.name == "triton":
        pytest.skip("there is `draw`, see test_draw.py; what the host edits is drawn by torch")
    return ops.sample


NONE = torch.empty(0, dtype=torch.int64)


def rows(
    temperature: list[float],
    seed: list[int] | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    ban_until: int = 0,
    ban_ids: tuple[int, ...] = (-1, -1),
) -> SamplingRows:
    b = len(temperature)
    return SamplingRows(
        torch.tensor(seed or list(range(b))),
        torch.tensor(temperature),
        torch.full((b,), top_k),
        torch.full((b,), top_p),
        torch.full((b,), min_p),
        torch.full((b,), ban_until),
        torch.tensor([ban_ids] * b),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 192, 4096])
def test_first_maximum_wins(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randint(0, 4, (3, 5, vocab), generator=generator).to(dtype)
    x[0, 0] = -math.inf
    x[0, 1] = 1.0
    x[0, 2, -1] = 9.0
    padded = torch.nn.functional.pad(x, (0, 64), value=99.0)[..., :vocab]  # a view of wider logits
    for y in (x, padded):
        want = [[row.index(max(row)) for row in batch] for batch in y.tolist()]
        assert first_argmax(y).tolist() == want


CASES = {
    "cold": (0.5, 0, 1.0, 0.0),
    "one": (1.0, 0, 1.0, 0.0),
    "hot": (1.7, 0, 1.0, 0.0),
    "top_k": (1.0, 12, 1.0, 0.0),
    "top_p": (0.8, 0, 0.85, 0.0),
    "min_p": (1.3, 0, 1.0, 0.1),
    "all": (1.2, 20, 0.9, 0.03),
}


@pytest.mark.slow
@pytest.mark.further(name=["cold", "hot"])
@pytest.mark.further(ops="torch", name=["top_k", "top_p", "min_p"])  # "all" has them, too
@pytest.mark.parametrize("name", CASES)
def test_frequencies(sample: Callable[..., Tensor], name: str) -> None:
    temperature, top_k, top_p, min_p = CASES[name]
    n, vocab = 12_000, 40
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.2

    p = (row.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    p = p[order]
    if top_k:
        p[top_k:] = 0
    p /= p.sum()
    if top_p < 1:
        p[1:] *= (p.cumsum(0) < top_p)[:-1]
    p[p < min_p * p[0]] = 0
    p = torch.zeros(vocab, dtype=torch.float64).index_copy(0, order, p / p.sum())

    batch = n // 12  # seeds and positions both vary; 12 nodes of one row at 12 depths are independent draws
    depth = torch.arange(12).expand(batch, 12)
    params = rows([temperature] * batch, list(range(batch)), top_k, top_p, min_p)
    everyone = torch.arange(batch)
    got = sample(
        row.expand(batch, 12, vocab),
        depth + 100,
        depth,
        11,
        params,
        everyone,
        everyone if name != "one" else NONE,
        NONE,
    )
    counts = torch.bincount(got.flatten(), minlength=vocab).double()
    assert counts[p == 0].sum() == 0
    common = p * n >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((p[common] * n, (p[~common].sum() * n)[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert freedom >= 4
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Wilson-Hilferty: the cube root of a chi-square is nearly normal; 3.3 deviations are a level of 0.0005.
    score = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert score < 3.3


def test_candidates_hold_the_largest_values():
    generator = torch.Generator().manual_seed(0)
    for vocab in (40, 512, 4096, 49152):
        x = torch.randn(3, 2, vocab, generator=generator)
        got = top_candidates(x, 8)
        assert torch.equal(got, x.topk(8).indices.sort(-1).values)
        rounded = x.bfloat16()
        got = top_candidates(rounded, 8)
        assert torch.equal(got, got.sort(-1).values) and (got.diff(dim=-1) > 0).all()
        assert torch.equal(rounded.gather(-1, got).sort(-1).values, rounded.topk(8).values.sort(-1).values)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_exact_logits_decide_what_rounding_blurs(sample: Callable[..., Tensor], temperature):
    """bfloat16 logits around 25 tie at every turn; the choice must be that of the float32 logits."""
    generator = torch.Generator().manual_seed(1)
    batch, nodes, vocab = 300, 3, 600
    true = torch.randn(batch, nodes, vocab, generator=generator) + 40
    rounded = true.bfloat16()
    params = rows([temperature] * batch)
    depth = torch.arange(nodes).expand(batch, nodes)
    noisy = torch.arange(batch) if temperature else NONE

    def exact(ids, only):
        return (true if only is None else true[only]).gather(-1, ids)

    args = (10 + depth, depth, nodes - 1, params, noisy, NONE, NONE)
    blurred, rescored = sample(rounded, *args), sample(rounded, *args, exact)
    assert torch.equal(rescored, sample(true, *args))
    assert (blurred != rescored).sum() > 5


# -- filters ----------------------------------------------------------------------------------------------------------


def expected_mask(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], float]:
    """Kept ids in float64, and how far the nearest decision was from falling the other way (relative)."""
    largest = max(logits)
    weight = [math.exp((x - largest) / temperature) for x in logits]
    kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1] if top_k > 0 else -math.inf
    kept = {i for i, x in enumerate(logits) if x >= kth}
    margin = 1.0
    if top_p < 1:
        total, mass, crossing = sum(weight[i] for i in kept), 0.0, math.inf
        for level in sorted({logits[i] for i in kept}, reverse=True):
            if mass >= top_p * total:
                break
            crossing = level
            mass += sum(weight[i] for i in kept if logits[i] == level)
            margin = min(margin, abs(mass / (top_p * total) - 1))
        kept = {i for i in kept if logits[i] >= crossing}
    if min_p > 0:
        margin = min(margin, *(abs(w / min_p - 1) for w in weight))
    return {i for i in kept if weight[i] >= min_p}, margin


def random_case(generator: torch.Generator, rows: int, vocab: int, coarse: bool) -> tuple[Tensor, ...]:
    def pick(choices: list[float]) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=generator)]

    logits = torch.randn(rows, vocab, generator=generator) * pick([0.1, 2.0, 10.0])[:, None]
    if coarse:
        logits = (logits * 4).round() / 4  # many ties
    logits[torch.rand(rows, vocab, generator=generator) < 0.05] = -math.inf
    logits[:, 0] = 0.0
    return (
        logits,
        pick([0.1, 0.7, 1.0, 3.0]),
        pick([-1, 0, 1, 2, 5, vocab // 2, vocab, vocab + 9]).long(),
        pick([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
        pick([0.0, 0.01, 0.2, 1.0]),
    )


@pytest.mark.parametrize("vocab", [2, 37, 300])
@pytest.mark.parametrize("coarse", [False, True])
def test_equals_sorting(vocab: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    case = random_case(generator, 150, vocab, coarse)
    got = keep_mask(*case)
    checked = removed = 0
    for row, values in enumerate(zip(*(x.tolist() for x in case), strict=True)):
        want, margin = expected_mask(*values)
        if margin < 1e-5 and values[4] != 1.0:
            continue  # float32 may decide either way
        assert set(got[row].nonzero()[:, 0].tolist()) == want, values[1:]
        checked += 1
        removed += vocab - len(want)
    assert checked > 120 and removed > 80


def test_top_p_at_a_limit() -> None:
    """The float32 nearest to k / n asks for k or k + 1 of n tokens whose probabilities float32 cannot tell apart,
    though their logits differ: as many as whole numbers say."""
    asked = [(count, kept) for count in range(2, 60) for kept in range(1, count)]
    top_p = torch.tensor([kept / count for count, kept in asked])
    logits = torch.full((len(asked), 60), -math.inf)
    for row, (count, _) in enumerate(asked):
        logits[row, :count] = torch.arange(count) * -1e-12
    want = [math.ceil(Fraction(p) * count) for p, (count, _) in zip(top_p.tolist(), asked, strict=True)]
    assert {more - kept for more, (_, kept) in zip(want, asked, strict=True)} == {0, 1}
    zero = torch.zeros(len(asked))
    got = keep_mask(logits, torch.ones(len(asked)), zero.long(), top_p, zero)
    assert torch.equal(got, torch.arange(60) < torch.tensor(want)[:, None])


@pytest.mark.parametrize("k", [1, 2, 50, 1024, 5000, 49_151])
def test_top_k_of_a_real_vocabulary(k: int) -> None:
    logits = torch.randn(2, 49_152, generator=torch.Generator().manual_seed(k)) * 4
    one = torch.ones(2)
    got = keep_mask(logits, one, torch.tensor([k, 0]), one, torch.zeros(2))
    smallest = logits[0].topk(k).values[-1]
    # The gap to the maximum may round two logits onto one value: nothing else may be kept beyond the k largest.
    gap = logits[0].max() - logits[0]
    assert torch.equal(got[0], gap <= logits[0].max() - smallest)
    assert k <= got[0].sum() <= k + 3
    assert got[1].all()


def test_nothing_is_removed_when_off() -> None:
    logits = torch.linspace(-1000, 0, 500)[None].repeat(2, 1)  # most tokens underflow to probability 0
    off = keep_mask(logits, torch.full((2,), 0.5), torch.tensor([0, -1]), torch.ones(2), torch.zeros(2))
    assert off.all()


def test_signed_zeros_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0]])
    one = torch.ones(1)
    assert keep_mask(logits, one, torch.tensor([1]), one, torch.zeros(1)).tolist() == [[True, True, False]]


@pytest.mark.slow
@pytest.mark.further(vocab=[1000, 20_000])
@pytest.mark.parametrize("vocab", [1000, 1001, 20_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_mask_does_not_depend_on_the_batch(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = random_case(torch.Generator().manual_seed(vocab), 9, vocab, coarse=False)
        together = keep_mask(*case)
        assert not together.all()
        for rows in ([0], [8], [7, 2, 5]):
            assert torch.equal(keep_mask(*(x[rows] for x in case)), together[rows])
    finally:
        torch.set_num_threads(before)


def test_rows_without_a_maximum_do_no_harm() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    good = keep_mask(logits, torch.ones(3), torch.full((3,), 7), torch.full((3,), 0.9), torch.zeros(3))
    logits[0, 5] = math.nan
    logits[2] = -math.inf
    got = keep_mask(logits, torch.ones(3), torch.full((3,), 7), torch.full((3,), 0.9), torch.zeros(3))
    assert torch.equal(got[1], good[1])


# -- in C -------------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16]
TEMPERATURES = [0.01, 0.3, 0.8, 1.0, 2.0, 5.0]
Doubles = npt.NDArray[np.float64]


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
def test_the_best_are_those_of_float64(cpu_ops: CpuOps, dtype: torch.dtype, vocab: int, rows: int) -> None:
    """Wherever float64 puts more between two tokens than `epsilon`, a few roundings of the noise and of the sum."""
    logits, positions, seed, temperature, _ = random_rows(rows, vocab, dtype, vocab)
    count = min(8, vocab - 1)
    ids, added = cpu_ops.candidates(logits, positions, positions * 0, params(temperature, seed), NONE, count)
    only, _ = cpu_ops.candidates(logits, positions, positions * 0, params(temperature, seed), NONE, 1)
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


def test_noise_of_one_function_is_that_of_the_other(cpu_ops: CpuOps) -> None:
    _, positions, seed, _, _ = random_rows(60, 700, torch.float32, 0)
    nothing = torch.zeros(60, 1, 700)
    ids, added = cpu_ops.candidates(nothing, positions, positions * 0, params(torch.ones(60), seed), NONE, 16)
    assert torch.equal(added, cpu_ops.gumbel(seed, positions + 1, 700).gather(-1, ids))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("same_threads")
def test_a_row_does_not_see_the_others(cpu_ops: CpuOps, dtype: torch.dtype, top_p: float) -> None:
    logits, positions, seed, temperature, generator = random_rows(40, 5003, dtype, 7)
    temperature[::4] = 0.0
    own = params(temperature, seed, top_p=top_p)
    filtered = torch.arange(40) if top_p < 1 else NONE
    torch.set_num_threads(1)
    alone = [
        cpu_ops.candidates(
            logits[i : i + 1], positions[i : i + 1], positions[i : i + 1] * 0,
            SamplingRows(*(field[i : i + 1] for field in own)), filtered[:1], 8,
        )
        for i in range(40)
    ]  # fmt: skip
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        order = torch.randperm(40, generator=generator)
        shuffled = SamplingRows(*(field[order] for field in own))
        ids, added = cpu_ops.candidates(logits[order], positions[order], positions * 0, shuffled, filtered, 8)
        assert torch.equal(ids, torch.cat([alone[i][0] for i in order]))
        assert torch.equal(added, torch.cat([alone[i][1] for i in order]))
    # As nodes of trees: node n of row b stands depth further than its root.
    depth = torch.tensor([[0, 1, 1, 3]]).expand(10, 4)
    first = SamplingRows(*(field[:10] for field in own))
    ids, _ = cpu_ops.candidates(logits.view(10, 4, -1), positions[:10] + depth, depth, first, filtered[:10], 8)
    for n in range(4):
        one, _ = cpu_ops.candidates(
            logits.view(10, 4, -1)[:, n : n + 1], positions[:10] + depth[:, n : n + 1], depth[:, :1] * 0, first,
            filtered[:10], 8,
        )  # fmt: skip
        assert torch.equal(ids[:, n], one[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [8, 17, 129, 2000])
def test_ties_go_to_the_lowest_ids_in_c(cpu_ops: CpuOps, dtype: torch.dtype, vocab: int) -> None:
    """Greedy rows with few different logits."""
    x = torch.randint(-2, 3, (50, 2, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    x[3], x[4, 0] = 0.0, -0.0
    x[5, 0, -1] = 99.0
    zero = torch.zeros(50, 2, dtype=torch.int64)
    ids, added = cpu_ops.candidates(x, zero, zero, None, NONE, 8)
    want = x.double().sort(dim=-1, descending=True, stable=True).indices[..., :8].sort(-1).values
    assert torch.equal(ids, want) and not added.any()
    assert torch.equal(cpu_ops.candidates(x, zero, zero, None, NONE, 1)[0].squeeze(-1), x.double().argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.5, 0.1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinities(
    cpu_ops: CpuOps, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float
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
    ids, added = cpu_ops.candidates(x, zero, zero, own, torch.arange(6), 8)
    assert ids[0, 0].tolist() == list(range(8)) and added[0].eq(-math.inf).all()
    assert ids[1, 0].tolist() == [*range(7), 150] and added[1, 0].isfinite().tolist() == [False] * 7 + [True]
    assert ids[2, 0].tolist() == [*range(6), 9, 190] and added[2, 0].isfinite().sum() <= 2
    one = cpu_ops.candidates(x, zero, zero, own, torch.arange(6), 1)[0].flatten().tolist()
    assert one[:2] == [NOT_FINITE, 150] and one[2] in (9, 190) and one[3] == 7 | NOT_FINITE
    assert one[4] < 100 and one[5] == 77 | NOT_FINITE


def test_the_heaviest_candidate(cpu_ops: CpuOps) -> None:
    """The first of equals, as torch chooses; of NaN, too."""
    sampling = CpuSamplingOps(CpuRuntime(torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 10**6, (40, 5, 8), generator=generator)
    noise, logits = torch.randint(-3, 3, (2, 40, 5, 8), generator=generator).float()
    noise[torch.rand(noise.shape, generator=generator) < 0.2] = -math.inf
    noise[0] = -math.inf
    logits[1, :, 3:5] = math.nan
    best = (noise + logits).max(-1)
    wanted = ids.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1) + ~best.values.isfinite() * NOT_FINITE
    assert torch.equal(sampling.best_candidate(ids, noise, logits), wanted)
    first = sampling.best_candidate(ids[..., :1], noise[..., :1], logits[..., :1])
    assert torch.equal(first & TOKEN, ids[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_zeros_are_one_logit(cpu_ops: CpuOps, dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 100), -9.0).index_fill_(2, torch.arange(0, 4), 0.0)
    x[0, 0, [0, 2]] = -0.0
    x[0, 0, 4:20] = -torch.arange(1.0, 17.0)
    for top_k in (3, 4):
        own = params(torch.ones(1), torch.zeros(1, dtype=torch.int64), top_k)
        zero = torch.zeros(1, 1, dtype=torch.int64)
        _, added = cpu_ops.candidates(x.to(dtype), zero, zero, own, torch.arange(1), 16)
        assert added.isfinite().sum() == 4  # equals of the last one stay


FILTERS = {
    "k": (7, 1.0, 0.0), "k of all": (10**6, 1.0, 0.0), "large k": (700, 1.0, 0.0), "p": (0, 0.9, 0.0),
    "small p": (0, 1e-6, 0.0), "large p": (0, 0.999999, 0.0), "min p": (0, 1.0, 0.05), "min p 1": (0, 1.0, 1.0),
    "all": (60, 0.95, 0.02), "none": (0, 1.0, 0.0),
}  # fmt: skip


@pytest.mark.slower(dtype=torch.float32)
@pytest.mark.slower(name=["k of all", "large k", "small p", "large p", "min p 1"])
@pytest.mark.further(dtype=torch.float32, name=["k", "k of all", "p", "small p", "min p 1", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_torch(cpu_ops: CpuOps, dtype: torch.dtype, name: str) -> None:
    """A thousand mixed rows; the two differ in the last bits, so one in a thousand may be another token."""
    logits, positions, seed, temperature, generator = random_rows(1000, 777, dtype, 5)
    temperature[::7] = 0.0
    noisy = (temperature > 0).nonzero().flatten()
    filtered = noisy[torch.rand(len(noisy), generator=generator) < 0.5] if name != "none" else NONE
    own = params(temperature, seed, *FILTERS[name])
    depth = torch.arange(2).expand(500, 2)
    half = SamplingRows(*(field[:500] for field in own))
    args = (positions[:500] + depth, depth, 1, half, noisy[noisy < 500], filtered[filtered < 500], NONE)
    native = cpu_ops.sample(logits.view(500, 2, -1), *args)
    assert (native != TorchOps().sample(logits.view(500, 2, -1), *args)).sum() <= 1
