"""Experts in every form that weights have: what is loaded expert by expert is what rows are multiplied with."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from block_ops import BlockTorchOps
from group_ops import GroupTorchOps
from torch import Tensor

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.experts import ExpertLinear, ExpertMLP, Router, shared_parts
from draftwing.layers.linear_ops.base import PackMode, WeightFormat
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.layers.mlp import GatedMLP
from draftwing.layers.part_configs import Activation, ExpertConfig
from draftwing.models.decoder import pack_layers
from draftwing.ops.experts.routing import Routing
from draftwing.ops.gemm.groups import PackedGroups, unpacked
from draftwing.ops.gemm.stored import MXRows, QuantizedRows
from draftwing.ops.table import PLAIN, TorchOps

CPU, COUNT, TOP = torch.device("cpu"), 4, 2


def loaded(
    form: WeightFormat, parts: list[Tensor | QuantizedRows | MXRows], bias: Tensor | None, device: torch.device = CPU
) -> ExpertLinear:
    """parts: gates and ups of one expert after the other, each of so many rows."""
    first = parts[0]
    rows = len(first if isinstance(first, Tensor) else first.codes)
    columns = (
        first.columns
        if isinstance(first, MXRows)
        else (first.codes if isinstance(first, QuantizedRows) else first).shape[1]
    )
    layer = ExpertLinear(columns, 2 * rows, COUNT, bias is not None, torch.bfloat16, device, form)
    for number, part in enumerate(parts):
        (place,) = form.slices("", number * rows, rows).values()
        if not layer.op.keep(place, part):
            assert isinstance(part, Tensor)
            place._replace(param="weight").of(layer.weight).copy_(part)
    if layer.bias is not None and bias is not None:
        layer.bias.data.copy_(bias)
    return layer


def triton_ops(device: torch.device) -> TorchOps:
    pytest.importorskip("triton")
    from draftwing.ops.triton.ops import TritonOps

    return TritonOps(device)


@pytest.mark.parametrize("rows", [32, 16])
@pytest.mark.parametrize(
    "case", ["dense", "plain", "blocks", "mx blocks", "mx torch", "mx triton", "groups torch", "groups triton"]
)
def test_forms(request: pytest.FixtureRequest, case: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(COUNT * 2 * rows, generator=generator).bfloat16()
    ops: TorchOps = BlockTorchOps(CPU)
    form = DENSE
    parts: list[Tensor | QuantizedRows | MXRows] = []
    if case.endswith("triton"):
        request.getfixturevalue("mended_interpreter")
        ops = triton_ops(request.getfixturevalue("device"))
    elif case.endswith("torch"):
        ops = GroupTorchOps(CPU)
    if case.startswith("mx"):
        form = BlockFormat("Q8_0", ops) if case == "mx blocks" else GroupFormat(ops=ops)
        for _ in range(2 * COUNT):
            codes = torch.randint(0, 256, (rows, 64), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(118, 124, (rows, 4), generator=generator, dtype=torch.uint8)
            parts.append(MXRows(codes.to(ops.device), exponents.to(ops.device)))
        expected = torch.cat([part.dense(torch.bfloat16) for part in parts if isinstance(part, MXRows)])
        tolerance = 0.0
    elif case.startswith("groups"):
        form = GroupFormat(ops=ops)
        for _ in range(2 * COUNT):
            codes = torch.randint(-8, 8, (rows, 128), generator=generator, dtype=torch.int8)
            scales = torch.rand(rows, 2, generator=generator) / 32
            scales = scales.bfloat16().to(ops.device)
            parts.append(QuantizedRows(codes.to(ops.device), 4, scales, None, 1, 64, None))
        expected = torch.cat([part.dense(torch.bfloat16) for part in parts if isinstance(part, QuantizedRows)])
        tolerance = 0.0
    else:
        parts += list((torch.randn(2 * COUNT * rows, 128, generator=generator) / 8).split(rows))
        expected, tolerance = torch.cat(parts), 0.005
        if case == "blocks":
            form = BlockFormat("Q8_0", ops)
    layer = loaded(form, parts, bias, ops.device)
    if tolerance:  # what stays quantised has no such weight before it is packed
        torch.testing.assert_close(layer.op.dense_weight().float(), expected.float(), atol=tolerance, rtol=0.005)
    x, logits = torch.randn(5, 128, generator=generator).bfloat16(), torch.randn(5, COUNT, generator=generator)
    x, logits, bias, expected = (part.to(ops.device) for part in (x, logits, bias, expected))
    if case != "plain":
        layer.pack(ops, PackMode())
    else:
        ops = PLAIN  # type: ignore[assignment]
    assert layer.op.dense_weight().shape == expected.shape
    routed = ops.route(logits, Routing(TOP))
    matrices, biases = expected.double().view(COUNT, 2 * rows, 128), bias.double().view(COUNT, -1)
    pairs = [(row, expert) for row in range(5) for expert in routed.experts[row].tolist()]
    wanted = torch.stack([matrices[expert] @ x[row].double() + biases[expert] for row, expert in pairs])
    torch.testing.assert_close(layer(x, routed).double(), wanted, atol=0.05, rtol=0.02)
    gate, up = wanted.chunk(2, 1)
    torch.testing.assert_close(layer.gated(x, routed).double(), gate * gate.sigmoid() * up, atol=0.1, rtol=0.03)
    if case == "blocks":
        assert set(layer.op.sizes) == {"Q8_0"} and not hasattr(layer, "weight")
    if case == "mx blocks":
        assert set(layer.op.sizes) == {"Q5_0"} and torch.equal(layer.op.dense_weight(), expected)
    if case == "mx triton":
        assert set(layer.op.sizes) == {"mxfp4"}
    if case == "groups triton":
        assert set(layer.op.sizes) == {"int4"}


@pytest.mark.further(form="fp8", gated=False)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", ["dense", "fp8", "fp8 twice as wide", "dense twice as wide"])
def test_a_shared_expert_becomes_one_of_the_others(
    mended_interpreter: None, device: torch.device, form: str, gated: bool
) -> None:
    """Or two, where it is as wide. The device routes to them: the text is that of the layer that is not packed, which
    has it apart."""
    form, _, wider = form.partition(" ")
    many = 2 if wider else 1
    ops, generator = triton_ops(device), torch.Generator().manual_seed(0)
    experts = ExpertConfig(COUNT, Routing(TOP), 64, shared=64 * many, shared_gate=gated)
    layer = LayerConfig(128, AttentionConfig(4, 2, 16), 48, experts=experts)
    plain, merged = ExpertMLP(layer, torch.float32, CPU), ExpertMLP(layer, torch.float32, device)
    for one, other in zip(plain.parameters(), merged.parameters(), strict=True):
        one.data.normal_(0, 0.2, generator=generator)
        other.data.copy_(one)
    assert plain.shared is not None and merged.shared is not None
    if form == "fp8":
        merged = ExpertMLP(replace(layer, weight_format=GroupFormat("fp8", ops)), torch.bfloat16, device)
        assert merged.shared is not None
        for mine, theirs in (
            (merged.gate_up, plain.gate_up), (merged.down, plain.down),
            (merged.shared.gate_up, plain.shared.gate_up), (merged.shared.down, plain.shared.down),
        ):  # fmt: skip
            (place,) = layer.weight_format.slices("", 0, len(theirs.weight)).values()
            assert mine.op.keep(place, theirs.weight.detach())
        for name, param in plain.named_parameters():
            if name in dict(merged.named_parameters()):
                merged.get_parameter(name).data.copy_(param)
    kept = [weakref.ref(part.weight) for part in (merged.gate_up, merged.down) if form == "dense"]
    held: list[list[bool]] = []
    ops.empty_cache = lambda: held.append([ref() is not None for ref in kept])  # type: ignore[method-assign]
    pack_layers(merged, ops, PackMode())
    assert held[0::many] == ([[False, True], [False, False]] if kept else [[], []]), "one goes before another one comes"
    assert merged.shared is None and merged.gate_up.count == COUNT + many
    gates, ups = merged.gate_up.dense_weight()[-128 * many :].view(many, 2, 64, -1).transpose(0, 1).flatten(1, 2)
    down = merged.down.dense_weight()[-128 * many :].view(many, 128, -1)
    for theirs, weight in (
        (plain.gate_up, merged.gate_up.dense_weight()[: -128 * many]),
        (plain.down, merged.down.dense_weight()[: -128 * many]), (plain.shared.gate_up, torch.cat((gates, ups))),
        (plain.shared.down, torch.cat([*down], 1)),
    ):  # fmt: skip
        torch.testing.assert_close(theirs.weight.data, weight.cpu().float(), atol=0.03, rtol=0.07)
        theirs.weight.data.copy_(weight)  # as it was rounded
    x, residual = torch.randn(2, 5, 128, generator=generator)
    dtype = torch.float32 if form == "dense" else torch.bfloat16
    found, expected = merged(x.to(device, dtype), residual.to(device, dtype)).cpu().float(), plain(x, residual)
    assert (found - expected).abs().max() < (1e-5 if form == "dense" else 0.03) * expected.abs().max()


@pytest.mark.parametrize("kind", ["plain", "gated", "ungated"])
def test_shared_experts_among_the_others_make_the_same_of_a_row_in_any_batch(
    mended_interpreter: None, device: torch.device, kind: str
) -> None:
    """ungated: all of them are squares of what is above 0."""
    generator = torch.Generator().manual_seed(0)
    experts = ExpertConfig(COUNT, Routing(TOP), 64, shared=192, shared_gate=kind == "gated")
    activation: Activation = "relu2" if kind == "ungated" else "silu"
    layer = LayerConfig(128, AttentionConfig(4, 2, 16), 48, experts=experts, activation=activation)
    mixture, apart = (ExpertMLP(layer, torch.bfloat16, device) for _ in range(2))
    for param, other in zip(mixture.parameters(), apart.parameters(), strict=True):
        param.data.copy_(torch.randn(param.shape, generator=generator) * 0.2)
        other.data.copy_(param)
    pack_layers(mixture, triton_ops(device), PackMode())
    assert mixture.shared is None and mixture.gate_up.count == COUNT + 3
    x = torch.randn(5, 128, generator=generator).to(device, torch.bfloat16)
    found, expected = mixture(x), apart(x)
    assert torch.equal(torch.cat([mixture(row) for row in x.split(1)]), found)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_shared_expert_whose_groups_would_be_cut_stays_whole() -> None:
    layer = LayerConfig(128, AttentionConfig(4, 2, 16), 256, weight_format=GroupFormat("w4a16", GroupTorchOps(CPU)))
    mlp = GatedMLP(layer, torch.bfloat16, CPU)
    for linear in (mlp.gate_up, mlp.down):
        weight = torch.randn(linear.out_features, linear.in_features, generator=torch.Generator().manual_seed(1))
        (place,) = layer.weight_format.slices("", 0, len(weight)).values()
        assert linear.op.keep(place, weight)
    assert shared_parts(mlp, 64) == [], "down has groups of 128 columns"
    parts, gate_up, down = shared_parts(mlp, 128), mlp.gate_up.op.groups(), mlp.down.op.groups()
    assert isinstance(gate_up, PackedGroups) and isinstance(down, PackedGroups)
    for i, (first, second) in enumerate(parts):
        at = slice(128 * i, 128 * i + 128)
        whole = first.op.groups()
        assert isinstance(whole, PackedGroups)
        assert torch.equal(unpacked(whole), torch.cat([half[at] for half in unpacked(gate_up).chunk(2)]))
        whole = second.op.groups()
        assert isinstance(whole, PackedGroups) and torch.equal(unpacked(whole), unpacked(down)[:, at])
    assert len(parts) == 2


@pytest.mark.parametrize("ops", ["cpu"], indirect=True)
def test_a_shared_expert_makes_the_same_of_a_row_in_any_batch(ops: TorchOps) -> None:
    """Its gate, too: torch's sigmoid of a tensor's last elements, which fill no vector, has other bits."""
    generator = torch.Generator().manual_seed(0)
    experts = ExpertConfig(4, Routing(2), 32, shared=48, shared_gate=True)
    mixture = ExpertMLP(LayerConfig(64, AttentionConfig(4, 2, 16), 48, experts=experts), torch.float32, CPU)
    for param in mixture.parameters():
        param.data.normal_(0, 0.3, generator=generator)
    pack_layers(mixture, ops, PackMode(True))
    x = torch.randn(21, 64, generator=generator)
    assert torch.equal(torch.cat([mixture(row) for row in x.split(1)]), mixture(x))


def test_a_wide_router_where_gemms_have_other_bits_in_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic mode of a GPU: no GEMM in float32 keeps to them."""
    ops, generator = TorchOps(CPU), torch.Generator().manual_seed(0)
    monkeypatch.setattr(ops, "keeps_bits", lambda weight: False)
    router = Router(64, 7, True, torch.bfloat16, CPU, wide=True)
    for param in router.parameters():
        param.data.normal_(generator=generator)
    x, weight = torch.randn(9, 64, generator=generator).bfloat16(), router.weight.double()
    router.pack(ops, PackMode(True))
    assert router.weight.dtype == torch.float32 and router.bias is not None
    found = router(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.T + router.bias.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([router(row) for row in x.split(1)]), found)
