"""The prediction layers of GLM-4.5, DeepSeek-V3 and GLM-4.7-Flash as draft heads, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_models
import pytest
import tiny_quantised as tiny
import torch
from dense_cache import DenseCache
from hybrid_models import tokens
from models.test_gguf_families import IN_FILES
from models.test_gguf_families import write as write_family
from moe_models import LAYERS, predicting, published, reference, with_layer, write_gguf
from reference.latent_layer import PredictionLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache

from draftwing.config.options import Options
from draftwing.engine.devices import pick_device
from draftwing.errors import CheckpointError
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.heads.own_layers import with_own_layers
from draftwing.models.loader import load_config, load_model
from draftwing.parallel.ranks import ALONE, Absent, Ranks
from draftwing.train.capture import FeatureModel

KINDS = [
    "glm4-moe", "glm4-moe-groups", "deepseek-v3", "glm4-moe-lite", "hunyuan-v3", "ling2", "ling3", "exaone-moe",
    "exaone-moe-window", "mellum", "mellum-upside-down", "mellum-full",
]  # fmt: skip
SAID = ("exaone-moe-window", "mellum-full")  # whose configs say of what kind their prediction layer is
COMMITTED, GROWN = 12, 3


def features(model: DecoderModel, ids: Tensor) -> Tensor:
    return FeatureModel(model, (model.final_aux_layer,), pick_device("cpu")).batch([ids])[0][0]


@torch.inference_mode()
def check(head: MTPHead, model: DecoderModel, theirs: Any, layer: Any) -> None:
    """A text's rows, and a chain behind them."""
    ids = tokens(COMMITTED + 1)
    fed, known = features(model, ids[:COMMITTED]), MtpCache(config=theirs.config.get_mtp_config())
    torch.testing.assert_close(fed, theirs.model(ids[None, :COMMITTED]).last_hidden_state[0], atol=1e-4, rtol=1e-4)
    head.set_max_positions(64)
    assert head.aux_layers == (model.final_aux_layer,) and not any(param.is_meta for param in head.parameters())
    cache = DenseCache()
    hidden = head.run(ids[1:], torch.arange(COMMITTED), head.features(fed), 0, cache)
    expected = layer.forward_layer(0, fed[None], torch.arange(1, COMMITTED + 1)[None], known, input_ids=ids[None, 1:])
    for level in range(1, GROWN + 1):
        torch.testing.assert_close(hidden, expected[0], atol=1e-4, rtol=1e-4)
        logits = head.logits(hidden)
        torch.testing.assert_close(logits, theirs.lm_head(expected[0]), atol=1e-4, rtol=1e-4)
        token, position = logits[-1:].argmax(-1), torch.tensor([COMMITTED - 1 + level])
        hidden = head.run(token, position, hidden[-1:], level, cache)
        expected = layer.forward_layer(0, expected[:, -1:], position[None] + 1, known, input_ids=token[None])


@pytest.mark.slower(kind=[kind for kind in KINDS if kind != "deepseek-v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_folder(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = hybrid_models.reference(kind) if kind == "ling3" else reference(kind)
    layer = predicting(theirs)
    said = {} if kind in SAID else {"mtp_layer_types": None}
    folder = with_layer(tmp_path / "model", theirs, published(theirs, layer), **said)
    model = load_model(folder, torch.float32, "cpu")
    head = load_mtp_head(folder, model, torch.float32, "cpu")
    assert "not used" not in caplog.text
    check(head, model, theirs, layer)
    # The layer alone, in a folder of its own.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(published(theirs, layer), alone / "model.safetensors")
    again = load_draft_head(alone, model, "NEXTN", torch.float32, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.further(kind="deepseek-v3")
@pytest.mark.slower(kind="glm4-moe-groups")
@pytest.mark.parametrize("kind", ["glm4-moe-groups", "deepseek-v3", "glm4-moe-lite"])
def test_of_a_gguf_file(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = reference(kind)
    layer = predicting(theirs)
    tensors = {**theirs.state_dict(), **published(theirs, layer)}
    path = write_gguf(tmp_path / "m.gguf", theirs.config, tensors)
    model = load_model(path, torch.float32, "cpu")
    head = load_mtp_head(path, model, torch.float32, "cpu")
    assert "not used" not in caplog.text
    check(head, model, theirs, layer)


@pytest.mark.further(kind=["deepseek-v3.2", "glm4-moe"], beside=True)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", ["glm4-moe", "glm4-moe-lite", "deepseek-v3.2", "glm-5"])
def test_a_gguf_file_has_the_layer_of_the_folder(tmp_path: Path, kind: str, beside: bool) -> None:
    """In the model's file, or in one of its own next to it, as llama.cpp's converter writes them."""
    theirs = reference(kind)
    own, layer = theirs.state_dict(), published(theirs, predicting(theirs))
    folder = with_layer(tmp_path / "model", theirs, layer)
    expected = load_mtp_head(folder, load_model(folder, torch.float32, "cpu"), torch.float32, "cpu")
    file = write_gguf(tmp_path / "m-F32.gguf", theirs.config, own if beside else {**own, **layer})
    side = file.with_name(f"mtp-{file.name}")
    if beside:
        write_gguf(side, theirs.config, {**own, **layer}, only_mtp=True)
    options = with_own_layers(Options(model=str(file)).resolve(), file, load_config(file))
    assert options.drafter == "NEXTN" and options.speculative_draft_model_path == (str(side) if beside else None)
    model = load_model(file, torch.float32, "cpu")
    head = load_draft_head(side if beside else file, model, "NEXTN", torch.float32, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), expected.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.further(kind=["exaone-moe", "hunyuan-v3"])
@pytest.mark.parametrize("kind", ["ling2", "exaone-moe", "hunyuan-v3"])
def test_of_a_gguf_file_with_other_names(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Names are as converters make them of the checkpoint's; experts lie together."""
    theirs = reference(kind)
    layer, at = predicting(theirs), f"model.layers.{LAYERS}."
    tensors = with_layer(tmp_path / "model", theirs, published(theirs, layer))
    stored = load_file(tensors / "model.safetensors")
    numbered = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
                "norm": "shared_head.norm"}  # fmt: skip
    renames = {f"mtp.{name}.": f"{at}{theirs_}." for name, theirs_ in numbered.items()} | {"mtp.layers.0.": at}
    renames |= {f"{at}final_layernorm.": f"{at}shared_head.norm."}
    state = {name: value for name, value in stored.items() if ".experts." not in name}
    for one, other in renames.items():
        state = {other + name.removeprefix(one) if name.startswith(one) else name: v for name, v in state.items()}
    experts = theirs.state_dict() | {
        name.replace("layers.0.mtp_block.", at): value for name, value in layer.state_dict().items()
    }
    state |= {name: value for name, value in experts.items() if ".experts." in name}
    write_family(tmp_path / "m.gguf", theirs.config, state, *IN_FILES[kind])
    model = load_model(tmp_path / "m.gguf", torch.float32, "cpu")
    head = load_mtp_head(tmp_path / "m.gguf", model, torch.float32, "cpu")
    assert "not used" not in caplog.text
    check(head, model, theirs, layer)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["glm4-moe-lite", "glm-5"])
def test_in_float64(tmp_path: Path, kind: str) -> None:
    """GLM-4.7-Flash's, which transformers has put together from a layer of the model here, and nowhere else; and
    GLM-5's, whose indexer picks all of so short a text."""
    theirs = reference(kind)
    weights = published(theirs, predicting(theirs))
    model = load_model(with_layer(tmp_path, theirs, weights), torch.float32, "cpu")
    head = load_mtp_head(tmp_path, model, torch.float32, "cpu")
    head.set_max_positions(64)
    own = {name.removeprefix(f"model.layers.{LAYERS}."): value for name, value in weights.items()}
    layer = PredictionLayer(theirs.config, own, theirs.get_input_embeddings().weight)
    text = tokens(COMMITTED + 1)
    ids, fed, cache = text[1:], features(model, text[:COMMITTED]), DenseCache()
    hidden = head.run(ids, torch.arange(COMMITTED), head.features(fed), 0, cache)
    for level in range(1, GROWN + 1):
        expected = layer(ids, fed)[-len(hidden) :]
        torch.testing.assert_close(hidden.double(), expected, atol=1e-4, rtol=1e-4)
        token, position = head.logits(hidden)[-1:].argmax(-1), torch.tensor([COMMITTED - 1 + level])
        ids, fed = torch.cat((ids, token)), torch.cat((fed, expected[-1:].float()))
        hidden = head.run(token, position, fed[-1:], level, cache)


@pytest.mark.slow
def test_a_rank_has_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("draftwing.models.heads.base.SPREAD", 0)
    theirs = reference("glm4-moe")
    folder = with_layer(tmp_path, theirs, published(theirs, predicting(theirs)))
    whole = load_mtp_head(folder, load_model(folder, torch.float32, "cpu"), torch.float32, "cpu")
    shares = []
    for rank in range(2):
        model = load_model(folder, torch.float32, "cpu", ranks=Absent(2, rank))
        shares.append(load_mtp_head(folder, model, torch.float32, "cpu"))
    for name in ("layers.0.layer.mlp.down.weight", "layers.0.layer.mlp.shared.down.weight"):
        joined = torch.cat([share.get_parameter(name) for share in shares], 1)
        assert torch.equal(joined, whole.get_parameter(name))
    name = "layers.0.layer.mlp.correction"
    assert all(torch.equal(share.get_parameter(name), whole.get_parameter(name)) for share in shares)
    for rank in range(2):
        model = load_model(folder, torch.float32, "cpu", ranks=Absent(2, rank, expert_parallel=True))
        share = load_mtp_head(folder, model, torch.float32, "cpu")
        for name in ("layers.0.layer.mlp.down.weight", "layers.0.layer.mlp.gate_up.weight"):
            assert torch.equal(share.get_parameter(name), whole.get_parameter(name).chunk(2)[rank])
    assert "not used" not in caplog.text


@pytest.mark.slow
@pytest.mark.further(kind=["glm4-moe", "glm4-moe-lite"])
@pytest.mark.parametrize("kind", ["glm4-moe", "deepseek-v3", "glm4-moe-lite"])
def test_a_rank_has_a_share_of_a_quantised_layer(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.models.heads.base.SPREAD", 0)
    theirs = reference(kind)
    with_layer(tmp_path, theirs, published(theirs, predicting(theirs)))
    config, write = tiny.FORMATS["fp8 block"]
    tiny.quantise(tmp_path, config, lambda _: write)

    def loaded(ranks: Ranks = ALONE) -> MTPHead:
        return load_mtp_head(tmp_path, load_model(tmp_path, torch.float32, "cpu", ranks=ranks), torch.float32, "cpu")

    whole, shares = loaded(), [loaded(Absent(2, rank)) for rank in range(2)]
    name = "layers.0.layer.mlp.down.weight"
    assert torch.equal(torch.cat([share.get_parameter(name) for share in shares], 1), whole.get_parameter(name))
    half = loaded(Absent(2, 1, expert_parallel=True))
    assert torch.equal(half.get_parameter(name), whole.get_parameter(name).chunk(2)[1])


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    theirs = reference("glm4-moe")
    weights = published(theirs, predicting(theirs))
    folder = with_layer(tmp_path / "a", theirs, weights)
    model = load_model(folder, torch.float32, "cpu")
    two = {name.replace("layers.3.", "layers.4."): value.clone() for name, value in weights.items()}
    with pytest.raises(CheckpointError, match="expected one prediction layer, found 2"):
        load_mtp_head(with_layer(tmp_path / "b", theirs, {**weights, **two}), model, torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"has no multi-token prediction layers \(model.layers.3.\*\)"):
        load_mtp_head(with_layer(tmp_path / "c", theirs, {}), model, torch.float32, "cpu")
