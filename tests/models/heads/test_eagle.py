"""EAGLE and EAGLE-3 heads, loaded from published layouts, against their arithmetic in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.loader import load_draft_head
from draftwing.ops import make_ops
from draftwing.ops.attention import FunctionAttend


@pytest.fixture(scope="module")
def target(drafts: SimpleNamespace) -> DecoderModel:
    return drafts.make_target()


def load(folder: Path, target: DecoderModel, algorithm: str, **options: Any) -> Any:
    head = load_draft_head(folder, target, algorithm, target.norm.weight.dtype, "cpu", **options)
    head.set_max_positions(64)
    return head


def test_final_tap_is_the_output(drafts: SimpleNamespace, target: DecoderModel) -> None:
    with torch.inference_mode():
        ids = torch.tensor([1, 2, 3])
        hidden, aux_hidden = target(ids, torch.arange(3), drafts.DenseCache(), (8, target.final_aux_layer))
    assert aux_hidden is not None
    assert torch.equal(aux_hidden[:, 32:], hidden)
    assert torch.equal(target.norm(aux_hidden[:, :32]), hidden)


# ---- EAGLE and EAGLE-2 -----------------------------------------------------------------------------------------------


def eagle_row(drafts: SimpleNamespace, target: DecoderModel, weights: Any, layers: int, theta: float) -> Any:
    reference = drafts.Reference(weights, theta=theta)

    def row(token: int, aux_hidden: Tensor | None, feature: Tensor, position: int, level: int) -> tuple[Tensor, Tensor]:
        x = reference.linear(torch.cat((target.embed.weight[token], feature)), "fc")
        for i in range(layers):
            normed = reference.rms(x, f"layers.{i}.input_layernorm.weight") if i else x
            x = reference.layer(f"layers.{i}", normed, x, position)
        return x, target.lm_head.weight @ x

    return row


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        pytest.param({"fc_bias": True}, {}, id="llama2: no rope_theta, no bias key, bias in the file"),
        pytest.param({"fc_bias": False}, {"rope_theta": 500000.0, "bias": False}, id="llama3"),
        pytest.param({"fc_bias": False}, {"bias": True}, id="bias promised but not in the file"),
        pytest.param({"qkv_bias": True}, {"rope_theta": 1e6, "qkv_bias": True}, id="qwen2"),
        pytest.param({"layers": 2}, {"num_hidden_layers": 2}, id="two layers"),
    ],
)
def test_eagle(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    weights = drafts.eagle_weights(**options)
    head = load(drafts.write(tmp_path, weights, pickled=True, **changes), target, "EAGLE")
    assert head.aux_layers == (9,) and head.lookahead == 1 and head.target_ids is None
    assert [tuple(spec) for spec in head.kv_layers] == [(2, 8)] * options.get("layers", 1)
    row = eagle_row(drafts, target, weights, options.get("layers", 1), changes.get("rope_theta", 10000.0))
    drafts.check_chain(head, target, row)


@pytest.mark.parametrize("tied", [False, True])
def test_token_map_gathers_rows_of_the_head(drafts: SimpleNamespace, tmp_path: Path, tied: bool) -> None:
    target = drafts.make_target(tied=tied)
    weights, ids = drafts.eagle_weights(), torch.tensor([2, 3, 11, 30, 49])
    head = load(drafts.write(tmp_path, weights), target, "EAGLE", token_ids=ids)
    assert head.vocab == 5 and torch.equal(head.target_ids, ids)
    full = eagle_row(drafts, target, weights, 1, 10000.0)
    drafts.check_chain(head, target, lambda *args: ((out := full(*args))[0], out[1][ids]))
    assert "lm_head" not in " ".join(head.names())


@torch.inference_mode()
def test_token_map_of_a_packed_target(drafts: SimpleNamespace, tmp_path: Path) -> None:
    target = drafts.make_target(torch.float32)
    expected = target.lm_head.weight[[1, 40]].clone()
    target.pack(make_ops(torch.device("cpu")))
    head = load(drafts.write(tmp_path, drafts.eagle_weights()), target, "NEXTN", token_ids=torch.tensor([1, 40]))
    x = torch.randn(3, 32)
    torch.testing.assert_close(head.logits(x), x @ expected.T)
    head.pack(make_ops(torch.device("cpu")))
    torch.testing.assert_close(head.logits(x), x @ expected.T)
    assert head.run(torch.tensor([1, 2, 3]), torch.arange(3), x, 0, drafts.DenseCache()).shape == (3, 32)


# ---- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def eagle3_row(
    drafts: SimpleNamespace,
    target: DecoderModel,
    weights: Any,
    first: str,
    theta: float = 10000.0,
    head_dim: int = 8,
    kv: int = 2,
    before_residual: bool = False,
    norm_output: bool = False,
    later: tuple[str, ...] = (),
) -> Any:
    reference = drafts.Reference(weights, head_dim, theta, kv)
    embed = reference.w.get("embed_tokens.weight", target.embed.weight)
    lm_head = reference.w.get("lm_head.weight", target.lm_head.weight)

    def fuse(aux_hidden: Tensor) -> Tensor:
        if "input_norm.weight" in weights:
            aux_hidden = reference.rms(aux_hidden, "input_norm.weight")
        if "fc_norm.0.weight" in weights:
            parts = aux_hidden.chunk(3)
            aux_hidden = torch.cat([reference.rms(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
        return reference.linear(aux_hidden, "fc")

    def row(token: int, aux_hidden: Tensor | None, feature: Tensor, position: int, level: int) -> tuple[Tensor, Tensor]:
        g = feature if aux_hidden is None else fuse(aux_hidden)
        normed = reference.rms(g, f"{first}.hidden_norm.weight")
        a = torch.cat((reference.rms(embed[token], f"{first}.input_layernorm.weight"), normed))
        x = reference.layer(first, a, normed if before_residual else g, position)
        for i, name in enumerate(later, 1):
            x = reference.layer(f"layers.{i}", reference.rms(x, f"layers.{i}.{name}.weight"), x, position)
        out = reference.rms(x, "norm.weight")
        return out if norm_output else x, lm_head @ out

    return row


@pytest.mark.parametrize(
    ("options", "changes", "reference"),
    [
        pytest.param({}, {"draft_vocab_size": 20}, {}, id="official"),
        pytest.param({"first": "layers.0"}, {"rope_theta": 5e5}, {"theta": 5e5}, id="layers.0"),
        pytest.param({}, {"norm_before_residual": True}, {"before_residual": True}, id="norm_before_residual"),
        pytest.param({}, {"norm_output": True}, {"norm_output": True}, id="norm_output"),
        pytest.param({"head_dim": 16}, {"head_dim": 16}, {"head_dim": 16}, id="head_dim is not H / heads"),
        pytest.param({"kv": 4}, {"num_key_value_heads": ...}, {"kv": 4}, id="no key/value heads given"),
        pytest.param({"draft_vocab": None}, {}, {}, id="shared head"),
        pytest.param({"draft_vocab": 50}, {"draft_vocab_size": 50}, {}, id="own head over every token"),
        pytest.param({"aux": 2}, {"eagle_aux_hidden_state_layer_ids": [1, 6]}, {}, id="two aux layers"),
    ],
)
def test_eagle3(
    drafts: SimpleNamespace,
    target: DecoderModel,
    tmp_path: Path,
    options: dict[str, Any],
    changes: dict[str, Any],
    reference: dict[str, Any],
) -> None:
    weights = drafts.eagle3_weights(**options)
    head = load(drafts.write(tmp_path, weights, **changes), target, "EAGLE3")
    assert head.aux_layers == ((2, 7) if "aux" in options else (2, 4, 5))
    if options.get("draft_vocab", 20) == 20:
        assert torch.equal(head.target_ids, drafts.kept_ids(20))
    else:
        assert head.target_ids is None and head.vocab == 50
    row = eagle3_row(drafts, target, weights, options.get("first", "midlayer"), **reference)
    drafts.check_chain(head, target, row)


@pytest.mark.parametrize("form", ["fc_norm", "aux_norm", "aux_norm bare", "input_norm", "input_norm without a key"])
def test_norms_before_fc(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, form: str) -> None:
    weights = drafts.eagle3_weights()
    stored, changes = dict(weights), {}
    if form.startswith("input"):
        weights.norm("input_norm.weight", 96)
        stored["input_norm.weight"] = weights["input_norm.weight"]
        changes = {} if "without" in form else {"eagle_config": {"norm_before_fc": True}}
    else:
        for i, part in enumerate(("low", "mid", "high")):
            weights.norm(f"fc_norm.{i}.weight")
            name = f"fc_norm.{i}" if form == "fc_norm" else f"aux_norm_{part}"
            stored[name if "bare" in form else f"{name}.weight"] = weights[f"fc_norm.{i}.weight"]
        changes = {"fc_norm": True} if form == "fc_norm" else {"use_aux_norm": True}
    head = load(drafts.write(tmp_path, stored, **changes), target, "EAGLE3")
    drafts.check_chain(head, target, eagle3_row(drafts, target, weights, "midlayer"))


@pytest.mark.parametrize("name", ["hidden_norm", "input_layernorm"])
def test_later_layers(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, name: str) -> None:
    weights = drafts.eagle3_weights("layers.0")
    for i in (1, 2):
        weights.layer(f"layers.{i}")
        weights.norm(f"layers.{i}.{name}.weight")
    head = load(drafts.write(tmp_path, weights), target, "EAGLE3")
    assert len(head.kv_layers) == 3
    drafts.check_chain(head, target, eagle3_row(drafts, target, weights, "layers.0", later=(name, name)))


def test_a_wider_target_needs_an_embedding_of_the_draft(drafts: SimpleNamespace, tmp_path: Path) -> None:
    target = drafts.make_target(hidden=48)
    weights = drafts.eagle3_weights(aux_size=48)
    weights.matrix("embed_tokens.weight", 50, 32)
    head = load(drafts.write(tmp_path, weights, target_hidden_size=48), target, "EAGLE3")
    assert head.width == 32 and head.embed is not None
    drafts.check_chain(head, target, eagle3_row(drafts, target, weights, "midlayer"))


def test_speculators_layout(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path) -> None:
    """The layer's config is nested, and its residual stream starts from the normed feature if nothing is said."""
    weights = drafts.eagle3_weights("layers.0")
    weights.matrix("embed_tokens.weight", 50, 32)
    inner = {**drafts.CONFIG, "rope_theta": 77.0}
    changes = dict.fromkeys(drafts.CONFIG, ...) | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": inner,
        "draft_vocab_size": 20,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
    }
    head = load(drafts.write(tmp_path, weights, **changes), target, "EAGLE3")
    del weights["embed_tokens.weight"]  # random in some exports: the target's is used
    row = eagle3_row(drafts, target, weights, "layers.0", theta=77.0, before_residual=True)
    drafts.check_chain(head, target, row)


# ---- training and device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_every_parameter_gets_a_gradient_and_the_target_none(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, algorithm: str
) -> None:
    weights = drafts.eagle_weights() if algorithm == "EAGLE" else drafts.eagle3_weights()
    head = load(drafts.write(tmp_path, weights), target, algorithm).requires_grad_()
    ids = torch.tensor([4, 17, 3, 29])
    with torch.no_grad():
        _, aux_hidden = target(ids, torch.arange(4), drafts.DenseCache(), head.aux_layers)
    cache = drafts.DenseCache()
    hidden = head.run(ids, torch.arange(4), head.features(aux_hidden), 0, cache)
    hidden = head.run(ids, torch.arange(1, 5), hidden, 1, cache)
    F.cross_entropy(head.logits(hidden), torch.tensor([1, 2, 3, 4])).backward()
    for name, param in head.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, name
    assert all(param.grad is None for param in target.parameters())


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_runs_on_fake_tensors(drafts: SimpleNamespace, tmp_path: Path, algorithm: str) -> None:
    """No data is read on the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    target = drafts.make_target(torch.float32)
    weights = drafts.eagle_weights() if algorithm == "EAGLE" else drafts.eagle3_weights()
    head = load(drafts.write(tmp_path, weights), target, algorithm)
    with FakeTensorMode(allow_non_fake_inputs=True):
        aux_hidden = torch.empty(5, 32 * len(head.aux_layers))
        ids, positions = torch.zeros(5, dtype=torch.int64), torch.arange(5)
        hidden = head.run(
            ids, positions, head.features(aux_hidden), 0, FunctionAttend(lambda layer, q, k, v: q.flatten(1))
        )
        assert head.logits(hidden).shape == (5, head.vocab)
