"""Models with recurrent layers against transformers on small random checkpoints, one per family and switch, and of GGUF
files in the layout of llama.cpp's converter."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import KINDS, Pooled, check_steps, on_ranks, reference, saved, tokens, whole_logits
from safetensors.torch import load_file, save_file

from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf_file import open_gguf
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.hybrid import HybridConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.models.apart import of_state_space, without_latents
from draftwing.models.decoder import DecoderModel
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_config, load_model
from draftwing.models.weight_map import canonical, checkpoint_names, stored_tensors
from draftwing.ops import make_ops
from draftwing.parallel.ranks import Absent
from draftwing.train.capture import Causal

CPU = torch.device("cpu")
SOME = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2"]


QUICK = ("qwen3.5-every", "qwen3-next-mixed", "lfm2-plain")
# Of which there are GGUF files that say all that the kind has.
WITHOUT = (
    "qwen3-next-mixed", "falcon-h1-normed", "ling3-plain", "lfm3", "qwen4", "olmo-hybrid", "olmo-hybrid-turned",
    "minimax",
)  # fmt: skip
IN_FILES = [kind for kind in KINDS if kind not in WITHOUT]
of_quick = pytest.mark.slower(pair=[kind for kind in KINDS if kind not in QUICK])


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "qwen4"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs = reference(request.param)
    folder = saved(tmp_path_factory.mktemp("model"), theirs)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


@of_quick
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


@pytest.mark.further(rotary=0.25)
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


@of_quick
def test_a_checkpoint_is_written_as_it_was_read(pair: tuple[Any, DecoderModel, Path]) -> None:
    _, model, folder = pair
    stored, apart = load_file(folder / "model.safetensors"), model.config.family.apart
    stored = {canonical(name): value for name, value in stored.items()}
    if apart is not None:
        stored = {name: value for one in stored.items() for name, value in apart(*one)}
    mixer = model.config.layers[0].mixer
    if isinstance(mixer, HybridConfig):
        stored = {name: value for one in stored.items() for name, value in of_state_space(mixer.net, *one)}
    latent = next((one.mixer for one in model.config.layers if isinstance(one.mixer, LatentAttentionConfig)), None)
    if latent is not None:
        stored = dict(without_latents(stored.items(), latent, {}))
    for name, value in stored_tensors(model, checkpoint_names(model.config)):
        at = name if name in stored else None
        if at is None:  # experts may be one tensor there
            assert ".experts." in name
            continue
        torch.testing.assert_close(value, stored.pop(at), rtol=0, atol=1e-6, msg=name)
    assert all(".experts." in name or name == "lm_head.weight" for name in stored), sorted(stored)


@pytest.mark.slow
@pytest.mark.further(kind=["qwen3-next", "qwen3.5-even", "lfm2"], name="fp8 block")
@pytest.mark.further(kind=["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "lfm3"], name="")
@pytest.mark.further(kind=["qwen3.5", "qwen3.5-moe", "qwen3.5-even"], name="gptq")
@pytest.mark.parametrize("kind", [*SOME, "qwen3.5-even", "lfm3"])
@pytest.mark.parametrize("name", ["", "fp8 block", "gptq"])
def test_shares_of_ranks_are_the_whole(tmp_path: Path, kind: str, name: str) -> None:
    saved(tmp_path, reference(kind))
    if name:
        config, write = tiny.FORMATS[name]
        small = ("_a", "_b", "_ba", "attn.gate_proj")
        tiny.quantise(tmp_path, config, lambda module: None if module.endswith(small) else write)
    ids, ops = tokens(12), make_ops(CPU)
    whole = load_model(tmp_path, torch.float32, "cpu")
    whole.pack(ops)

    found = on_ranks(tmp_path, ops, ids)
    torch.testing.assert_close(found, whole_logits(whole, ids), atol=2e-4, rtol=1e-4)


def test_what_cannot_be_spread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tp-size 3"):
        load_config(saved(tmp_path / "b", reference("lfm2"))).spread(Absent(3))


@pytest.mark.slow
@pytest.mark.further(form="dense")  # tests/models/test_family_formats.py has some
@pytest.mark.further(form="groups", name=["fp8 tensor", "compressed int4"])
@pytest.mark.further(form="blocks", name=["fp8 block", "awq", "gptq"])
@pytest.mark.further(kind="qwen3-next", name=["fp8 block", "awq"])
@pytest.mark.further(kind="qwen3.5-moe", name=["gptq", "compressed int4"])
@pytest.mark.further(kind="lfm2", form="blocks")
@pytest.mark.further(kind="qwen3.5", name=["fp8 block", "awq"])
@pytest.mark.parametrize("form", ["dense", "groups", "blocks"])
@pytest.mark.parametrize("name", ["fp8 block", "fp8 tensor", "awq", "gptq", "compressed int4"])
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.covering
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


@pytest.mark.slow
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
@pytest.mark.further(dtype=torch.bfloat16, kind=["qwen3.5", "qwen3.5-moe"])
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_FILES)
def test_it_is_the_model_of_transformers(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ids = reference(kind), tokens(40)
    tied = theirs.config.tie_word_embeddings
    state = {name: value for name, value in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    path = write(tmp_path / "m.gguf", theirs.config, state, joined_experts="next" in kind)
    model, folder = load_model(path, torch.float32, "cpu"), load_config(saved(tmp_path / "hf", theirs))
    assert "not used" not in caplog.text and model.config.stop_ids == (1,)
    for ours, of_folder in zip(model.config.layers, folder.layers, strict=True):
        assert ours.experts == of_folder.experts
        assert ours.mixer == of_folder.mixer or isinstance(ours.mixer, DeltaNetConfig | HybridConfig)
    assert model.config.ropes == folder.ropes and model.config.tie_embeddings == tied
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(Pooled(model).chunk(ids, 0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_older_layout_of_qwen3_next(tmp_path: Path) -> None:
    """Whose q, k, v and z are one tensor."""
    theirs, ids = reference("qwen3-next"), tokens(20)
    paths = [
        write(tmp_path / name, theirs.config, theirs.state_dict(), joined_inputs=joined)
        for name, joined in (("a.gguf", False), ("b.gguf", True))
    ]
    assert "blk.0.ssm_in.weight" in open_gguf(paths[1]).tensors
    found = [whole_logits(load_model(path, torch.float32, "cpu"), ids) for path in paths]
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.further(kind=["qwen3.5", "qwen3-next"])
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2"])
def test_blocks_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    theirs, ids, ops = reference(kind), tokens(20), BlockTorchOps(CPU)
    path = write(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), Type.Q8_0)
    dense = load_model(path, torch.float32, "cpu")
    model = load_model(path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    for one, other in zip(model.layers, dense.layers, strict=True):
        for mine, whole in zip(one.linears(), other.linears(), strict=True):
            torch.testing.assert_close(mine.dense_weight(), whole.dense_weight(), rtol=0, atol=0)
    model.pack(ops)
    found, expected = whole_logits(model, ids), whole_logits(dense, ids)
    assert (found - expected).norm() < (0.5 if "moe" in kind or "next" in kind else 0.1) * expected.norm()


@pytest.mark.slow
def test_a_file_is_spread(tmp_path: Path) -> None:
    """Tiled heads too: a rank's lie apart."""
    theirs, ids = reference("qwen3.5"), tokens(9)
    path = write(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    whole, ops = load_model(path, torch.float32, "cpu"), BlockTorchOps(CPU)

    found = on_ranks(path, ops, ids)
    torch.testing.assert_close(found, whole_logits(whole, ids), atol=2e-4, rtol=1e-4)


def test_a_file_that_does_not_say_how_much_of_a_head_is_turned_has_the_familys_share(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    file = open_gguf(write(tmp_path / "m.gguf", theirs.config, theirs.state_dict()))
    del file.metadata["qwen35.rope.dimension_count"]
    assert model_config(file).ropes[0].dims == theirs.config.head_dim // 4


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    path = write(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    for key, value, message in (
        ("ssm.inner_size", 100, "ssm.inner_size: expected a multiple of the 3 value heads, found 100"),
        ("ssm.group_count", 3, "found 4 and 3"),
        ("full_attention_interval", 9, "expected a layer with attention, found none"),
        ("rope.dimension_count", 7, "found 7"),
        ("nextn_predict_layers", 4, "nextn_predict_layers: expected an integer from 0 to 3, found 4"),
    ):
        file = open_gguf(path)
        file.metadata[f"qwen35.{key}"] = value
        if key == "ssm.inner_size":
            file.metadata["qwen35.ssm.time_step_rank"] = 3
        with pytest.raises(CheckpointError, match=message):
            model_config(file)
    lfm2 = reference("lfm2")
    file = open_gguf(write(tmp_path / "l.gguf", lfm2.config, lfm2.state_dict()))
    file.metadata["lfm2.attention.head_count_kv"][0] = 4
    with pytest.raises(CheckpointError, match="head_count_kv: expected one number for all layers with attention"):
        model_config(file)
