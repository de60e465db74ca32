"""DFlash, DFlash2 and DSpark heads in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile, open_gguf
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, refuse_unread_metadata
from draftwing.requests.refusals import show

ARCHITECTURE = "dflash"
SELECTOR, MARKOV = "selector_predecessor.weight", "markov_w1.weight"  # which DFlash2 heads have, and DSpark ones
_IDS = "d2t"  # of the target, of tokens of a vocabulary of the head's own
_NAMES = {
    "fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight", "output_norm.weight": "norm.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    SELECTOR: "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    MARKOV: "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight", "conf_proj.bias": "confidence_head.proj.bias",
}  # fmt: skip
_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}  # fmt: skip
_FACTORS = {
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_LM_HEAD = "output.weight"
_SHARED = "token_embd.weight", _LM_HEAD  # copies of the target's, but for a vocabulary of the head's own


def gguf_config(path: Path) -> dict[str, Any]:
    """Returns the flat keys of a head's config (`flatten_config`) that the file's metadata has. Raises CheckpointError
    for a file of another architecture, and for keys that nobody reads."""
    file = _open(path)
    fields = Fields(file.metadata, str(path), f"{ARCHITECTURE}.")
    tokenizer, size = Fields(file.metadata, str(path), "tokenizer.ggml."), fields.whole
    layers, heads = size("block_count", high=MAX_LAYERS), size("attention.head_count", high=WIDEST)
    hidden = size("embedding_length", high=WIDEST)
    window = size("attention.sliding_window", 0, default=0)
    raw: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length", high=WIDEST),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", high=heads, default=heads),
        "head_dim": size("attention.key_length", high=WIDEST, default=hidden // heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0, 1),
        "rope_theta": fields.number("rope.freq_base", 1, 1e12, 10000.0),
        "max_position_embeddings": size("context_length"),
        "block_size": size("block_size"),
        "mask_token_id": tokenizer.whole("mask_token_id", 0),
        # Streams that enter layers, so numbered as boundaries.
        "aux_hidden_state_layer_ids": _whole_numbers(fields, "target_layers"),
        "layer_types": _kinds(fields, layers, window),
        "sliding_window": window or None,
    }
    vocab = _vocab(file)
    if vocab is not None:
        raw["vocab_size"] = vocab
    for key, name in (("attention.causal", "is_causal"), ("sample_from_anchor", "sample_from_anchor")):
        if fields.has(key):
            raw[name] = fields.flag(key)
    fields.check("has_confidence_head", ("conf_proj.weight" in file.tensors,))
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if fields.has(key):
            raw[key] = size(key)
    raw |= {name: fields.get(key) for key, name in _FACTORS.items() if fields.has(key)}
    fields.check("attention.value_length", (raw["head_dim"],))
    fields.check("rope.dimension_count", (raw["head_dim"],))
    refuse_unread_metadata(fields)
    return raw


def gguf_block(path: Path) -> dict[str, Any]:
    """Returns what a file says of blocks, as far as it can be read: who loads the head says what is wrong with it."""
    try:
        file = _open(path)
    except CheckpointError:
        return {}
    said = {
        key: file.metadata.get(f"{ARCHITECTURE}.{key}")
        for key in ("block_size", "selector_top_k", "sample_from_anchor")
    }
    return said | {"markov_rank": file.tensors[MARKOV].shape[1] if MARKOV in file.tensors else None}


def gguf_weights(path: Path, dtype: torch.dtype, meta: bool = False) -> dict[str, Tensor]:
    """Returns the tensors by the names that a folder has them under, dequantised; those that would lose by `dtype` stay
    in float32. meta: without their values. Raises CheckpointError for a tensor that no such head has."""
    file, found = _open(path), dict[str, Tensor]()
    for stored in file.tensors:
        if stored == _IDS:
            found[_IDS] = _offsets(file, meta)
            continue
        if stored in _SHARED:
            if stored == _LM_HEAD and _IDS in file.tensors:
                found["lm_head.weight"] = _value(file, stored, meta).to(dtype)
            continue
        match = _BLOCK.fullmatch(stored)
        own = _NAMES.get(stored) if match is None else _OF_LAYER.get(match[2])
        if own is None:
            raise CheckpointError(
                f"{path}: {stored} is no tensor of a head that drafts blocks, as llama.cpp names them"
            )
        name = own if match is None else f"layers.{match[1]}.{own}"
        value = _value(file, stored, meta)
        found[name] = value if file.kind(stored) == "F32" else value.to(dtype)
    return found


def _value(file: GGUFFile, stored: str, meta: bool) -> Tensor:
    shape = file.tensors[stored].shape
    return torch.empty(shape, device="meta") if meta else torch.from_numpy(file.dequantized(stored))


def _offsets(file: GGUFFile, meta: bool) -> Tensor:
    """Returns the ids of a head's own tokens as folders have them, less the token's own number."""
    count, kind = file.tensors[_IDS].shape[0], file.kind(_IDS)
    if kind != "I64":
        raise CheckpointError(f"{file.path}: {_IDS}: expected numbers of type I64, found {kind}")
    if meta:
        return torch.zeros(count, dtype=torch.int64)
    return torch.from_numpy(np.frombuffer(file.raw(_IDS), np.int64).copy()) - torch.arange(count)


def _open(path: Path) -> GGUFFile:
    file = open_gguf(path)
    found = file.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise CheckpointError(f"{path}: expected general.architecture {ARCHITECTURE!r} of a head, found {show(found)}")
    return file


def _vocab(file: GGUFFile) -> int | None:
    codebook, tokens = file.tensors.get(SELECTOR), file.metadata.get("tokenizer.ggml.tokens")
    if codebook is not None:
        return codebook.shape[0]
    return len(tokens) if isinstance(tokens, list) else None


def _whole_numbers(fields: Fields, key: str) -> list[int]:
    found = fields.get(key)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise fields.unlike(key, "a list of integers")
    return [int(one) for one in found]


def _kinds(fields: Fields, layers: int, window: int) -> list[str]:
    """Of each layer, by a pattern that says which of them have a window; all have it where none is given."""
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = [window > 0] * layers
    if not isinstance(pattern, list | np.ndarray) or len(pattern) != layers:
        raise fields.unlike("attention.sliding_window_pattern", f"one for each of {layers} layers")
    return ["sliding_attention" if one else "full_attention" for one in pattern]
