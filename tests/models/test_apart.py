"""Tensors of all experts taken apart, and MXFP4 against its definition and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models import apart
from draftwing.models.apart import each_expert
from draftwing.ops.gemm.stored import MXRows
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

COUNT, HIDDEN, FFN = 3, 64, 96
AT = "model.layers.0.mlp.experts"
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packed(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (COUNT, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 140, (COUNT, rows, columns // 32), generator=generator, dtype=torch.uint8)


def by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., blocks, 16] -> [.., columns] float64"""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    low, high = table[(blocks & 15).long()], table[(blocks >> 4).long()]
    return (torch.stack((low, high), -1).flatten(-2) * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(-2)


def test_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # which takes 3 s

    blocks, scales = packed(8, HIDDEN)
    for expert in range(COUNT):
        found = MXRows(blocks[expert].flatten(1), scales[expert]).dense(torch.bfloat16)
        assert torch.equal(found.double(), by_hand(blocks[expert], scales[expert]))  # nothing is rounded
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(found, theirs[-1])


def stored(mx: bool) -> dict[str, Tensor]:
    names: dict[str, Tensor] = {f"{AT}.gate_up_proj_bias": torch.randn(COUNT, 2 * FFN)}
    names[f"{AT}.down_proj_bias"] = torch.randn(COUNT, HIDDEN)
    for name, rows, columns in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
        if mx:
            names[f"{AT}.{name}_scales"], names[f"{AT}.{name}_blocks"] = packed(rows, columns)[::-1]
        else:
            names[f"{AT}.{name}"] = torch.randn(COUNT, columns, rows)
    return names | {"model.norm.weight": torch.ones(HIDDEN)}


@pytest.mark.parametrize("mx", [False, True])
def test_gates_and_ups_come_in_turn(mx: bool) -> None:
    tensors = stored(mx)
    found = dict(each_expert(tensors.items(), COUNT, {}, interleaved=True))
    assert len(found) == COUNT * 6 + 1
    for expert in range(COUNT):
        if mx:
            gate_up, down = (
                by_hand(tensors[f"{AT}.{name}_blocks"][expert], tensors[f"{AT}.{name}_scales"][expert])
                for name in ("gate_up_proj", "down_proj")
            )
        else:
            gate_up, down = (tensors[f"{AT}.{name}"][expert].t().double() for name in ("gate_up_proj", "down_proj"))
        bias = tensors[f"{AT}.gate_up_proj_bias"][expert]
        expected = {
            "gate_proj.weight": gate_up[::2], "up_proj.weight": gate_up[1::2], "down_proj.weight": down,
            "gate_proj.bias": bias[::2], "up_proj.bias": bias[1::2],
            "down_proj.bias": tensors[f"{AT}.down_proj_bias"][expert],
        }  # fmt: skip
        for name, value in expected.items():
            part = found[f"{AT}.{expert}.{name}"]
            assert torch.equal(part.dense(torch.float64) if isinstance(part, MXRows) else part.double(), value.double())


def test_a_rank_gets_its_share() -> None:
    tensors = stored(True)
    whole = dict(each_expert(tensors.items(), COUNT, {}, interleaved=True))
    gate, down = f"{AT}.1.gate_proj.weight", f"{AT}.1.down_proj.weight"
    found = dict(
        each_expert(
            tensors.items(),
            COUNT,
            {gate: Cut(0, Share(32, 32, 96)), down: Cut(1, Share(64, 32, 96))},
            interleaved=True,
        )
    )
    for name, expected in ((gate, (slice(32, 64), slice(None))), (down, (slice(None), slice(64, 96)))):
        part, every = found[name], whole[name]
        assert isinstance(part, MXRows) and isinstance(every, MXRows)
        assert torch.equal(part.dense(torch.float32), every.dense(torch.float32)[expected])
    with pytest.raises(CheckpointError, match="no whole number of blocks of 32: expected a smaller --tp-size"):
        list(each_expert(tensors.items(), COUNT, {down: Cut(1, Share(0, 48, 96))}, interleaved=True))
    for name, axis, whole in ((gate, 0, 64), (down, 1, 64)):
        cuts = {name.replace(".1.", ".0."): Cut(axis, Share(0, 32, whole))}
        with pytest.raises(CheckpointError, match=r"expected \d+ (rows of gates and ups|columns in MXFP4), found"):
            list(each_expert(tensors.items(), COUNT, cuts, interleaved=True))


def test_nothing_else_is_copied_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, copied = stored(True), list[int]()
    monkeypatch.setattr(apart, "uploaded", lambda tensor, device: copied.append(tensor.numel()) or tensor)
    shares = ("gate_proj", Cut(0, Share(32, 32, FFN))), ("up_proj", Cut(0, Share(32, 32, FFN))), (
        "down_proj", Cut(1, Share(32, 32, FFN)),
    )  # fmt: skip
    cuts = {f"{AT}.{expert}.{name}.weight": cut for expert in range(COUNT) for name, cut in shares}
    device = torch.device("cpu")
    whole = dict(each_expert(tensors.items(), COUNT, {}, device, interleaved=True))
    every, _ = sum(copied), copied.clear()
    found = dict(each_expert(tensors.items(), COUNT, cuts, device, interleaved=True))
    assert sum(copied) * 3 == every
    for name, cut in cuts.items():
        part, all_of_it = found[name], whole[name]
        assert isinstance(part, MXRows) and isinstance(all_of_it, MXRows)
        expected = all_of_it.dense(torch.float32).narrow(cut.axis, 32, 32)
        assert torch.equal(part.dense(torch.float32), expected)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("down_proj", torch.zeros(COUNT, 5), "down_proj: expected 3 dimensions"),
        ("down_proj_bias", torch.zeros(COUNT + 1, 5), "down_proj_bias: expected tensors of 3 experts, found shape"),
        ("down_proj_scales", torch.zeros(COUNT, 5, 1), "down_proj_scales: expected 3 dimensions in uint8"),
        ("down_proj_scales", torch.zeros(COUNT, 9, 3, dtype=torch.uint8), "_blocks: expected shape [3, 9, 3, 16]"),
        ("down_proj_scales", None, "missing from the checkpoint: expected model.layers.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, value: Tensor | None, named: str) -> None:
    tensors = {key: tensor for key, tensor in stored(True).items() if key != f"{AT}.{name}"}
    tensors |= {} if value is None else {f"{AT}.{name}": value}
    with pytest.raises(CheckpointError) as error:
        list(each_expert(tensors.items(), COUNT, {}, interleaved=True))
    assert named in str(error.value)
