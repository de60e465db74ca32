"""Matrices in fp8 that are multiplied with activations in fp8: which they are, and what becomes of the others."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from decoder_configs import decoder_config
from group_ops import Fp8TorchOps
from plain_attention import FunctionAttend
from thread_ranks import meet
from torch import Tensor

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.linear import Linear, row_parallel
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.linear_ops.groups import Fp8Linear, GroupFormat, PackedLinear, log_groups
from draftwing.layers.norm import RMSNorm
from draftwing.layers.part_configs import NormConfig
from draftwing.models.decoder import DecoderModel, pack_layers
from draftwing.ops.fp8.spec import FP8_FROM, packed_rows, quantised
from draftwing.ops.gemm.stored import QuantizedRows
from draftwing.parallel.cut import Cut, Order
from draftwing.parallel.ranks import Share

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FORM = GroupFormat(None, Fp8TorchOps(CPU), fp8_from=0)


def fp8(rows: int, columns: int = 256, dynamic: bool = True, tall: int = 128, seed: int = 0) -> QuantizedRows:
    made = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=made) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // tall), -(-columns // 128), generator=made) / 1024
    return QuantizedRows(codes, 8, scales, None, tall, 128, None, dynamic)


def made(*parts: QuantizedRows | Tensor, form: GroupFormat = FORM) -> Linear:
    """A packed `Linear` whose weight came in these parts."""
    rows = [len(part.codes) if isinstance(part, QuantizedRows) else len(part) for part in parts]
    first = parts[0].codes if isinstance(parts[0], QuantizedRows) else parts[0]
    layer, start = Linear(first.shape[1], sum(rows), False, BF16, torch.device("meta"), form), 0
    for part, size in zip(parts, rows, strict=True):
        place = ParamSlice("weight", start, size)
        if not layer.op.keep(place, part):
            if layer.weight.is_meta:
                layer.weight = torch.nn.Parameter(torch.empty(sum(rows), first.shape[1], dtype=BF16), False)
            place.of(layer.weight).copy_(part.dense(BF16) if isinstance(part, QuantizedRows) else part)
        start += size
    layer.pack(FORM.ops, PackMode())
    return layer


def rounded(x: Tensor) -> Tensor:
    """x [M, K] in float64, each row's groups of 128 as codes of e4m3 whose largest is 448."""
    groups = x.double().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2, keepdim=True) / 448
    return ((groups / scales).float().to(torch.float8_e4m3fn).double() * scales).flatten(1)


def inputs(rows: int, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(BF16)


PARTS = {
    "one": [fp8(128)],
    "q, k and v": [fp8(256), fp8(64, seed=1), fp8(64, seed=2)],
    "other groups": [fp8(128, tall=32), fp8(64, tall=16, seed=1)],
    "small parts": [fp8(48, tall=16), fp8(80, tall=80, seed=1)],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_one_matrix(name: str) -> None:
    parts = PARTS[name]
    layer = made(*parts)
    assert isinstance(layer.op, Fp8Linear) and not list(layer.parameters())
    expected, x = torch.cat([part.dense(torch.float64) for part in parts]), inputs(5)
    torch.testing.assert_close(layer.dense_weight(), expected.to(BF16))
    right, residual = rounded(x) @ expected.T, torch.randn(5, len(expected)).to(BF16)
    limits = {"rtol": 2.0**-8, "atol": 1e-5}
    torch.testing.assert_close(layer(x).double(), right, **limits)
    assert not torch.allclose(layer(x).double(), x.double() @ expected.T, **limits), "they are rounded"
    torch.testing.assert_close(layer(x, residual.clone(), overwrite=True).double(), right + residual.double(), **limits)
    gate, up = right.chunk(2, 1)
    torch.testing.assert_close(layer.gated(x).double(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=1e-4)
    assert layer.op.sizes == {"fp8": expected.numel() + expected.numel() // 2048 * 4}


@pytest.mark.parametrize("name", ["static", "no blocks of 128 columns", "one is not", "asked"])
def test_others_have_activations_in_16_bits(name: str) -> None:
    parts = {
        "static": [fp8(128, dynamic=False)],
        "no blocks of 128 columns": [fp8(128, 192)],
        "one is not": [fp8(128), fp8(64, dynamic=False, seed=1)],
        "asked": [fp8(128)],
    }[name]
    layer = made(*parts, form=FORM if name != "asked" else replace(FORM, fp8_from=None))
    assert isinstance(layer.op, PackedLinear)
    expected = torch.cat([part._replace(scales=part.scales.to(BF16)).dense(BF16) for part in parts])
    assert torch.equal(layer.dense_weight(), expected)
    x = inputs(3, expected.shape[1])
    torch.testing.assert_close(layer(x).double(), x.double() @ expected.double().T, rtol=1e-2, atol=1e-3)


def test_one_beside_a_dense_part_is_dequantised() -> None:
    layer = made(fp8(128), torch.randn(64, 256).to(BF16))
    assert not isinstance(layer.op, (Fp8Linear, PackedLinear))


def test_scales_that_16_bits_cannot_have() -> None:
    """With activations in fp8 they can be anything; a part beside that needs 16 bits has the matrix dequantised."""
    large = fp8(128)._replace(scales=torch.full((1, 2), 200.0))
    assert isinstance(made(large).op, Fp8Linear)
    layer, other = made(large, fp8(64, dynamic=False, seed=1)), fp8(64, seed=1)
    assert not isinstance(layer.op, (Fp8Linear, PackedLinear))
    torch.testing.assert_close(layer.dense_weight()[:128], large.dense(BF16), rtol=0, atol=0)
    torch.testing.assert_close(layer.dense_weight()[128:], other.dense(BF16), rtol=2.0**-7, atol=0)


def test_the_log_says_which(caplog: pytest.LogCaptureFixture) -> None:
    config = decoder_config(
        hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=192, vocab_size=16,
        max_positions=64, weight_format=FORM,
    )  # fmt: skip
    model = DecoderModel(config, BF16, "meta")
    for name, part in model.named_modules():
        if isinstance(part, Linear) and name.startswith("layers"):
            assert part.op.keep(ParamSlice("weight", 0, part.out_features), fp8(part.out_features, part.in_features))
    with caplog.at_level(logging.INFO):
        log_groups(model)
    assert "3 tensors in fp8, groups of 128 x 128, for activations in fp8: kept" in caplog.text
    assert "1 tensors in fp8, groups of 128 x 128: kept" in caplog.text  # `down`, of 192 columns


@pytest.mark.parametrize("added", [False, True])
def test_a_layer_that_adds_to_what_it_reads(added: bool) -> None:
    """Nothing can be added to activations in fp8, so its norms give none: the sums of its parts are the layer."""
    config = LayerConfig(
        256, AttentionConfig(4, 2, 64), 256, NormConfig(1e-6), weight_format=FORM, normed_residual=added
    )
    layer = DecoderLayer(config, 0, BF16, torch.device("meta"))
    assert layer.attn_norm is not None and layer.mlp_norm is not None and layer.mlp is not None
    for part in [*layer.modules()]:
        if isinstance(part, Linear):
            assert part.op.keep(ParamSlice("weight", 0, part.out_features), fp8(part.out_features, part.in_features))
        elif isinstance(part, RMSNorm):
            part.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 256, dtype=BF16), False)
    pack_layers(layer, FORM.ops, PackMode())
    assert all(isinstance(linear.op, Fp8Linear) for linear in layer.linears())
    assert (layer.weights() is None) == added  # nor does a device do it in one call
    x, turn = inputs(5), (torch.ones(5, 1, 64), torch.zeros(5, 1, 64))
    attend = FunctionAttend(lambda layer, q, k, v: q.flatten(1) + v.repeat_interleave(2, 1).flatten(1))
    normed = layer.attn_norm(x)
    middle = (normed if added else x) + layer.mixer(normed, *turn, attend)
    under = layer.mlp_norm(middle)
    expected = (under if added else middle) + layer.mlp(under)
    close = {"rtol": 2.0**-6, "atol": 2.0**-6 * float(expected.abs().max())}
    torch.testing.assert_close(layer(x, *turn, attend), expected, **close)
    made, normed = layer.under(layer.mlp_norm, normed, x, *turn, attend)
    torch.testing.assert_close(made, expected, **close)
    torch.testing.assert_close(normed, layer.mlp_norm(made), **close)


def test_experts_stay_as_they_are() -> None:
    experts = ExpertLinear(256, 128, 2, False, BF16, torch.device("meta"), FORM.of_experts)
    for at in (0, 128):
        assert experts.op.keep(ParamSlice("weight", at, 128), fp8(128, seed=at))
    assert experts.op.groups() is not None


def test_shares_and_orders_of_rows() -> None:
    """What a rank has of a matrix, and rows of heads of which a part is turned."""
    whole, dense = fp8(512, 512), fp8(512, 512).dense(BF16)
    columns = Cut(1, Share(128, 256, 512)).of("w", whole)
    order = Order(0, ((0, 32), (64, 96), (32, 32), (160, 96)), 512).of("w", whole)
    assert isinstance(columns, QuantizedRows) and isinstance(order, QuantizedRows)
    rows = torch.cat([torch.arange(at, at + size) for at, size in ((0, 32), (64, 96), (32, 32), (160, 96))])
    for part, expected in ((columns, dense[:, 128:384]), (order, dense[rows])):
        layer = made(part)
        assert isinstance(layer.op, Fp8Linear) and torch.equal(layer.dense_weight(), expected)


def test_ranks_take_what_is_quantised() -> None:
    """Each has columns of the weight and of x; what is quantised with it is as what is quantised for it."""
    whole, x, found = fp8(128, 512), inputs(3, 512), {}
    for ranks in meet(2):
        columns = Cut(1, Share(256 * ranks.rank, 256, 512))
        part = columns.of("w", whole)
        assert isinstance(part, QuantizedRows)
        layer = row_parallel(Linear(256, 128, False, BF16, torch.device("meta"), FORM), ranks)
        assert layer.op.keep(ParamSlice("weight", 0, 128), part)
        layer.pack(FORM.ops, PackMode())
        assert layer.takes_fp8
        found[ranks.rank] = layer, columns.of_tensor("x", x)
    with ThreadPoolExecutor(2) as threads:
        plain = [*threads.map(lambda rank: found[rank][0](found[rank][1]), found)]
        rows = {rank: packed_rows(*quantised(share)) for rank, (_, share) in found.items()}
        taken = [*threads.map(lambda rank: found[rank][0](rows[rank]), found)]
    assert all(torch.equal(y, plain[0]) for y in (*plain, *taken))
    right = rounded(x) @ whole.dense(torch.float64).T
    torch.testing.assert_close(plain[0].double(), right, rtol=2.0**-6, atol=1e-3)


def test_a_weight_takes_the_values_of_another() -> None:
    one, two = made(fp8(128)), made(fp8(128, seed=1))
    before = [part.data_ptr() for part in one.op._weight]  # type: ignore[attr-defined]
    one.op.copy_from(two.op)
    assert [part.data_ptr() for part in one.op._weight] == before  # type: ignore[attr-defined]
    assert torch.equal(one(inputs(3)), two(inputs(3)))


@pytest.mark.parametrize(("shape", "kind"), [((144, 256), Fp8Linear), ((144, 192), PackedLinear)])
def test_weights_that_are_quantised_at_load(shape: tuple[int, int], kind: type) -> None:
    """In blocks of 16 x 128 where the matrix has such, else by row, for activations in 16 bits."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16) * 0.02
    weight[5] = 0
    layer = made(weight[:80], weight[80:], form=replace(FORM, scheme="fp8"))
    found = layer.dense_weight()
    assert isinstance(layer.op, kind) and not found[5].any()
    assert float((found - weight).float().std() / weight.float().std()) < 0.028
    largest = weight[:16, :128].abs().amax()
    assert abs(float(found[:16, :128].abs().amax() / largest) - 1) < 0.01, "the largest of a block is a code"


# Outputs and inputs, and whether they are large enough for kernels to gain.
SIZES = {
    "27B o": (5120, 6144, True), "35B-A3B qkvz": (12288, 2048, True), "35B-A3B o": (2048, 4096, False),
    "V2-Lite q": (3072, 2048, False), "V2-Lite o": (2048, 2048, False), "8B o": (4096, 4096, True),
}  # fmt: skip


@pytest.mark.parametrize("scheme", [None, "fp8"])
@pytest.mark.parametrize("name", SIZES)
def test_small_matrices_have_activations_in_16_bits(name: str, scheme: str | None) -> None:
    outputs, inputs, large = SIZES[name]
    form = GroupFormat(scheme, FORM.ops, fp8_from=FP8_FROM)
    layer = Linear(inputs, outputs, False, BF16, torch.device("meta"), form)
    part = torch.ones(64, inputs).to(BF16) if scheme else fp8(64, inputs)  # the rest may come as it likes
    assert layer.op.keep(ParamSlice("weight", 0, 64), part)
    (kept,) = layer.op.kept  # type: ignore[attr-defined]
    assert ("activations in fp8" in kept) == large
