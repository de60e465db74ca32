"""Heads that draft blocks in GGUF files: what is loaded is what a folder with the same values has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from reference.block_heads import dflash2_head, dflash_head, dspark_head
from reference.checkpoints import Checkpoint, llama_target

from draftwing.config.options import Options
from draftwing.config.trees import BRANCHED_BLOCK, TreeShape
from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads import beside
from draftwing.models.heads.beside import with_found_drafter
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.loader import load_draft_head
from draftwing.models.heads.trees import tree_of
from draftwing.models.loader import load_model

TARGET = llama_target(4, num_hidden_layers=5, vocab_size=12)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
FACTORS = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
SCALED = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
OUTER = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip
WHOLE = {
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
}
BASES = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    if not name.startswith("layers."):
        return f"{OUTER[name.removesuffix('.weight')]}.weight"
    _, layer, part = name.split(".", 2)
    own = BASES.get(part) or f"{INNER[part.removesuffix('.weight')]}.weight"
    return f"blk.{layer}.{own}"


def write(
    path: Path, head: Checkpoint, edit: Callable[[gguf_package.GGUFWriter], Any] | None = None, arch: str = "dflash"
) -> Path:
    """As llama.cpp's converter has them: layers of the target are those whose input is read."""
    config = head.config | head.config.get("dflash_config", {})
    writer = gguf_package.GGUFWriter(path, arch)
    sizes = {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length":
        "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv":
        "num_key_value_heads", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
        "context_length": "max_position_embeddings", "block_size": "block_size", "conv_kernel_size":
        "conv_kernel_size", "conv_group_size": "conv_group_size", "selector_rank": "selector_rank",
        "selector_top_k": "selector_top_k",
    }  # fmt: skip
    for key, name in sizes.items():
        if name in config:
            writer.add_uint32(f"{arch}.{key}", config[name])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    writer.add_array(f"{arch}.target_layers", [one + 1 for one in config["target_layer_ids"]])
    writer.add_uint32("tokenizer.ggml.mask_token_id", config["mask_token_id"])
    writer.add_array("tokenizer.ggml.tokens", [str(one) for one in range(config["vocab_size"])])
    if "is_causal" in config:
        writer.add_bool(f"{arch}.attention.causal", config["is_causal"])
    for key, name in FACTORS.items():
        if name in config:
            writer.add_float32(f"{arch}.{key}", config[name])
    if "layer_types" in config:
        writer.add_uint32(f"{arch}.attention.sliding_window", config["sliding_window"])
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", kinds)
    if edit is not None:
        edit(writer)
    if "markov_rank" in config:
        writer.add_bool(f"{arch}.sample_from_anchor", config.get("sample_from_anchor", True))
        writer.add_bool(f"{arch}.has_confidence_head", "confidence_head.proj.weight" in head.tensors)
    own = "d2t" in head.tensors
    for name, value in head.tensors.items():
        if name == "d2t":  # ids in place of differences
            writer.add_tensor("d2t", (value + torch.arange(len(value))).numpy())
        elif name != "t2d" and (own or name != "lm_head.weight"):
            writer.add_tensor(gguf_name(name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_own_tokens(head: Checkpoint) -> Checkpoint:
    """A head that drafts some of the target's tokens."""
    ids = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11])
    own = {name: head.tensors[name][ids].clone() for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    kept = torch.zeros(12, dtype=torch.bool).index_fill_(0, ids, True)
    own |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    return Checkpoint(head.tensors | own, head.config | {"draft_vocab_size": len(ids)})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(TARGET.write(tmp_path_factory.mktemp("target")), torch.float32, "cpu")


def load(path: Path, target: DecoderModel) -> BlockHead:
    head = load_draft_head(path, target, "DFLASH2", torch.float32, "cpu")
    assert isinstance(head, BlockHead)
    return head


@pytest.mark.parametrize(
    "make",
    [
        lambda: dflash_head(TARGET, is_causal=False),
        lambda: dflash2_head(TARGET),
        lambda: dflash2_head(TARGET, dflash_config={"conv_kernel_size": 3}, **SLIDING),
        lambda: dflash_head(TARGET, **SLIDING),  # of which those with a window are causal
        lambda: dflash2_head(TARGET, dflash_config=SCALED),
        lambda: dspark_head(TARGET),
        lambda: dspark_head(TARGET, confidence=False, sample_from_anchor=False),
        lambda: with_own_tokens(dspark_head(TARGET)),
    ],
    ids=[
        "dflash",
        "dflash2",
        "three taps, windows",
        "nothing said of causality",
        "scaled",
        "dspark",
        "dspark, no anchor",
        "own tokens",
    ],
)
def test_it_is_the_head_of_a_folder(make: Callable[[], Checkpoint], target: DecoderModel, tmp_path: Path) -> None:
    head = make()
    found, expected = load(write(tmp_path / "head.gguf", head), target), load(head.write(tmp_path / "head"), target)
    assert found.config_of_block == expected.config_of_block and found.aux_layers == expected.aux_layers
    assert found.config.ropes == expected.config.ropes
    for own, layer in zip(found.config.layers, expected.config.layers, strict=True):
        assert replace(own, norm=layer.norm) == layer and own.norm.eps == pytest.approx(layer.norm.eps)
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(
    ("edit", "arch", "says"),
    [
        (None, "llama", "expected general.architecture 'dflash' of a head, found 'llama'"),
        (lambda w: w.add_float32("dflash.attention.scale", 0.3), "dflash", r"dflash.attention.scale' = 0.3\d* is not"),
        (lambda w: w.add_uint32("dflash.rope.dimension_count", 8), "dflash", "rope.dimension_count = 8 is not supp"),
        (
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy()), "dflash",
            "blk.0.attn_sinks.weight is no tensor of a head that drafts blocks",
        ),
        (
            lambda w: w.add_array("dflash.attention.sliding_window_pattern", [True]), "dflash",
            "sliding_window_pattern: expected one for each of 2 layers",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(edit: Any, arch: str, says: str, target: DecoderModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        load(write(tmp_path / "head.gguf", dflash2_head(TARGET), edit, arch), target)


@pytest.mark.parametrize(
    ("make", "rows", "tree"),
    [
        (dflash2_head, 6, TreeShape(5, 4, 16)),
        (dflash_head, 6, TreeShape(5, 1, 6)),
        (partial(dflash2_head, dflash_config={"block_size": 8}), 8, None),
        (dflash_head, 16, TreeShape(7, 1, 8)),
        (dspark_head, 5, TreeShape(5, 4, 16)),
    ],
)
def test_its_tree_fits_into_its_blocks(
    make: Callable[..., Checkpoint], rows: int, tree: TreeShape | None, tmp_path: Path
) -> None:
    """None: the drafter's own. A head without a selector is a chain."""
    head = write(tmp_path / "head.gguf", make(TARGET, block_size=rows))
    assert tree_of(head, "cpu", BRANCHED_BLOCK, True, False) == tree
    assert tree_of(tmp_path / "nothing.gguf", "cpu", BRANCHED_BLOCK, True, False) is None


@pytest.mark.parametrize(
    ("heads", "drafter", "file"),
    [
        ({"Little-3B-DFlash2-Q8_0": dflash2_head}, "DFLASH2", 0),
        ({"little-3b-dflash": dflash_head}, "DFLASH", 0),
        ({"Little-3B-DSpark": dspark_head, "Little-3B-DFlash": dflash_head}, "DSPARK", 0),
        ({"Little-3B-DFlash": dflash_head, "Little-DFlash2": dflash2_head}, "DFLASH2", 1),
        ({"Other-3B-DFlash2-Q8_0": dflash2_head, "Little-3B-Q8_0": dflash2_head}, "none", None),
    ],
    ids=["selector", "without", "Markov", "of both", "names of others"],
)
def test_one_next_to_the_models_file_drafts(
    heads: dict[str, Callable[[Checkpoint], Checkpoint]], drafter: str, file: int | None, target: DecoderModel,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = write(tmp_path / "Little-3B-Q4_K_M.gguf", dflash2_head(TARGET), arch="llama")  # its name alone counts
    files = [write(tmp_path / f"{name}.gguf", make(TARGET)) for name, make in heads.items()]

    def found(**given: Any) -> tuple[str, str | None]:
        options = with_found_drafter(Options(model=str(model), **given).resolve(), model, target.config)
        return options.drafter, options.speculative_draft_model_path

    assert found() == (drafter, None if file is None else str(files[file]))
    assert found(speculative_algorithm="none") == ("none", None)
    assert found(speculative_algorithm="NGRAM") == ("NGRAM", None)


def test_one_of_other_sizes_does_not_draft_and_the_log_says_why(
    target: DecoderModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(tmp_path / "m-Q8_0.gguf", dflash2_head(TARGET), arch="llama")
    other = llama_target(4, num_hidden_layers=5, vocab_size=12, hidden_size=64)
    write(tmp_path / "m-DFlash2.gguf", dflash2_head(other))
    with caplog.at_level(logging.WARNING):
        options = with_found_drafter(Options(model=str(model)).resolve(), model, target.config)
    assert (
        options.drafter == "none" and "m-DFlash2.gguf does not draft: " in caplog.text and "hidden_size" in caplog.text
    )


def test_one_that_may_not_be_read_does_not_draft_and_ends_no_start(
    target: DecoderModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(tmp_path / "m-Q8_0.gguf", dflash2_head(TARGET), arch="llama")
    (tmp_path / "m-DFlash2.gguf").touch()

    def refused(path: Path) -> GGUFFile:
        raise PermissionError(13, "Permission denied", str(path))  # which root is not

    monkeypatch.setattr(beside, "open_gguf", refused)
    with caplog.at_level(logging.WARNING):
        options = with_found_drafter(Options(model=str(model)).resolve(), model, target.config)
    assert options.drafter == "none" and "m-DFlash2.gguf does not draft: " in caplog.text
