"""DeciLM from GGUF files, as converters of llama.cpp lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from hybrid_models import Pooled, check_steps
from published import published, random_model
from tiny_gguf import finish, permuted

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_model
from draftwing.ops import make_ops

NAME = "llama-3.3-nemotron-super-49b"
OPS = make_ops(torch.device("cpu"))


def written(folder: Path, **changes: list[int]) -> tuple[Any, Path]:
    """changes: of numbers of layers."""
    config, path = published(NAME) | {"rope_scaling": None}, folder / "m.gguf"
    (folder / "config.json").write_text(json.dumps(config))
    theirs = random_model(folder, "DeciLMForCausalLM")
    heads, layers = theirs.config.num_attention_heads, theirs.model.layers
    kv = [getattr(layer.self_attn, "k_proj", None) for layer in layers]
    widths = [getattr(layer.mlp, "gate_proj", None) for layer in layers]
    numbers = {
        "head_count": [heads if one is not None else 0 for one in kv],
        "head_count_kv": [one.out_features // 16 if one is not None else 0 for one in kv],
        "feed_forward_length": [one.out_features if one is not None else 0 for one in widths],
    }
    writer = gguf_package.GGUFWriter(path, "deci")
    writer.add_block_count(len(layers))
    writer.add_context_length(theirs.config.max_position_embeddings)
    writer.add_embedding_length(theirs.config.hidden_size)
    for key, values in (numbers | changes).items():
        getattr(writer, f"add_{key}")(values)
    writer.add_layer_norm_rms_eps(theirs.config.rms_norm_eps)
    writer.add_rope_freq_base(theirs.config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(theirs.config.vocab_size)
    writer.add_token_list(["a", "<|im_end|>", *(f"t{i}" for i in range(theirs.config.vocab_size - 2))])
    known = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.DECI, len(layers))
    for name, value in theirs.state_dict().items():
        values, stored = value.float().numpy(), known.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permuted(values, len(values) // 16)
        writer.add_tensor(stored, np.ascontiguousarray(values))
    finish(writer)
    return theirs, path


def test_steps_equal_transformers(tmp_path: Path) -> None:
    theirs, path = written(tmp_path)
    model = load_model(path, torch.float32, "cpu")
    model.pack(OPS)
    check_steps(theirs, Pooled(model, OPS))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_count": [4, 0, 2, 4]}, "head_count: expected the same of all layers"),
        ({"head_count_kv": [0, 0, 0, 4]}, "head_count_kv: expected more than 0 where"),
        ({"head_count_kv": [0, 0, 0, 0]}, "head_count_kv: expected numbers up to"),
        ({"head_count_kv": [2, 1]}, "expected parts of each of 4 layers"),
        ({"feed_forward_length": [256, 256, 512]}, "expected parts of each of 4 layers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, list[int]], named: str) -> None:
    _, path = written(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named):
        model_config(open_gguf(path))
