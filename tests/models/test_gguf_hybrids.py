"""Hybrid models from GGUF files in the layout of llama.cpp's converter, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import KINDS, Pooled, on_two_ranks, reference, saved, tokens, whole_logits

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models import gguf
from draftwing.models.loader import load_config, load_model

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3-next-mixed"])
def test_it_is_the_model_of_transformers(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ids = reference(kind), tokens(40)
    tied = theirs.config.tie_word_embeddings
    state = {name: value for name, value in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    path = write(tmp_path / "m.gguf", theirs.config, state, joined_experts="next" in kind)
    model, folder = load_model(path, torch.float32, "cpu"), load_config(saved(tmp_path / "hf", theirs))
    assert "not used" not in caplog.text and model.config.stop_ids == (1,)
    for ours, of_folder in zip(model.config.layers, folder.layers, strict=True):
        assert (ours.experts, ours.ffn) == (of_folder.experts, of_folder.ffn) or not ours.experts
        assert ours.mixer == of_folder.mixer or isinstance(ours.mixer, DeltaNetConfig)
    assert model.config.ropes == folder.ropes and model.config.tie_embeddings == tied
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(Pooled(model).chunk(ids, 0), expected, atol=1e-4, rtol=1e-4)


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


def test_a_file_is_spread(tmp_path: Path) -> None:
    """Tiled heads too: a rank's lie apart."""
    theirs, ids = reference("qwen3.5"), tokens(9)
    path = write(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    whole, ops = load_model(path, torch.float32, "cpu"), BlockTorchOps(CPU)

    found = on_two_ranks(path, ops, ids)
    torch.testing.assert_close(found, whole_logits(whole, ids), atol=2e-4, rtol=1e-4)


def test_a_file_that_does_not_say_how_much_of_a_head_is_turned_has_the_familys_share(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    file = open_gguf(write(tmp_path / "m.gguf", theirs.config, theirs.state_dict()))
    del file.metadata["qwen35.rope.dimension_count"]
    assert gguf.model_config(file).ropes[0].dims == theirs.config.head_dim // 4


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    for key, value, message in (
        ("ssm.inner_size", 100, "ssm.inner_size: expected a multiple of the 3 value heads, found 100"),
        ("ssm.group_count", 3, "found 4 and 3"),
        ("full_attention_interval", 9, "expected a layer with attention, found none"),
        ("rope.dimension_count", 7, "found 7"),
        ("nextn_predict_layers", 4, "nextn_predict_layers: expected an integer from 0 to 3, found 4"),
    ):
        file = open_gguf(write(tmp_path / "m.gguf", theirs.config, theirs.state_dict()))
        file.metadata[f"qwen35.{key}"] = value
        if key == "ssm.inner_size":
            file.metadata["qwen35.ssm.time_step_rank"] = 3
        with pytest.raises(CheckpointError, match=message):
            gguf.model_config(file)
    lfm2 = reference("lfm2")
    file = open_gguf(write(tmp_path / "l.gguf", lfm2.config, lfm2.state_dict()))
    file.metadata["lfm2.attention.head_count_kv"][0] = 4
    with pytest.raises(CheckpointError, match="head_count_kv: expected one number for all layers with attention"):
        gguf.model_config(file)
