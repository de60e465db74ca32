"""Rows that are taken, put and joined, and logits of some of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layer_numbers import made

from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.table import TorchOps

pytestmark = pytest.mark.usefixtures("poisoned")


def test_concat_columns(dtype: torch.dtype, ops: TorchOps) -> None:
    whole = made(ops, dtype, 4, 90)
    parts = whole[:, 5:38], whole[:, 40:41], whole[::1, 60:].contiguous()
    for some in (parts, parts[:2], parts[:1]):
        assert torch.equal(ops.concat_columns(*some), torch.cat(some, 1))


@pytest.mark.parametrize("rows", [1, 20])
def test_put_rows(rows: int, dtype: torch.dtype, ops: TorchOps) -> None:
    index = torch.randperm(50, generator=torch.Generator().manual_seed(rows))[:rows].to(ops.device)
    source, before = made(ops, dtype, rows, 2 * 6, seed=1)[:, :6], made(ops, dtype, 50, 6, seed=2)
    target = before.clone()
    ops.put_rows(target, index, source)
    at = {int(one): i for i, one in enumerate(index)}
    assert all(torch.equal(target[i], source[at[i]] if i in at else before[i]) for i in range(50))


@pytest.mark.parametrize("shape", [(1,), (2, 3, 4)])
def test_take_rows(shape: tuple[int, ...], dtype: torch.dtype, ops: TorchOps) -> None:
    index = torch.tensor([6, 0, 0, 3], device=ops.device)
    for source in (made(ops, dtype, 7, *shape), made(ops, dtype, 14, *shape)[::2]):
        for some in (index, index[::2], index[:0]):
            assert torch.equal(ops.take_rows(source, some), source[some])
    alone = made(ops, dtype, 1, 5, 4)[:, 2]  # contiguous, whatever its stride
    assert alone.is_contiguous() and alone.stride(0) == 20
    assert torch.equal(ops.take_rows(alone, torch.zeros_like(index)), alone.expand(4, 4))
    if ops.name == "cpu":
        for wrong in (-1, 7):
            with pytest.raises(IndexError):
                ops.take_rows(made(ops, dtype, 7, *shape), torch.tensor([2, wrong]))


def test_row_numbers(ops: TorchOps) -> None:
    table, rows = torch.tensor([0, 3, 1, 2], device=ops.device), torch.tensor([3, 0, 1], device=ops.device)
    for some in (rows, rows.repeat_interleave(2)[::2]):
        assert ops.row_numbers(table, some, 2).tolist() == [2, 2, 0, 0, 3, 3]
        one = ops.row_numbers(table, some[:1], 4)
        assert one.tolist() == [2] * 4 and one.is_contiguous()  # as kernels read them
        added = torch.tensor([10, 20, -5, 1 << 40, 30, 0], device=ops.device)
        assert ops.row_numbers(table, some, 2, added).tolist() == [12, 22, -5, 1 << 40, 33, 3]
    for added in (None, rows[:0]):
        assert ops.row_numbers(table, rows[:0], 2, added).shape == (0,)


@pytest.mark.parametrize("size", [100, 2048])
def test_share_rows(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    whole = made(ops, dtype, 10, size)
    index = torch.tensor([0, 9, 4, 3, 7, 6, 4], device=ops.device)
    for begin, end in ((0, 4), (4, 7), (7, 10), (0, 10)):
        found = ops.share_rows(whole[begin:end], index, begin)
        there = ((index >= begin) & (index < end)).unsqueeze(1)
        assert torch.equal(found, torch.where(there, whole[index], torch.zeros_like(whole[index])))


# -- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.further(ops="triton", dtype=[torch.float16, torch.float32])
@pytest.mark.further(ops="triton", size=40)
@pytest.mark.parametrize("size", [40, 1030])
def test_exact_logits(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    weight = made(ops, dtype, 90, size)
    generator = torch.Generator().manual_seed(2)
    for shape in ((3,), (2, 2)):
        hidden = made(ops, dtype, *shape, 2 * size, seed=1)[..., :size]
        ids = torch.randint(0, 90, (*shape, 8), generator=generator).to(ops.device)
        found = ops.exact_logits(hidden, weight, ids)
        assert found.dtype == torch.float32
        expected = (weight.double()[ids] * hidden.double().unsqueeze(-2)).sum(-1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        parts = [ops.share_logits(hidden, weight[begin : begin + 45].clone(), ids, begin) for begin in (0, 45)]
        assert torch.equal(parts[0] + parts[1], found)  # each is 0 but in one of them
        if len(shape) == 1:
            torch.testing.assert_close(ops.every_logit(hidden, weight).gather(1, ids), found, rtol=1e-5, atol=1e-4)
            every = ops.every_logit(hidden, weight.float())  # of a wide weight
            torch.testing.assert_close(every.gather(1, ids), found, rtol=1e-5, atol=1e-4)
            assert not ops.sums_logits or torch.equal(ops.every_logit(hidden[-1:], weight.float())[0], every[-1])
            assert ops.exact_logits(hidden[:0], weight, ids[:0]).shape == (0, 8)
        if ops.name != "torch":  # a logit has the same bits among others
            alone = ops.exact_logits(hidden[-1:, ...].clone(), weight, ids[-1:, ..., 3:4].clone())
            assert torch.equal(alone, found[-1:, ..., 3:4])
            strided = hidden.transpose(0, -2).contiguous().transpose(0, -2)
            assert torch.equal(ops.exact_logits(strided, weight, ids), found)


@pytest.mark.parametrize("size", [40, pytest.param(2056, marks=pytest.mark.exhaustive)])
def test_every_logit_of_many_rows(size: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """So many that a device may sum them in another way than one."""
    weight, hidden = made(ops, torch.float32, 19, size), made(ops, dtype, 131, 2 * size, seed=1)[:, :size]
    found = ops.every_logit(hidden, weight)
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    if ops.name != "torch":  # whose sums depend on the number of rows
        alone = [ops.every_logit(hidden[i : i + 1], weight) for i in (0, 3, 4, 130)]
        assert torch.equal(torch.cat(alone), found[[0, 3, 4, 130]])


def test_logits_of_a_few_clusters(dtype: torch.dtype, ops: TorchOps) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.stack([torch.randperm(37, generator=generator) for _ in range(3)])
    ordering = torch.randperm(37 * 5, generator=generator)
    given = (scores / 8).to(ops.device, dtype), 4, ordering.to(ops.device)
    ids = ops.cluster_tokens(*given).cpu()
    best = np.argsort(-scores.numpy())[:, :4]
    expected = ordering.numpy().reshape(37, 5)[best].reshape(3, 20)
    assert np.array_equal(np.sort(ids.numpy()), np.sort(expected))
    if isinstance(ops, CpuOps) and dtype != torch.float16:  # of equals the lower one comes first; torch has no order
        tied = ops.cluster_tokens((scores // 4).to(dtype), 20, ordering)
        best = np.argsort(-(scores // 4).numpy(), kind="stable")[:, :20]
        assert np.array_equal(tied.numpy(), ordering.numpy().reshape(37, 5)[best].reshape(3, 100))
    found = torch.randn(3, 20, generator=generator).to(ops.device)
    logits = ops.spread_logits(found, ids.to(ops.device), 37 * 5, dtype).cpu()
    assert logits.dtype == dtype
    for row, some, values in zip(logits, ids.tolist(), found.cpu().to(dtype), strict=True):
        wanted = (values.min() - 1).repeat(37 * 5)
        wanted[some] = values
        assert torch.equal(row, wanted)
    none = ids[:0].to(ops.device)
    assert ops.cluster_tokens(given[0][:0], *given[1:]).shape == none.shape
    assert ops.spread_logits(found[:0], none, 37 * 5, dtype).shape == (0, 37 * 5)


@pytest.mark.further(vocab=[16, 5003])
@pytest.mark.parametrize(("vocab", "count", "group"), [(16, 16, 1), (272, 16, 16), (5003, 8, 128)])
def test_the_largest_of_groups(vocab: int, count: int, group: int, ops: TorchOps) -> None:
    """Torch finds the largest of all; Triton, of each group of neighbours the largest. Of equal ones the first comes
    first there."""
    if ops.name != "triton":
        group = 1
    wide = torch.randn(3, vocab + 5, generator=torch.Generator().manual_seed(vocab)).mul_(8)
    wide[1] = wide[1].round()  # many are equal
    wide[2, 7:] = -torch.inf
    logits = wide.to(ops.device)[:, :vocab]
    found, x = ops.largest(logits, count).cpu(), logits.cpu().numpy()
    for row in [0, 1, 2] if ops.name == "triton" else [0]:
        best = [start + int(x[row, start : start + group].argmax()) for start in range(0, vocab, group)]
        expected = sorted(best, key=lambda i: (-x[row, i], i))[:count]
        np.testing.assert_array_equal(found[row].numpy(), expected)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000])  # of both signs
def test_ids_are_tokens_where_logits_are_not_finite(bits: int, ops: TorchOps) -> None:
    logits = torch.full((2, 272), bits, dtype=torch.int32, device=ops.device).view(torch.float32)
    logits[1, ::3] = 1
    found = ops.largest(logits, 16)
    assert int(found.min()) >= 0 and int(found.max()) < 272
