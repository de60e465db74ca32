"""What adapters add to products, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from layer_numbers import close, made
from torch import Tensor

from draftwing.layers.adapters import AdaptedWeight
from draftwing.ops.adapters.spec import AdapterWeights, QueryAdapters
from draftwing.ops.table import TorchOps

pytestmark = pytest.mark.usefixtures("poisoned")
RANKS = ((4, 4, 1), (0, 7, 0), (16, 3, 9))  # of the slices of three slots
SCALES = (2.0, 0.5, 1.25)


def weights_of(
    ops: TorchOps, dtype: torch.dtype, inputs: int, sizes: tuple[int, ...], every: tuple[tuple[int, ...], ...] = RANKS,
    room: int = 16,
) -> AdapterWeights:  # fmt: skip
    """room: the rank that slots have room for."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    weights = AdapterWeights.empty(len(every), room, inputs, ends, dtype, ops.device)
    for slot, ranks in enumerate(every, 1):
        for place, rank in enumerate(ranks[: len(sizes)]):
            seed = 10 * slot + place
            down = made(ops, dtype, rank, inputs, seed=seed) / inputs**0.5
            weights.set(slot, place, down, made(ops, dtype, sizes[place], rank, seed=seed + 100), SCALES[slot - 1])
    return weights


def expected(y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
    """In float64, a row and a slice at a time."""
    out = y.double().clone()
    for row, slot in enumerate(slots.tolist()):
        begin = 0
        for place, end in enumerate(weights.ends.tolist()):
            if slot:
                down = weights.down[slot - 1, place].double() @ x[row].double()
                added = weights.up[slot - 1, :, begin:end].double().T @ down
                out[row, begin:end] += SCALES[slot - 1] * added
            begin = end
    return out


@pytest.mark.further(inputs=100, dtype=torch.bfloat16)
@pytest.mark.further(inputs=576, dtype=[torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [(100, (33, 20, 20)), (576, (576, 192, 192)), pytest.param(40, (7,), marks=pytest.mark.exhaustive)],
)
def test_adapters_of_rows(inputs: int, sizes: tuple[int, ...], dtype: torch.dtype, ops: TorchOps) -> None:
    weights = weights_of(ops, dtype, inputs, sizes)
    rows = torch.tensor(([0, 1, 3, 3, 0, 2, 1, 2, 3, 1] + 3 * [1, 1, 3]) * (4 if inputs == 100 else 1))
    rows = rows.to(ops.device)
    x = made(ops, dtype, len(rows), 2 * inputs)[:, :inputs]  # rows are apart
    y = made(ops, dtype, len(rows), sum(sizes), seed=1)
    found = y.clone()
    ops.adapt(found, x, weights, rows)
    close(found, expected(y, x, weights, rows), ops, roundings=1.1, floor=4.0 if dtype == torch.float32 else 0.5)
    assert torch.equal(found[rows == 0], y[rows == 0])
    in_two = y.clone()
    ops.adapter_up(in_two, ops.adapter_down(x, weights, rows), weights, rows)
    assert torch.equal(in_two, found)
    if ops.name == "triton" or (ops.name == "cpu" and dtype != torch.float16):  # which a CPU computes in float32
        for some in (slice(1, 2), slice(5, 9), slice(2, 17)):
            alone = y[some].clone()
            ops.adapt(alone, x[some], weights, rows[some].clone())
            assert torch.equal(alone, found[some])  # whoever is beside it
    nothing = y[:0].clone()
    ops.adapt(nothing, x[:0], weights, rows[:0])
    x[2, 3] = torch.nan
    ops.adapt(y, x, weights, rows)
    assert y.isnan().any(1).nonzero().tolist() == [[2]]


@pytest.mark.further(rank=64)
@pytest.mark.parametrize("rank", [1, 64, 256])
def test_ranks_up_to_the_largest(rank: int, dtype: torch.dtype, ops: TorchOps) -> None:
    """Slots have room for this rank, which some slices have; others have less."""
    ranks = ((rank, rank), (rank // 2, rank), (max(1, rank - 3), rank // 7))
    weights = weights_of(ops, dtype, 72, (40, 24), ranks, rank)
    weights.up.div_(rank**0.5)
    rows = torch.tensor([3, 0, 1, 2, 2, *[1] * 17]).to(ops.device)
    x, y = made(ops, dtype, len(rows), 72), made(ops, dtype, len(rows), 64, seed=1)
    found = y.clone()
    ops.adapt(found, x, weights, rows)
    close(found, expected(y, x, weights, rows), ops, roundings=1.1, floor=4.0 if dtype == torch.float32 else 0.5)
    assert torch.equal(found[rows == 0], y[rows == 0])
    if ops.name == "triton" or (ops.name == "cpu" and dtype != torch.float16):
        for some in (slice(0, 1), slice(2, 4), slice(4, 22)):
            alone = y[some].clone()
            ops.adapt(alone, x[some], weights, rows[some].clone())
            assert torch.equal(alone, found[some])


@pytest.mark.parametrize(
    ("requests", "each"),
    [*(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((64, 4), (1, 1))), (70, 4), (64, 1)],
)
def test_trees_of_many_adapters(requests: int, each: int, triton_ops: TorchOps) -> None:
    """Rows of more than a chunk, of as many adapters as there are slots: by a plan as without, each with the bits that
    it has alone; and nothing but these rows is written."""
    ops, dtype, count = triton_ops, torch.bfloat16, 32
    weights = AdapterWeights.empty(count, 16, 64, [48, 96], dtype, ops.device)
    for slot in range(1, count + 1):
        for place, rank in enumerate((16, slot % 16 + 1)):
            down = made(ops, dtype, rank, 64, seed=slot) / 8
            weights.set(slot, place, down, made(ops, dtype, 48, rank, seed=slot + place), 1 + slot / 8)
    table = torch.arange(requests, device=ops.device) * 7 % (count + 1)
    rows = ops.row_numbers(table, torch.arange(requests, device=ops.device), each)
    x, y = made(ops, dtype, len(rows), 64), made(ops, dtype, len(rows) + 2, 96, seed=1)
    found, plan = y.clone(), ops.adapter_plan(rows)
    ops.adapter_up(found[1:-1], ops.adapter_down(x, weights, rows, plan), weights, rows, plan)
    assert torch.equal(found[[0, -1]], y[[0, -1]])
    want = y[1:-1].double()
    for row, slot in enumerate(rows.tolist()):
        for place in (0, 1) if slot else ():
            between = weights.down[slot - 1, place].double() @ x[row].double()
            part = slice(48 * place, 48 * place + 48)
            want[row, part] += (1 + slot / 8) * (weights.up[slot - 1, :, part].double().T @ between)
    close(found[1:-1], want, ops, roundings=1.1, floor=0.5)
    for some in (slice(0, 1), slice(3, 20), slice(len(rows) // 2, len(rows))):
        alone = y[1:-1][some].clone()
        ops.adapt(alone, x[some], weights, rows[some].clone())
        assert torch.equal(alone, found[1:-1][some])


def test_what_is_begun_before_a_product(triton_ops: TorchOps) -> None:
    """A layer's two parts around its product give what one operation gives, also of fewer queries."""
    ops = triton_ops
    weights, slots = weights_of(ops, torch.bfloat16, 64, (48, 48)), torch.arange(20, device=ops.device) % 4
    x, y = made(ops, torch.bfloat16, 20, 64), made(ops, torch.bfloat16, 20, 96, seed=1)
    queries, some = QueryAdapters(), torch.tensor([3, 5, 7], device=ops.device)
    layer, found, few, want = AdaptedWeight(queries, weights, ops, None), y.clone(), y[some], y.clone()
    with queries.of(slots, ops.adapter_plan(slots)):
        begun = layer.begin(x)
        assert begun is not None
        layer.add(found, x, begun)
        queries.narrow(some)
        layer.add(few, x[some], layer.begin(x[some]))
    ops.adapt(want, x, weights, slots)
    assert torch.equal(found, want) and torch.equal(few, want[some]) and not torch.equal(found, y)


def test_plans_have_each_row_once(triton_ops: TorchOps) -> None:
    """In tiles of up to 16 rows of one adapter, as few as there can be of a chunk."""
    for rows, most in ((1, 1), (64, 33), (300, 5), (300, 1), (16, 0)):
        slots = torch.arange(rows, device=triton_ops.device) * 5 % (most + 1)
        plan = triton_ops.adapter_plan(slots)
        assert plan is not None
        tiles, lists = int(plan[0]), plan[8:].view(5, rows).tolist()
        seen = []
        for slot, begin, count in zip(*(one[:tiles] for one in lists[:3]), strict=True):
            mine = lists[3][begin : begin + count]
            assert 1 <= len(mine) <= 16 and {int(slots[row]) for row in mine} == {slot} and mine == sorted(mine)
            seen += mine
        assert sorted(seen) == slots.nonzero().flatten().tolist()
        chunks = slots.split(256)
        assert tiles == sum(-(-int(n) // 16) for one in chunks for n in one[one > 0].unique(return_counts=True)[1])


@pytest.mark.parametrize("dtype", [torch.float32])
def test_factors_in_half_precision(dtype: torch.dtype, ops: TorchOps) -> None:
    """Beside activations in float32, as with weights in blocks."""
    weights = weights_of(ops, torch.bfloat16, 64, (48, 16))
    rows, x, y = torch.tensor([3, 1, 0], device=ops.device), made(ops, dtype, 3, 64), made(ops, dtype, 3, 64, seed=1)
    found = y.clone()
    ops.adapt(found, x, weights, rows)
    close(found, expected(y, x, weights, rows), ops, floor=4.0)


def test_a_cleared_slot_adds_nothing(ops: TorchOps) -> None:
    weights, x = weights_of(ops, torch.float32, 64, (48, 16)), made(ops, torch.float32, 2, 64)
    y, rows = made(ops, torch.float32, 2, 64, seed=1), torch.tensor([1, 3], device=ops.device)
    weights.clear(3)
    found = y.clone()
    ops.adapt(found, x, weights, rows)
    assert torch.equal(found[1], y[1]) and not torch.equal(found[0], y[0])


# -- factors in 8 bits, on a CPU beside weights in blocks


def in_8_bits(
    ops: TorchOps, dtype: torch.dtype, inputs: int, ranks: Sequence[int], ends: list[int], strength: float
) -> tuple[AdapterWeights, dict[tuple[int, int], tuple[Tensor, Tensor, float]]]:
    """strength: of factors, whose sizes differ from row to row. Returns also what slots were given, in float64."""
    room = max(16, *ranks)
    weights, given = ops.empty_adapters(len(ranks), room, inputs, ends, dtype, ops.device, in_blocks=True), {}
    for slot, rank in enumerate(ranks, 1):
        begin = 0
        for place, end in enumerate(ends):
            down = made(ops, dtype, rank, inputs, seed=slot) * strength * 2.0 ** torch.randint(-6, 1, (rank, 1))
            up = made(ops, dtype, end - begin, rank, seed=slot + 10) * strength
            weights.set(slot, place, down, up, 1.5 / strength**2)
            given[slot, place] = down.double(), up.double(), 1.5 / strength**2
            begin = end
    return weights, given


def steps(x: Tensor, size: int) -> Tensor:
    """Returns the most that a number is off in 8 bits: the largest of `size` takes 127 steps, of a scale in float16."""
    each = x.abs().unflatten(-1, (-1, size)).amax(-1, keepdim=True) / 254 * (1 + 2**-4)
    return each.expand(*each.shape[:-1], size).flatten(-2)


@pytest.mark.parametrize(
    ("strength", "ranks"), [*((one, (16, 5, 1)) for one in (1.0, 1e-4, 300.0)), (1.0, (256, 64, 49))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_in_8_bits(dtype: torch.dtype, strength: float, ranks: tuple[int, ...], ops: TorchOps) -> None:
    """As near to float64 as 8 bits of x, of both factors and of what lies between them allow; and the same bits with
    any rows beside a row, and in two parts."""
    if ops.name != "cpu":
        pytest.skip("others have no factors in 8 bits")
    torch.manual_seed(0)
    ends, inputs = [32, 80], 96
    weights, given = in_8_bits(ops, dtype, inputs, ranks, ends, strength)
    assert weights.down.dtype == torch.uint8
    assert (weights.inputs, weights.outputs, weights.rank) == (96, 80, max(ranks))
    rows = torch.tensor([1, 0, 2, 2, 3, 1, *[1] * 40, 3, 2])
    x, y = made(ops, dtype, len(rows), inputs), made(ops, dtype, len(rows), 80, seed=1)
    found = y.clone()
    ops.adapt(found, x, weights, rows)
    errors, added = [], []
    for row, slot in enumerate(rows.tolist()):
        begin = 0
        for place, end in enumerate(ends):
            if not slot:
                assert torch.equal(found[row], y[row])
                continue
            (down, up, scale), one = given[slot, place], x[row].double()
            u = scale * down @ one
            off_x, off_down = steps(one, 32), steps(down, 32)
            off_u = scale * (off_down @ (one.abs() + off_x) + down.abs() @ off_x)
            rank, padded = len(u), (0, -len(u) % 16)
            most_u = steps(torch.nn.functional.pad(u.abs() + off_u, padded), 16)[:rank] + off_u
            off_up = steps(torch.nn.functional.pad(up, padded), 16)[:, :rank]
            bound = off_up @ (u.abs() + most_u) + up.abs() @ most_u
            exact = y[row, begin:end].double() + up @ u
            rounding = exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-20) + 1e-6
            off = (found[row, begin:end].double() - exact).abs()
            assert (off <= bound + rounding).all()
            errors.append((off - rounding).clamp(min=0))
            added.append(up @ u)
            begin = end
    assert 0 < torch.cat(errors).norm() < 0.02 * torch.cat(added).norm()
    for some in (slice(0, 1), slice(2, 5), slice(3, 31), slice(40, 48)):
        alone = y[some].clone()
        ops.adapt(alone, x[some], weights, rows[some].clone())
        assert torch.equal(alone, found[some])
    in_two = y.clone()
    ops.adapter_up(in_two, ops.adapter_down(x, weights, rows), weights, rows)
    assert torch.equal(in_two, found)
    x[2, 3] = torch.nan
    ops.adapt(y, x, weights, rows)
    assert y.isnan().any(1).nonzero().tolist() == [[2]]
    weights.clear(1)
    again = found.clone()
    ops.adapt(again, x.nan_to_num(), weights, torch.ones_like(rows))
    assert torch.equal(again, found)


def test_factors_in_8_bits_may_be_of_any_size(ops: TorchOps) -> None:
    """Files may have the largest numbers, and the smallest; in other slots they change nothing."""
    if ops.name != "cpu":
        pytest.skip("others have no factors in 8 bits")
    x, y = made(ops, torch.float32, 2, 96), made(ops, torch.float32, 2, 80, seed=1)
    for first, second in (
        (3.4e38, 3.4e38),
        (1e30, 1e-30),
        (1e-30, 1e30),
        (1e-20, 1e-20),
        (1e-42, 1e-44),
        (0.0, 3.4e38),
    ):
        weights, given = in_8_bits(ops, torch.float32, 96, [4, 4], [80], 1.0)
        down, up, scale = given[2, 0]
        own = (down.sign() * first).float(), (up.sign() * second).float()
        weights.set(2, 0, *own, scale)
        found = y.clone()
        ops.adapt(found, x, weights, torch.tensor([1, 2]))
        weights.clear(2)
        alone = y.clone()
        ops.adapt(alone, x, weights, torch.tensor([1, 2]))
        assert torch.equal(found[0], alone[0]) and torch.equal(alone[1], y[1])
        exact = y[1].double() + scale * own[1].double() @ (own[0].double() @ x[1].double())
        if exact.abs().max() < 1e30:
            assert (found[1].double() - exact).norm() < 0.02 * exact.norm(), (first, second)
