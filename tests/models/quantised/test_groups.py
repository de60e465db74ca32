"""Quantised checkpoints whose weights stay so: the logits of the same weights dequantised, and their text."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from group_ops import GroupTorchOps
from plain_attention import FunctionAttend
from reference.checkpoints import eagle3_head, llama_target, qwen2_target
from reference.learnable import ENGINE, prompts
from tiny_checkpoint import VOCAB, write_tokenizer
from tiny_gguf import causal
from torch import Tensor

from draftwing import LLM, SamplingParams
from draftwing.layers.linear import operations
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat, PackedLinear
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.eagle import EagleHead
from draftwing.models.loader import fill_parameters, load_model

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
INT4 = {**tiny.INT4, "group_size": 64}
GPTQ = {**tiny.GPTQ, "group_size": 64}
FORMATS: dict[str, tuple[dict[str, Any], tiny.Writer]] = {
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        tiny.float8(128, 128, "weight_scale_inv"),
    ),
    "fp8 channel": tiny.FORMATS["compressed fp8 channel"],
    "int4": (tiny.compressed(INT4, "pack-quantized"), tiny.packed(wide=64)),
    "int4 zeros": (
        tiny.compressed({**INT4, "symmetric": False}, "pack-quantized"), tiny.packed(wide=64, symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, tiny.awq(64)),
    "gptq": (GPTQ, tiny.gptq(wide=64)),
    "gptq row": tiny.FORMATS["gptq row"],
}  # fmt: skip


def checkpoint(folder: Path, name: str, arch: str = "llama") -> Path:
    made = {"llama": llama_target, "qwen2": qwen2_target}[arch](3, **SIZES).write(folder)
    config, writer = FORMATS[name]
    tiny.quantise(made, config, lambda _: writer)
    return made


@torch.inference_mode()
def logits(model: DecoderModel) -> Tensor:
    ids = torch.tensor([3, 1, 7, 7, 30, 2, 39, 0, 12])
    return model.logits(model(ids, torch.arange(9), FunctionAttend(causal))[0])


@pytest.mark.slow
@pytest.mark.further(arch="qwen2", name=[name for name in FORMATS if name != "int4 zeros"])
@pytest.mark.further(arch="llama", name=["fp8 channel", "int4", "int4 zeros", "gptq"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_model_of_the_dequantised_matrices(
    tmp_path: Path, name: str, arch: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, ops = checkpoint(tmp_path, name, arch), GroupTorchOps(CPU)
    with caplog.at_level(logging.INFO):
        model = load_model(folder, torch.bfloat16, "cpu", weight_format=GroupFormat(None, ops))
    assert ": kept" in caplog.text and "dequantised" not in caplog.text
    exact = load_model(folder, torch.bfloat16, "cpu")
    for each in (model, exact):
        each.pack(ops, True)
    assert sum(isinstance(op, PackedLinear) for op in operations(model)) == 4 * model.config.num_layers
    assert set(model.weight_bytes()) == {"bfloat16", "fp8" if "fp8" in name else "int4"}
    found, expected = logits(model).float(), logits(exact).float()
    if name.startswith("int4"):  # scales in bfloat16, which lose nothing
        assert torch.equal(found, expected)
    assert float((found - expected).std() / expected.std()) < 0.02


@pytest.mark.slow
@pytest.mark.further(name=["fp8 channel", "int4", "gptq", "gptq row"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_stored_as_the_config_says(tmp_path: Path, name: str) -> None:
    """As long as the checkpoint's own, and with as large values as those of a model that is not quantised."""
    folder, ops = checkpoint(tmp_path, name), GroupTorchOps(CPU)
    stored, dummy, dense = (
        load_model(folder, torch.bfloat16, "cpu", dummy=dummy, weight_format=form)
        for dummy, form in ((False, GroupFormat(None, ops)), (True, GroupFormat(None, ops)), (True, DENSE))
    )
    for model in (stored, dummy, dense):
        model.pack(ops, True)
    assert dummy.weight_bytes() == stored.weight_bytes() and set(dense.weight_bytes()) == {"bfloat16"}
    found, expected = logits(dummy).float(), logits(dense).float()
    assert found.isfinite().all() and 0.5 < float(found.std() / expected.std()) < 2


def made(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and options; name: of a format, or an option and its value."""
    if name in FORMATS:
        folder, options = checkpoint(folder, name), {}
    else:
        folder, options = llama_target(3, **SIZES).write(folder), {"quantization": name.split()[1]}
    write_tokenizer(folder)
    return folder, {**ENGINE, "dtype": "bfloat16", **options}


def texts(folder: Path, kind: str, requests: int, **options: Any) -> list[list[int]]:
    params = [
        SamplingParams(temperature=i / 2 % 2, sampling_seed=i, max_new_tokens=16, ignore_eos=True)
        for i in range(requests)
    ]
    with LLM(str(folder), **options) as llm:
        assert kind in llm.engine.info.weight_bytes
        return [done.token_ids for done in llm.generate(prompts(requests, seed=1), params)]


def drafts(folder: Path, shape: tuple[int, int, int] | None) -> dict[str, Any]:
    """NGRAM, or a random EAGLE-3 head, written to `folder`, always with this depth, top k and size."""
    if shape is None:
        return {"speculative_algorithm": "NGRAM"}
    head = eagle3_head(
        llama_target(3, **SIZES), rows=None, **SIZES, head_dim=32, eagle_aux_hidden_state_layer_ids=[0, 1, 1]
    )
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head.write(folder)),
        "speculative_fixed_shape": True, **dict(zip(names, shape, strict=True)),
    }  # fmt: skip


TREE, CHAIN = (3, 4, 12), (3, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("fp8 block", None, marks=pytest.mark.exhaustive), ("awq", TREE),
        pytest.param("--quantization w4a16", None, marks=pytest.mark.exhaustive),
        pytest.param("--quantization fp8", CHAIN, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_drafts_change_no_token(
    tmp_path: Path, name: str, shape: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwing.engine.devices.base.make_ops", GroupTorchOps)
    (folder, options), kind = made(tmp_path / "target", name), "fp8" if "fp8" in name else "int4"
    plain = texts(folder, kind, 4, speculative_algorithm="none", **options)
    assert texts(folder, kind, 4, **drafts(tmp_path / "head", shape), **options) == plain
    assert all(len(set(ids)) > 4 for ids in plain[1:])


@torch.inference_mode()
def test_a_draft_head_beside_a_quantised_target(tmp_path: Path) -> None:
    """Its matrices and the rows of the target's head that it reads are in 8 bits; its embedding is as it was."""
    ops = GroupTorchOps(CPU)
    target = load_model(llama_target(3, **SIZES).write(tmp_path), torch.bfloat16, "cpu")
    config = replace(target.config, layers=target.config.layers[:1])
    dense = EagleHead(config, target, False, torch.bfloat16, "cpu")
    for i, parameter in enumerate(dense.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) / 12)
    form = GroupFormat("int8", ops)
    head = EagleHead(replace(config, weight_format=form, vocab_format=form), target, False, torch.bfloat16, "meta")
    fill_parameters(head, head.names(), dense.stored_tensors(), "cpu")
    ids = torch.tensor([1, 2, 3, 30, 39, 12, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17])
    outputs = []
    for each in (dense, head):
        each.restrict(ids)
        each.pack(ops)
        each.set_max_positions(32)
        features = torch.randn(9, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
        hidden = each.run(torch.arange(9), torch.arange(9), features, 0, FunctionAttend(causal))
        outputs.append((hidden.float(), each.logits(hidden).float()))
    assert isinstance(head.output_layer()[1].op, PackedLinear)
    assert all(isinstance(op, PackedLinear) for op in operations(head))
    for expected, found in zip(*outputs, strict=True):
        assert 0 < float((found - expected).std() / expected.std()) < 0.03


ASKED = {"--quantization fp8": "fp8", "--quantization w4a16": "int4", "--quantization none": "bfloat16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "kv"),
    [*((name, "auto") for name in (*FORMATS, *list(ASKED)[:2])), *((name, "fp8_e4m3") for name in ASKED)],
)
def test_on_a_gpu(tmp_path: Path, name: str, kv: str) -> None:
    """One request at a time and twenty, with graphs, and with lookups, trees and chains: the same text."""
    (folder, options), kind = made(tmp_path / "target", name), ASKED.get(name, "fp8" if "fp8" in name else "int4")
    options |= {"device": "cuda", "enable_deterministic_inference": True, "max_running_requests": 20}
    options |= {"kv_cache_dtype": kv}
    plain = texts(folder, kind, 20, speculative_algorithm="none", **options)
    for shape in (None, TREE, CHAIN) if name in ASKED else (TREE,):
        assert texts(folder, kind, 20, **drafts(tmp_path / "head", shape), **options) == plain, shape
    alone = {**options, "max_running_requests": 1}
    for drafting in ({"speculative_algorithm": "none"}, drafts(tmp_path / "head", TREE)):
        assert texts(folder, kind, 20, **drafting, **alone) == plain, drafting
    assert all(len(set(ids)) > 4 for ids in plain[1::4])
