"""sample() against one row at a time in plain steps, and against the distribution it must have."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftwing.ops.torch.argmax import top_candidates
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
@pytest.mark.further(ops="torch", name=["top_p", "min_p"])  # "all" has them, too
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
