"""The prediction layer of Qwen4-Exp against its parts of transformers: the layer, and what makes one of the streams,
are those of a model of one layer with attention, which reads the joined streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import DenseCache
from hybrid_models import layer_weights, reference, tokens, with_layer
from torch import Tensor
from transformers import Qwen4ExpTextConfig

from draftwing.engine.devices import pick_device
from draftwing.models.heads.loader import load_mtp_head
from draftwing.models.loader import load_model
from draftwing.train.capture import FeatureModel


class Reference:
    """Rows of a whole text."""

    def __init__(self, theirs: Any, weights: Mapping[str, Tensor]) -> None:
        one = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"], "ple_layer_ids": []}
        own = Qwen4ExpTextConfig(**{**theirs.config.to_dict(), **one})
        self.theirs, self.weights, self.model = theirs, weights, type(theirs.model)(own).float().eval()
        inner = {name.removeprefix("mtp."): value for name, value in weights.items()}
        missing = self.model.load_state_dict(inner, strict=False).missing_keys
        assert missing == ["embed_tokens.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """All of a row as one; weights are stored less 1."""
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.theirs.config.rms_norm_eps).sqrt() * (1 + self.weights[f"mtp.{name}.weight"])

    def streams(self, ids: Tensor, fed: Tensor) -> Tensor:
        """ids [T] of the next tokens, fed [T, count * hidden] -> the same"""
        embedded = self.norm(self.theirs.model.embed_tokens(ids), "pre_fc_norm_embedding")
        streams = self.norm(fed, "pre_fc_norm_hidden").unflatten(1, (self.theirs.config.hc_count, -1))
        own = embedded @ self.weights["mtp.fc_embedding.weight"].T
        x = (streams @ self.weights["mtp.fc_hidden.weight"].T + own.unsqueeze(1)).flatten(1)[None]
        turns = self.model.rotary_emb(x, torch.arange(len(ids)).expand(3, 1, -1))
        mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)[None, None]
        return self.model.layers[0](x, position_embeddings=turns, attention_mask=mask)[0]

    def logits(self, streams: Tensor) -> Tensor:
        mixed = self.model.hyper_connection_mixer(streams[None])
        return self.theirs.lm_head(mixed[0] if isinstance(mixed, tuple) else mixed).flatten(0, -2)


@torch.inference_mode()
def test_rows_equal_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text's rows, and one behind them that is fed by the last; all of so few tokens are picked."""
    theirs = reference("qwen4", indexer_budget=64)
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path, theirs, weights)
    model = load_model(folder, torch.float32, "cpu", context=64)
    head = load_mtp_head(folder, model, torch.float32, "cpu")
    assert "not used" not in caplog.text and head.aux_layers == model.stream_layers
    ids, written, cache = tokens(13), Reference(theirs, weights), DenseCache()
    fed = FeatureModel(model, model.stream_layers, pick_device("cpu")).batch([ids[:12]])[0][0]
    head.set_max_positions(64)
    made = head.run(ids[1:], torch.arange(12), head.features(fed), 0, cache)
    expected = written.streams(ids[1:], fed)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(made), written.logits(expected), atol=1e-4, rtol=1e-4)
    more = head.run(ids[:1], torch.tensor([12]), made[-1:], 1, cache)
    last = written.streams(torch.cat((ids[1:], ids[:1])), torch.cat((fed, expected[-1:])))[-1:]
    torch.testing.assert_close(more, last, atol=1e-4, rtol=1e-4)
