"""A trained head as a folder: published names, shapes, dtypes and config keys, and the same logits in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.block_heads import dflash2_head, dflash_head, domino_head
from reference.checkpoints import Checkpoint, eagle2_head, eagle3_head, llama_target, qwen2_target
from reference.learnable import ENGINE, VOCAB, drafting, write_target
from safetensors import safe_open

from draftwing import LLM, ConfigError
from draftwing.config.trees import carried_window
from draftwing.engine.devices import pick_device
from draftwing.layers.rope import RopeConfig
from draftwing.models.fields import Fields
from draftwing.models.heads.config import BlockConfig, resolve_aux_layers
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.loader import load_model
from draftwing.models.positions import rotary_dims
from draftwing.train import blocks
from draftwing.train.capture import FeatureModel
from draftwing.train.checkpoint import _rope_scaling, aux_layer_ids, save_head
from draftwing.train.heads import (
    load_head,
    load_target_ends,
    new_block_head,
    new_eagle3_head,
    new_eagle_head,
    new_head,
    new_mtp_head,
)
from draftwing.train.ttt import unroll

HIDDEN, FFN, HEADS, KV, SIZE, V = 32, 48, 4, 2, 8, 64
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
KEPT = torch.tensor([1, 4, 5, 9, 20, 33, 40, 63])


def target_of(family: str, folder: Path, **changes: Any) -> Any:
    if family == "qwen3":
        changes |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": SIZE}
        plain = llama_target(0, num_hidden_layers=8, rope_theta=10000.0, rope_scaling=None, **changes)
        for i in range(8):
            for part in "qk":
                plain.tensors[f"model.layers.{i}.self_attn.{part}_norm.weight"] = torch.ones(SIZE)
    else:
        plain = (qwen2_target if family == "qwen2" else llama_target)(0, num_hidden_layers=8, **changes)
    return load_model(plain.write(folder / "target"), torch.float32, "cpu")


def stored(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """name -> dtype and shape, of all files"""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                part = content.get_slice(name)
                assert name not in found
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def layer(prefix: str, inputs: int, norms: tuple[str, ...], bias: bool = False) -> dict[str, list[int]]:
    table = {
        "self_attn.q_proj.weight": [HEADS * SIZE, inputs],
        "self_attn.k_proj.weight": [KV * SIZE, inputs],
        "self_attn.v_proj.weight": [KV * SIZE, inputs],
        "self_attn.o_proj.weight": [HIDDEN, HEADS * SIZE],
        "mlp.gate_proj.weight": [FFN, HIDDEN],
        "mlp.up_proj.weight": [FFN, HIDDEN],
        "mlp.down_proj.weight": [HIDDEN, FFN],
        **{f"{norm}.weight": [HIDDEN] for norm in norms},
    }
    if bias:
        table |= {f"self_attn.{p}_proj.bias": [n * SIZE] for p, n in (("q", HEADS), ("k", KV), ("v", KV))}
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def half(shapes: dict[str, list[int]]) -> dict[str, tuple[str, list[int]]]:
    return {name: ("BF16", shape) for name, shape in shapes.items()}


SIZES = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": SIZE, "num_hidden_layers": 1, "vocab_size": V, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bias": False, "attention_bias": False,
    "max_position_embeddings": 256,
}  # fmt: skip
THETA = {"llama": 500000.0, "qwen2": 1000000.0, "qwen3": 10000.0}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_eagle3_head_is_stored_as_published(family, tmp_path):
    head = new_eagle3_head(target_of(family, tmp_path), KEPT)
    folder = save_head(head, tmp_path / "head")
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes = {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN], "lm_head.weight": [len(KEPT), HIDDEN]}
    expected = half(shapes | layer("midlayer", 2 * HIDDEN, norms))
    assert stored(folder) == expected | {"d2t": ("I64", [len(KEPT)]), "t2d": ("BOOL", [V])}
    with safe_open(folder / "model.safetensors", "pt") as content:
        assert content.get_tensor("d2t").tolist() == [i - n for n, i in enumerate(KEPT.tolist())]
        assert content.get_tensor("t2d").nonzero().flatten().tolist() == KEPT.tolist()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == len(KEPT)
    assert SIZES.items() <= config.items()
    assert (config["rope_theta"], config["rope_scaling"]) == (THETA[family], None)  # llama3 scaling is not inherited
    assert "eagle_config" not in config  # default layers: every engine has the same
    loaded = load_draft_head(folder, head.target, "EAGLE3", torch.float32, "cpu")
    assert loaded.aux_layers == (2, 4, 5) and loaded.target_ids.tolist() == KEPT.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_eagle_head_is_stored_as_published(family, tmp_path):
    head = new_eagle_head(target_of(family, tmp_path), fc_bias=family == "llama")
    folder = save_head(head, tmp_path / "head")
    shapes = {"fc.weight": [HIDDEN, 2 * HIDDEN]} | ({"fc.bias": [HIDDEN]} if family == "llama" else {})
    expected = shapes | layer("layers.0", HIDDEN, ("post_attention_layernorm",), family == "qwen2")
    assert stored(folder) == half(expected)
    config = json.loads((folder / "config.json").read_text())
    assert {**SIZES, "bias": family == "llama"}.items() <= config.items()
    assert config.get("qkv_bias", False) == (family == "qwen2") and "draft_vocab_size" not in config
    assert {"LlamaForCausalLMEagle", "LlamaForCausalLM"} == set(config["architectures"])
    load_draft_head(folder, head.target, "EAGLE", torch.float32, "cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_mtp_layer_has_mimos_names(family, tmp_path):
    head = new_mtp_head(target_of(family, tmp_path))
    folder = save_head(head, tmp_path / "head")
    prefix = "model.mtp_layers.0"
    own = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    norms = ("input_layernorm", "post_attention_layernorm", *own)
    shapes = {f"{prefix}.input_proj.weight": [HIDDEN, 2 * HIDDEN]}
    assert stored(folder) == half(shapes | layer(prefix, HIDDEN, norms, family == "qwen2"))
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["num_hidden_layers"] == 8
    load_draft_head(folder, head.target, "NEXTN", torch.float32, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("markov", ["", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("kept", "tied"), [(None, False), (KEPT, False), (KEPT, True)])
def test_a_block_head_is_stored_as_published(markov, kept, tied, tmp_path):
    """z-lab's layout without a Markov head, DeepSpec's with one; what is loaded again is the same head. Rows of the
    target's lm_head are not stored."""
    target = target_of("llama", tmp_path)
    rank, confidence = (8, "markov") if markov else (0, "")
    block = BlockConfig((2, 4, 5), 6, 60, bool(markov), (), (), 0, markov, rank, confidence, tied)
    head = new_block_head(target, block, kept, layers=2, ffn_size=FFN)
    folder = save_head(head, tmp_path / "head")
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes = {"fc.weight": [HIDDEN, 3 * HIDDEN], "hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    for i in range(2):
        shapes |= layer(f"layers.{i}", HIDDEN, norms)
        shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": [SIZE] for part in "qk"}
    rows = V if kept is None else len(kept)
    if markov:
        shapes |= {"markov_head.markov_w1.weight": [V, 8], "markov_head.markov_w2.weight": [rows, 8]}
        shapes |= {"confidence_head.proj.weight": [1, HIDDEN + 8], "confidence_head.proj.bias": [1]}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": [8, HIDDEN + 8], "markov_head.gate_proj.bias": [8]}
    if markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": [24, HIDDEN + 16], "markov_head.joint_proj.bias": [24]}
    expected = half(shapes | ({} if kept is None or tied else {"lm_head.weight": [rows, HIDDEN]}))
    maps = {} if kept is None else {"d2t": ("I64", [rows]), "t2d": ("BOOL", [V])}
    assert stored(folder) == expected | maps
    config = json.loads((folder / "config.json").read_text())
    inner = config if markov else config["dflash_config"]
    assert inner["target_layer_ids"] == [1, 3, 4] and inner["mask_token_id"] == 60 and config["block_size"] == 6
    assert config["architectures"] == ["Qwen3DSparkModel" if markov else "DFlashDraftModel"]
    loaded = load_head(folder, target, "DSPARK" if markov else "DFLASH")
    assert loaded.config_of_block == head.config_of_block and loaded.config.layers[0].ffn == FFN
    assert loaded.target_ids is None if kept is None else torch.equal(loaded.target_ids, kept)
    for a, b in zip(loaded.parameters(), head.parameters(), strict=True):
        frozen = a is getattr(loaded.head_rows, "weight", None)
        assert torch.equal(a, b if frozen else b.bfloat16().float()) and a.requires_grad != frozen
    if tied:
        assert torch.equal(loaded.readout(torch.zeros(1, HIDDEN))[1], target.lm_head.dense_weight()[kept])


@pytest.mark.parametrize("changes", [SLIDING, {**SLIDING, "is_causal": False}, {"dflash_config": {"causal": True}}])
def test_windows_and_causal_layers_of_a_block_head_that_is_trained_on(changes, tmp_path):
    plain = llama_target(4, num_hidden_layers=5, vocab_size=12)
    target = load_model(plain.write(tmp_path / "target"), torch.float32, "cpu")
    head = load_head(dflash_head(plain, **changes).write(tmp_path / "published"), target, "DFLASH")
    again = load_head(save_head(head, tmp_path / "again", torch.float32), target, "DFLASH")
    assert again.config_of_block == head.config_of_block
    assert any(head.config_of_block.windows) or all(head.config_of_block.causal)


@pytest.mark.parametrize(("longest", "seen"), [(20, 20), (0, 0), (10**6, 0)])
def test_a_block_head_is_served_with_the_positions_that_it_learnt(longest, seen, tmp_path):
    """And trained on without a window."""
    target = target_of("llama", tmp_path)
    head = new_block_head(target, BlockConfig((2, 4), 4, 60, False, (), ()), layers=2, ffn_size=FFN, longest=longest)
    folder = save_head(head, tmp_path / "head")
    assert head.config_of_block.windows == (0, 0)
    served = load_draft_head(folder, target, "DFLASH", torch.float32, "cpu")
    assert served.config_of_block.windows == (seen, seen)
    again = load_head(folder, target, "DFLASH", longest=30)
    assert again.config_of_block.windows == (0, 0)
    assert again.config.max_positions == (max(longest, 30) if seen else target.config.max_positions)


def test_weights_are_split_into_files_of_a_given_size(tmp_path):
    head = new_eagle3_head(target_of("llama", tmp_path), KEPT)
    one, many = save_head(head, tmp_path / "one"), save_head(head, tmp_path / "many", max_file_bytes=8000)
    assert [file.name for file in one.iterdir() if "model" in file.name] == ["model.safetensors"]
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size <= 8000 for file in files)
    assert stored(many) == stored(one)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(many)) and set(index["weight_map"].values()) == {
        file.name for file in files
    }
    with safe_open(files[0], "pt") as content:
        assert all(index["weight_map"][name] == files[0].name for name in content.keys())  # noqa: SIM118
    loaded = [load_draft_head(folder, head.target, "EAGLE3", torch.bfloat16, "cpu") for folder in (one, many)]
    for a, b in zip(*(head.parameters() for head in loaded), strict=True):
        assert torch.equal(a, b)
    # a smaller head in the place of a larger one leaves nothing of it
    save_head(head, many, extra={"note": 1})
    assert sorted(file.name for file in many.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((many / "config.json").read_text())["note"] == 1
    with pytest.raises(ConfigError, match=r"fc\.weight has 6144 bytes"):
        save_head(head, tmp_path / "none", max_file_bytes=6000)
    assert not (tmp_path / "none").exists()


def test_the_share_of_each_head_that_is_turned_is_read_back():
    for size in (8, 46, 98, 128):
        for dims in range(2, size, 2):
            said = {"rope_scaling": _rope_scaling(RopeConfig(dims=dims), size)}
            assert rotary_dims(Fields(said, "config"), size, 1.0) == dims


def test_layers_are_named_so_that_they_are_read_back():
    unnamed = 0
    for layers in (3, 8, 30):
        for first in range(layers + 1):
            for last in range(first + 1, layers + 1):
                try:
                    ids = aux_layer_ids((first, last), layers)
                except ConfigError:
                    unnamed += 1
                    assert first in (0, 3) and last < layers
                    continue
                raw = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
                assert resolve_aux_layers(raw, 2, layers, "auto") == (first, last)
    assert unnamed
    assert aux_layer_ids((2, 4, 5), 8) is None and aux_layer_ids((2, 4, 6), 8) == [1, 3, 5]
    with pytest.raises(ConfigError, match="0 to 8"):
        aux_layer_ids((2, 4, 9), 8)


def test_a_head_of_other_layers_and_width(tmp_path):
    target = target_of("llama", tmp_path)
    head = new_eagle3_head(target, None, aux_layers=(1, 6), ffn_size=20)
    loaded = load_draft_head(save_head(head, tmp_path / "h"), target, "EAGLE3", torch.float32, "cpu")
    assert loaded.aux_layers == (1, 6) and loaded.config.layers[0].ffn == 20 and loaded.target_ids is None
    assert not {"d2t", "t2d"} & set(stored(tmp_path / "h")) and loaded.vocab == V
    for longest, window in ((100, 100), (256, 0)):  # tokens of a text in training; the target has 256 positions
        head = new_head("eagle3", target, None, (1, 6), 20, 0, longest)
        short = load_draft_head(save_head(head, tmp_path / f"{longest}"), target, "EAGLE3", torch.float32, "cpu")
        assert short.config.layers[0].mixer.window == window
    for longest, window in ((180, 180), (50, 100)):  # it was trained on 100, and is trained on
        head = load_head(tmp_path / "100", target, "EAGLE3", longest)
        assert not head.config.layers[0].mixer.window, "it learns from texts that are longer than those that it knows"
        again = load_draft_head(save_head(head, tmp_path / f"{longest}"), target, "EAGLE3", torch.float32, "cpu")
        assert again.config.layers[0].mixer.window == window
    with pytest.raises(ConfigError, match="taken for others"):
        new_eagle3_head(target, None, aux_layers=(3, 4, 5))
    for ids in (torch.tensor([3, 3]), torch.tensor([5, 2]), torch.tensor([1, V])):
        with pytest.raises(ConfigError, match="ascending"):
            new_eagle3_head(target, ids)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_what_learnt_from_short_texts_sees_no_further(kind: str, tmp_path: Path) -> None:
    """The target has 256 positions. A head is trained on 100, then on 180, 50, and all of them."""
    target, algorithm = target_of("llama", tmp_path), {"eagle": "EAGLE", "mtp": "NEXTN"}[kind]
    save_head(new_head(kind, target, None, (), 0, 0, 100), tmp_path / "100")
    for longest, window in ((100, 100), (180, 180), (50, 100), (256, None)):
        again = save_head(load_head(tmp_path / "100", target, algorithm, longest), tmp_path / f"again {longest}")
        loaded = load_draft_head(again, target, algorithm, torch.float32, "cpu")
        seen = carried_window(again) if kind == "mtp" else loaded.config.layers[0].mixer.window or None
        assert seen == window


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 5}, 5),
        ({"max_position_embeddings": ...}, 0),  # nobody knows how many it knows
    ],
)
def test_a_head_that_is_trained_on_sees_as_far_as_before(
    kind: str, keys: dict[str, Any], window: int, tmp_path: Path
) -> None:
    plain = llama_target(0, num_hidden_layers=8, max_position_embeddings=4096)
    target = load_model(plain.write(tmp_path / "target"), torch.float32, "cpu")
    published = {"EAGLE": eagle2_head, "EAGLE3": eagle3_head}[kind](plain)
    config = published.config | {"max_position_embeddings": 4096} | keys
    said = {key: value for key, value in config.items() if value is not ...}
    folder = Checkpoint(published.tensors, said).write(tmp_path / "head")

    def reach() -> int:
        head = load_draft_head(folder, target, kind, torch.float32, "cpu")
        (layer,) = head.config.layers
        return layer.mixer.window

    assert reach() == window
    save_head(load_head(folder, target, kind, 100), folder)
    assert reach() == window


def test_the_ends_of_a_target_are_enough(tmp_path):
    whole = target_of("llama", tmp_path)
    ends = load_target_ends(tmp_path / "target", torch.float32, "cpu")
    assert torch.equal(ends.embed.weight, whole.embed.weight) and torch.equal(ends.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(ends.norm.weight, whole.norm.weight)
    assert all(p.is_meta for p in ends.layers[:-1].parameters())
    heads = [new_eagle3_head(target, KEPT, seed=3) for target in (whole, ends)]
    for a, b in zip(*(head.parameters() for head in heads), strict=True):
        assert torch.equal(a, b) and a.requires_grad
    # a fresh head says what the target would of the same state
    assert torch.equal(heads[0].lm_head.weight, whole.lm_head.weight[KEPT])
    assert torch.equal(heads[0].norm.weight, whole.norm.weight)
    assert not torch.equal(
        new_eagle3_head(whole, KEPT, seed=4).fusion.mixer.qkv.weight, heads[0].fusion.mixer.qkv.weight
    )


@pytest.fixture(scope="module")
def served_target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("served") / "target")


@pytest.mark.parametrize("make", [domino_head, dflash2_head])
def test_parts_of_a_block_head_that_is_trained_on(make, tmp_path):
    """Stored under the names and keys under which it was published."""
    target = llama_target(4, num_hidden_layers=5, vocab_size=12)
    served = load_model(target.write(tmp_path / "target"), torch.float32, "cpu")
    published = make(target, dflash_config={"output_multiplier": 0.5})
    found = load_draft_head(published.write(tmp_path / "head"), served, "DFLASH", torch.float32, "cpu")
    again = load_head(save_head(found, tmp_path / "again", torch.float32), served, "DFLASH")
    assert again.config_of_block == found.config_of_block
    assert {name: shape for name, (_, shape) in stored(tmp_path / "again").items()} == {
        name: list(value.shape) for name, value in published.tensors.items()
    }
    inner = json.loads((tmp_path / "again" / "config.json").read_text())["dflash_config"]
    assert inner.items() >= published.config["dflash_config"].items()
    for a, b in zip(again.parameters(), found.parameters(), strict=True):
        assert torch.equal(a, b)


PROMPT = [7, 130, 4, 99, 250]


def drafted(
    path: Path, head: Any, folder: Path, algorithm: str, depth: int, method: str
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The logits of the engine's first chain of drafts after a prompt, by a method of the drafter's head; the text with
    these drafts, [1, T], and its features in training. The head is stored in `folder`, as after training: norms and
    biases are not what they were at first."""
    with torch.no_grad():
        for i, param in enumerate(head.parameters()):
            if param.dim() == 1:
                param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(i)))
    save_head(head, folder, torch.float32)
    served: list[torch.Tensor] = []
    with LLM(str(path), **ENGINE, **drafting(algorithm, folder, depth)) as llm:
        own = llm.engine.parts.executor.drafter.head
        logits = getattr(own, method)

        def watched(*rest: Any, **newest: Any) -> Any:
            found = logits(*rest, **newest)
            served.append((found[0] if method == "given" else found).clone())
            return found

        setattr(own, method, watched)
        (answer,) = llm.generate(PROMPT, {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    drafts = [int(row.argmax()) for row in served[:depth]]
    if head.target_ids is not None:
        drafts = head.target_ids[drafts].tolist()
    ids = torch.tensor([[*PROMPT, answer.token_ids[0], *drafts]])
    features = FeatureModel(head.target, head.aux_layers, pick_device("cpu"))
    ((aux_hidden, _),) = features.batch([torch.tensor(PROMPT)])
    head.set_max_positions(64)
    missing = aux_hidden.new_zeros(ids.shape[1] - len(PROMPT), aux_hidden.shape[1])
    return served[:depth], ids, head.features(torch.cat((aux_hidden, missing)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("markov", "tied", "causal"),
    [
        ("", False, False), ("", False, True), ("vanilla", True, False), ("vanilla", False, True),
        ("rnn", False, False), ("domino", False, False),
    ],
)  # fmt: skip
def test_trainer_and_engine_have_the_same_logits_of_a_block(markov, tied, causal, served_target, tmp_path):
    """Of a chain: each draft's logits are those of training, where the text goes on as it was drafted."""
    target = load_model(served_target, torch.float32, "cpu")
    block = BlockConfig(
        (2, 4), 4 if markov else 5, 255, bool(markov), (), (causal,), 0, markov, 16 if markov else 0, tied=tied,
        memory=12 if markov == "domino" else 0,
    )  # fmt: skip
    head = new_block_head(target, block, torch.arange(0, VOCAB, 2), layers=2, seed=5)
    served, ids, features = drafted(served_target, head, tmp_path / "head", "DSPARK", 4, "given")
    assert ("lm_head.weight" in stored(tmp_path / "head")) != tied
    assert head.config_of_block.causal == (causal, causal)
    with torch.no_grad():
        hidden = blocks.unroll(head, ids, features, torch.tensor([[len(PROMPT)]]))
        state, weight = head.readout(hidden)
        expected = state @ weight.t()
        if markov:
            above = ids[:, len(PROMPT) : len(PROMPT) + 4]
            expected = expected + blocks.mixed(head, hidden, above) @ head.markov.out.weight.t()
    torch.testing.assert_close(torch.cat(served), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MTP"])
def test_trainer_and_engine_have_the_same_logits(algorithm, served_target, tmp_path):
    target, depth = load_model(served_target, torch.float32, "cpu"), 3
    if algorithm == "EAGLE3":
        head = new_eagle3_head(target, torch.arange(0, VOCAB, 2), seed=5)
    else:
        head = new_eagle_head(target, fc_bias=True, seed=5) if algorithm == "EAGLE" else new_mtp_head(target, seed=5)
    name = "NEXTN" if algorithm == "MTP" else algorithm
    served, ids, features = drafted(served_target, head, tmp_path / "head", name, depth, "logits")
    with torch.no_grad():
        for found, hidden in zip(served, unroll(head, ids, features, depth), strict=True):
            expected = head.logits(hidden[len(PROMPT) - 1 : len(PROMPT)])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again = load_head(tmp_path / "head", target, algorithm)  # a head that is trained further starts as it was saved
    for a, b in zip(again.parameters(), head.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad
