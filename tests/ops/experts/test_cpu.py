"""Mixtures of experts in one call on the CPU, against float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.runtime import Spare
from draftwing.ops.cpu.tape import Recording, record
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.experts.cpu import _SLICE, NativeMixture, can_mix
from draftwing.ops.experts.routing import MixtureWeights, Routing, WholeMixture
from draftwing.ops.gemm.stored import BlockRows

Array = npt.NDArray[np.float64]


class Case(NamedTuple):
    count: int = 6
    top_k: int = 3
    hidden: int = 256
    ffn: int = 96
    kinds: tuple[str, str, str] = ("Q8_0", "Q8_0", "Q4_0")  # of gates, ups and down
    biases: bool = False
    renormalise: bool = True
    limit: float = 0.0
    dtype: torch.dtype = torch.float32
    sigmoid: bool = False
    corrected: bool = False
    groups: tuple[int, int] = (1, 1)  # and of them those that are chosen
    wide: bool = False  # the router
    scale: float = 1.0
    beside: bool = (
        False  # as Gemma 4's: GELU, weights of rows with a factor of each expert, a router that reads another
    )
    ungated: bool = False  # squares of ReLU
    by: int = 0  # size of what the router reads, where that is another

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k, self.renormalise, self.sigmoid, *self.groups, self.scale, corrected=self.corrected)


CASES = {
    "plain": Case(),
    "of all": Case(renormalise=False),
    "half": Case(dtype=torch.bfloat16),
    "gpt-oss": Case(32, 4, 288, 288, ("MXFP4", "MXFP4", "MXFP4"), True, True, 7.0),
    "gpt-oss, half": Case(32, 4, 288, 288, ("MXFP4", "MXFP4", "MXFP4"), True, True, 7.0, torch.bfloat16),
    "Qwen3": Case(72, 8, 256, 256, ("Q4_K", "Q4_K", "Q4_K")),
    "two kinds": Case(kinds=("Q4_K", "Q8_0", "MXFP4"), biases=True),
    "one expert": Case(count=1, top_k=1),
    "sigmoids": Case(sigmoid=True, scale=2.5),
    "sigmoids as they are": Case(count=21, top_k=5, renormalise=False, sigmoid=True),
    "groups": Case(count=24, top_k=4, sigmoid=True, groups=(6, 2), scale=2.5, wide=True),
    "groups of one, half": Case(count=6, top_k=2, sigmoid=True, groups=(6, 3), dtype=torch.bfloat16, wide=True),
    "groups of logits": Case(count=24, top_k=4, renormalise=False, groups=(6, 2), scale=16.0, wide=True),
    "scaled": Case(scale=0.5),
    "corrected": Case(count=21, top_k=5, renormalise=False, corrected=True, wide=True, scale=2.5),
    "corrected, half": Case(count=21, top_k=5, corrected=True, dtype=torch.bfloat16, wide=True),
    "odd number": Case(count=21, top_k=5),
    "gemma4": Case(count=21, top_k=5, beside=True),
    "nemotron": Case(count=24, top_k=5, sigmoid=True, scale=2.5, wide=True, ungated=True),
    "nemotron, latents, half": Case(
        count=21, top_k=5, dtype=torch.bfloat16, sigmoid=True, wide=True, ungated=True, by=96
    ),
}


class Mixture:
    """A case's weights, also in float64."""

    def __init__(self, cpu_ops: CpuOps, case: Case) -> None:
        self.case, count, hidden, ffn = case, case.count, case.hidden, case.ffn
        self._random = torch.Generator().manual_seed(0)
        size = case.by or hidden
        self.router, self.router_bias = self.some(count, size) * (3 / size**0.5), self.some(count)
        if case.wide:  # of more bits than those of x
            self.router = self.router.float() + 2**-11 * torch.randn(count, size, generator=self._random)
        self.correction = torch.randn(count, generator=self._random) if case.routing.has_correction else None
        if case.corrected and self.correction is not None:
            self.correction /= 10
        self.biases = self.some(count * (1 if case.ungated else 2) * ffn), self.some(count * hidden)
        gate, up, down = case.kinds
        made = (up,) if case.ungated else (gate, up)
        ups = [[self._blocks(cpu_ops, kind, ffn, hidden) for kind in made] for _ in range(count)]
        downs = [[self._blocks(cpu_ops, down, hidden, ffn)] for _ in range(count)]
        self.ups, self.downs = ([np.concatenate([_dense(p) for p in one]) for one in each] for each in (ups, downs))
        gemms = [[cpu_ops.block_gemm(one, case.dtype) for one in each] for each in (ups, downs)]
        biases = self.biases if case.biases else (None, None)
        bias = self.router_bias if case.biases else None
        more = biases, case.routing, case.limit
        self.scales = torch.rand(count, generator=self._random) + 0.5 if case.beside else None
        more = *more, self.scales, case.beside, not case.ungated
        self.weights = MixtureWeights(self.router, bias, self.correction, gemms[0], gemms[1], *more)

    def some(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.case.dtype)

    def _blocks(self, cpu_ops: CpuOps, kind: str, rows: int, columns: int) -> BlockRows:
        """Values of such a size that a product with a normal row is about normal."""
        if kind != "MXFP4":
            return cpu_ops.quantize(torch.randn(rows, columns, generator=self._random) * columns**-0.5, kind)
        data = torch.randint(0, 256, (rows, columns // 32, 17), dtype=torch.uint8, generator=self._random)
        data[:, :, 0] = 121
        return BlockRows(kind, data.flatten(1), columns)

    def made(self, cpu_ops: CpuOps) -> WholeMixture:
        found = cpu_ops.whole_mixture(self.weights)
        assert found is not None
        return found

    def exact(self, x: Tensor, residual: Tensor | None, by: Tensor | None = None) -> Array:
        """Row by row, as such layers are described; what GEMMs read is rounded to 8 bits. by: what the router reads,
        None: x."""
        read = (x if by is None else by).double().numpy()
        case, found = self.case, []
        for i, row in enumerate(x.double().numpy()):
            logits = self.router.double().numpy() @ read[i]
            logits += self.router_bias.double().numpy() if case.biases else 0
            order, odds = self.routed(logits)
            total = np.zeros(case.hidden) if residual is None else residual[i].double().numpy()
            found.append(total + sum(odds[e] * self._expert(e, in_8_bits(row)) for e in order))
        return np.stack(found)

    def routed(self, logits: Array) -> tuple[list[int], Array]:
        """The experts of a row, and weights of all of them."""
        case = self.case
        odds = np.exp(logits - logits.max())
        scores, (groups, chosen) = logits, case.groups
        if self.correction is not None:
            odds = 1 / (1 + np.exp(-logits)) if case.sigmoid else odds / odds.sum()
            scores = odds + self.correction.double().numpy()
        by_group = np.sort(scores.reshape(groups, -1), 1)[:, -1 - case.sigmoid :].sum(1)
        best = np.argsort(-by_group)[:chosen]
        every = np.isin(np.arange(case.count) // (case.count // groups), best)
        order = sorted(np.flatnonzero(every).tolist(), key=lambda e: (-scores[e], e))[: case.top_k]
        whole = odds[order].sum() if case.renormalise else 1 if case.sigmoid else odds.sum()
        return order, odds / whole * case.scale * (1 if self.scales is None else self.scales.double().numpy())

    def _expert(self, expert: int, row: Array) -> Array:
        case = self.case
        biases = [bias.double().numpy().reshape(case.count, -1)[expert] * case.biases for bias in self.biases]
        made = self.ups[expert] @ row + biases[0]
        gate, up = (made, made) if case.ungated else np.split(made, 2)
        if case.ungated:
            inner = np.maximum(up, 0) ** 2
        elif case.limit:
            gate, up = np.minimum(gate, case.limit), np.clip(up, -case.limit, case.limit)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        elif case.beside:
            inner = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
        else:
            inner = gate / (1 + np.exp(-gate)) * up
        found: Array = self.downs[expert] @ in_8_bits(inner) + biases[1]
        return found


def _dense(part: BlockRows) -> Array:
    return dequantize(part.data.numpy(), GGMLQuantizationType[part.kind]).astype(np.float64)


def in_8_bits(row: Array) -> Array:
    """127 steps of the largest of each 32."""
    parts = row.reshape(-1, 32)
    scale = np.abs(parts).max(1, keepdims=True) / 127
    return np.asarray(np.rint(parts / scale) * scale).reshape(-1)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in CASES]
)
def mixture(cpu_ops: CpuOps, request: pytest.FixtureRequest) -> Mixture:
    return Mixture(cpu_ops, CASES[request.param])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_mixtures(cpu_ops: CpuOps, mixture: Mixture, rows: int) -> None:
    x = mixture.some(rows, mixture.case.hidden)
    residual = mixture.some(rows, mixture.case.hidden) if rows > 1 else None
    case = mixture.case
    by = mixture.some(rows, case.by or case.hidden) if case.beside or case.by else None
    found = mixture.made(cpu_ops)(x, residual, None, by)
    exact = mixture.exact(x, residual, by)
    assert found.dtype == x.dtype
    size = np.linalg.norm(exact - (0 if residual is None else residual.double().numpy()), axis=1)
    off = np.linalg.norm(found.double().numpy() - exact, axis=1) / size
    # A step of 8 bits where both round apart; in bfloat16 each result between GEMMs is rounded, and so are logits.
    assert off.max() < (0.03 if x.dtype == torch.bfloat16 else 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "half", "groups of one, half", "nemotron, latents, half"])
def test_a_row_has_the_same_bits_among_any_number_and_any_threads(cpu_ops: CpuOps, name: str) -> None:
    mixture, before, rows = Mixture(cpu_ops, CASES[name]), torch.get_num_threads(), _SLICE + 70
    x, residual = mixture.some(rows, mixture.case.hidden), mixture.some(rows, mixture.case.hidden)
    by = mixture.some(rows, mixture.case.by) if mixture.case.by else x
    whole = mixture.made(cpu_ops)(x, residual, None, by)
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            again = mixture.made(cpu_ops)
            for size in (1, 2, 8, 9, 33, rows):
                parts = list(zip(x.split(size), residual.split(size), by.split(size), strict=True))[:12]
                found = [again(one, added, None, read) for one, added, read in parts]
                assert torch.equal(torch.cat(found), whole[: size * len(parts)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_what_calls_need_on_the_way_is_kept(cpu_ops: CpuOps) -> None:
    """A piece for each thread that is there at once; what is recorded has its own."""
    spare = Spare()
    with spare.of(1 << 20) as kept, spare.of(1 << 10) as second:
        assert kept.data_ptr() != second.data_ptr()
    with spare.of(1 << 26) as more:
        assert len(more) >= 1 << 26
    with spare.of(1) as first, spare.of(1) as second:
        assert {len(first), len(second)} == {1 << 10, 1 << 26}
    mixture = Mixture(cpu_ops, CASES["plain"])
    made = NativeMixture(mixture.weights, spare, Workers())
    for rows in (1, 8, 40):
        x = mixture.some(rows, mixture.case.hidden)
        recording, found = record(lambda x=x: made(x, None, None))  # type: ignore[misc]
        assert isinstance(recording, Recording)
        expected = found.clone()
        made(mixture.some(_SLICE + 70, mixture.case.hidden), None, None)
        with spare.of(1) as between:
            between.fill_(255)
        recording.replay()
        assert torch.equal(found, expected)
        with spare.of(1) as between:
            assert between.eq(255).all(), "it does not write there"


def test_equal_logits_go_to_the_first_experts(cpu_ops: CpuOps) -> None:
    mixture = Mixture(cpu_ops, Case(count=5, top_k=2))
    mixture.router[:] = mixture.router[0].clone()
    x = mixture.some(4, mixture.case.hidden)
    np.testing.assert_allclose(mixture.made(cpu_ops)(x, None, None), mixture.exact(x, None), atol=0.02)


@pytest.mark.parametrize("name", ["plain", "groups"])
@pytest.mark.slower(name="groups")
def test_what_is_no_number_stays_in_its_row(cpu_ops: CpuOps, name: str) -> None:
    mixture = Mixture(cpu_ops, CASES[name])
    x = mixture.some(12, mixture.case.hidden)
    whole = mixture.made(cpu_ops)(x, None, None)
    for bad in (torch.nan, torch.inf):
        x[5, 40] = bad
        found = mixture.made(cpu_ops)(x, None, None)
        assert found[5].isnan().all() and torch.equal(found[6:], whole[6:]) and torch.equal(found[:5], whole[:5])


@pytest.mark.parametrize(("sigmoid", "groups"), [(False, (1, 1)), (True, (7, 3))])
@pytest.mark.slower(sigmoid=False)
def test_scattered_rows_choose_as_elsewhere(cpu_ops: CpuOps, sigmoid: bool, groups: tuple[int, int]) -> None:
    """Which reads as many experts as tokens that have nothing in common do."""
    mixture = Mixture(cpu_ops, Case(count=21, top_k=5, sigmoid=sigmoid, groups=groups))
    scatter = torch.ones(1, dtype=torch.int32)
    x = mixture.some(7, mixture.case.hidden)
    routed = cpu_ops.route(torch.zeros(7, 21), mixture.case.routing, mixture.correction, scatter=scatter)
    rows = []
    for row, experts, shares in zip(x.double().numpy(), routed.experts.tolist(), routed.weights.tolist(), strict=True):
        parts = [share * mixture._expert(e, in_8_bits(row)) for e, share in zip(experts, shares, strict=True)]
        rows.append(np.sum(parts, 0))
    np.testing.assert_allclose(mixture.made(cpu_ops)(x, None, scatter), np.stack(rows), atol=0.02)
    assert torch.equal(mixture.made(cpu_ops)(x, None, scatter * 0), mixture.made(cpu_ops)(x, None, None))


def test_what_it_does_not_take(cpu_ops: CpuOps) -> None:
    """Experts of which one is not in blocks."""
    mixture = Mixture(cpu_ops, CASES["plain"])
    assert can_mix(mixture.weights)
    assert not can_mix(mixture.weights._replace(down=[None] * 6))
    assert not can_mix(mixture.weights._replace(gate_up=[*mixture.weights.gate_up[:5], None]))
    assert mixture.made(cpu_ops)(torch.empty(0, 256), None, None).shape == (0, 256)
