"""sample() against one row at a time in plain steps, and against the distribution it must have."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftwing.ops.torch.argmax import top_candidates
from draftwing.ops.torch.filters import keep_mask
from draftwing.ops.torch.noise import gumbel
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.torch.sampling import first_argmax
from draftwing.ops.types import SamplingRows


@pytest.fixture
def sample(ops: TorchOps) -> Callable[..., Tensor]:
    """`SamplingOps.sample` of the implementations that have one of their own."""
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


def one_by_one(
    logits: Tensor, positions: Tensor, params: SamplingRows, noisy: list[int], filtered: list[int], banning: list[int]
) -> list[list[int]]:
    tokens: list[list[int]] = []
    for b in range(logits.shape[0]):
        tokens.append([])
        for n in range(logits.shape[1]):
            x = logits[b, n].float().clone()
            position = int(positions[b, n]) + 1
            if b in banning and position < params.ban_until[b]:
                for i in params.ban_ids[b].tolist():
                    if i >= 0:
                        x[i] = -math.inf
            if b in noisy:
                z = x + params.temperature[b] * gumbel(params.seed[b : b + 1], torch.tensor([[position]]), len(x))[0, 0]
                if b in filtered:
                    limits = (f[b : b + 1] for f in (params.temperature, params.top_k, params.top_p, params.min_p))
                    z[~keep_mask(x[None], *limits)[0]] = -math.inf
                x = z
            tokens[-1].append(x.tolist().index(x.max().item()))
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [100, 1024])
@pytest.mark.parametrize(
    ("noisy", "filtered", "banning"),
    [
        ([], [], []),
        ([], [], [1, 3]),
        ([0, 2, 3], [], [0]),
        ([0, 2, 3], [2], [2, 1]),
        ([3, 0, 2], [2, 3], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [1, 3], [3]),
        ([2, 0, 1, 3], [3, 1, 0, 2], []),
    ],
)
def test_mixed_batches(
    sample: Callable[..., Tensor],
    dtype: torch.dtype,
    vocab: int,
    noisy: list[int],
    filtered: list[int],
    banning: list[int],
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    depth = torch.tensor([[0, 1, 1, 2, 0]] * 4)
    positions = torch.tensor([[4], [10], [3], [900]]) + depth
    logits = (torch.randn(4, 5, vocab, generator=generator) * 2).to(dtype)
    best = logits.float().argmax(-1)[:, 0]
    params = rows([0.7 if b in noisy else 0.0 for b in range(4)], [5, 2**62, 7, 0], top_k=20, top_p=0.8)
    params = params._replace(
        ban_until=torch.tensor([6, 11, 5, 2000]), ban_ids=torch.stack((best, torch.full((4,), -1), best * 0), -1)
    )
    before = logits.clone()
    index = [torch.tensor(x, dtype=torch.int64) for x in (noisy, filtered, banning)]
    got = sample(logits, positions, depth, 2, params, *index)
    assert got.dtype == torch.int64
    assert got.tolist() == one_by_one(logits, positions, params, noisy, filtered, banning)
    assert torch.equal(logits, before)
    for b in banning:
        if positions[b, 0] + 1 < params.ban_until[b]:
            assert got[b, 0] != best[b]
    if noisy and not banning:
        assert not torch.equal(got, logits.float().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 50, 192, 1000, 4096, 49_152])
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
@pytest.mark.parametrize("name", CASES)
def test_frequencies(sample: Callable[..., Tensor], name: str) -> None:
    temperature, top_k, top_p, min_p = CASES[name]
    n, vocab = 24_000, 40
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
