"""Mixtures of experts, each implementation of this machine against loops in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftwing.layers.linear_ops.groups import dequantised
from draftwing.ops.experts.routing import Routed, Routing
from draftwing.ops.gemm.groups import PackedGroups, pack
from draftwing.ops.gemm.stored import MXRows, QuantizedRows
from draftwing.ops.table import PLAIN, TorchOps

COUNT, TOP = 6, 3
Weight = Tensor | PackedGroups | MXRows


def made(ops: TorchOps, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(ops.device, dtype)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed) -> Tensor:
    """[pairs, out] float64"""
    matrices = weight.double().view(routed.count, -1, x.shape[1])
    rows, every = [], routed.experts.flatten().tolist()
    for pair, expert in enumerate(every):
        y = matrices[expert] @ x[pair * len(x) // len(every)].double()
        rows.append(y if bias is None else y + bias.view(routed.count, -1)[expert].double())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("rows", "count", "routing"),
    [
        (1, 6, Routing(1, False)),
        (5, 6, Routing(3)),
        (4, 128, Routing(8, False)),
        (1, 6, Routing(1, sigmoid=True)),
        (5, 6, Routing(3, False, True, scale=1.5)),
        (40, 21, Routing(4, True, True, 7, 2, 2.5)),
        (33, 10, Routing(3, True, True, 10, 5)),
        (4, 256, Routing(8, True, True, 8, 4, 2.5)),
        (3, 96, Routing(4, scale=0.5)),
        (5, 64, Routing(6, corrected=True)),
        (4, 21, Routing(5, False, corrected=True, scale=2.5)),
        (40, 21, Routing(4, False, groups=7, top_groups=2, scale=16.0)),
        (5, 160, Routing(6, groups=8, top_groups=3)),
    ],
)
def test_routes(ops: TorchOps, rows: int, count: int, routing: Routing) -> None:
    logits, shift = made(ops, rows, count) * 3, made(ops, count, seed=1) if routing.has_correction else None
    if shift is not None and not routing.sigmoid:
        shift /= 10
    routed = ops.route(logits, routing, shift)
    for row, experts, weights in zip(logits.double(), routed.experts, routed.weights, strict=True):
        scores = row.sigmoid() if routing.sigmoid else row.softmax(0)
        by, size = scores if shift is None else scores + shift.double(), count // routing.groups
        groups = by.view(routing.groups, size).sort(descending=True).values[:, : 1 + routing.sigmoid].sum(1)
        chosen = sorted(range(routing.groups), key=lambda g: -float(groups[g]))[: routing.top_groups]
        order = sorted((e for g in chosen for e in range(g * size, (g + 1) * size)), key=lambda e: -float(by[e]))
        expected = scores[order[: routing.top_k]]
        expected = expected / expected.sum() if routing.renormalise else expected
        assert experts.tolist() == order[: routing.top_k]
        torch.testing.assert_close(weights.double(), expected * routing.scale, atol=1e-6, rtol=1e-5)
    alone = [ops.route(row, routing, shift) for row in logits.split(1)]
    assert torch.equal(torch.cat([one.experts for one in alone]), routed.experts)
    assert torch.equal(torch.cat([one.weights for one in alone]), routed.weights)


@pytest.mark.parametrize(("rows", "count", "near"), [(1, 16, 0.02), (40, 16, 0.7), (7, 6, 2.0)])
def test_weights_are_among_those_that_are_near(ops: TorchOps, rows: int, count: int, near: float) -> None:
    """SparseMixer, also of rows whose largest logits are below 0."""
    logits = made(ops, rows, count) * 3
    logits[rows // 2 :] -= 4
    routed = ops.route(logits, Routing(2, near=near))
    for row, experts, weights in zip(logits.double().cpu(), routed.experts.tolist(), routed.weights.cpu(), strict=True):
        assert experts == row.argsort(descending=True)[:2].tolist()
        for choice, expert in enumerate(experts):
            its, left = row[expert], [e for e in range(count) if e not in experts[:choice]]
            close = [e for e in left if not (its - row[e]) / max(abs(row[e]), its) > near]
            expected = 1 / sum((row[e] - its).exp() for e in close)
            torch.testing.assert_close(weights[choice].double(), expected, atol=1e-6, rtol=1e-5)
    alone = [ops.route(row, Routing(2, near=near)) for row in logits.split(1)]
    assert torch.equal(torch.cat([one.weights for one in alone]), routed.weights)


@pytest.mark.parametrize(
    ("rows", "sigmoid", "more", "shared"),
    [
        (1, False, 1, "whole"),
        (5, False, 1, "gated"),
        (5, True, 1, "whole"),
        (1, False, 2, "gated"),
        (5, True, 3, "gated"),
    ],
)
def test_every_row_goes_to_a_shared_expert(ops: TorchOps, rows: int, sigmoid: bool, more: int, shared: str) -> None:
    logits, shift = made(ops, rows, COUNT + 1) * 3, made(ops, COUNT, seed=1) if sigmoid else None
    chosen, gate = logits[:, :COUNT], logits[:, COUNT:]
    plain = ops.route(chosen, Routing(TOP, sigmoid=sigmoid, scale=1.5), shift)
    routing = Routing(TOP, sigmoid=sigmoid, scale=1.5, shared=shared, shared_count=more)  # type: ignore[arg-type]
    routed = ops.route(logits if shared == "gated" else chosen, routing, shift)
    assert routed.count == COUNT + more and routing.choices == TOP + more
    assert torch.equal(routed.experts[:, :TOP], plain.experts)
    assert routed.experts[:, TOP:].tolist() == [[COUNT + i for i in range(more)]] * rows
    assert torch.equal(routed.weights[:, :TOP], plain.weights)
    expected = gate[:, 0].double().sigmoid() if shared == "gated" else torch.ones(rows, dtype=torch.float64)
    expected = expected.cpu()[:, None].expand(-1, more)
    torch.testing.assert_close(routed.weights[:, TOP:].cpu().double(), expected, atol=1e-6, rtol=1e-6)
    weight, x = made(ops, (COUNT + more) * 32, 64, seed=5) / 8, made(ops, rows, 64, seed=4)
    gemm = ops.expert_gemm and ops.expert_gemm(weight, COUNT + more)
    outs = ops.experts_linear(x, weight, None, routed) if gemm is None else gemm.linear(x, None, routed)
    torch.testing.assert_close(outs.double(), by_hand(x, weight, None, routed), atol=1e-4, rtol=1e-4)


def test_sigmoids_that_are_0_or_no_numbers(ops: TorchOps) -> None:
    """What is no number fails its request; nothing else is divided by 0."""
    logits = torch.stack((torch.full((COUNT,), -200.0), torch.arange(float(COUNT))))
    logits[1, 3] = torch.nan
    for groups in (0, 1, 3):
        routing = Routing(TOP, sigmoid=True, groups=groups, top_groups=min(groups, 2))
        routing = routing if groups else Routing(TOP, corrected=True)
        routed = ops.route(logits.to(ops.device), routing, torch.zeros(COUNT, device=ops.device))
        assert all(len(set(row)) == TOP and max(row) < COUNT for row in routed.experts.tolist())
        assert routed.weights[0].isfinite().all() and not routed.weights[1].isfinite().any()


def test_equal_logits_and_such_that_are_no_numbers_stay_among_the_experts(ops: TorchOps) -> None:
    logits = torch.stack((torch.zeros(COUNT), torch.full((COUNT,), torch.nan), torch.full((COUNT,), -torch.inf)))
    routed = ops.route(logits.to(ops.device), Routing(TOP))
    assert routed.experts.min() >= 0 and routed.experts.max() < COUNT
    assert all(len(set(row)) == TOP for row in routed.experts.tolist()), "an expert's tiles have a row once"
    assert not routed.weights[1].isfinite().any()  # so that the request fails, as it does with any such model
    logits = torch.arange(2.0 * COUNT).view(2, COUNT)
    logits[1, 3] = torch.nan
    routed = ops.route(logits.to(ops.device), Routing(TOP))
    assert routed.weights[0].isfinite().all() and not routed.weights[1].isfinite().any()
    assert len(set(routed.experts[1].tolist())) == TOP


@pytest.mark.parametrize("sigmoid", [False, True])
def test_scattered_rows_choose_at_random(ops: TorchOps, sigmoid: bool) -> None:
    """As many experts as rows that choose independently; and without it nothing changes."""
    routing, shift = Routing(8, sigmoid=sigmoid), torch.arange(128.0, device=ops.device) if sigmoid else None
    logits, scatter = torch.zeros(16, 128, device=ops.device), torch.zeros(1, dtype=torch.int32, device=ops.device)
    alike = ops.route(logits, routing, shift)
    assert torch.equal(ops.route(logits, routing, shift, scatter=scatter).experts, alike.experts)
    assert alike.experts.unique().numel() == 8
    routed = ops.route(logits, routing, shift, scatter=scatter + 1)
    assert all(len(set(row)) == 8 for row in routed.experts.tolist())
    expected = 128 * (1 - (1 - 8 / 128) ** 16)
    assert abs(routed.experts.unique().numel() - expected) < 12


@pytest.mark.further(dtype=torch.bfloat16, rows=[70, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 70, 1500])
@pytest.mark.further(ops="triton", rows=70)
@pytest.mark.covering("ops")
def test_experts_of_other_ranks_are_left_out(
    ops: TorchOps, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank multiplies the pairs of its own experts; the sum of what ranks have is that of all experts. A row has
    the same bits in any batch, also where other rows have none of the rank's experts."""
    if rows == 1500 and type(ops).__name__ == "TritonOps" and ops.device.type == "cpu":  # the interpreter is slow
        monkeypatch.setattr("draftwing.ops.experts.triton_tiles.FEW_PAIRS", 100)  # so that they are sorted as many are
        rows = 70
    logits, x = made(ops, rows, COUNT, seed=3), made(ops, rows, 64, seed=4, dtype=dtype)
    weight = made(ops, COUNT * 40, 64, seed=5, dtype=dtype) / 8
    bias = made(ops, COUNT * 40, seed=6, dtype=dtype)

    def mixed(own: range | None, at: slice) -> Tensor:
        part = range(COUNT) if own is None else own
        mine = weight.view(COUNT, 40, 64)[part.start : part.stop].flatten(0, 1)
        added = bias.view(COUNT, 40)[part.start : part.stop].flatten()
        routed = ops.route(logits[at], Routing(TOP), exact=True, own=own)
        gemm = ops.expert_gemm and ops.expert_gemm(mine, len(part))
        outs = ops.experts_linear(x[at], mine, added, routed) if gemm is None else gemm.linear(x[at], added, routed)
        return ops.mix(outs, routed, None)

    every, parts = slice(None), [range(2), range(2, 4), range(4, COUNT)]
    whole, shares = mixed(None, every), [mixed(own, every) for own in parts]
    unit = 1e-4 if dtype == torch.float32 else 2.0**-4
    torch.testing.assert_close(sum(shares[1:], shares[0]), whole, atol=unit, rtol=unit)
    routed = ops.route(logits, Routing(TOP), exact=True)
    for own, share in zip(parts, shares, strict=True):
        here = ((routed.experts >= own.start) & (routed.experts < own.stop)).any(1)
        assert not share[~here].any() and bool(share[here].any(1).all())
        if ops.expert_gemm is not None and ops.expert_gemm(weight, COUNT) is not None:
            for row in range(0, rows, 1 + rows // 6):
                assert torch.equal(mixed(own, slice(row, row + 1))[0], share[row])


@pytest.mark.parametrize("residual", [False, True])
def test_mixes(ops: TorchOps, residual: bool) -> None:
    routed = ops.route(made(ops, 4, COUNT), Routing(TOP))
    y, more = made(ops, 4 * TOP, 96, seed=1), made(ops, 4, 96, seed=2) if residual else None
    expected = torch.einsum("mkn,mk->mn", y.double().view(4, TOP, 96), routed.weights.double())
    expected = expected if more is None else expected + more.double()
    torch.testing.assert_close(ops.mix(y, routed, more).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_mixes_under_a_norm(ops: TorchOps, wide: bool) -> None:
    routed = ops.route(made(ops, 4, COUNT), Routing(TOP))
    size, half = 576, torch.bfloat16  # of fewer a GPU may sum squares in another order
    y, residual = made(ops, 4 * TOP, size, seed=1, dtype=half), made(ops, 4, size, seed=2, dtype=half)
    weight = made(ops, size, seed=3, dtype=torch.float32 if wide else half)
    x, normed = ops.mix_norm(y, routed, residual, weight, 1e-5)
    assert torch.equal(x, ops.mix(y, routed, residual))
    expected = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, atol=2**-6, rtol=2**-6)
    cut = ops.name == "triton" and ops.device.type == "cpu"  # the interpreter cuts bfloat16 off instead of rounding it
    for dtype in (torch.float32,) if cut else (torch.float32, torch.bfloat16):
        y, residual, weight = y.to(dtype), residual.to(dtype), weight.to(weight.dtype if wide else dtype)
        x, normed = ops.mix_norm(y, routed, residual, weight, 1e-5, 0.22)
        assert torch.equal(x, ops.add_scaled(residual, ops.add_scaled(ops.mix(y, routed, None), None, 0.22)))
        assert torch.equal(normed, ops.rms_norm(x, weight, 1e-5))


def test_clamps(ops: TorchOps) -> None:
    gate_up = made(ops, 5, 2 * 96) * 4
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(ops.clamped_swiglu(gate_up, 2.5).double(), expected, atol=1e-5, rtol=1e-5)


def test_plain_gemms_by_expert(ops: TorchOps) -> None:
    routed = ops.route(made(ops, 7, COUNT), Routing(TOP))
    weight, bias = made(ops, COUNT * 10, 32, seed=3), made(ops, COUNT * 10, seed=4)
    x = made(ops, 7, 32, seed=5)
    found = ops.experts_linear(x, weight, bias, routed)
    torch.testing.assert_close(found.double(), by_hand(x, weight, bias, routed), atol=1e-4, rtol=1e-4)


@pytest.fixture
def triton_ops(device: torch.device, mended_interpreter: None) -> TorchOps:
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    return TritonOps(device)


def test_pairs_of_a_tile() -> None:
    pytest.importorskip("triton")
    from draftwing.ops.experts.triton_tiles import tile_rows

    assert tile_rows(128, 8, 16, 192) == tile_rows(256, 4, 128, 192) == 16
    assert tile_rows(129, 8, 128, 192) == 192 and tile_rows(129, 8, 128) == 64 and tile_rows(129, 8, 128, 16) == 16


@pytest.mark.parametrize("few", [4096, 20])
@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (7, 16), (70, 16), (30, 64), (400, 64)])
def test_tiles_have_every_pair_once_with_its_expert(
    triton_ops: TorchOps, rows: int, tile: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted in one kernel, or as many pairs are."""
    from draftwing.ops.experts.triton_tiles import tiles_of

    monkeypatch.setattr("draftwing.ops.experts.triton_tiles.FEW_PAIRS", few)
    liked = torch.tensor([3, 1, 1, 1, 0.1, 9.0], device=triton_ops.device)
    experts = PLAIN.route(made(triton_ops, rows, COUNT) * liked, Routing(TOP)).experts
    made_tiles, seen = tiles_of(experts.to(triton_ops.device), COUNT, tile), []
    flat = experts.flatten().tolist()
    assert made_tiles.order is not None
    for expert, first, count in made_tiles.tiles.t().tolist():
        if expert < 0:
            continue
        pairs = made_tiles.order[first : first + count].tolist()
        assert 0 < len(pairs) == count <= tile and {flat[pair] for pair in pairs} == {expert}
        seen += pairs
    assert sorted(seen) == list(range(rows * TOP))


def weights_of(kind: str, rows: int, columns: int, dtype: torch.dtype) -> Weight:
    generator = torch.Generator().manual_seed(7)
    if kind == "dense":
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)
    if kind.startswith("mxfp4"):
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        return MXRows(codes, torch.randint(121, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8))
    wide = {"int4 of 32": 32, "int4 of 64 with zeros": 64, "int4 of 128": 128}.get(kind, columns)
    scales = torch.rand(rows, columns // wide, generator=generator) / columns**0.5
    if kind == "fp8":
        codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 0  # no numbers
        return pack(QuantizedRows(codes.view(torch.float8_e4m3fn), 8, scales / 64, None, 1, wide, None), dtype, "cpu")
    bits = 8 if kind == "int8" else 4
    codes = torch.randint(-1 << bits - 1, 1 << bits - 1, (rows, columns), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, scales.shape, generator=generator, dtype=torch.int16) if "zeros" in kind else None
    return pack(QuantizedRows(codes, bits, scales / (64 if bits == 8 else 4), zeros, 1, wide, None), dtype, "cpu")


def on(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    if isinstance(weight, MXRows):
        return MXRows(*(part.to(device) for part in weight))
    return PackedGroups(*(part.to(device) if isinstance(part, Tensor) else part for part in weight))


KINDS = ["dense", "mxfp4", "mxfp4 of 96 columns", "int4 of 32", "int4 of 64 with zeros", "int4 of 128", "int8", "fp8"]


@pytest.mark.further(kind=["dense", "mxfp4", "int4 of 32", "int4 of 128", "int8"])
@pytest.mark.further(dtype=torch.float16, kind=["mxfp4 of 96 columns", "fp8"])
@pytest.mark.further(dtype=torch.bfloat16, kind="int4 of 64 with zeros")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_gemms(triton_ops: TorchOps, kind: str, dtype: torch.dtype) -> None:
    """Against the dequantised matrix, in float64; and each row alone has the same bits."""
    if kind in ("int8", "fp8") and dtype == torch.float16:
        pytest.skip("no such weights with activations in float16")
    columns = 608 if "96" in kind else 640  # ten chunks of which shares have one or two; half a chunk at the end
    weight = on(weights_of(kind, COUNT * 96, columns, dtype), triton_ops.device)
    matrix = weight if isinstance(weight, Tensor) else dequantised(weight, dtype)
    gemm = triton_ops.expert_gemm(weight, COUNT)
    assert gemm is not None
    logits, bias = made(triton_ops, 9, COUNT, seed=11), made(triton_ops, COUNT * 96, seed=12, dtype=dtype)
    logits[:, 2] += 5  # one that all choose, more than a tile in the end
    x, routed = made(triton_ops, 9, columns, seed=13, dtype=dtype), triton_ops.route(logits, Routing(TOP), exact=True)
    # The interpreter cuts bfloat16 off instead of rounding it, weights too.
    expected, unit = by_hand(x, matrix, bias, routed), 2.0**-6 if dtype == torch.bfloat16 else 2.0**-10
    found = gemm.linear(x, bias, routed)
    torch.testing.assert_close(found.double(), expected, atol=unit, rtol=unit)
    gate, up = expected.chunk(2, -1)
    gated = gemm.gated(x, bias, routed, 0.0)
    assert gated is not None
    torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, atol=2 * unit, rtol=2 * unit)
    for row in (0, 5):
        alone = triton_ops.route(logits[row : row + 1], Routing(TOP), exact=True)
        own = slice(row * TOP, row * TOP + TOP)
        assert torch.equal(gemm.linear(x[row : row + 1], bias, alone), found[own])
        again = gemm.gated(x[row : row + 1], bias, alone, 0.0)
        assert again is not None and torch.equal(again, gated[own])


@pytest.mark.further(
    kind=["dense", "mxfp4 of 96 columns", "int4 of 32", "int4 of 64 with zeros", "int8", "fp8"]
)  # as test_triton_gemms has some
@pytest.mark.parametrize("kind", KINDS)
def test_large_tiles(triton_ops: TorchOps, kind: str) -> None:
    """Against the dequantised matrix, in float64, with the sums of small tiles and with their own."""
    from draftwing.ops.experts.triton_tiles import LARGE_TILE, tiles_of

    columns = 608 if "96" in kind else 640
    weight = on(weights_of(kind, COUNT * 64, columns, torch.bfloat16), triton_ops.device)
    matrix = weight if isinstance(weight, Tensor) else dequantised(weight, torch.bfloat16)
    gemm, rows = triton_ops.expert_gemm(weight, COUNT), 50
    assert gemm is not None
    logits, x = made(triton_ops, rows, COUNT), made(triton_ops, rows, columns, seed=13, dtype=torch.bfloat16)
    logits[:, 2] += 5
    for exact in (True, False):
        routed = triton_ops.route(logits, Routing(TOP))
        routed = replace(routed, tiles=tiles_of(routed.experts, COUNT, LARGE_TILE, exact))
        expected = by_hand(x, matrix, None, routed)
        torch.testing.assert_close(gemm.linear(x, None, routed).double(), expected, atol=2**-6, rtol=2**-6)
        gate, up = expected.chunk(2, -1)
        gated = gemm.gated(x, None, routed, 0.0)
        assert gated is not None
        torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, atol=2**-5, rtol=2**-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("limit", [0.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_many_rows(triton_ops: TorchOps, kind: str, limit: float) -> None:
    """In large tiles where the device has them, a row has the bits that it has alone."""
    columns, rows = 608 if "96" in kind else 1664, 700
    weight = on(weights_of(kind, COUNT * 192, columns, torch.bfloat16), triton_ops.device)
    gemm = triton_ops.expert_gemm(weight, COUNT)
    assert gemm is not None
    logits, x = made(triton_ops, rows, COUNT), made(triton_ops, rows, columns, seed=13, dtype=torch.bfloat16)
    bias = made(triton_ops, COUNT * 192, seed=12, dtype=torch.bfloat16)
    how = {"exact": True, "most_pairs": gemm.most_pairs(torch.bfloat16)}
    routed = triton_ops.route(logits, Routing(TOP), **how)
    found, gated = gemm.linear(x, bias, routed), gemm.gated(x, bias, routed, limit)
    assert gated is not None
    made_apart = triton_ops.clamped_swiglu(found, limit) if limit else triton_ops.silu_mul(found)
    assert torch.equal(gated, made_apart), "which adapters may have added to"
    for some in (slice(0, 1), slice(5, 14), slice(300, 428), slice(600, 700)):
        alone, own = triton_ops.route(logits[some], Routing(TOP), **how), slice(some.start * TOP, some.stop * TOP)
        assert torch.equal(gemm.linear(x[some], bias, alone), found[own]), some
        again = gemm.gated(x[some], bias, alone, limit)
        assert again is not None and torch.equal(again, gated[own]), some


def test_triton_gemms_of_every_expert(triton_ops: TorchOps) -> None:
    """As heads' matrices are: each row has one row for each of them; with any number of rows the same bits."""
    weight, x = made(triton_ops, COUNT * 40, 32), made(triton_ops, 37 * COUNT, 32, seed=1)
    gemm = triton_ops.expert_gemm(weight, COUNT)
    assert gemm is not None
    every = gemm.linear(x, None, triton_ops.every_expert(37, COUNT, triton_ops.device))
    for rows in (0, 1, 16, 37):
        routed, own = triton_ops.every_expert(rows, COUNT, triton_ops.device), slice(rows * COUNT)
        assert routed.experts.tolist() == [list(range(COUNT))] * rows and bool((routed.weights == 1).all())
        assert torch.equal(gemm.linear(x[own], None, routed), every[own])
    torch.testing.assert_close(every.double(), by_hand(x, weight, None, routed), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["dense", "fp8", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40, 128])
@pytest.mark.parametrize("own", [None, range(64, 128)])
def test_layers_in_a_graph(triton_ops: TorchOps, kind: str, rows: int, own: range | None) -> None:
    """Kernels that come up while the one before runs, with more tiles than blocks: in each replay a row has the bits
    that it has alone, launch by launch."""
    count, top_k, size, device = 64, 4, 512, triton_ops.device
    weights = [on(weights_of(kind, count * n, size, torch.bfloat16), device) for n in (2 * size, size)] * 2
    gemms = [triton_ops.expert_gemm(weight, count) for weight in weights]
    x, logits = (
        torch.empty(rows, size, dtype=torch.bfloat16, device=device),
        torch.empty(rows, own.stop if own else count, device=device),
    )

    def forward(x: Tensor, logits: Tensor) -> Tensor:
        for gate_up, down in zip(gemms[::2], gemms[1::2], strict=True):
            assert gate_up is not None and down is not None
            routed = triton_ops.route(logits, Routing(top_k), own=own)
            inner = gate_up.gated(x, None, routed, 0.0)
            assert inner is not None
            x = triton_ops.mix(down.linear(inner, None, routed), routed, x)
            logits = logits.roll(7, 1)
        return x

    x.normal_(), logits.normal_(), forward(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(x, logits)
    for _ in range(5):
        x.normal_(), logits.normal_()
        graph.replay()
        for row in range(0, rows, 1 + rows // 8):
            alone = forward(x[row : row + 1], logits[row : row + 1])
            torch.cuda.synchronize()
            assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("rows", [40, 130])
def test_triton_gemms_of_odd_sizes(triton_ops: TorchOps, rows: int) -> None:
    """Rows by pair, float32, columns and outputs that no tile divides, more pairs of an expert than a tile has; by both
    kinds of tiles."""
    weight = made(triton_ops, COUNT * 2 * 50, 40, seed=1)
    gemm = triton_ops.expert_gemm(weight, COUNT)
    assert gemm is not None
    logits = made(triton_ops, rows, COUNT, seed=2)
    logits[:, 1] += 9
    routed = triton_ops.route(logits, Routing(TOP, False))
    assert routed.tiles is not None and routed.tiles.rows == (16 if rows == 40 else 64)
    x = made(triton_ops, rows * TOP, 40, seed=3)
    expected = by_hand(x, weight, None, routed)
    torch.testing.assert_close(gemm.linear(x, None, routed).double(), expected, atol=1e-4, rtol=1e-4)
    gate, up = expected.chunk(2, -1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    clamped = gemm.gated(x, None, routed, 1.5)
    assert clamped is not None
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(clamped.double(), expected, atol=1e-4, rtol=1e-4)
