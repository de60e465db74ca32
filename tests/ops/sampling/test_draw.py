"""`TorchOps.draw`, what the rows of the table ask for, against the definitions in float64; and Triton's filters
against `keep_mask`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.noise import gumbel64
from torch import Tensor

from draftwing.core import NOT_FINITE, TOKEN
from draftwing.ops.sampling.spec import CANDIDATES, keep_mask
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Rescoring, SampleInputs, SamplingGroups, SamplingRows

CUDA = torch.cuda.is_available()
BANS = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Table(NamedTuple):
    """Sampling parameters as the row table keeps them; the last row is the dummy of padding."""

    seed: Tensor
    floats: Tensor  # temperature, top_p, min_p
    top_k: Tensor
    ban_until: Tensor
    ban_ids: Tensor
    kv_len: Tensor

    def to(self, device: torch.device) -> Table:
        return Table(*(field.to(device) for field in self))

    def sampling(self, rows: Tensor) -> SamplingRows:
        floats = self.floats[rows]
        return SamplingRows(
            self.seed[rows], floats[:, 0], self.top_k[rows], floats[:, 1], floats[:, 2], self.ban_until[rows],
            self.ban_ids[rows],
        )  # fmt: skip


def kept(
    x: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    """The tokens that top-k, top-p of what it leaves, and min-p leave; whoever ties with the last one stays."""
    p = np.exp((x - x.max()) / temperature)
    falling = np.sort(p)[::-1]
    least = falling[top_k - 1] if 0 < top_k <= len(p) else 0.0
    if top_p < 1:
        falling = falling[falling >= least]
        reached = falling.cumsum()
        least = falling[np.searchsorted(reached, top_p * reached[-1])]
    found: npt.NDArray[np.bool_] = (p >= least) & (p >= min_p)
    return found


def make_table(kinds: list[str], vocab: int, generator: torch.Generator) -> Table:
    """One row for each kind, letters: n noisy, k top-k, p top-p, m min-p, b banned."""
    count = len(kinds) + 1
    table = Table(
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.zeros(count, 3),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        torch.full((count, BANS), -1),
        torch.zeros(count, dtype=torch.int64),
    )
    for row, kind in enumerate(kinds):
        table.floats[row, 1] = 1.0
        if "n" in kind:
            table.floats[row, 0] = 0.3 + torch.rand((), generator=generator)
        if "k" in kind:
            table.top_k[row] = int(torch.randint(1, min(vocab, 200), (), generator=generator))
        if "p" in kind:
            table.floats[row, 1] = 0.2 + 0.75 * torch.rand((), generator=generator)
        if "m" in kind:
            table.floats[row, 2] = 0.01 + 0.3 * torch.rand((), generator=generator)
        if "b" in kind:
            table.ban_until[row] = 52  # positions of the tests begin at 50
            table.ban_ids[row, : BANS - 1] = torch.randint(0, vocab, (BANS - 1,), generator=generator)
    return table


class Case(NamedTuple):
    logits: Tensor  # [B, N, V]
    hidden: Tensor  # [B, N, H]
    weight: Tensor  # [V, H]
    positions: Tensor
    depth: Tensor
    rows: Tensor
    table: Table

    def expected(self, rescored: bool) -> Tensor:
        """One node after the other in float64, from the definitions."""
        return torch.tensor(
            [[self._chosen(b, n, rescored) for n in range(self.depth.shape[1])] for b in range(len(self.rows))]
        )

    def _chosen(self, b: int, n: int, rescored: bool) -> int:
        table, row = self.table, int(self.rows[b])
        x = self.logits[b, n].double().numpy().copy()
        if self.positions[b, n] + 1 < table.ban_until[row]:
            x[[i for i in table.ban_ids[row].tolist() if i >= 0]] = -math.inf
        temperature, top_p, min_p = table.floats[row].double().tolist()
        z, ids = x.copy(), np.arange(len(x))
        if temperature > 0:
            place = (self.positions[b, :1] + self.depth[b, n : n + 1] + 1).numpy()
            z += temperature * gumbel64(table.seed[row : row + 1].numpy(), place, ids)[0]
            z[~kept(x, temperature, int(table.top_k[row]), top_p, min_p)] = -math.inf
        if rescored:
            best = np.sort(np.argsort(-z, kind="stable")[:CANDIDATES])
            best = best[z[best] > -math.inf]
            true = self.weight.double().numpy()[best] @ self.hidden[b, n].double().numpy()
            return int(best[np.argmax(z[best] - x[best] + true)])
        return int(np.argmax(z))

    def drawing(self) -> SamplingGroups:
        """What the host knows of the rows."""
        params = self.table.sampling(self.rows)
        noisy = params.temperature > 0
        filtered = noisy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
        return SamplingGroups(*(which.nonzero().flatten() for which in (noisy, filtered, params.ban_until > 0)))

    def drawn(self, ops: TorchOps, rescored: bool, filtered: bool, apart: bool = False) -> Tensor:
        """apart: the weight is not where the logits are drawn from."""
        case = Case(*(part.to(ops.device) for part in self))

        def logits(hidden: Tensor, ids: Tensor) -> Tensor:
            return (case.weight[ids].double() * hidden.unsqueeze(-2).double()).sum(-1).float()

        unread = case.positions, case.positions.unsqueeze(2), case.positions  # of edits
        depth = case.depth, int(self.depth.max())
        return ops.draw(
            SampleInputs(case.rows, case.logits, case.hidden, case.positions, *depth, *unread), case.table,
            SamplingGroups(*(which.to(ops.device) for which in self.drawing())), filtered,
            Rescoring(case.hidden, None if apart else case.weight, logits) if rescored else None,
        ).cpu()  # fmt: skip


def make_case(
    kinds: list[str], nodes: int, vocab: int, dtype: torch.dtype, seed: int, size: int = 96, spread: float = 2.5
) -> Case:
    """A row of each kind in a shuffled order, then the dummy row twice."""
    generator = torch.Generator().manual_seed(seed)
    table = make_table(kinds, vocab, generator)
    rows = torch.cat((torch.randperm(len(kinds), generator=generator), torch.tensor([len(kinds)] * 2)))
    hidden = torch.randn(len(rows), nodes, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (spread / math.sqrt(size))
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = (hidden.float().flatten(0, 1) @ weight.float().T).view(len(rows), nodes, vocab).to(dtype)
    depth = torch.arange(nodes).add(1).log2().long().expand(len(rows), -1).contiguous()
    positions = 50 + torch.arange(len(rows))[:, None] % 3 + depth
    best = logits[:, 0].argmax(-1)
    for place, row in enumerate(rows.tolist()):
        if table.ban_until[row] > 0:
            table.ban_ids[row, 0] = best[place]
    return Case(logits, hidden, weight, positions, depth, rows, table)


MIXED = ["", "n", "nb", "b", "n"]
FILTERED = ["", "nk", "np", "n", "nm", "nkpm", "b", "nkb", "nkp", "npb"]
SIZES = [(1003, 3), (5, 2), (4096, 1)] + ([(128256, 1), (32000, 4), (50257, 3)] if CUDA else [])


@pytest.mark.further(ops="triton", vocab=[5, 4096])
@pytest.mark.further(ops="triton", dtype=[torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "nodes"), SIZES)
def test_mixed_rows(ops: TorchOps, vocab: int, nodes: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, nodes, vocab, dtype, seed=vocab + nodes)
    rescored = dtype.itemsize == 2
    expected = case.expected(rescored)
    assert torch.equal(case.drawn(ops, rescored, False), expected)
    assert torch.equal(case.drawn(ops, rescored, True), expected)  # no row has a filter
    if rescored:
        assert torch.equal(case.drawn(ops, rescored, False, apart=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "nodes"), [(128256, 2), (32000, 7), (5003, 2)] if CUDA else [(5003, 1)])
def test_filtered_rows(ops: TorchOps, vocab: int, nodes: int, dtype: torch.dtype) -> None:
    case = make_case(FILTERED, nodes, vocab, dtype, seed=vocab)
    rescored = dtype.itemsize == 2
    assert torch.equal(case.drawn(ops, rescored, True), case.expected(rescored))


@pytest.mark.skipif(not CUDA, reason="the interpreter would take minutes")
@pytest.mark.parametrize("kinds", [["n", "", "nb", "b"] * 16, ["nk", "np", "n", ""] * 16])
def test_a_tree_batch_of_real_size(ops: TorchOps, kinds: list[str]) -> None:
    case = make_case(kinds, 16, 32000, torch.bfloat16, seed=3, size=128)
    assert torch.equal(case.drawn(ops, True, True), case.expected(True))


def test_a_row_does_not_depend_on_its_batch(ops: TorchOps) -> None:
    case = make_case(FILTERED if CUDA else ["nkp", "n"], 2, 3001, torch.bfloat16, seed=12)
    together = case.drawn(ops, True, True)
    for place in range(len(case.rows) - 1):
        alone = Case(*(field[place : place + 1] for field in case[:2]), case.weight,
                     *(field[place : place + 1] for field in case[3:6]), case.table)  # fmt: skip
        assert torch.equal(alone.drawn(ops, True, True), together[place : place + 1])


def test_exact_products_decide_what_rounding_hides(ops: TorchOps) -> None:
    """Eight logits that round to one bfloat16: the true largest wins, and the lowest id among exact equals."""
    vocab, size = 2000, 64
    weight = torch.zeros(vocab, size)
    ids = torch.tensor([3, 77, 200, 201, 900, 1500, 1501, 1999])
    weight[ids, 0] = 1.0
    weight[ids, 1] = torch.tensor([0.0, 3.0, 1.0, 2.0, 7.0, 7.0, 0.0, 5.0]) / 256
    hidden = torch.zeros(1, 1, size)
    hidden[..., 0], hidden[..., 1] = 24.0, 1.0
    logits = torch.zeros(1, 1, vocab)
    logits[..., ids] = 24.0
    zero = torch.zeros(1, 1, dtype=torch.int64)
    table = make_table([""], vocab, torch.Generator())
    half = torch.bfloat16
    case = Case(logits.to(half), hidden.to(half), weight.to(half), zero, zero, torch.zeros(1, dtype=torch.int64), table)
    assert case.drawn(ops, True, False).item() == 900
    assert case.drawn(ops, False, False).item() == 3


def test_ties_go_to_the_lowest_id(ops: TorchOps) -> None:
    vocab = 3000
    logits = torch.full((4, 1, vocab), -1.0)
    logits[0, 0, [2999, 511, 140]] = 2.0
    logits[1, 0, [2047, 2048]] = 0.0
    logits[1, 0, 1999] = -0.0  # equals 0
    logits[2] = -math.inf
    zero = torch.zeros(4, 1, dtype=torch.int64)
    table = make_table(["", "", "", ""], vocab, torch.Generator())
    case = Case(logits, logits, logits, zero, zero, torch.arange(4), table)
    assert case.drawn(ops, False, False).flatten().tolist() == [140, 1999, NOT_FINITE, 0]


@pytest.mark.further(ops="triton", dtype=torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_logits_give_valid_ids(ops: TorchOps, dtype: torch.dtype) -> None:
    case = make_case(["", "npb", "nkm", "n"], 4, 2500, dtype, seed=9)
    case.logits[:, 0, ::3] = torch.nan
    case.logits[:, 0, 5] = math.inf
    case.logits[:, 1] = torch.nan
    case.logits[:, 2] = -math.inf
    case.hidden[:, 1] = torch.nan
    for rescored in (False, True) if CUDA else (dtype == torch.bfloat16,):
        drawn = case.drawn(ops, rescored, True)
        tokens, not_finite = drawn & TOKEN, (drawn & NOT_FINITE) != 0
        assert tokens.min() >= 0 and tokens.max() < 2500
        assert not_finite[:, 1:3].all() and not not_finite[:, 3].any()


@pytest.mark.further(vocab=1003)
@pytest.mark.further(dtype=torch.float32, listed=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("vocab", "nodes"), [(1003, 1), (5003, 1)] + ([(128256, 4)] if CUDA else []))
def test_limits_keep_what_keep_mask_keeps(
    device: torch.device,
    mended_interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
    vocab: int,
    nodes: int,
    listed: bool,
    dtype: torch.dtype,
) -> None:
    filters = pytest.importorskip("draftwing.ops.sampling.triton_filters")
    if not listed:  # as for many rows with flat logits
        monkeypatch.setattr(filters, "_LIST_WORDS", 1)
        monkeypatch.setattr(filters, "_MIN_LIST", 3)
    kinds = ["nk", "np", "nm", "nkp", "nkpm", "npm", "n", "np"]
    case = make_case(kinds, nodes, vocab, dtype, seed=vocab, spread=1.0)
    table = case.table
    table.floats[7, :2] = torch.tensor([2.0, 0.999])  # almost everything stays
    table.top_k[0] = vocab + 5  # off
    expected = kept_by_mask(case)
    found = filters.limits(
        case.logits.to(device), case.positions.to(device), case.rows.to(device), table.to(device)
    )  # fmt: skip
    assert torch.equal(kept_by_limits(case, found), expected)
    assert not expected[case.table.floats[case.rows, 2] > 0].all(-1).any()  # filters do filter


def kept_by_mask(case: Case) -> Tensor:
    rows, table = case.rows, case.table
    vocab, nodes = case.logits.shape[-1], case.positions.shape[1]
    floats = table.floats[rows].repeat_interleave(nodes, 0)
    top_k = table.top_k[rows].repeat_interleave(nodes)
    greedy = floats[:, 0] == 0
    kept = keep_mask(
        case.logits.float().view(-1, vocab), floats[:, 0].where(~greedy, 1), top_k, floats[:, 1], floats[:, 2]
    )  # fmt: skip
    return (kept | greedy[:, None]).view(len(rows), nodes, vocab)


def kept_by_limits(case: Case, found: Any) -> Tensor:
    gap = found.top.cpu()[:, None] - case.logits.float().view(len(found.top), -1)
    return (gap.view(torch.int32) <= found.limit.cpu()[:, None]).view(case.logits.shape)


def test_limits_at_ties(device: torch.device, mended_interpreter: None) -> None:
    """Four equal probabilities, two of them asked for by top-k or top-p: all ties of the last one stay."""
    filters = pytest.importorskip("draftwing.ops.sampling.triton_filters")
    vocab = 1003
    logits = torch.full((5, 1, vocab), -20.0)
    logits[:, 0, [3, 700, 701, 1002]] = 4.0
    logits[:, 0, 50] = 5.0
    logits[4, 0, 60:90] = 5.0
    zero = torch.zeros(5, 1, dtype=torch.int64)
    table = make_table(["n"] * 5, vocab, torch.Generator())
    table.floats[:, 0] = 1.0
    table.top_k[0], table.top_k[1] = 3, 1
    table.floats[2, 1], table.floats[3, 2], table.floats[4, 1] = 0.6, 1.0, 1e-9
    case = Case(logits, logits, logits, zero, zero, torch.arange(5), table)
    found = filters.limits(logits.to(device), zero.to(device), case.rows.to(device), table.to(device))
    kept = kept_by_limits(case, found)
    assert kept.sum(-1).flatten().tolist() == [5, 1, 5, 1, 31]
    assert torch.equal(kept, kept_by_mask(case))
