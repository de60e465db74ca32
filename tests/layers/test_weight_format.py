"""A weight format from outside: a class and a line in the table are all that serving it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.learnable import ENGINE, prompts, write_target
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint
from torch import Tensor, nn

from draftwing import LLM, SamplingParams
from draftwing.errors import CheckpointError
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import FORMATS
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.ops import make_ops
from draftwing.ops.table import LayerOps

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Int8Rows(WeightFormat):
    """Whole numbers of 8 bits, with a scale for each row."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Int8Rows:
        if config.get("bits") != 8:
            raise CheckpointError(f"int8_rows: expected 8 bits, found {config.get('bits')!r}")
        return cls()

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> LinearOp:
        shape = layer.out_features, layer.in_features
        layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=device), False)
        layer.weight_scale = nn.Parameter(torch.empty(layer.out_features, dtype=torch.float32, device=device), False)
        return Int8RowsOp(layer, dtype)

    def slices(self, layer: str, start: int, rows: int) -> dict[str, ParamSlice]:
        return {name: ParamSlice(f"{layer}.{name}", start, rows) for name in ("weight", "weight_scale")}


class Int8RowsOp(LinearOp):
    def __init__(self, layer: Linear, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self.dtype = dtype

    def dense_weight(self) -> Tensor:
        return (self.layer.weight.float() * self.layer.weight_scale.unsqueeze(1)).to(self.dtype)


class KeepsInt8(Int8RowsOp):
    """Multiplies out in every call, in serving too."""

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp:
        return self


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint in 8 bits, and one with the same weights in float32."""
    monkeypatch.setitem(FORMATS, "int8_rows", Int8Rows.from_config)
    eight, wide = (write_target(tmp_path / name) for name in ("eight", "wide"))
    stored, same = load_file(wide / "model.safetensors"), {}
    for name, weight in list(stored.items()):
        same[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1) / 127
            whole = (weight / scale.unsqueeze(1)).round().to(torch.int8)
            stored[name], stored[f"{name}_scale"] = whole, scale
            same[name] = whole.float() * scale.unsqueeze(1)
    save_file(stored, eight / "model.safetensors")
    save_file(same, wide / "model.safetensors")
    configure(eight, quant_method="int8_rows", bits=8)
    return eight, wide


def configure(folder: Path, **quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.mark.slow
def test_it_serves_the_text_of_the_same_weights(checkpoints: tuple[Path, Path]) -> None:
    params, answers = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True), []
    for folder, algorithm in zip(checkpoints, ("NGRAM", "none"), strict=True):
        with LLM(str(folder), **ENGINE, speculative_algorithm=algorithm) as llm:
            answers.append([done.token_ids for done in llm.generate(prompts(4, seed=1), params)])
    assert answers[0] == answers[1]
    assert all(len(set(ids)) > 4 for ids in answers[0])  # texts that could differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Of what a format is packed to if it says nothing else."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(1536, 64, False, dtype, CPU, Int8Rows())
    linear.weight.copy_(torch.randint(-127, 128, linear.weight.shape, generator=generator))
    linear.weight_scale.fill_(0.01)
    x = torch.randn(9, 1536, generator=generator).to(dtype)
    exact = x.double() @ linear.dense_weight().double().T
    linear.pack(make_ops(CPU))
    assert [name for name, _ in linear.named_parameters()] in ([], ["weight"])
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.01 * float(exact.std()))
    for rows in (1, 2, 3, 8):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])


@pytest.mark.slower(op=KeepsInt8)
@pytest.mark.parametrize("op", [Int8RowsOp, KeepsInt8])
def test_its_tensors_go_where_it_wants_them(
    checkpoints: tuple[Path, Path], op: type[Int8RowsOp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.Int8RowsOp", op)
    eight, wide = (load_model(path, torch.float32, "cpu") for path in checkpoints)
    stored = load_file(checkpoints[0] / "model.safetensors")
    qkv = eight.layers[1].mixer.qkv
    assert qkv.weight.dtype == torch.int8 and qkv.weight_scale.dtype == torch.float32
    parts = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(qkv.weight, torch.cat(parts))
    for (name, tensor), (other, same) in zip(
        sorted(stored_tensors(eight, checkpoint_names(eight.config))), sorted(stored.items()), strict=True
    ):
        assert name == other and torch.equal(tensor, same)
    for model in (eight, wide):
        model.pack(make_ops(CPU))
    for one, other in zip(eight.layers, wide.layers, strict=True):
        for linear in ("mixer.qkv", "mixer.o", "mlp.gate_up", "mlp.down"):
            mine, theirs = one.get_submodule(linear), other.get_submodule(linear)
            assert isinstance(mine, Linear) and isinstance(theirs, Linear)
            torch.testing.assert_close(mine.dense_weight(), theirs.dense_weight())
            ids = torch.tensor([3, 0])
            torch.testing.assert_close(mine.rows(ids), theirs.rows(ids))
            x = torch.randn(2, mine.in_features, generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(mine.exact_logits(x, ids.expand(2, 2)), (x @ mine.rows(ids).T))
            assert mine(x).shape == theirs(x).shape


def test_what_it_does_not_take_is_refused(checkpoints: tuple[Path, Path]) -> None:
    eight, _ = checkpoints
    stored = load_file(eight / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(stored | {name: stored[name].float()}, eight / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: expected values in torch.int8, found torch.float32"):
        load_model(eight, torch.float32, "cpu")
    save_file({key: tensor for key, tensor in stored.items() if key != f"{name}_scale"}, eight / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing from the checkpoint: {name}_scale"):
        load_model(eight, torch.float32, "cpu")
    configure(eight, quant_method="int8_rows", bits=4)
    with pytest.raises(CheckpointError, match="expected 8 bits, found 4"):
        load_config(eight)


@pytest.mark.parametrize("quantization", [{"quant_method": "mxfp4"}, {}, "awq", {"quant_method": None}])
def test_formats_that_nobody_has_added_are_refused(
    tmp_path: Path, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=r"expected none or .*, found .* Take the model's"):
        load_config(folder)
    monkeypatch.setitem(FORMATS, "int8_rows", Int8Rows.from_config)
    with pytest.raises(CheckpointError, match=r"expected none or quant_method .*, int8_rows, found "):
        load_config(folder)
