"""Configs that draft heads were published with, and small random checkpoints of them.

`tests/models/heads/published.json` has the configs as they are. Of the sizes of layers only relations are kept; target
layers are as many as the target has, for ids of layers mean something by their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference.block_heads import dflash2_parts
from reference.checkpoints import Checkpoint, Maker, draft_vocabulary, llama_target
from reference.draft_heads import flat_config
from torch import Tensor

FILE = Path(__file__).parents[1] / "models" / "heads" / "published.json"
VOCAB, DRAFT_VOCAB, HIDDEN, HEAD_DIM, READ = 24, 10, 32, 16, 3


class Row(NamedTuple):
    """What is known of a head.

    kind: which head it is.  of: the target.  source: where its keys are from.  layers: of the target.  config: its
    config.json.  parts: what its file has or lacks beside what all of its kind have.  streams: residual streams of the
    target that it was trained on, after so many layers; (): those that its trainer takes where a config names none.
    causal: of each layer of a block head, whether rows see none after them, (): none.  anchor: whether its first row
    predicts.  refused: a part of the sentence for it, "": it is served.
    """

    name: str
    kind: str
    of: str
    source: str
    layers: int
    config: dict[str, Any]
    parts: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()
    anchor: bool = False
    refused: str = ""


@cache
def rows() -> dict[str, Row]:
    table = json.loads(FILE.read_text(encoding="utf8"))
    return {name: Row(name, source=about.pop("from"), **about) for name, about in table.items()}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with sizes of a few tokens and channels. What is equal stays so, and groups of heads stay groups."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    sizes = {
        "hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "intermediate_size": 40, "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB if config.get("draft_vocab_size") == config.get("vocab_size", -1) else DRAFT_VOCAB,
        "truncated_vocab_size": VOCAB, "num_attention_heads": 4, "head_dim": HEAD_DIM, "sliding_window": 4,
        "swa_window_size": 4, "markov_rank": 8, "emb_dim": 8, "gru_hidden_dim": 10,
        "mask_token_id": 5, "ptd_token_id": 5, "pard_token": 5,
        "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5, "original_max_position_embeddings": 1024,
        "num_key_value_heads": 4 if kv_heads == heads else 1 if kv_heads == 1 else 2,
    }  # fmt: skip
    return {
        key: small(value) if isinstance(value, dict) else sizes[key] if key in sizes and value is not None else value
        for key, value in config.items()
    }


def written(row: Row) -> tuple[Checkpoint, Checkpoint]:
    """The target and the head, in little."""
    config = small(row.config)
    flat = flat_config(config)
    width = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": row.layers}
    target = llama_target(3, rope_scaling=None, **width)
    make = Maker(17)
    if row.kind in ("eagle", "eagle3"):
        tensors = _eagle(make, flat.get("model") or flat, row)
    elif row.kind in ("medusa", "hydra", "mlp", "mtp"):
        tensors = _others(make, row)
    else:
        tensors = _block(make, flat | flat.get("dflash_config", {}), row)
    if "own embedding" in row.parts:
        tensors["embed_tokens.weight"] = make.matrix(VOCAB, HIDDEN, HIDDEN**0.5)
    if "embedding" in row.parts:
        tensors["embed_tokens.weight"] = make.matrix(VOCAB, HIDDEN)  # of random values, which nobody may use
    return target, Checkpoint(tensors, config)


def _vocabulary(make: Maker, draft_vocab: int | None) -> dict[str, Tensor]:
    rows = draft_vocab or VOCAB
    tensors = {"lm_head.weight": make.matrix(rows, HIDDEN, 3.0)}
    if rows != VOCAB:
        tensors |= dict(zip(("d2t", "t2d"), draft_vocabulary(VOCAB, rows, 1), strict=True))
    return tensors


def _eagle(make: Maker, flat: dict[str, Any], row: Row) -> dict[str, Tensor]:
    eagle3, parts = row.kind == "eagle3", row.parts
    aux = len(row.streams) or READ
    first = "layers.0" if not eagle3 or "layers.0" in parts else "midlayer"
    norms = ["post_attention_layernorm", *(("hidden_norm", "input_layernorm") if eagle3 else ())]
    tensors = make.layer(first, flat, 2 * HIDDEN if eagle3 else None, "biases" in parts, norms=tuple(norms))
    if "biases" in parts:
        tensors[f"{first}.self_attn.o_proj.bias"] = make.vector(HIDDEN)
    later = "input_layernorm" if "input_layernorm" in parts else "hidden_norm"
    # Some copy the number of layers from the target's config.
    for i in range(1, flat["num_hidden_layers"] if flat["num_hidden_layers"] < row.layers else 1):
        tensors |= make.layer(f"layers.{i}", flat, norms=(later, "post_attention_layernorm"))
    if "head norms" in parts:
        for name in [name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")]:
            tensors |= {f"{name}{part}_norm.weight": make.norm(HEAD_DIM) for part in "qk"}
    if "no fc" not in parts:
        tensors["fc.weight"] = make.matrix(HIDDEN, (aux if eagle3 else 2) * HIDDEN, 1.4)
    if "fc bias" in parts:
        tensors["fc.bias"] = make.vector(HIDDEN)
    if eagle3:
        tensors |= {"norm.weight": make.norm(HIDDEN), **_vocabulary(make, flat.get("draft_vocab_size"))}
        tensors |= {f"fc_norm.{i}.weight": make.norm(HIDDEN) for i in range(aux) if flat.get("fc_norm")}
        if flat.get("norm_before_fc"):
            tensors["input_norm.weight"] = make.norm(aux * HIDDEN)
    if "latent" in parts:
        for part in "qkv":
            del tensors[f"{first}.self_attn.{part}_proj.weight"]
        for name, shape in {"q_a_proj": (8, 64), "q_b_proj": (64, 8), "kv_a_proj_with_mqa": (8, 64)}.items():
            tensors[f"{first}.self_attn.{name}.weight"] = make.matrix(*shape)
    more = {
        "mask_hidden": {"mask_hidden": make.matrix(1, aux * HIDDEN)[None]},
        "aux_norm": {f"aux_norm_{part}.weight": make.norm(HIDDEN) for part in ("low", "mid", "high")},
        "parallel heads": {"parallel_draft_heads.0.medusa_layers.0.linear.weight": make.matrix(HIDDEN, HIDDEN)},
        "gemma": {f"{first}.layer_scalar": torch.ones(1), f"{first}.pre_feedforward_layernorm.weight": make.norm(32)},
    }
    for part in parts:
        tensors |= more.get(part, {})
    return tensors


def _block(make: Maker, flat: dict[str, Any], row: Row) -> dict[str, Tensor]:
    read = len(flat.get("target_layer_ids") or flat["aux_hidden_state_layer_ids"])
    tensors = {"fc.weight": make.matrix(HIDDEN, read * HIDDEN, 1.4)}
    tensors |= {"hidden_norm.weight": make.norm(HIDDEN), "norm.weight": make.norm(HIDDEN)}
    for i in range(flat["num_hidden_layers"]):
        tensors |= make.layer(f"layers.{i}", flat)
        tensors |= {f"layers.{i}.self_attn.{part}_norm.weight": make.norm(HEAD_DIM) for part in "qk"}
    vocab = flat.get("draft_vocab_size") or VOCAB
    if "draft_vocab_size" in flat:
        tensors |= _vocabulary(make, vocab)
    if row.kind == "dflash2":
        tensors |= dflash2_parts(flat, 18, flat)
    if row.kind == "domino":
        tensors["prefix_gru.weight_ih_l0"] = make.matrix(30, HIDDEN, 8.0)
        tensors["prefix_gru.weight_hh_l0"] = make.matrix(30, 10)
        tensors["embed_proj.0.weight"] = make.matrix(8, HIDDEN + 10)
        tensors["embed_proj.2.weight"] = make.matrix(vocab, 8)
    if row.kind == "dspark":
        rank = flat["markov_rank"]
        tensors |= {f"markov_head.markov_w{i}.weight": make.matrix(size, rank) for i, size in ((1, VOCAB), (2, vocab))}
        tensors |= {"confidence_head.proj.weight": make.matrix(1, HIDDEN + rank)}
        tensors |= {"confidence_head.proj.bias": make.vector(1)}
        if flat["markov_head_type"] == "gated":
            tensors |= {"markov_head.gate_proj.weight": make.matrix(rank, HIDDEN + rank)}
            tensors |= {"markov_head.gate_proj.bias": make.vector(rank)}
    if "lilicorr" in row.parts:
        tensors["lilicorr.token_proj.weight"] = make.matrix(8, HIDDEN)
    if "dflare" in row.parts:
        del tensors["fc.weight"]
        tensors["layer_fusion_weights"] = make.matrix(flat["num_hidden_layers"], read)
    return tensors


def _others(make: Maker, row: Row) -> dict[str, Tensor]:
    matrix, lm_head = make.matrix(HIDDEN, HIDDEN), make.matrix(VOCAB, HIDDEN)
    if row.kind == "medusa" and "blocks" in row.parts:
        return {"blocks.0.layers.0.weight": matrix, "lm_heads.0.weight": lm_head}
    if row.kind == "mlp":
        return {"speculator.emb.0.weight": lm_head, "speculator.proj.0.weight": matrix}
    if row.kind == "hydra":
        return {"prefix_layer.self_attn.q_proj.weight": matrix, "hydra_mlp.0.0.linear.weight": matrix}
    if row.kind == "mtp":
        return {"mtp_layers.0.input_proj.weight": make.matrix(HIDDEN, 2 * HIDDEN)}
    return {"0.0.linear.weight": matrix, "0.0.linear.bias": make.vector(HIDDEN), "0.1.weight": lm_head}
