"""Models of Qwen3.5 in fp8 that were made for activations in fp8, with recurrent layers, gated attention of which a
part is turned, prediction layers and experts: drafts change no token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import hybrid_models
import moe_models
import pytest
import tiny_quantised as tiny
import torch
from engine.test_hybrid_models import CHAIN, TREE, texts
from group_ops import Fp8TorchOps
from safetensors.torch import load_file, save_file
from tiny_checkpoint import VOCAB, write_tokenizer

pytestmark = pytest.mark.slow

DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "vocab_size": VOCAB, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
KINDS = {"qwen3.5": {"intermediate_size": 256}, "qwen3.5-moe": {"moe_intermediate_size": 128}}


def checkpoint(folder: Path, kind: str) -> Path:
    """As published: b and a of delta nets, convolutions and routers are not quantised."""
    theirs = hybrid_models.reference(kind, **SIZES, **KINDS[kind])
    moe_models.with_layer(folder, theirs, hybrid_models.layer_weights(theirs), mtp_num_hidden_layers=1)
    write_tokenizer(folder)
    file = folder / "model.safetensors"
    save_file({name: part.clone() for name, part in moe_models.by_expert(load_file(file)).items()}, file)
    small = ("_proj_a", "_proj_b", "conv1d", "mlp.gate", "shared_expert_gate", "mtp.fc")
    write = tiny.float8(128, 128, "weight_scale_inv")
    tiny.quantise(folder, DYNAMIC, lambda module: None if module.endswith(small) else write)
    return folder


def check(path: Path, kind: str, caplog: pytest.LogCaptureFixture, all_ways: bool = True, **options: Any) -> None:
    """Drafts, chunks of other lengths, one request at a time: the same text. all_ways: else one of each kind."""
    options = {"lengths": (5, 20, 50, 7), "chunked_prefill_size": 24, **options}
    with caplog.at_level(logging.INFO):
        expected = texts(path, "none", "bfloat16", **options)
    kept = [record.getMessage() for record in caplog.records if record.getMessage().endswith(": kept")]
    # Queries and keys, whose rows move in runs of 16 and 48, and all others that are no experts.
    assert any("groups of 16 x 128, for activations in fp8" in what for what in kept)
    assert any("activations" not in what for what in kept) == (kind == "qwen3.5-moe")
    drafts: list[tuple[str, dict[str, Any]]] = [("NEXTN", TREE), ("NEXTN", CHAIN), ("NGRAM", {})]
    for drafter, shape in drafts if all_ways else drafts[:1]:
        own = {**options, **shape, "speculative_fixed_shape": True}
        assert texts(path, drafter, "bfloat16", **own) == expected, drafter
    others: tuple[dict[str, Any], ...] = {"chunked_prefill_size": 64}, {"max_running_requests": 1}
    for other in others if all_ways else others[:1]:
        assert texts(path, "none", "bfloat16", **{**options, **other}) == expected, other


@pytest.mark.further(kind="qwen3.5-moe")
@pytest.mark.further(all_ways=True)
@pytest.mark.parametrize("all_ways", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(
    tmp_path: Path, kind: str, all_ways: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftwing.engine.devices.base.make_ops", Fp8TorchOps)
    check(checkpoint(tmp_path, kind), kind, caplog, all_ways)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU with warp groups"
)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("draftwing.ops.gemm.gpu.FP8_FROM", 0)
    check(checkpoint(tmp_path, kind), kind, caplog, device="cuda", enable_deterministic_inference=True)
