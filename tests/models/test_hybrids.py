"""Models with recurrent layers against transformers on small random checkpoints, one per family and switch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from block_ops import BlockTorchOps
from hybrid_models import KINDS, Pooled, check_steps, on_two_ranks, reference, saved, tokens, whole_logits
from safetensors.torch import load_file, save_file

from draftwing.errors import CheckpointError, ConfigError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.formats import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.ops import make_ops
from draftwing.parallel.ranks import Absent
from draftwing.train.capture import Causal

CPU = torch.device("cpu")
SOME = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs = reference(request.param)
    folder = saved(tmp_path_factory.mktemp("model"), theirs)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@torch.inference_mode()
def test_whole_sequences_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids = torch.stack([tokens(70, seed) for seed in (1, 2)])
    expected = theirs(ids).logits
    hidden, _ = model(ids.flatten(), torch.arange(70).repeat(2), Causal(2, 70))
    torch.testing.assert_close(model.logits(hidden).view_as(expected), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    check_steps(theirs, Pooled(model))


@pytest.mark.parametrize("rotary", [0.25, 0.5])
def test_attention_with_gates_on_the_devices_kernels(tmp_path: Path, rotary: float) -> None:
    """Heads a part of which is turned lie as all kernels turn them."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotary}
    theirs = reference("qwen3.5", layer_types=["full_attention"] * 4, rope_parameters=rope)
    model, ids, ops = load_model(saved(tmp_path, theirs), torch.float32, "cpu"), tokens(30), make_ops(CPU)
    model.pack(ops)
    pooled = Pooled(model, ops)
    found = [pooled.chunk(ids[:20], 0), *(pooled.tree(ids[i : i + 1], [-1], i) for i in range(20, 30))]
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-4, rtol=1e-4)


def test_a_checkpoint_is_written_as_it_was_read(pair: tuple[Any, DecoderModel, Path]) -> None:
    _, model, folder = pair
    stored = load_file(folder / "model.safetensors")
    for name, value in stored_tensors(model, checkpoint_names(model.config)):
        at = name if name in stored else None
        if at is None:  # experts may be one tensor there
            assert ".experts." in name
            continue
        torch.testing.assert_close(value, stored.pop(at), rtol=0, atol=1e-6, msg=name)
    assert all(".experts." in name or name == "lm_head.weight" for name in stored), sorted(stored)


@pytest.mark.slow
@pytest.mark.further(packed="torch", kind=["qwen3.5", "qwen3-next", "lfm2"])
@pytest.mark.parametrize("packed", ["torch", "c"])
@pytest.mark.parametrize("kind", SOME)
def test_a_packed_model_gives_the_same(tmp_path: Path, kind: str, packed: str) -> None:
    theirs, ids = reference(kind), tokens(40)
    model = load_model(saved(tmp_path, theirs), torch.float32, "cpu")
    model.pack(make_ops(CPU) if packed == "c" else BlockTorchOps(CPU))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.further(kind=["qwen3-next", "qwen3.5-even", "lfm2"], name="fp8 block")
@pytest.mark.further(kind=["qwen3.5", "qwen3.5-moe", "qwen3.5-even"], name="gptq")
@pytest.mark.parametrize("kind", [*SOME, "qwen3.5-even"])
@pytest.mark.parametrize("name", ["", "fp8 block", "gptq"])
def test_shares_of_ranks_are_the_whole(tmp_path: Path, kind: str, name: str) -> None:
    saved(tmp_path, reference(kind))
    if name:
        config, write = tiny.FORMATS[name]
        tiny.quantise(tmp_path, config, lambda module: None if module.endswith(("_a", "_b", "_ba")) else write)
    ids, ops = tokens(12), make_ops(CPU)
    whole = load_model(tmp_path, torch.float32, "cpu")
    whole.pack(ops)

    found = on_two_ranks(tmp_path, ops, ids)
    torch.testing.assert_close(found, whole_logits(whole, ids), atol=2e-4, rtol=1e-4)


def test_what_cannot_be_spread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="divides the 2 key heads of the model's delta nets; found 4"):
        load_config(saved(tmp_path / "a", reference("qwen3.5", num_key_value_heads=4))).spread(Absent(4))
    with pytest.raises(ConfigError, match="--tp-size 3"):
        load_config(saved(tmp_path / "b", reference("lfm2"))).spread(Absent(3))


@pytest.mark.slow
@pytest.mark.further(form="dense", name=["fp8 tensor", "gptq", "compressed int4"])
@pytest.mark.further(form="groups", name=["fp8 tensor", "compressed int4"])
@pytest.mark.further(form="blocks", name=["fp8 block", "awq", "gptq"])
@pytest.mark.further(kind="qwen3-next", name=["fp8 block", "awq"])
@pytest.mark.further(kind="qwen3.5-moe", name=["gptq", "compressed int4"])
@pytest.mark.further(kind="lfm2", form=["dense", "blocks"])
@pytest.mark.further(kind="qwen3.5", form="groups", name=["fp8 block", "awq"])
@pytest.mark.parametrize("form", ["dense", "groups", "blocks"])
@pytest.mark.parametrize("name", ["fp8 block", "fp8 tensor", "awq", "gptq", "compressed int4"])
@pytest.mark.parametrize("kind", SOME)
def test_quantised_weights(tmp_path: Path, kind: str, name: str, form: str) -> None:
    """Of some matrices only: those that share a GEMM with others may be stored in another way."""
    config, write = tiny.FORMATS[name]
    for part in ("quantised", "wide"):
        saved(tmp_path / part, reference(kind))
    plain = ("_z", "_a", "_b", "_ba") if form == "dense" else ("_a", "_b", "_ba")
    exact = tiny.quantise(tmp_path / "quantised", config, lambda one: None if one.endswith(plain) else write)
    save_file(exact, tmp_path / "wide/model.safetensors")
    ops, ids = BlockTorchOps(CPU), tokens(20)
    formats = {"dense": DENSE, "groups": GroupFormat(ops=ops), "blocks": BlockFormat("Q8_0", ops)}
    model = load_model(tmp_path / "quantised", torch.float32, "cpu", weight_format=formats[form])
    model.pack(ops)
    found, expected = whole_logits(model, ids), whole_logits(load_model(tmp_path / "wide", torch.float32, "cpu"), ids)
    if form == "blocks":  # in 8 bits; a token near the edge may go to another expert
        assert (found - expected).norm() < (0.5 if "moe" in kind or "next" in kind else 0.1) * expected.norm()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
def test_the_language_model_of_a_model_for_images(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ids = reference(kind), tokens(30)
    saved(tmp_path, theirs)
    text = json.loads((tmp_path / "config.json").read_text())
    name = text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    whole = {"architectures": [name], "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in stored.items()}
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(8, 8), "mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        model = load_model(tmp_path, torch.float32, "cpu")
    assert "1 tensors for images or sound are not loaded" in caplog.text and "not used" not in caplog.text
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.further(dtype=torch.float32, kind=["qwen3.5", "qwen3-next", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SOME)
def test_from_the_config_alone(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = load_model(saved(tmp_path, reference(kind)), dtype, "cpu", dummy=True)
    model.pack(make_ops(CPU))
    ids = tokens(200)
    logits = whole_logits(model, ids).float()
    assert logits.isfinite().all() and 4 < logits.std() < 32 and len(logits.argmax(-1).unique()) > 10


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    stored = load_file(saved(tmp_path, reference("qwen3.5")) / "model.safetensors")
    name = "model.layers.0.linear_attn.{}"
    for wrong, message in (
        ({name.format("A_log"): torch.zeros(5)}, r"A_log: expected shape \[4\], found \[5\]"),
        ({"model.layers.3.self_attn.q_proj.weight": torch.zeros(128, 64)}, "expected 256 in axis 0, found shape"),
        ({name.format("in_proj_z.weight"): None}, "missing from the checkpoint: .*in_proj_z"),
    ):
        tensors = {key: value for key, value in {**stored, **wrong}.items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path, torch.float32, "cpu")
