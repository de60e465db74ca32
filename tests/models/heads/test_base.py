"""The copy of an lm_head in fewer bits that drafts of few rows multiply with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from group_ops import GroupTorchOps
from thread_ranks import meet
from torch import Tensor

from draftwing.layers.linear import Linear, vocab_parallel
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.heads.base import MOST_ROWS, RESCORED, for_rows, linear_of, quantized_copy
from draftwing.parallel.ranks import Ranks

OPS = GroupTorchOps(torch.device("cpu"))
ROWS, COLUMNS = 272, 192  # 192: one and a half groups of 128


def weight_of(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    return (made * torch.linspace(0.1, 3, rows)[:, None]).bfloat16()


def lm_head_of(weight: Tensor, ranks: Ranks | None = None) -> Linear:
    """A packed one; over ranks that rank's share of it."""
    if ranks is None:
        made = linear_of(weight, None, DENSE)
    else:
        start, size, whole = ranks.share(len(weight))
        made = vocab_parallel(linear_of(weight[start : start + size], None, DENSE), ranks, whole)
    made.pack(OPS)
    return made


def by_row(weight: np.ndarray) -> np.ndarray:
    """Rounded to the nearest of 255 multiples of a scale for each row, which is in bfloat16."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 127).bfloat16().double().numpy()
    return np.rint(weight / scales).clip(-128, 127) * scales


@pytest.mark.parametrize("step", [64, 1 << 14])
def test_few_rows_have_the_rounded_weight_and_more_the_weight(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.models.heads.base._STEP", step)  # 272 rows are four parts and a rest
    weight = weight_of()
    lm_head = lm_head_of(weight)
    copy = quantized_copy(lm_head, "int8", OPS)
    assert copy is not None
    x = torch.randn(MOST_ROWS + 1, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    for rows in (1, MOST_ROWS):
        found = for_rows(rows, lm_head, copy)(x[:rows]).double().numpy()
        expected = x[:rows].double().numpy() @ by_row(weight.double().numpy()).T
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01 * expected.std())
    assert torch.equal(for_rows(len(x), lm_head, copy)(x), lm_head(x))
    assert for_rows(1, lm_head, None) is lm_head


@pytest.mark.parametrize(("scheme", "error"), [("int8", 0.02), ("w4a16", 0.15)])
def test_errors_of_logits(scheme: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.models.heads.base.RESCORED", {})
    lm_head = lm_head_of(weight_of())
    copy = quantized_copy(lm_head, scheme, OPS)
    assert copy is not None and 2 * copy.op.sizes.total() < 1.1 * lm_head.weight.nbytes
    x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = lm_head(x).double()
    assert 0 < float((copy(x) - exact).std() / exact.std()) < error


def test_the_largest_of_4_bits_are_those_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, count = weight_of(), RESCORED["w4a16"]
    copy = quantized_copy(lm_head_of(weight), "w4a16", OPS)
    monkeypatch.setattr("draftwing.models.heads.base.RESCORED", {})
    plain = quantized_copy(lm_head_of(weight), "w4a16", OPS)
    assert copy is not None and plain is not None
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
    found, few, exact = copy(x), plain(x), (x.double() @ weight.double().T).bfloat16()
    chosen = few.argsort(1, descending=True)[:, :count]
    assert torch.equal(found.gather(1, chosen), exact.gather(1, chosen))
    assert torch.equal(found.scatter(1, chosen, 0), few.scatter(1, chosen, 0))
    assert not torch.equal(few.gather(1, chosen), exact.gather(1, chosen))


@pytest.mark.parametrize("scheme", ["int8", "w4a16"])
def test_each_rank_has_its_share(scheme: str) -> None:
    weight, x = weight_of(), torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(4)).bfloat16()
    alone = quantized_copy(lm_head_of(weight), scheme, OPS)
    copies = [quantized_copy(lm_head_of(weight, ranks), scheme, OPS) for ranks in meet(17)]  # 16 rows each
    assert alone is not None and len(copies) == 17
    with ThreadPoolExecutor(len(copies)) as threads:
        for found in threads.map(lambda copy: copy(x), copies):
            assert torch.equal(found, alone(x))


def test_what_has_no_copy() -> None:
    """Rows and columns that the kernels do not take, and what is in fewer bits already."""
    for shape in ((ROWS + 1, COLUMNS), (ROWS, COLUMNS + 32)):
        assert quantized_copy(lm_head_of(weight_of(*shape)), "int8", OPS) is None
    own = linear_of(weight_of(), None, GroupFormat("int8", OPS))
    own.pack(OPS)
    assert quantized_copy(own, "w4a16", OPS) is None
