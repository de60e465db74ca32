"""Checkpoints that were made for activations in fp8: their own arithmetic, and text that drafts do not change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from group_ops import Fp8TorchOps
from plain_attention import FunctionAttend
from reference.checkpoints import llama_target
from reference.learnable import ENGINE, prompts
from tiny_checkpoint import VOCAB, write_tokenizer
from tiny_gguf import causal
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.layers.linear import Linear, operations
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.layers.linear_ops.groups import Fp8Linear, GroupFormat, PackedLinear
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_config, load_model

CPU, BF16 = torch.device("cpu"), torch.bfloat16
pytestmark = pytest.mark.slow
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCKS = {
    "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True,
    "dynamic": False,
}  # fmt: skip
INPUTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}


def compressed(inputs: dict[str, Any] | None) -> dict[str, Any]:
    config = tiny.compressed(BLOCKS, "float-quantized")
    for group in config["config_groups"].values():
        group["input_activations"] = inputs
    return config


# By name, with the suffix of the tensor of scales, and whether activations are rounded.
CONFIGS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "fp8": (DYNAMIC, "weight_scale_inv", True),
    "fp8 by default": ({key: DYNAMIC[key] for key in DYNAMIC if key != "activation_scheme"}, "weight_scale_inv", True),
    "fp8 static": ({**DYNAMIC, "activation_scheme": "static"}, "weight_scale_inv", False),
    "compressed": (compressed(INPUTS), "weight_scale", True),
    "compressed by token": (compressed({**INPUTS, "strategy": "token", "group_size": None}), "weight_scale", False),
    "compressed, 16 bits": (compressed(None), "weight_scale", False),
}


def checkpoint(folder: Path, name: str = "fp8", sizes: dict[str, Any] = SIZES) -> Path:
    made = llama_target(3, **sizes).write(folder)
    config, scale, _ = CONFIGS[name]
    tiny.quantise(made, config, lambda _: tiny.float8(128, 128, scale))
    write_tokenizer(made)
    return made


class Written(LinearOp):
    """The arithmetic of transformers' `FP8Linear` in float64: each row's groups of 128 activations are codes of e4m3,
    the largest of which is 448. Between products there is bfloat16."""

    def __init__(self, layer: Linear, weight: Tensor) -> None:
        super().__init__(layer)
        self.weight = weight.double()

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = self(x.double(), bias).chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        groups = x.float().unflatten(1, (-1, 128))
        scales = groups.abs().amax(2, keepdim=True) / 448
        codes = (groups / scales).to(torch.float8_e4m3fn).double()
        y = (codes * scales.double()).flatten(1) @ self.weight.T
        return (y if residual is None else y + residual.double()).to(x.dtype)


@torch.inference_mode()
def logits(model: DecoderModel) -> Tensor:
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    return model.logits(model(ids, torch.arange(9), FunctionAttend(causal))[0]).double()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_arithmetic_that_a_checkpoint_was_made_for(tmp_path: Path, name: str) -> None:
    folder, ops, rounds = checkpoint(tmp_path, name), Fp8TorchOps(CPU), CONFIGS[name][2]
    model = load_model(folder, BF16, "cpu", weight_format=GroupFormat(None, ops, fp8_from=0))
    model.pack(ops, True)
    kinds = {type(op) for name, op in _operations(model).items() if name.startswith("layers")}
    assert kinds == {Fp8Linear if rounds else PackedLinear}
    assert set(model.weight_bytes()) == {"bfloat16", "fp8"}
    exact, other = load_model(folder, BF16, "cpu"), load_model(folder, torch.float32, "cpu")
    as_stored = logits(exact)
    for part, wide in zip(exact.layers.modules(), other.layers.modules(), strict=True):
        if isinstance(part, Linear) and isinstance(wide, Linear):
            part.op = Written(part, wide.dense_weight())
    found, rounded = logits(model), logits(exact)
    apart = float((rounded - as_stored).std() / as_stored.std())
    right = rounded if rounds else as_stored
    assert float((found - right).std() / right.std()) < 0.02 < apart


def _operations(model: DecoderModel) -> dict[str, LinearOp]:
    return {name: part.op for name, part in model.named_modules() if isinstance(part, Linear)}


def test_random_weights_are_as_stored_ones(tmp_path: Path) -> None:
    folder, ops = checkpoint(tmp_path, sizes={**SIZES, "intermediate_size": 320}), Fp8TorchOps(CPU)
    form, models = GroupFormat(None, ops, fp8_from=0), []
    for dummy in (False, True):
        models.append(load_model(folder, BF16, "cpu", dummy=dummy, weight_format=form))
        models[-1].pack(ops, True)
    stored, dummy = models
    assert stored.weight_bytes() == dummy.weight_bytes()
    assert [type(op) for op in operations(stored)] == [type(op) for op in operations(dummy)]
    assert {type(op) for op in operations(dummy)} > {Fp8Linear, PackedLinear}  # `down` has 320 columns
    assert logits(dummy).isfinite().all()


def texts(folder: Path, **options: Any) -> list[list[int]]:
    params = [
        SamplingParams(temperature=i / 2 % 2, sampling_seed=i, max_new_tokens=16, ignore_eos=True) for i in range(4)
    ]
    with LLM(str(folder), **{**ENGINE, "dtype": "bfloat16", **options}) as llm:
        return [done.token_ids for done in llm.generate(prompts(4, seed=1), params)]


def test_drafts_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftwing.engine.devices.base.make_ops", Fp8TorchOps)
    folder = checkpoint(tmp_path)
    with caplog.at_level(logging.INFO):
        plain = texts(folder, speculative_algorithm="none")
    assert "for activations in fp8: kept" in caplog.text
    assert texts(folder, speculative_algorithm="NGRAM") == plain
    assert texts(folder, speculative_algorithm="none", chunked_prefill_size=4) == plain
    assert all(len(set(ids)) > 4 for ids in plain[1:])
    caplog.clear()
    with caplog.at_level(logging.INFO):
        other = texts(folder, speculative_algorithm="none", fp8_activations="none")
    assert "for activations in fp8" not in caplog.text and other != plain


def test_what_a_config_says_of_activations(tmp_path: Path) -> None:
    for name, (_, _, rounds) in CONFIGS.items():
        stored = load_config(checkpoint(tmp_path / name.replace(" ", "_"), name)).quantization
        assert stored is not None
        scheme = stored.scheme_of("model.layers.0.mlp.down_proj")
        assert scheme is not None and scheme.dynamic == rounds
