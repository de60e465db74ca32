"""Weights that stay quantised: parts of a fused matrix, groups in the order of activations, what is dequantised."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from decoder_configs import decoder_config
from group_ops import GroupTorchOps, LateSideWork, RowByRow
from torch import Tensor

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import MixerConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops import groups as of_groups
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat, PackedLinear, log_groups
from draftwing.models.decoder import DecoderModel
from draftwing.ops.gemm import gemms
from draftwing.ops.gemm.stored import QuantizedRows

CPU, BF16 = torch.device("cpu"), torch.bfloat16
COLUMNS = 128


def int4(rows: int, seed: int = 0, zeros: bool = False, wide: int = 64, order: int | None = None) -> QuantizedRows:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, COLUMNS), generator=made).to(torch.int8)
    scales = (torch.rand(rows, -(-COLUMNS // wide), generator=made) / 16).to(BF16)
    zero = torch.randint(-8, 8, scales.shape, generator=made).to(torch.int16) if zeros else None
    group_of = torch.arange(COLUMNS) // wide
    if order is not None:
        group_of = group_of[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(order))]
    return QuantizedRows(codes, 4, scales, zero, 1, wide, None if order is None else group_of)


def fp8(rows: int, tall: int = 1, wide: int = COLUMNS) -> QuantizedRows:
    made = torch.Generator().manual_seed(7)
    codes = torch.randn(rows, COLUMNS, generator=made).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // tall), -(-COLUMNS // wide), generator=made).to(BF16)
    return QuantizedRows(codes, 8, scales, None, tall, wide, None)


def made(ops: GroupTorchOps, *parts: QuantizedRows | Tensor, scheme: str | None = None, **mode: bool) -> Linear:
    """A packed `Linear` whose weight came in these parts."""
    rows = [len(part.codes) if isinstance(part, QuantizedRows) else len(part) for part in parts]
    layer = Linear(COLUMNS, sum(rows), False, BF16, torch.device("meta"), GroupFormat(scheme, ops))
    start = 0
    for part, size in zip(parts, rows, strict=True):
        place = ParamSlice("weight", start, size)
        if not layer.op.keep(place, part):
            if layer.weight.is_meta:
                layer.weight = torch.nn.Parameter(torch.empty(sum(rows), COLUMNS, dtype=BF16), False)
            place.of(layer.weight).copy_(part.dense(BF16) if isinstance(part, QuantizedRows) else part)
        start += size
    layer.pack(ops, PackMode(**mode))
    return layer


def values(*parts: QuantizedRows | Tensor) -> Tensor:
    return torch.cat([part.dense(BF16) if isinstance(part, QuantizedRows) else part for part in parts])


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(3)).to(BF16)


@pytest.mark.parametrize(
    "parts",
    [
        (int4(32), int4(16, 1), int4(16, 2)),
        (int4(32), int4(32, 1, zeros=True)),
        (int4(32, wide=64), int4(32, 1, wide=128)),
        (int4(32, wide=32), int4(32, 1, zeros=True, wide=64)),
        (int4(32, order=5), int4(32, 1, order=5)),
        (fp8(32), fp8(32)),
        (fp8(32, tall=16, wide=64), fp8(32, tall=32)),
    ],
    ids=["q.k.v", "zeros of one part", "two sizes of groups", "small groups", "order", "fp8", "blocks and a scale"],
)
def test_parts_of_one_matrix(parts: tuple[QuantizedRows, ...]) -> None:
    ops = GroupTorchOps(CPU)
    layer = made(ops, *parts)
    assert isinstance(layer.op, PackedLinear) and not list(layer.parameters())
    expected = values(*parts)
    assert torch.equal(layer.dense_weight(), expected)
    assert torch.equal(layer.rows(torch.tensor([3, 40])), expected[[3, 40]])
    x, residual = inputs(5), torch.randn(5, len(expected)).to(BF16)
    right = x.double() @ expected.double().T
    torch.testing.assert_close(layer(x).double(), right, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer(x, residual).double(), right + residual.double(), rtol=1e-2, atol=2e-2)
    gate, up = right.chunk(2, 1)
    torch.testing.assert_close(layer.gated(x).double(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)
    assert ops.made.gemm.rows == [5, 5, 5]
    bits = 8 if parts[0].bits == 8 else 4
    (kind,) = layer.op.sizes
    assert kind == ("fp8" if parts[0].codes.is_floating_point() else f"int{bits}")
    assert layer.op.sizes[kind] >= expected.numel() * bits // 8


@pytest.mark.parametrize(
    "parts",
    [(int4(32), fp8(32)), (int4(32), torch.randn(32, COLUMNS).to(BF16)), (int4(32, order=5), int4(32, 1, order=6))],
    ids=["two widths", "one is dense", "two orders"],
)
def test_parts_that_no_kernel_reads_at_once_are_dequantised(parts: tuple[QuantizedRows | Tensor, ...]) -> None:
    layer = made(GroupTorchOps(CPU), *parts)
    assert not isinstance(layer.op, PackedLinear)
    assert torch.equal(layer.dense_weight(), values(*parts))


def test_what_has_no_kernel_is_refused_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    odd = QuantizedRows(torch.zeros(32, COLUMNS, dtype=torch.int8), 8, torch.ones(32, 1), None, 1, COLUMNS, None)
    reasons = {
        "integers of 8 bits with zeros": odd._replace(zeros=torch.ones(32, 1, dtype=torch.int16)),
        "groups of 16 columns": int4(32, wide=16),
        "a shape of 24 x 128": int4(24),
        "a scale beyond 128": fp8(32)._replace(scales=torch.full((32, 1), 1000.0)),
        "a scale beyond 1019": int4(32)._replace(scales=torch.full((32, 2), 2000.0)),
        "groups of different sizes": int4(32)._replace(group_of=(torch.arange(COLUMNS) > 3).long()),
    }
    for reason, part in reasons.items():
        form = GroupFormat(None, GroupTorchOps(CPU))
        layer = Linear(COLUMNS, len(part.codes), False, BF16, torch.device("meta"), form)
        assert not layer.op.keep(ParamSlice("weight", 0, len(part.codes)), part)
        with caplog.at_level(logging.INFO):
            log_groups(layer)
        assert reason in caplog.text and "there is no kernel" in caplog.text
        caplog.clear()
    layer = Linear(COLUMNS, 32, False, BF16, torch.device("meta"), GroupFormat(None, GroupTorchOps(CPU)))
    assert layer.op.keep(ParamSlice("weight", 0, 32), int4(32))
    with caplog.at_level(logging.INFO):
        log_groups(layer)
    assert "1 tensors in int4, groups of 64: kept" in caplog.text


@pytest.mark.parametrize("order", [None, 5])
@pytest.mark.parametrize("deterministic", [True, False])
def test_prompts(deterministic: bool, order: int | None) -> None:
    """More rows than the kernels take have a GEMM of the matrix; in deterministic mode with the same bits."""
    part = int4(64, order=order)
    ops = GroupTorchOps(CPU)
    layer = made(ops, part, deterministic=deterministic)
    x, residual = inputs(200), torch.randn(200, 64).to(BF16)
    y, added, gated = layer(x), layer(x, residual.clone(), overwrite=True), layer.gated(x)
    assert ops.made.gemm.rows == []
    one = layer(x[7:8]), layer(x[7:8], residual[7:8]), layer.gated(x[7:8])
    for mine, whole in zip(one, (y, added, gated), strict=True):
        if deterministic:
            assert torch.equal(mine, whole[7:8])
        else:
            torch.testing.assert_close(mine, whole[7:8], rtol=2e-2, atol=2e-2)
    right = RowByRow().linear(x, part.dense(BF16), None, residual)
    torch.testing.assert_close(added, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("order", [None, 5])
@pytest.mark.parametrize("deterministic", [True, False])
def test_matrices_are_dequantised_beside_attention(
    deterministic: bool, order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of three matrices, of which the first of each is in front of attention: with the same bits, for all of
    them there when they are needed; not for few rows, nor where nothing runs meanwhile."""
    monkeypatch.setattr(gemms, "_MANY_ROWS", 200)
    ops = GroupTorchOps(CPU)
    side = ops.made.side = LateSideWork()
    layers = [
        [made(ops, int4(32, 7 * i + j, order=order), deterministic=deterministic) for j in range(3)] for i in (0, 1)
    ]
    every, x = [linear for layer in layers for linear in layer], inputs(201)
    before = [linear(x) for linear in every]
    of_groups.dequantise_beside_attention([([first.op], [one.op for one in rest]) for first, *rest in layers])
    for busy, count in ((True, [0] * 6), (False, [3, 2, 1, 2, 1, 0])):
        side.busy = busy
        for i, linear in enumerate(every):
            assert torch.equal(linear(x), before[i]), (busy, i)
            assert side.waiting == count[i], (busy, i)
    for i, linear in enumerate(every):
        linear(x[:200])
        assert side.waiting == 0, i
    every[0](x)
    every[0](x)  # a forward that was broken off, and the next one
    assert side.waiting == 3 and torch.equal(every[1](x), before[1])


@pytest.mark.parametrize("mixer", [AttentionConfig(2, 2, 32), DeltaNetConfig(8, 8, 16, 16, 4)], ids=["own", "delta"])
def test_a_decoder_says_what_comes_behind_its_attention(mixer: MixerConfig) -> None:
    """Up to the next one, before which a delta net has two matrices."""
    ops = GroupTorchOps(CPU)
    config = decoder_config(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32,
        ffn_size=64, vocab_size=16, max_positions=64, weight_format=GroupFormat("fp8", ops), vocab_format=DENSE,
    )  # fmt: skip
    layers = tuple(replace(layer, mixer=mixer) for layer in config.layers)
    model = DecoderModel(replace(config, layers=layers), BF16, "cpu")
    for name, part in model.named_modules():
        if isinstance(part, Linear) and name.startswith("layers"):
            part.op.keep(ParamSlice("weight", 0, part.out_features), torch.randn(part.out_features, part.in_features))
    model.pack(ops)
    one, two = (layer.linears() for layer in model.layers if isinstance(layer, DecoderLayer))
    assert all(isinstance(linear.op, PackedLinear) for linear in (*one, *two))
    last = len(one) - 4  # before attention: behind it are `out` and those of the MLP
    expected = {one[last]: [*one[last + 1 :], *two[: last + 1]], two[last]: two[last + 1 :]}
    for linear in (*one, *two):
        later = [gemm for other in expected.get(linear, []) for gemm in other.op.gemms[-1:]]
        assert list(linear.op.gemms[-1]._later) == later  # type: ignore[attr-defined]


@pytest.mark.parametrize(("scheme", "most"), [("fp8", 0.028), ("w4a16", 0.105)])
def test_dense_weights_are_quantised(scheme: str, most: float) -> None:
    weight = torch.randn(96, COLUMNS, generator=torch.Generator().manual_seed(1)).to(BF16) * 0.02
    weight[5] = 0
    layer = made(GroupTorchOps(CPU), weight[:64], weight[64:], scheme=scheme)
    assert isinstance(layer.op, PackedLinear)
    found = layer.dense_weight()
    assert not found[5].any()
    assert float((found - weight).float().std() / weight.float().std()) < most
    assert float((found.double() * weight.double()).sum() / weight.double().square().sum()) == pytest.approx(
        1, abs=0.01
    )
