"""Qwen4-Exp against transformers: residual streams, embeddings of n-grams and an indexer of blocks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import Pooled, check_steps, on_ranks, reference, saved, tokens, whole_logits
from reference.hf_configs import QWEN4_FLASH
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp

from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.config import from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.gguf_config import model_config
from draftwing.models.loader import load_model, mapped_bytes
from draftwing.ops import make_ops

CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    # Of blocks of 3 tokens, longer n-grams and three streams.
    "other sizes": {
        "hc_count": 3, "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 48, "ple_conv_kernel_size": 2,
        "indexer_budget": 15, "indexer_compress_ratio": 3, "eos_token_id": [9, 7], "seed": 5,
        "indexer_n_heads": 16, "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True,
    },
    "without n-grams": {"ple_layer_ids": [], "eos_token_id": None, "output_gate_type": "silu"},
    "blocks of one token": {"indexer_budget": 14, "indexer_compress_ratio": 1},
}  # fmt: skip


@pytest.fixture(scope="module", params=SETTINGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel, Path]:
    theirs = reference("qwen4", **SETTINGS[request.param])
    folder = saved(tmp_path_factory.mktemp("model"), theirs)
    return theirs, load_model(folder, torch.float32, "cpu"), folder


def with_ends(count: int) -> Tensor:
    """Tokens among which are some that end texts, beside each other, too."""
    ids = tokens(count)
    ids[torch.tensor([4, 5, 11])] = torch.tensor([7, 9, 7])
    return ids


@torch.inference_mode()
def test_prompts_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    ids = with_ends(60)
    expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(Pooled(model).chunk(ids, 0), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole_logits(model, ids[:14]), expected[:14], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_chunks_tokens_and_trees_equal_transformers(pair: tuple[Any, DecoderModel, Path]) -> None:
    theirs, model, _ = pair
    check_steps(theirs, Pooled(model))


@pytest.mark.slow
def test_the_devices_kernels_give_it_bit_by_bit(pair: tuple[Any, DecoderModel, Path]) -> None:
    """In chunks, tokens and trees alike."""
    theirs, _, folder = pair
    model, ops, ids = load_model(folder, torch.float32, "cpu"), make_ops(CPU), with_ends(40)
    model.pack(ops)
    whole = Pooled(model, ops).chunk(ids, 0)
    with torch.inference_mode():
        torch.testing.assert_close(whole, theirs(ids[None]).logits[0], atol=2e-4, rtol=1e-4)
    pooled = Pooled(model, ops)
    assert torch.equal(pooled.chunk(ids[:3], 0), whole[:3])
    assert torch.equal(pooled.chunk(ids[3:21], 3), whole[3:21])
    drafted = ids[torch.tensor([21, 5, 22, 9, 23])]
    made = pooled.tree(drafted, [-1, 0, 0, 2, 2], 21)
    assert torch.equal(made[torch.tensor([0, 2, 4])], whole[21:24])
    pooled.accept(21, [0, 2, 4])
    for at in range(24, 40):
        assert torch.equal(pooled.tree(ids[at : at + 1], [-1], at)[0], whole[at]), at


def test_tables_are_read_from_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes as the loader says, and nothing of a checkpoint is left over."""
    folder = saved(tmp_path, reference("qwen4"))
    with caplog.at_level(logging.INFO, "draftwing"):
        model = load_model(folder, torch.float32, "cpu")
    assert "stays in the model's file" in caplog.text and "not used" not in caplog.text
    held = {name for name, _ in model.named_parameters() if ".ngram.embed" in name}
    stored = load_file(folder / "model.safetensors")
    shards = sum(value.nbytes for name, value in stored.items() if ".shard_" in name)
    assert not held and mapped_bytes(folder, model.config) == shards


@pytest.mark.parametrize("kind", [Type.F32, pytest.param(Type.Q8_0, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_a_file(tmp_path: Path, kind: Type, caplog: pytest.LogCaptureFixture) -> None:
    """As converters of llama.cpp write it, with one table, whose rows are read from the file."""
    theirs, ids = reference("qwen4", ple_layer_ids=[1], ple_embed_dim=128), with_ends(60)
    path = write(tmp_path / "m.gguf", theirs.config, theirs.state_dict(), kind)
    with caplog.at_level(logging.INFO, "draftwing"):
        model = load_model(path, torch.float32, "cpu")
    assert "stay in the model's file" in caplog.text and "not used" not in caplog.text
    table = open_gguf(path).raw("per_layer_token_embd.weight")
    assert mapped_bytes(path, model.config) == table.nbytes
    found, expected = Pooled(model).chunk(ids, 0), theirs(ids[None]).logits[0]
    if kind == Type.F32:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:  # other experts may be chosen
        assert (found - expected).norm() < 0.3 * expected.norm()
        ops = make_ops(CPU)
        packed = load_model(path, torch.float32, "cpu", weight_format=BlockFormat("Q8_0", ops))
        packed.pack(ops)
        assert (Pooled(packed, ops).chunk(ids, 0) - found).norm() < 0.3 * found.norm()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ple.head_offsets", np.array([0, 1, 2, 3]), r"ple\.head_offsets: expected the sums of the sizes before each"),
        ("ple.layers", np.array([1]), r"ple\.layers: expected the number of a layer with a delta net"),
        ("ple.layers", np.array([0, 2]), r"ple\.layers: expected 1 whole numbers"),
        ("attention.compress_ratios", np.array([0, 4, 0, 2]), r"compress_ratios: expected 0 or one number for all"),
        ("attention.compress_ratios", None, r"compress_ratios: expected 4 whole numbers"),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, key: str, value: Any, message: str) -> None:
    theirs = reference("qwen4", ple_layer_ids=[1])
    file = open_gguf(write(tmp_path / "m.gguf", theirs.config, theirs.state_dict()))
    file.metadata[f"qwen4exp.{key}"] = value
    with pytest.raises(CheckpointError, match=message):
        model_config(file)


def test_a_missing_part_of_a_table_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path, reference("qwen4")) / "model.safetensors"
    stored = load_file(file)
    save_file({name: value for name, value in stored.items() if "0.ple" not in name or "shard_1" not in name}, file)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: .*ngram_embedding.shard_1"):
        load_model(tmp_path, torch.float32, "cpu")


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    folder, ops, ids = saved(tmp_path, reference("qwen4")), make_ops(CPU), with_ends(14)
    whole = load_model(folder, torch.float32, "cpu")
    whole.pack(ops)
    torch.testing.assert_close(on_ranks(folder, ops, ids), whole_logits(whole, ids), atol=1e-4, rtol=1e-4)


def test_its_published_sizes() -> None:
    """Hashes and tables are those that transformers makes."""
    config = from_hf({**QWEN4_FLASH, "ple_layer_ids": [2, 5]})
    assert [i for i, layer in enumerate(config.layers) if isinstance(layer.mixer, AttentionConfig)] == [
        *range(3, 40, 4)
    ]
    for at, layer in enumerate((config.layers[1], config.layers[4])):
        ngram = layer.ngram
        assert ngram is not None and len(ngram.tables) == 16 and ngram.rows % 128 == 0
        assert list(ngram.multipliers) == modeling_qwen4_exp._build_layer_multipliers(248320, 3, at, 1234).tolist()
        first = modeling_qwen4_exp._find_nth_prime_after(19_999_999, 16 * at + 1)
        assert ngram.tables[0] == first and 0 <= ngram.rows - sum(ngram.tables) < 128
    index = config.attention.index
    assert index is not None and (index.topk, index.ratio, index.width, index.turned) == (128, 16, 2063, 64)
    assert config.for_texts(2063).attention.index is None and config.for_texts(2064) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_budget": 2050}, "indexer_budget: expected a multiple of the 16 tokens"),
        ({"indexer_n_heads": None}, "indexer_n_heads: expected an integer"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: expected 1, found 2"),
        ({"indexer_head_dim": 32}, "indexer_head_dim: expected at least the 64 elements"),
        ({"hc_count": 1}, "hc_count: expected an integer from 2"),
        ({"ple_embed_dim": 2040}, "ple_embed_dim: expected a multiple of the 16 heads"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids: expected numbers of layers with delta nets"),
        ({"ple_layer_ids": [41]}, "ple_layer_ids: expected a list of numbers of layers, from 1 to 40"),
        ({"eos_token_id": None}, "eos_token_id: expected a token id"),
        ({"output_gate_type": "relu"}, "output_gate_type = 'relu' is not supported"),
        ({"layer_types": ["sliding_attention"] * 40}, "layer_types = 'sliding_attention' is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf({**QWEN4_FLASH, **changes})
