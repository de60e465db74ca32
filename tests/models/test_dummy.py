"""Random weights: everything that has a config can be made without its tensors, and stays finite."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_attention import FunctionAttend
from reference.hf_configs import GEMMA3_1B, GPT_OSS_20B, QWEN3_30B
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.models.config import from_hf
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.eagle import Eagle3Head, EagleHead
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.loader import load_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
    "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q + v.repeat_interleave(2, 1)).flatten(1)


@pytest.mark.further(dtype=[torch.float32, torch.float16], tied=True)
@pytest.mark.further(dtype=[torch.float16, torch.bfloat16], tied=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_model_from_a_config_alone(
    tmp_path: Path, tied: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(folder(tmp_path, tie_word_embeddings=tied), dtype, "cpu", dummy=True)
    assert "random weights" in caplog.text and "dummy" in caplog.text
    assert (model.lm_head.weight is model.embed.weight) == tied
    assert not any(p.is_meta or p.requires_grad or p.dtype != dtype for p in model.parameters())
    assert (model.norm.weight == 1).all() and (model.layers[0].mixer.qkv.bias == 0).all()
    ids = torch.arange(50)
    hidden, _ = model(ids, ids, FunctionAttend(attend))
    logits = model.logits(hidden).float()
    assert logits.isfinite().all() and 8 < logits.std() < 32
    assert len(logits.argmax(-1).unique()) > 10, "the rows are alike"
    again = load_model(tmp_path, dtype, "cpu", dummy=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    down = model.layers[0].mlp.down.weight
    assert not torch.equal(down, model.layers[1].mlp.down.weight)


@pytest.mark.parametrize(
    ("algorithm", "changes", "kind"),
    [
        ("EAGLE", {"num_hidden_layers": 1, "bias": True}, EagleHead), ("NEXTN", {"num_hidden_layers": 2}, EagleHead),
        ("EAGLE3", {"num_hidden_layers": 1, "draft_vocab_size": 20, "bias": True}, Eagle3Head),
        ("EAGLE3", {"num_hidden_layers": 2, "attention_bias": True}, Eagle3Head),
        ("EAGLE3", {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [1, 4]}, Eagle3Head),
        ("EAGLE3", {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8, "target_hidden_size": 32}, Eagle3Head),
        ("NEXTN", {"num_nextn_predict_layers": 2}, MTPHead),
    ],
)  # fmt: skip
def test_heads_from_a_config_alone(
    drafts: SimpleNamespace, tmp_path: Path, algorithm: str, changes: dict[str, Any], kind: type
) -> None:
    target: DecoderModel = drafts.make_target(torch.float32)
    path = folder(tmp_path, **{"attention_bias": False, **changes})
    head: Any = load_draft_head(path, target, algorithm, torch.float32, "cpu", dummy=True)
    assert type(head) is kind
    head.set_max_positions(64)
    ids = torch.arange(9)
    features = head.features(torch.randn(9, len(head.aux_layers) * 32))
    hidden = head.run(ids, ids, features, 0, FunctionAttend(attend))
    logits = head.logits(hidden)
    assert logits.isfinite().all() and logits.shape == (9, changes.get("draft_vocab_size", 50))
    if "draft_vocab_size" in changes:
        assert head.target_ids is not None
        assert head.target_ids.unique().numel() == 20 and head.target_ids.max() < 50
    else:
        assert head.target_ids is None
    if kind is not MTPHead:
        assert len(head.layers if kind is EagleHead else [head.fusion, *head.later]) == changes["num_hidden_layers"]


PUBLISHED = {  # keys of EAGLE-3 heads' configs as they were published, the hidden states that they read, the window
    "gpt-oss-20b": (GPT_OSS_20B, {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}, "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 17280, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
        "rms_norm_eps": 1e-05, "max_position_embeddings": 4096,
    }, (2, 12, 22), 4096),
    "Qwen3-30B-A3B": (QWEN3_30B, {
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 151936, "rope_theta": 1000000.0, "rope_scaling": None,
        "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "max_position_embeddings": 2048,
    }, (2, 24, 45), 2048),
    "gemma-3-1b": (GEMMA3_1B, {
        "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
        "num_key_value_heads": 1, "vocab_size": 262144, "rope_theta": 1000000, "sliding_window": 512,
        "use_sliding_window": False, "target_model_type": "gemma3_text", "max_position_embeddings": 32768,
    }, (2, 13, 23), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_of_experts_and_windows(tmp_path: Path, name: str) -> None:
    """Of their real sizes, without data."""
    of_target, keys, aux_layers, window = PUBLISHED[name]
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "draft_vocab_size": 32000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    } | keys  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = DecoderModel(from_hf(of_target), torch.bfloat16, "meta")
    head: Any = load_draft_head(tmp_path, target, "EAGLE3", torch.bfloat16, "meta", dummy=True)
    assert isinstance(head, Eagle3Head) and head.aux_layers == aux_layers and head.vocab == 32000
    (layer,) = head.layer_configs
    assert layer.mixer.window == window and not layer.mixer.sinks and layer.experts is None


def test_prediction_layers_of_the_target_itself(drafts: SimpleNamespace, tmp_path: Path) -> None:
    target: DecoderModel = drafts.make_target(torch.float32)
    path = folder(tmp_path, num_nextn_predict_layers=3)
    assert len(load_mtp_head(path, target, torch.float32, "cpu", dummy=True).layers) == 3
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        load_mtp_head(folder(tmp_path), target, torch.float32, "cpu", dummy=True)


def test_a_config_that_does_not_fit_is_refused_as_ever(drafts: SimpleNamespace, tmp_path: Path) -> None:
    target: DecoderModel = drafts.make_target(torch.float32)
    for changes, expected in (
        ({"vocab_size": 60}, "vocab_size: expected 50, found 60"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"draft_vocab_size": 70}, "exceeds"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            load_draft_head(
                folder(tmp_path, num_hidden_layers=1, **changes), target, "EAGLE3", torch.float32, "cpu", dummy=True
            )
