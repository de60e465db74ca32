"""The prediction layer of Qwen3.5 and its like as a draft head, against its arithmetic written out in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import DenseCache
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import layer_weights, reference, saved, tokens, with_layer
from reference.qwen_mtp import Reference
from torch import Tensor

from draftwing.engine.devices import pick_device
from draftwing.errors import CheckpointError
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head, load_mtp_head
from draftwing.models.heads.mtp import MTPHead
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.train.capture import FeatureModel
from draftwing.train.checkpoint import save_head
from draftwing.train.heads import new_mtp_head

KINDS = ["qwen3.5", "qwen3.5-even", "qwen3.5-moe", "qwen3-next"]
COMMITTED, GROWN = 12, 3


def features(model: DecoderModel, ids: Tensor) -> Tensor:
    return FeatureModel(model, (model.final_aux_layer,), pick_device("cpu")).batch([ids])[0][0]


@torch.inference_mode()
def check(head: MTPHead, model: DecoderModel, theirs: Any, weights: Mapping[str, Tensor], near: float = 1e-4) -> None:
    """A text's rows, and a chain behind them."""
    ids = tokens(COMMITTED + 1)
    fed, written = features(model, ids[:COMMITTED]), Reference(theirs, weights)
    head.set_max_positions(64)
    assert head.aux_layers == (model.final_aux_layer,) and not any(param.is_meta for param in head.parameters())
    cache = DenseCache()
    hidden = head.run(ids[1:], torch.arange(COMMITTED), head.features(fed), 0, cache)
    expected = [written.row(int(ids[i + 1]), fed[i].double(), i) for i in range(COMMITTED)]
    torch.testing.assert_close(hidden.double(), torch.stack([h for h, _ in expected]), atol=near, rtol=1e-4)
    logits = head.logits(hidden)
    torch.testing.assert_close(logits.double(), torch.stack([z for _, z in expected]), atol=near, rtol=1e-4)
    hidden, feature = hidden[-1:], expected[-1][0]
    for level in range(1, GROWN + 1):
        token = logits[-1:].argmax(-1)
        hidden = head.run(token, torch.tensor([COMMITTED - 1 + level]), hidden, level, cache)
        logits = head.logits(hidden)
        feature, z = written.row(int(token), feature, COMMITTED - 1 + level)
        torch.testing.assert_close(logits[0].double(), z, atol=near, rtol=1e-4)


@pytest.mark.slower(kind=KINDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_folder(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = reference(kind)
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path, theirs, weights)
    model = load_model(folder, torch.float32, "cpu")
    head = load_mtp_head(folder, model, torch.float32, "cpu")
    assert "not used" not in caplog.text
    check(head, model, theirs, weights)
    for name, value in head.stored_tensors():
        if ".experts." not in name:
            torch.testing.assert_close(value, weights[name.removeprefix("model.")], rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
@pytest.mark.parametrize("beside", [False, True])
def test_of_a_gguf_file(tmp_path: Path, kind: str, beside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In the model's own, or in one that comes with it."""
    theirs = reference(kind)
    weights, state = layer_weights(theirs), dict(theirs.state_dict())
    path = write(tmp_path / "m.gguf", theirs.config, state if beside else {**state, **weights})
    model = load_model(path, torch.float32, "cpu")
    assert model.config.num_layers == 4 and "not used" not in caplog.text
    if beside:
        with pytest.raises(CheckpointError, match=r"has no multi-token prediction layers \(mtp\.\*\)"):
            load_mtp_head(path, model, torch.float32, "cpu")
        path = write(tmp_path / "mtp-m.gguf", theirs.config, {**state, **weights}, only_mtp=True)
        head = load_draft_head(path, model, "NEXTN", torch.float32, "cpu")
    else:
        head = load_mtp_head(path, model, torch.float32, "cpu")
    assert isinstance(head, MTPHead)
    check(head, model, theirs, weights)


def in_blocks(folder: Path, kind: str, stored: Type) -> tuple[Path, BlockFormat, DecoderModel]:
    """Returns a file whose matrices are blocks of `stored`, a format that makes blocks of Q8_0, and its model so."""
    theirs = reference(kind)
    path = write(folder / "m.gguf", theirs.config, {**theirs.state_dict(), **layer_weights(theirs)}, stored)
    ops = make_ops(torch.device("cpu"))
    if "Q8_0" not in getattr(ops, "block_kinds", ()):
        pytest.skip("needs the C extension")
    form = BlockFormat("Q8_0", ops)
    return path, form, load_model(path, torch.float32, "cpu", weight_format=form)


def test_blocks_of_a_file_stay(tmp_path: Path) -> None:
    path, form, model = in_blocks(tmp_path, "qwen3.5", Type.Q8_0)
    head = load_mtp_head(path, model, torch.float32, "cpu", weight_format=form)
    dense = load_mtp_head(path, model, torch.float32, "cpu")
    assert set(head.layers[0].input_proj.op.sizes) == {"Q8_0"}
    q = head.layers[0].layer.mixer.qkv.dense_weight()
    assert torch.equal(q, dense.layers[0].layer.mixer.qkv.dense_weight())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stored"), [("qwen3.5", "Q8_0"), ("qwen3.5-moe", "Q4_0")])
def test_blocks_of_layers_that_nothing_replaces_stay(tmp_path: Path, kind: str, stored: str) -> None:
    """Layers that can be trained are loaded as a trained one would be; experts would take four times the memory."""
    path, form, model = in_blocks(tmp_path, kind, Type.Q4_0)
    head = load_mtp_head(path, model, torch.float32, "cpu", weight_format=form, as_stored=False)
    assert set(head.layers[0].input_proj.op.sizes) == {stored}


@pytest.mark.slow
def test_a_layer_in_bfloat16(tmp_path: Path) -> None:
    """Its norms are in float32, and nothing else."""
    theirs = reference("qwen3.5-even")
    weights, ids = layer_weights(theirs), tokens(6)
    folder, ops = with_layer(tmp_path, theirs, weights), make_ops(torch.device("cpu"))
    model = load_model(folder, torch.bfloat16, "cpu")
    head = load_mtp_head(folder, model, torch.bfloat16, "cpu")
    head.set_max_positions(16)
    assert head.rope.table.dtype == torch.bfloat16 and head.layers[0].final_norm.weight.dtype == torch.float32
    fed, written = features(model, ids), Reference(theirs, weights)
    head.pack(ops)
    with torch.inference_mode():
        found = head.logits(head.run(ids, torch.arange(6), fed, 0, DenseCache())).double()
    expected = torch.stack([written.row(int(ids[i]), fed[i].double(), i)[1] for i in range(6)])
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_packed_head_and_a_token_map(tmp_path: Path) -> None:
    theirs = reference("qwen3.5-even")
    weights, kept = layer_weights(theirs), torch.tensor([3, 9, 40, 77])
    folder = with_layer(tmp_path, theirs, weights)
    model, ops = load_model(folder, torch.float32, "cpu"), make_ops(torch.device("cpu"))
    fed, ids = features(model, tokens(6)), tokens(6, 2)
    heads = [load_mtp_head(folder, model, torch.float32, "cpu", token_ids=some) for some in (None, kept)]
    logits = []
    for head in heads:
        head.set_max_positions(16)
        head.pack(ops)
        with torch.inference_mode():
            logits.append(head.logits(head.run(ids, torch.arange(6), fed, 0, DenseCache())))
    torch.testing.assert_close(logits[1], logits[0][:, kept], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_from_the_config_alone(tmp_path: Path) -> None:
    for kind in ("qwen3.5", "qwen3.5-moe"):
        theirs = reference(kind)
        folder = with_layer(tmp_path / kind, theirs, {})
        model = load_model(folder, torch.float32, "cpu", dummy=True)
        head = load_mtp_head(folder, model, torch.float32, "cpu", dummy=True)
        head.set_max_positions(16)
        hidden = head.run(tokens(5), torch.arange(5), torch.randn(5, 64), 0, DenseCache())
        assert head.embedding_first and head.logits(hidden).isfinite().all()
        file = write(tmp_path / f"{kind}.gguf", theirs.config, {**theirs.state_dict(), **layer_weights(theirs)})
        assert load_mtp_head(file, model, torch.float32, "cpu", dummy=True).embedding_first


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    weights = layer_weights(theirs)
    folder = with_layer(tmp_path / "a", theirs, weights)
    model = load_model(folder, torch.float32, "cpu")
    two = {name.replace("layers.0.", "layers.1."): value.clone() for name, value in weights.items()}
    with pytest.raises(CheckpointError, match="expected one prediction layer, found 2"):
        load_mtp_head(with_layer(tmp_path / "b", theirs, {**weights, **two}), model, torch.float32, "cpu")
    quantised = with_layer(tmp_path / "c", theirs, {}, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="though mtp_num_hidden_layers is 1: whoever quantised it left them out"):
        load_mtp_head(quantised, model, torch.float32, "cpu")
    few = with_layer(tmp_path / "d", theirs, {k: v for k, v in weights.items() if k != "mtp.norm.weight"})
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.mtp\.norm\.weight"):
        load_mtp_head(few, model, torch.float32, "cpu")
    moe = reference("qwen3.5-moe")
    other = write(tmp_path / "o.gguf", moe.config, {**moe.state_dict(), **weights})
    with pytest.raises(CheckpointError, match="expected layers of a Qwen3_5ForCausalLM, found architecture 'qwen35m"):
        load_mtp_head(other, model, torch.float32, "cpu")


def test_a_new_layer_is_as_qwens(tmp_path: Path) -> None:
    """One that is trained has the names that everybody loads."""
    model = load_model(saved(tmp_path, reference("qwen3.5")), torch.float32, "cpu")
    head = new_mtp_head(model)
    expected = {f"model.{name}" for name in layer_weights(reference("qwen3.5"))}
    assert {name for name, _ in head.stored_tensors()} == expected
    again = load_draft_head(save_head(head, tmp_path / "head", torch.float32), model, "NEXTN", torch.float32, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), again.parameters(), strict=True))
