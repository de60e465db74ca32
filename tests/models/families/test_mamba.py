"""Mamba, Falcon Mamba and Mamba-2 from GGUF files, as llama.cpp's converter lays them out, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from gguf import MODEL_ARCH
from hybrid_models import tokens, whole_logits
from published import written
from tiny_gguf import finish

from draftwing.gguf_file import open_gguf
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_config, load_model


def write(path: Path, config: Any, tensors: dict[str, torch.Tensor]) -> None:
    kind = MODEL_ARCH.MAMBA2 if config.model_type == "mamba2" else MODEL_ARCH.MAMBA
    writer = gguf_package.GGUFWriter(path, gguf_package.MODEL_ARCH_NAMES[kind])
    inner, heads = config.intermediate_size, getattr(config, "num_heads", 0)
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(heads or config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if heads:
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
    known = gguf_package.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = value.detach().float()
        if name.endswith("conv1d.weight"):
            stored = stored.squeeze(1)
        if name.endswith("A_log"):
            stored = -stored.exp()
        if heads and name.endswith(("A_log", ".D")):
            stored = stored[:, None]
        if heads and name.endswith("mixer.norm.weight"):
            stored = stored.view(config.n_groups, -1)
        theirs = known.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, stored.contiguous().numpy())
    finish(writer)


@pytest.mark.parametrize("row", ["mamba-2.8b-hf", "falcon-mamba-7b", "mamba-codestral-7b"])
@torch.inference_mode()
def test_files_equal_transformers(tmp_path: Path, row: str) -> None:
    theirs, ids = written(tmp_path / "folder", row), tokens(40)
    write(tmp_path / "m.gguf", theirs.config, theirs.state_dict())
    found, folder = model_config(open_gguf(tmp_path / "m.gguf")), load_config(tmp_path / "folder")
    assert [one.mixer for one in found.layers] == [one.mixer for one in folder.layers]
    assert found.max_positions == folder.max_positions and not any(one.has_mlp for one in found.layers)
    expected = theirs(input_ids=ids[None]).logits[0]
    model = load_model(tmp_path / "m.gguf", torch.float32, "cpu")
    torch.testing.assert_close(whole_logits(model, ids), expected, atol=1e-4, rtol=1e-4)
