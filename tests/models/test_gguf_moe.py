"""GGUF files of models whose experts are chosen by sigmoids, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_ops import BlockTorchOps
from gguf import GGMLQuantizationType as Type
from hybrid_models import on_ranks, tokens, whole_logits
from moe_models import YARN, reference, write_gguf

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.kv.pool import KVSpec
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_model, open_checkpoint
from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import load_extension
from draftwing.parallel.ranks import Absent

YARN_AS_IN_GGUF = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
CPU = torch.device("cpu")
KINDS = ["glm4-moe", "glm4-moe-groups", "minimax-m2"]
LATENT = ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "glm4-moe-lite", "youtu"]


def in_gguf(kind: str, **overrides: Any) -> Any:
    """A model that a file can describe."""
    own = {
        "deepseek-v2": {"rope_parameters": YARN_AS_IN_GGUF},
        "glm4-moe-lite": {"routed_scaling_factor": 1.5},
    }
    return reference(kind, **own.get(kind, {}), **overrides)


@pytest.mark.further(kind=[kind for kind in LATENT if kind != "deepseek-v2"], joined=True)
@pytest.mark.slower(joined=False, kind=[kind for kind in KINDS + LATENT if kind != "minimax-m2"])
@pytest.mark.parametrize(
    ("kind", "joined"), [(kind, False) for kind in KINDS + LATENT] + [(kind, True) for kind in LATENT]
)
def test_equals_transformers(tmp_path: Path, kind: str, joined: bool, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ids = in_gguf(kind), tokens(40)
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), joined=joined)
    theirs.save_pretrained(tmp_path / "folder")
    model, folder = load_model(path, torch.float32, "cpu"), load_model(tmp_path / "folder", torch.float32, "cpu")
    assert "not used" not in caplog.text
    told, said = ([(one.mixer, one.experts, one.ffn) for one in each.config.layers] for each in (model, folder))
    assert told == said and model.config.ropes == folder.config.ropes
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), folder.parameters(), strict=True))


@pytest.mark.slower(kind="deepseek-v2")
@pytest.mark.parametrize("kind", ["minimax-m2", "deepseek-v2"])
def test_blocks_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    theirs, ops = in_gguf(kind), BlockTorchOps(CPU)
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), Type.Q8_0)
    dense = load_model(path, torch.float32, "cpu")
    model = load_model(path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    for one, other in zip(model.layers, dense.layers, strict=True):
        for mine, whole in zip(one.linears(), other.linears(), strict=True):
            torch.testing.assert_close(mine.dense_weight(), whole.dense_weight(), rtol=0, atol=0)
    assert model.layers[1].mlp.router.weight.dtype == torch.float32


@pytest.mark.skipif(load_extension() is None, reason="the C extension was not built")
@pytest.mark.parametrize("sizes", [(64, 24), (24, 32)])  # rows of a head for keys and values: some share panels
@pytest.mark.slow
def test_matrices_of_heads_are_multiplied_by_other_kernels_each(tmp_path: Path, sizes: tuple[int, int]) -> None:
    latent, values = sizes
    own = {"kv_lora_rank": latent, "v_head_dim": values, "qk_nope_head_dim": 32, "first_k_dense_replace": 3}
    theirs, ops, ids = in_gguf("deepseek-v2", **own), make_ops(CPU), tokens(9)
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), Type.Q8_0)
    expected = whole_logits(load_model(path, torch.float32, "cpu"), ids)
    model = load_model(path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
    model.pack(ops)
    assert (whole_logits(model, ids) - expected).norm() < 0.06 * expected.norm()


@pytest.mark.slower(kind="glm4-moe")
@pytest.mark.parametrize("kind", ["glm4-moe", "minimax-m2"])
def test_routers_of_models_in_bfloat16_are_in_float32(tmp_path: Path, kind: str) -> None:
    theirs = reference(kind)
    model = load_model(write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict()), torch.bfloat16, "cpu")
    mlp, block = model.layers[1].mlp, theirs.model.layers[1].mlp
    correction = block.e_score_correction_bias if kind == "minimax-m2" else block.gate.e_score_correction_bias
    assert torch.equal(mlp.router.weight, block.gate.weight) and torch.equal(mlp.correction, correction)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for ops in (None, make_ops(CPU)):
        if ops is not None:
            model.pack(ops)
        torch.testing.assert_close(mlp.router(x), x.float() @ block.gate.weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_experts_of_a_file_are_spread_whole(tmp_path: Path) -> None:
    """In blocks of more values than a share of an expert has; a folder's logits are the same. None of the experts of
    the other rank is read."""
    theirs, ids, ops = in_gguf("deepseek-v3"), tokens(9), BlockTorchOps(CPU)
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    theirs.save_pretrained(tmp_path / "folder")
    expected = whole_logits(load_model(path, torch.float32, "cpu"), ids)
    for each in (path, tmp_path / "folder"):
        found = on_ranks(each, ops, ids, expert_parallel=True)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        for rank in range(2):
            _, read = open_checkpoint(each, ranks=Absent(2, rank, True))
            numbers = {int(name.split(".experts.")[1].split(".")[0]) for name, _ in read if ".experts." in name}
            assert numbers == set(range(4 * rank, 4 * rank + 4))
    theirs, form = in_gguf("minimax-m2"), BlockFormat("Q8_0", ops)
    path = write_gguf(tmp_path / "q.gguf", theirs.config, theirs.state_dict(), Type.Q8_0)
    with pytest.raises(CheckpointError, match="16 of its 32 columns in Q8_0"):
        load_model(path, torch.float32, "cpu", weight_format=form, ranks=Absent(2))
    whole = load_model(path, torch.float32, "cpu", weight_format=form)
    for rank in range(2):
        share = load_model(path, torch.float32, "cpu", weight_format=form, ranks=Absent(2, rank, True))
        for name in ("gate_up", "down"):
            mine, every = (model.layers[1].mlp.get_submodule(name).op for model in (share, whole))
            assert 2 * mine.sizes["Q8_0"] == every.sizes["Q8_0"]
            assert torch.equal(mine.dense_weight(), every.dense_weight().chunk(2)[rank])


def test_whose_router_a_file_has(tmp_path: Path) -> None:
    """Which files need not say."""
    for kind, architecture in (("deepseek-v2", "DeepseekV2ForCausalLM"), ("deepseek-v3", "DeepseekV3ForCausalLM")):
        theirs = in_gguf(kind)
        file = open_gguf(write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict()))
        del file.metadata["deepseek2.expert_gating_func"]
        config = model_config(file)
        assert config.architecture == architecture and config.experts is not None
        assert config.experts.routing.sigmoid == (kind == "deepseek-v3")
        assert config.experts.routing.renormalise == (kind == "deepseek-v3")


def test_a_matrix_that_is_whole_and_in_parts_is_read_once(tmp_path: Path) -> None:
    theirs, found = in_gguf("deepseek-v2"), []
    for apart in (False, True):
        path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), joined=True, apart=apart)
        found.append(load_model(path, torch.float32, "cpu"))
    whole, both = found
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), both.parameters(), strict=True))


def test_what_is_wrong_with_latents_is_said(tmp_path: Path) -> None:
    theirs = in_gguf("deepseek-v2")
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    for key, value, message in (
        ("expert_weights_norm", True, "expert_weights_norm = True is not supported"),
        ("expert_gating_func", 3, "expert_gating_func = 3 is not supported"),
        ("attention.key_length", 57, "attention.key_length: expected 56, found 57"),
        ("attention.key_length_mla", 8, "attention.key_length_mla: expected an integer from 9 to"),
        ("attention.temperature_scale", 0.1, "temperature_scale = 0.1 is not supported"),
    ):
        file = open_gguf(path)
        file.metadata[f"deepseek2.{key}"] = value
        with pytest.raises(CheckpointError, match=message):
            model_config(file)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    theirs = reference("glm4-moe")
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    for key, value, message in (
        ("expert_gating_func", 1, "expert_gating_func = 1 is not supported"),
        ("expert_group_count", 3, "expected groups of one size, found 8 experts in 3 groups"),
        ("expert_used_count", 9, "expert_used_count: expected an integer from 1 to 8, found 9"),
        ("expert_group_used_count", 2, "expert_group_used_count: expected an integer from 0 to 1, found 2"),
    ):
        file = open_gguf(path)
        file.metadata[f"glm4moe.{key}"] = value
        with pytest.raises(CheckpointError, match=message):
            model_config(file)


@pytest.mark.parametrize(
    ("types", "fits"),
    [([True, False, True], True), ([1, 0, 1], True), ([1, 1, 1], False), ([1, 0], False), (None, True), (1, False)],
)
def test_which_layers_have_an_indexer_is_told_by_tensors(tmp_path: Path, types: Any, fits: bool) -> None:
    """And what a file says of them must be the same."""
    theirs = in_gguf("glm-5")
    path = write_gguf(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    file = open_gguf(path)
    if types is not None:
        file.metadata["glm-dsa.attention.indexer.types"] = np.array(types) if isinstance(types, list) else types
    if fits:
        kept = [layer.mixer.keeps() for layer in model_config(file).layers]
        assert [spec.index_size for spec in kept if isinstance(spec, KVSpec)] == [32, 0, 32]
        return
    with pytest.raises(CheckpointError, match=r"attention\.indexer\.types: expected 1 of each layer with tensors"):
        model_config(file)
