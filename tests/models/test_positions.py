"""Rotary tables and contexts of configs with scaled positions, vs transformers' and the rules of model cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import tiny_gguf
import torch
from reference.hf_configs import QWEN25_7B
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwing.errors import CheckpointError
from draftwing.layers.rope import rope_table
from draftwing.models.config import from_hf
from draftwing.models.loader import load_config

HEAD_DIM = 16
BASE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scaled(positions: int, key: str = "rope_scaling", theta: float = 1e6, **scaling: object) -> dict[str, Any]:
    """What such a config.json has. positions: its max_position_embeddings."""
    return {"max_position_embeddings": positions, "rope_theta": theta, key: scaling}


def yarn(positions: int, original: int, factor: float = 4.0, **more: Any) -> dict[str, Any]:
    more = {"rope_type": "yarn", **more}
    return scaled(positions, factor=factor, original_max_position_embeddings=original, **more)


CONTEXTS = [
    (yarn(40960, 32768), 131072),  # Qwen3's card
    (scaled(32768, type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),  # Qwen2.5's
    (yarn(40960, 32768, 2.5), 81920),
    (scaled(40960, rope_type="yarn", factor=2.0), 81920),  # the original is what is there
    (yarn(32768, 32768, key="rope_parameters"), 1 << 17),
    # The number was raised already, or is more than the factor makes.
    (yarn(131072, 4096, 32.0), 131072),
    (yarn(40960, 32768, 1.0), 40960),
    # Other rules: their numbers stand as they are.
    (scaled(131072, theta=5e5, rope_type="llama3", **LLAMA3), 131072),
    (scaled(16384, type="linear", factor=4.0), 16384),
    (scaled(4096, type="dynamic", factor=4.0), 4096),
]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "positions"), CONTEXTS)
def test_context_and_table_of_a_config(more: dict[str, Any], positions: int) -> None:
    config = from_hf({"architectures": ["LlamaForCausalLM"], **BASE, **more})
    assert config.max_positions == positions
    theirs = LlamaRotaryEmbedding(LlamaConfig(**BASE, **more))
    at = torch.tensor([0, 1, 77, positions // 2, positions - 1])
    cos, sin = theirs(torch.empty(1, dtype=torch.float32), at[None])
    table = rope_table(config.ropes[0], HEAD_DIM, positions, torch.float32, "cpu")[at]
    # Angles in float32 are off by as much as their last bit.
    tolerance = {"atol": float(at[-1]) * 2**-23 + 1e-5, "rtol": 0.0}
    torch.testing.assert_close(table[:, 0], cos[0], **tolerance)
    torch.testing.assert_close(table[:, 1].abs(), sin[0].abs(), **tolerance)


def test_the_context_ends_where_dual_chunk_attention_differs() -> None:
    """Of Qwen2.5-1M a text of one chunk is what Qwen2.5's is."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    own = {**QWEN25_7B, "max_position_embeddings": 1010000}
    found = from_hf({**own, "dual_chunk_attention_config": {**chunks, "sparse_attention_enabled": True}})
    assert found == replace(from_hf(own), max_positions=253952)
    trained = from_hf({**own, "dual_chunk_attention_config": {**chunks, "original_max_position_embeddings": 32768}})
    assert trained.max_positions == 32768  # scores of longer texts are scaled
    chunks["original_max_position_embeddings"] = 0
    assert from_hf({**own, "dual_chunk_attention_config": chunks}).max_positions == 253952
    with pytest.raises(
        CheckpointError, match=r"dual_chunk_attention_config\.local_size: expected an integer from 0 to 9"
    ):
        from_hf({**own, "dual_chunk_attention_config": {**chunks, "chunk_size": 10}})


@pytest.mark.parametrize(("window", "kept"), [(40960, True), (32768, True), (131072, False)])
def test_a_window_counts_against_the_longer_context(window: int, kept: bool) -> None:
    more = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    config = from_hf({"architectures": ["Qwen2ForCausalLM"], **BASE, **yarn(40960, 32768), **more})
    assert config.attention.window == (window if kept else 0)


@pytest.mark.parametrize(
    ("trained", "original", "factor", "positions"),
    [(128, 128, 4.0, 512), (160, 128, 4.0, 512), (512, 128, 4.0, 512), (128, None, 2.0, 256), (160, 128, 1.0, 160)],
)
def test_context_of_a_gguf_file(
    tmp_path: Path, trained: int, original: int | None, factor: float, positions: int
) -> None:
    """As converters write a config.json with YaRN, whose context stays the number that is there."""

    def edit(writer: gguf_package.GGUFWriter) -> None:
        del writer.kv_data[0]["qwen3.context_length"]
        writer.add_context_length(trained)
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    found = load_config(tiny_gguf.write(tmp_path / "m.gguf", "qwen3", edit=edit))
    assert (found.max_positions, found.ropes[0].original_max_positions) == (positions, original or trained)
    config = {**BASE, "head_dim": tiny_gguf.HEAD_DIM, **yarn(trained, original or trained, factor, theta=5000.0)}
    cos, _ = LlamaRotaryEmbedding(LlamaConfig(**config))(torch.empty(1), torch.arange(positions)[None])
    table = rope_table(found.ropes[0], tiny_gguf.HEAD_DIM, positions, torch.float32, "cpu")
    torch.testing.assert_close(table[:, 0], cos[0], atol=1e-4, rtol=0.0)


def test_a_window_of_a_gguf_file_counts_against_the_longer_context(tmp_path: Path) -> None:
    def edit(writer: gguf_package.GGUFWriter) -> None:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    with pytest.raises(CheckpointError, match="sliding_window: expected none, or at least 512, found 128"):
        load_config(tiny_gguf.write(tmp_path / "m.gguf", "llama", edit=edit))
