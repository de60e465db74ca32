"""MiMo: the model without its prediction layers, and those layers as a draft head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_gguf import write as write_gguf

from draftwing.errors import CheckpointError
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.loader import load_model

MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True, "head_dim": 8,
    "num_hidden_layers": 2, "max_window_layers": 2, "rope_theta": 640000.0, "num_nextn_predict_layers": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
}  # fmt: skip


def body(drafts: SimpleNamespace, layers: int = 2) -> Any:
    """A Qwen2 body with biases of q, k and v, and an untied head."""
    weights = drafts.Weights(5)
    weights.matrix("model.embed_tokens.weight", 50, 32)
    weights.matrix("lm_head.weight", 50, 32)
    weights.norm("model.norm.weight")
    for i in range(layers):
        decoder_layer(weights, f"model.layers.{i}")
    return weights


def decoder_layer(weights: Any, prefix: str) -> None:
    weights.layer(prefix)
    weights.norm(f"{prefix}.input_layernorm.weight")
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        weights.bias(f"{prefix}.self_attn.{name}_proj.bias", size)


def mimo(drafts: SimpleNamespace, mtp_layers: int) -> Any:
    weights = body(drafts)
    for i in range(mtp_layers):
        prefix = f"model.mtp_layers.{i}"
        decoder_layer(weights, prefix)
        weights.matrix(f"{prefix}.input_proj.weight", 32, 64)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            weights.norm(f"{prefix}.{name}.weight")
    return weights


@pytest.mark.parametrize("layers", [1, 3])
def test_mimo(drafts: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: int) -> None:
    weights = mimo(drafts, layers)
    drafts.write(tmp_path, weights, **MIMO)
    target = load_model(tmp_path, torch.float64, "cpu")
    assert "not used" not in caplog.text
    assert target.config.attention.qkv_bias and not target.config.attention.o_bias and not target.config.tie_embeddings
    head = load_mtp_head(tmp_path, target, torch.float64, "cpu")
    assert isinstance(head, MTPHead)
    assert head.aux_layers == (3,) and head.width == 32 and len(head.kv_layers) == layers
    assert {name for name, _ in head.stored_tensors()} == {name for name in weights if "mtp_layers" in name}
    assert all(torch.equal(tensor.float(), weights[name]) for name, tensor in head.stored_tensors())


def test_other_layers_of_the_same_model(drafts: SimpleNamespace, tmp_path: Path) -> None:
    """A fine-tuned prediction layer comes as another checkpoint of the model; a token map works for it too."""
    target = load_model(drafts.write(tmp_path, mimo(drafts, 1), **MIMO), torch.float64, "cpu")
    other = mimo(drafts, 1)
    other["model.mtp_layers.0.final_layernorm.weight"] *= 2
    folder = drafts.write(tmp_path / "tuned", other, **MIMO)
    head = load_draft_head(folder, target, "NEXTN", torch.float64, "cpu", token_ids=torch.tensor([7, 9]))
    assert isinstance(head, MTPHead) and head.vocab == 2
    x = torch.randn(2, 32, dtype=torch.float64)
    torch.testing.assert_close(head.logits(x), x @ target.lm_head.weight[[7, 9]].T)
    with pytest.raises(CheckpointError, match="NEXTN, found EAGLE3"):
        load_draft_head(folder, target, "EAGLE3", torch.float64, "cpu")


def test_refusals(drafts: SimpleNamespace, tmp_path: Path) -> None:
    weights = mimo(drafts, 1)
    target = load_model(drafts.write(tmp_path / "mimo", weights, **MIMO), torch.float64, "cpu")

    def refused(folder: Path, *expected: str) -> None:
        with pytest.raises(CheckpointError) as error:
            load_mtp_head(folder, target, torch.float64, "cpu")
        for part in expected:
            assert part in str(error.value)

    refused(drafts.write(tmp_path / "none", body(drafts), **MIMO), "no multi-token prediction", "draft-model-path")
    refused(tmp_path / "model.gguf", "expected a GGUF file, found none")
    refused(write_gguf(tmp_path / "llama.gguf", "llama"), "expected layers of a MiMoForCausalLM, found", "'llama'")
    llama = load_model(tmp_path / "llama.gguf", torch.float64, "cpu")
    with pytest.raises(CheckpointError, match="has no multi-token prediction layers"):
        load_mtp_head(tmp_path / "llama.gguf", llama, torch.float64, "cpu")
    partial = {name: tensor for name, tensor in weights.items() if not name.endswith("0.input_proj.weight")}
    refused(drafts.write(tmp_path / "partial", partial, **MIMO), "missing", "model.mtp_layers.0.input_proj.weight")
    turned = {**weights, "model.mtp_layers.0.input_proj.weight": torch.zeros(64, 32)}
    refused(drafts.write(tmp_path / "turned", turned, **MIMO), "[32, 64]", "found [64, 32]")
    refused(
        drafts.write(tmp_path / "vocab", weights, **{**MIMO, "vocab_size": 60}), "vocab_size: expected 50, found 60"
    )


@pytest.mark.parametrize(
    "name", ["model.layers.61.eh_proj.weight", "model.layers.46.shared_head.norm.weight", "mtp.fc.weight"]
)
def test_layers_of_models_that_are_not_served(drafts: SimpleNamespace, tmp_path: Path, name: str) -> None:
    target = drafts.make_target()
    drafts.write(tmp_path, {name: torch.zeros(32, 64)})
    for load in (
        lambda: load_mtp_head(tmp_path, target, torch.float64, "cpu"),
        lambda: load_draft_head(tmp_path, target, "EAGLE", torch.float64, "cpu"),
    ):
        with pytest.raises(CheckpointError, match="not served yet") as error:
            load()
        assert "mtp_layers" in str(error.value)
