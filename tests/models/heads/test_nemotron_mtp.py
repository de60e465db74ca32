"""The prediction layer of Nemotron 3, which is stored as two layers, as a draft head, against transformers' layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import DenseCache
from hybrid_gguf import NEXTN, write
from hybrid_models import expert_by_expert, layer_weights, reference, saved, tokens, with_layer
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

from draftwing.engine.devices import pick_device
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.loader import load_model
from draftwing.parallel.ranks import Absent
from draftwing.train.capture import FeatureModel
from draftwing.train.heads import new_mtp_head

KINDS = ["nemotron-h-moe", "nemotron-h-latent"]
COMMITTED, GROWN = 12, 3


class Reference:
    """All rows again for each new one."""

    def __init__(self, theirs: Any, weights: Mapping[str, Tensor]) -> None:
        self.theirs, self.w = theirs, weights
        first, own = theirs.config.layer_types.index, [dict[str, Tensor](), dict[str, Tensor]()]
        self.blocks = [NemotronHBlock(theirs.config, first(kind)).eval() for kind in ("full_attention", "moe")]
        for name, value in weights.items():
            _, _, layer, part = name.split(".", 3)
            if not part.startswith(("eh_proj", "enorm", "hnorm", "final_layernorm")):
                own[int(layer)][part] = value
        for block, state in zip(self.blocks, own, strict=True):
            block.load_state_dict(state)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.w[f"mtp.layers.{name}.weight"], self.theirs.config.layer_norm_epsilon)

    def __call__(self, ids: Tensor, fed: Tensor) -> Tensor:
        """ids [n]: the token behind each row's; fed [n, hidden] -> [n, hidden]"""
        embedded = self.theirs.get_input_embeddings()(ids)
        joined = torch.cat((self.norm(embedded, "0.enorm"), self.norm(fed, "0.hnorm")), -1)
        x = (joined @ self.w["mtp.layers.0.eh_proj.weight"].T)[None]
        seen = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        for block in self.blocks:
            x = block(x, attention_mask=seen)
        return self.norm(x[0], "1.final_layernorm")


def features(model: DecoderModel, ids: Tensor) -> Tensor:
    return FeatureModel(model, (model.final_aux_layer,), pick_device("cpu")).batch([ids])[0][0]


@torch.inference_mode()
def check(head: MTPHead, model: DecoderModel, theirs: Any, weights: Mapping[str, Tensor]) -> None:
    """A text's rows, and a chain behind them."""
    text, layer = tokens(COMMITTED + 1), Reference(theirs, weights)
    ids, fed, cache = text[1:], features(model, text[:COMMITTED]), DenseCache()
    torch.testing.assert_close(fed, theirs.model(text[None, :COMMITTED]).last_hidden_state[0], atol=1e-4, rtol=1e-4)
    head.set_max_positions(64)
    assert head.aux_layers == (model.final_aux_layer,) and not any(param.is_meta for param in head.parameters())
    hidden = head.run(ids, torch.arange(COMMITTED), head.features(fed), 0, cache)
    for level in range(1, GROWN + 1):
        expected = layer(ids, fed)[-len(hidden) :]
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        logits = head.logits(hidden)
        torch.testing.assert_close(logits, theirs.lm_head(expected), atol=1e-4, rtol=1e-4)
        token, position = logits[-1:].argmax(-1), torch.tensor([COMMITTED - 1 + level])
        ids, fed = torch.cat((ids, token)), torch.cat((fed, expected[-1:]))
        hidden = head.run(token, position, fed[-1:], level, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_folder(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = reference(kind)
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path, theirs, weights)
    model = load_model(folder, torch.float32, "cpu")
    head = load_mtp_head(folder, model, torch.float32, "cpu")
    assert "not used" not in caplog.text
    check(head, model, theirs, weights)
    stored = {name.removeprefix("model."): value for name, value in head.stored_tensors()}
    expected = expert_by_expert(weights)
    assert stored.keys() == expected.keys()
    for name, value in stored.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beside", [False, True])
def test_of_a_gguf_file(
    tmp_path: Path, kind: str, beside: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model's own, or in one that comes with it; under either name of its second norm."""
    if beside:
        monkeypatch.setitem(NEXTN, "mtp.layers.1.norm", "post_attention_norm")
    theirs = reference(kind)
    weights, state = layer_weights(theirs), dict(theirs.state_dict())
    path = write(tmp_path / "m.gguf", theirs.config, state if beside else {**state, **weights})
    model = load_model(path, torch.float32, "cpu")
    assert model.config.num_layers == 5 and "not used" not in caplog.text
    if beside:
        path = write(tmp_path / "mtp-m.gguf", theirs.config, {**state, **weights}, only_mtp=True)
        head = load_draft_head(path, model, "NEXTN", torch.float32, "cpu")
    else:
        head = load_mtp_head(path, model, torch.float32, "cpu")
    assert isinstance(head, MTPHead)
    check(head, model, theirs, weights)


def test_a_rank_has_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("draftwing.models.heads.base.SPREAD", 0)
    theirs = reference("nemotron-h-latent")
    folder = with_layer(tmp_path, theirs, layer_weights(theirs))
    whole = load_mtp_head(folder, load_model(folder, torch.float32, "cpu"), torch.float32, "cpu")
    for own in (False, True):
        shares = []
        for rank in range(2):
            model = load_model(folder, torch.float32, "cpu", ranks=Absent(2, rank, expert_parallel=own))
            shares.append(load_mtp_head(folder, model, torch.float32, "cpu"))
        for name, dim in (("mlp.down", 0 if own else 1), ("mlp.shared.down", 1), ("mixer.o", 1)):
            name = f"layers.0.layer.{name}.weight"
            joined = torch.cat([share.get_parameter(name) for share in shares], dim)
            assert torch.equal(joined, whole.get_parameter(name))
    assert "not used" not in caplog.text


def test_from_the_config_alone(tmp_path: Path) -> None:
    theirs = reference("nemotron-h-moe")
    folder = with_layer(tmp_path, theirs, {})
    model = load_model(folder, torch.float32, "cpu", dummy=True)
    head = load_mtp_head(folder, model, torch.float32, "cpu", dummy=True)
    head.set_max_positions(16)
    hidden = head.run(tokens(5), torch.arange(5), torch.randn(5, 64), 0, DenseCache())
    assert head.logits(hidden).isfinite().all()


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    theirs = reference("nemotron-h-moe")
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path / "a", theirs, weights)
    model = load_model(folder, torch.float32, "cpu")
    two = {name.replace("layers.1.", "layers.3."): value.clone() for name, value in weights.items()}
    two |= {name.replace("layers.0.", "layers.2."): value.clone() for name, value in two.items()}
    with pytest.raises(CheckpointError, match="expected one prediction layer, found 2"):
        load_mtp_head(with_layer(tmp_path / "b", theirs, {**weights, **two}), model, torch.float32, "cpu")
    few = {name: value for name, value in weights.items() if "final_layernorm" not in name}
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.mtp\.layers\.1\.final_layernorm"):
        load_mtp_head(with_layer(tmp_path / "d", theirs, few), model, torch.float32, "cpu")


def test_none_is_trained(tmp_path: Path) -> None:
    """A config that goes with a layer could not say what those of its model are; Falcon-H1 has no plain attention."""
    model = load_model(saved(tmp_path / "a", reference("nemotron-h")), torch.float32, "cpu")
    with pytest.raises(ConfigError, match="cannot be trained: expected plain attention and one MLP, found an MLP that"):
        new_mtp_head(model)
    model = load_model(saved(tmp_path / "b", reference("falcon-h1")), torch.float32, "cpu")
    with pytest.raises(CheckpointError, match="prediction layers of FalconH1ForCausalLM are not supported"):
        new_mtp_head(model)
