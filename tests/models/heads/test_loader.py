"""Which head a folder holds, what of it is read, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_quantised as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing.config.trees import BLOCK, TreeShape
from draftwing.errors import CheckpointError
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import DraftHead
from draftwing.models.heads.config import resolve_aux_layers
from draftwing.models.heads.eagle import Eagle3Head, EagleHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.trees import tree_of
from draftwing.train.checkpoint import save_head


@pytest.fixture(scope="module")
def target(drafts: SimpleNamespace) -> DecoderModel:
    return drafts.make_target(torch.float32)


def load(folder: Path, target: DecoderModel, algorithm: str = "EAGLE3", **options: Any) -> Any:
    head: DraftHead = load_draft_head(folder, target, algorithm, torch.float32, "cpu", **options)
    return head


def refused(folder: Path, target: DecoderModel, algorithm: str, *expected: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load(folder, target, algorithm)
    for part in expected:
        assert part in str(error.value)


# ---- kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Unheard"])
def test_kind_is_told_by_the_weights(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, name: str) -> None:
    one = drafts.write(tmp_path / "one", drafts.eagle_weights(), architectures=[name])
    three = drafts.write(tmp_path / "three", drafts.eagle3_weights(), architectures=[name])
    assert isinstance(load(one, target, "EAGLE"), EagleHead)
    assert isinstance(load(one, target, "NEXTN"), EagleHead)
    assert isinstance(load(three, target, "EAGLE3"), Eagle3Head)
    refused(one, target, "EAGLE3", "an EAGLE head", "expected --speculative-algorithm EAGLE,", "found EAGLE3")
    refused(three, target, "EAGLE", "an EAGLE-3 head", "expected --speculative-algorithm EAGLE3", "found EAGLE")


def test_eagle3_without_vocabulary_maps_and_midlayer(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path
) -> None:
    weights = drafts.eagle3_weights("layers.0", draft_vocab=None, aux=2)  # fc as wide as that of an EAGLE head
    config = {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    assert isinstance(load(drafts.write(tmp_path, weights, **config), target), Eagle3Head)


@pytest.mark.parametrize("pickled", [False, True])
def test_model_prefix(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, pickled: bool) -> None:
    weights = drafts.eagle3_weights()
    bare = ("lm_head.weight", "d2t", "t2d")
    prefixed = {name if name in bare else f"model.{name}": tensor for name, tensor in weights.items()}
    head = load(drafts.write(tmp_path, prefixed, pickled), target)
    assert torch.equal(head.fc.weight, weights["fc.weight"])
    assert torch.equal(head.fusion.hidden_norm.weight, weights["midlayer.hidden_norm.weight"])


def test_folders_that_hold_no_head(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path) -> None:
    model = drafts.Weights(0)
    model.layer("model.layers.0")
    refused(drafts.write(tmp_path / "model", model), target, "EAGLE", "STANDALONE", "fc.weight")
    normed = {**drafts.eagle_weights(), "layers.0.input_layernorm.weight": torch.ones(32)}
    refused(drafts.write(tmp_path / "normed", normed), target, "EAGLE", "no draft head", "fc.weight [32, 64]")
    parallel = {**drafts.eagle_weights(), "mask_hidden": torch.ones(32)}
    refused(drafts.write(tmp_path / "parallel", parallel), target, "EAGLE", "an EAGLE head for parallel drafting")
    other = drafts.write(tmp_path / "independent", drafts.eagle3_weights("layers.0"), speculators_model_type="mlp")
    refused(other, target, "EAGLE3", "expected eagle3, peagle, dflash, dflash2, dspark, found 'mlp'")
    refused(tmp_path / "nothing", target, "EAGLE", "found neither at")


# ---- sizes and tensors -----------------------------------------------------------------------------------------------


def test_head_of_another_target(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path) -> None:
    one = drafts.write(tmp_path / "one", drafts.eagle_weights())
    three = drafts.write(tmp_path / "three", drafts.eagle3_weights())
    wider = drafts.make_target(torch.float32, hidden=48)
    refused(one, wider, "EAGLE", "hidden_size", "expected 48, found 32", str(one))
    refused(three, wider, "EAGLE3", "hidden_size", "expected 48, found 32")
    larger = drafts.make_target(torch.float32, vocab=60)
    refused(one, larger, "EAGLE", "vocab_size: expected 60, found 50")
    refused(three, larger, "EAGLE3", "vocab_size: expected 60, found 50")


REQUIRED = ("fc.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight", "norm.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        *((name, None, f"missing from the checkpoint: {name}") for name in REQUIRED),
        ("d2t and t2d", None, "missing from the checkpoint: d2t"),
        ("midlayer.self_attn.k_proj.weight", (16, 32), "expected shape [16, 64], found [16, 32]"),
        ("fc.weight", (32, 95), "multiple of the target's hidden size 32 as columns, found 95"),
        ("fc.weight", (32, 64), "columns for 2 hidden states"),
        ("lm_head.weight", (21, 32), "expected shape [20, 32], found [21, 32]"),
        ("d2t", (19,), "d2t: expected shape [20], found [19]"), ("t2d", (51,), "t2d: expected shape [50], found [51]"),
        ("layers.0.mlp.down_proj.weight", (32, 41), "expected shape [32, 40], found [32, 41]"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_misshapen(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, name: str, shape: tuple[int, ...] | None,
    expected: str,
) -> None:  # fmt: skip
    """shape: None of one that is missing."""
    kind = "EAGLE" if name.startswith("layers.") else "EAGLE3"
    weights = drafts.eagle_weights() if kind == "EAGLE" else drafts.eagle3_weights()
    for part in name.split(" and "):
        weights[part] = torch.zeros(shape or (), dtype=weights[part].dtype)
        if shape is None:
            del weights[part]
    refused(drafts.write(tmp_path, weights, draft_vocab_size=20), target, kind, name.partition(" ")[0], expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fc_norm": True}, "missing from the checkpoint: fc_norm.0.weight"),
        ({"norm_before_fc": True}, "missing from the checkpoint: input_norm.weight"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states: expected 3, found 4"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_scaling.rope_type = 'ntk'"),
    ],
)
def test_what_the_config_says_and_is_not_so(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    refused(drafts.write(tmp_path, drafts.eagle3_weights(), **changes), target, "EAGLE3", expected)


def test_a_head_of_another_width_has_an_embedding(drafts: SimpleNamespace, tmp_path: Path) -> None:
    folder = drafts.write(tmp_path, drafts.eagle3_weights(aux_size=48), target_hidden_size=48)
    refused(folder, drafts.make_target(torch.float32, hidden=48), "EAGLE3", "missing", "embed_tokens.weight")


def test_vocabulary_maps(drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path) -> None:
    weights, ids = drafts.eagle3_weights(), drafts.kept_ids(20)
    only_mask = {name: tensor for name, tensor in weights.items() if name != "d2t"}
    assert torch.equal(load(drafts.write(tmp_path / "mask", only_mask), target).target_ids, ids)
    only_offsets = {name: tensor for name, tensor in weights.items() if name != "t2d"}
    assert torch.equal(load(drafts.write(tmp_path / "offsets", only_offsets), target).target_ids, ids)
    twice = ids.clone()
    twice[1] = twice[0]
    for name, wrong in (("outside", ids + 31), ("twice", twice)):
        folder = drafts.write(tmp_path / name, {**only_offsets, "d2t": wrong - torch.arange(20)})
        refused(folder, target, "EAGLE3", "d2t: expected offsets to 20 different ids below 50")
    full = drafts.eagle3_weights(draft_vocab=50) | drafts.vocab_maps(torch.arange(50))
    assert load(drafts.write(tmp_path / "full", full), target).target_ids is None


# ---- aux layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "layers", "convention", "aux_layers"),
    [
        (None, 32, "auto", (2, 16, 29)),
        (None, 32, "output", (2, 16, 29)),  # the default is no list of a config
        ([], 32, "auto", (2, 16, 29)),
        ([1, 11, 21], 24, "auto", (2, 12, 22)),  # outputs: first id 1
        ([24, 30, 36], 36, "auto", (24, 30, 36)),  # boundaries: last id is the number of layers
        ([1, 18, 36], 36, "auto", (1, 18, 36)),  # the last id decides before the first
        ([2, 18, 33], 36, "auto", (2, 18, 33)),  # boundaries: first id 2
        ([3, 18, 33], 36, "auto", (4, 19, 34)),
        ([1, 11, 21], 24, "boundary", (1, 11, 21)),
        ([2, 18, 33], 36, "output", (3, 19, 34)),
    ],
)
def test_aux_layer_ids(ids: list[int] | None, layers: int, convention: Any, aux_layers: tuple[int, ...]) -> None:
    assert resolve_aux_layers({"eagle_aux_hidden_state_layer_ids": ids}, 3, layers, convention) == aux_layers


@pytest.mark.parametrize(
    ("raw", "aux_layers"),
    [
        ({"target_layer_ids": [2, 9, 17]}, (3, 10, 18)),  # DeepSpec's, which are outputs whatever they look like
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [4, 20, 33]}, (4, 20, 33)),
        # converted from another's
        (
            {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 23, 34]},
            (2, 24, 35),
        ),  # converted
    ],
)
def test_aux_layer_ids_by_who_wrote_them(raw: dict[str, Any], aux_layers: tuple[int, ...]) -> None:
    assert resolve_aux_layers(raw, 3, 36, "auto") == aux_layers


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_aux_layer_ids_reach_the_target(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    changes = ids if place == "top" else {"eagle_config": {**ids, "use_aux_hidden_state": True}}
    folder = drafts.write(tmp_path, drafts.eagle3_weights(), **changes)
    with caplog.at_level(logging.INFO):
        assert load(folder, target).aux_layers == (2, 4, 7)
    assert "[1, 3, 6] are taken as layers whose output is meant" in caplog.text
    assert load(folder, target, aux_layer_ids="boundary").aux_layers == (1, 3, 6)


def test_aux_layer_ids_refused() -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    for raw, count, convention, expected in (
        ({key: [1, 2]}, 3, "auto", "columns for 3 hidden states"),
        ({key: [1, 4, 9]}, 3, "auto", "expected 0 to 7"),
        ({key: [1, 4, 8]}, 3, "output", "expected 0 to 7"),  # would be the stream after the final norm
        ({key: [-1, 4, 7]}, 3, "boundary", "expected 0 to 8"),
        ({key: "1,2,3"}, 3, "auto", "list of integers"),
        ({}, 4, "auto", "columns for 4"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            resolve_aux_layers(raw, count, 8, convention)  # type: ignore[arg-type]


# ---- forms of EAGLE-3 ------------------------------------------------------------------------------------------------

Form = tuple[dict[str, Any], dict[str, tuple[int, ...] | None], str]
_LATENT = {"q_a_proj": (24, 64), "q_b_proj": (64, 24), "kv_a_proj_with_mqa": (24, 64), "kv_b_proj": (64, 16)}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", *["full_attention"] * 7]}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
FORMS: dict[str, Form] = {  # keys of a config, tensors beside the plain ones or (None) missing, what a refusal names
    "the last state alone": ({"eagle_config": {"use_aux_hidden_state": False}}, {"fc.weight": None}, ""),
    "the last state and fc": ({"use_aux_hidden_state": False}, {}, "use_aux_hidden_state = false"),
    "layer types of the target": ({"layer_types": ["full_attention"] * 8}, {}, ""),
    "a window": (_SLIDING, {}, ""),
    "a window without a length": ({"layer_types": ["sliding_attention"]}, {}, "sliding_window"),
    "no layer type that is known": ({"layer_types": ["linear_attention"]}, {}, "layer_types"),
    "a switched window": ({"use_sliding_window": True, "sliding_window": 8}, {}, "use_sliding_window"),
    "mrope of a model that sees": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, {}, ""),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}}, {}, "",
    ),
    "fewer dimensions are turned": ({"partial_rotary_factor": 0.5}, {}, ""),
    "pairs that are turned by nothing": (
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}, {}, "",
    ),
    "longrope": (
        {
            "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0],
                "original_max_position_embeddings": 64,
            },
        },
        {}, "",
    ),
    "a switch of windows that types of layers overrule": (_SLIDING | {"use_sliding_window": True}, {}, ""),
    "norms of heads that the target alone has": ({"use_qk_norm": True}, {}, ""),
    "latent attention": (
        {"model_type": "kimi_k2", "q_lora_rank": 24, "kv_lora_rank": 16},
        {f"midlayer.self_attn.{name}.weight": shape for name, shape in _LATENT.items()}, "q_lora_rank",
    ),
    "experts": ({"num_experts": 4}, {"midlayer.mlp.gate.weight": (4, 32)}, "midlayer.mlp.gate.weight"),
    "experts that the target alone has": (_EXPERTS, {}, ""),
    "experts that Mixtral alone has": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {}, ""),
    "experts that DeepSeek alone has": ({"n_routed_experts": 256, "first_k_dense_replace": 3}, {}, ""),
    "experts that the config hides": ({}, {"midlayer.mlp.experts.0.up_proj.weight": (40, 32)}, "mlp.experts.0.up_proj"),
    "heads for later tokens": ({}, {"parallel_draft_heads.medusa_heads.0.0.linear.weight": (32, 32)}, "medusa_heads"),
    "drafting in parallel": ({"pard_token": 3}, {"mask_hidden": (1, 1, 96)}, ""),
    "drafting in parallel, with no token": ({}, {"mask_hidden": (1, 1, 96)}, "pard_token or ptd_token_id"),
    "drafting in parallel, a mask of another size": ({"ptd_token_id": 3}, {"mask_hidden": (1, 95)}, "mask_hidden"),
    "no norm of embeddings": ({}, {"midlayer.input_layernorm.weight": None}, "midlayer.input_layernorm"),
    "no last norm": ({}, {"norm.weight": None}, "norm.weight"),
    "a norm of its own": ({}, {"output_norm.weight": (32,)}, "output_norm"),
    "a norm after attention": ({}, {"midlayer.post_feedforward_layernorm.weight": (32,)}, "post_feedforward_layernorm"),
    "sinks": ({}, {"midlayer.self_attn.sinks": (4,)}, "sinks"),
    "layers by another name": ({}, {"additional_layers.0.self_attn.q_proj.weight": (32, 32)}, "additional_layers"),
    "scales of a cache": ({}, {"midlayer.self_attn.k_scale": (1,)}, ""),
    "copies of the target's": ({}, {"verifier_norm.weight": (32,), "verifier_lm_head.weight": (50, 32)}, ""),
    "another activation": ({"hidden_act": "gelu_pytorch_tanh"}, {}, "hidden_act"),
    "scaled embeddings": ({"embedding_multiplier": 12.0}, {}, "embedding_multiplier"),
    "scaled logits": ({"logit_scale": 0.5}, {}, "logit_scale"),
    "capped logits": ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_eagle3_is_served_or_refused_by_name(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, name: str
) -> None:
    keys, tensors, named = FORMS[name]
    weights: dict[str, Tensor] = dict(drafts.eagle3_weights())
    for tensor, shape in tensors.items():
        if shape is None:
            del weights[tensor]
        else:
            weights[tensor] = torch.ones(shape)
    folder = drafts.write(tmp_path / "a", weights, **keys)
    if named:
        refused(folder, target, "EAGLE3", named)
        return
    head = load(folder, target)
    again = load(save_head(head, tmp_path / "b"), target)
    assert again.eagle == head.eagle and again.config.layers == head.config.layers
    assert again.config.ropes == head.config.ropes
    assert stored(again).keys() == stored(head).keys()


@pytest.mark.parametrize(
    ("keys", "masks"),
    [
        ({"mask_token_id": 5}, True), ({"eagle_config": {"pard_token": 5}}, True), ({"ptd_token_id": 5}, True),
        ({"pard_token": 5}, False), ({}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pickled", [False, True])
def test_a_head_has_the_tree_of_one_pass_when_it_drafts_in_one(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, keys: Any, masks: bool, pickled: bool
) -> None:
    """Whatever its config says of masks. Dummy weights are made by the config alone."""
    weights = drafts.eagle3_weights() | ({"model.mask_hidden": torch.ones(1, 1, 96)} if masks else {})
    folder = drafts.write(tmp_path, weights, pickled, **keys)

    def tree(dummy: bool = False) -> TreeShape | None:
        return tree_of(folder, "cpu", BLOCK, True, dummy)

    assert (load(folder, target).eagle.mask is not None) == masks
    assert tree() == (TreeShape(7, 4, 16) if masks else None)
    assert (load(folder, target, dummy=True).eagle.mask is not None) == (tree(dummy=True) is not None) == bool(keys)


@pytest.mark.parametrize("known", [16, 64, ...])
def test_a_head_sees_no_further_than_the_positions_that_it_knows(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, known: Any
) -> None:
    """The target has 64. What a config does not say is not known."""
    caplog.set_level(logging.INFO)
    for name, weights in (("EAGLE", drafts.eagle_weights()), ("EAGLE3", drafts.eagle3_weights())):
        folder = drafts.write(tmp_path / name, weights, max_position_embeddings=known)
        found = [layer.mixer.window for layer in load(folder, target, name).config.layers]
        assert found == [16 if known == 16 else 0]
    wide = {"sliding_window": 40, "layer_types": ["sliding_attention"], "max_position_embeddings": known}
    head = load(drafts.write(tmp_path / "wide", drafts.eagle3_weights(), **wide), target)
    assert [layer.mixer.window for layer in head.config.layers] == [16 if known == 16 else 40]
    said = "knows 16 positions, and is used up to 64: its own attention sees the last 16"
    assert (said in caplog.text) == (known == 16)


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_shared_tensors_are_the_targets_and_others_are_reported(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"embed_tokens.weight": torch.full((50, 32), 9.0), "lm_head.weight": torch.full((50, 32), 9.0)}
    weights = {**drafts.eagle_weights(), **extra, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    with caplog.at_level(logging.INFO):
        head = load(drafts.write(tmp_path, {**weights, "extra.weight": torch.ones(1)}), target, "EAGLE")
    assert "embed_tokens.weight of the draft model is not read" in caplog.text
    assert "lm_head.weight of the draft model is not read" in caplog.text
    assert "not used: extra.weight" in caplog.text and "inv_freq" not in caplog.text
    x = torch.randn(2, 32)
    assert torch.equal(head.logits(x), target.logits(x))


def test_token_map_is_ignored_by_eagle3(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = drafts.write(tmp_path, drafts.eagle3_weights())
    head = load(folder, target, token_ids=torch.tensor([1, 2]))
    assert "token map is ignored" in caplog.text
    assert head.vocab == 20 and torch.equal(head.target_ids, drafts.kept_ids(20))


@pytest.mark.further(kind="eagle", name=["fp8 block", "compressed int4 zeros"])
@pytest.mark.further(kind="eagle3", name="gptq")
@pytest.mark.parametrize("name", ["fp8 block", "compressed int4 zeros", "gptq"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_quantised_heads_are_dequantised(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, kind: str, name: str
) -> None:
    weights = drafts.eagle_weights() if kind == "eagle" else drafts.eagle3_weights()
    quantised, wide = (drafts.write(tmp_path / part, weights) for part in ("quantised", "wide"))
    config, write = tiny.FORMATS[name]
    exact = tiny.quantise(quantised, config, lambda _: write)
    save_file(exact, wide / "model.safetensors")
    found, expected = (stored(load(folder, target, kind.upper())) for folder in (quantised, wide))
    assert found.keys() == expected.keys()
    for each in found:
        torch.testing.assert_close(found[each], expected[each], rtol=1e-6, atol=1e-7)
    (quantised / "config.json").write_text((wide / "config.json").read_text())
    refused(quantised, target, kind.upper(), "draft model", "quantization_config")


# ---- writing back ----------------------------------------------------------------------------------------------------


def stored(head: Any) -> dict[str, Tensor]:
    return dict(head.stored_tensors())


@pytest.mark.parametrize("case", ["eagle", "eagle bias", "eagle two layers", "official", "layers.0", "two layers"])
def test_stored_names_are_the_published_ones(
    drafts: SimpleNamespace, target: DecoderModel, tmp_path: Path, case: str
) -> None:
    algorithm = "EAGLE" if case.startswith("eagle") else "EAGLE3"
    if algorithm == "EAGLE":
        weights = drafts.eagle_weights("bias" in case, 2 if "two" in case else 1, qkv_bias="bias" in case)
    else:
        weights = drafts.eagle3_weights("midlayer" if case == "official" else "layers.0")
    if case == "two layers":
        weights.layer("layers.1")
        weights.norm("layers.1.hidden_norm.weight")
    expected = {name.replace("layers.0", "midlayer") if case == "layers.0" else name: t for name, t in weights.items()}
    found = stored(load(drafts.write(tmp_path / "a", weights), target, algorithm))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    again = drafts.write(tmp_path / "b", {name: tensor.clone() for name, tensor in found.items()})
    assert all(torch.equal(tensor, found[name]) for name, tensor in stored(load(again, target, algorithm)).items())


@pytest.mark.parametrize("norms", ["input_norm", "fc_norm", "both"])
def test_stored_norms_and_embedding(drafts: SimpleNamespace, tmp_path: Path, norms: str) -> None:
    weights = drafts.eagle3_weights(aux_size=48)
    weights.matrix("embed_tokens.weight", 50, 32)
    if norms != "fc_norm":
        weights.norm("input_norm.weight", 144)
    for i in range(3) if norms != "input_norm" else ():
        weights.norm(f"fc_norm.{i}.weight", 48)
    if norms == "both":
        wide = drafts.make_target(torch.float32, hidden=48)
        refused(drafts.write(tmp_path, weights, target_hidden_size=48), wide, "EAGLE3", "not supported", "order")
        return
    wider = drafts.make_target(torch.float32, hidden=48)
    found = stored(load(drafts.write(tmp_path, weights, target_hidden_size=48), wider))
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
