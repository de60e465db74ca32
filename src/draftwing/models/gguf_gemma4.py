"""Gemma 4 in GGUF files: what the metadata say of layers, and the names of their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.gemma4 import sources

ARCH = "gemma4"
PER_LAYER = "per_layer_token_embd.weight"
TOP_NAMES = {
    PER_LAYER: "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
NAMES = {  # besides those of layers with norms before and after each part
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"  # which may be lists, a number for each layer


def of_first(fields: Fields) -> Fields:
    """Returns the metadata with that of the first layer in place of a number for each."""
    own = {}
    for key in (_HEADS, _WIDTH):
        value = fields.get(key)
        if isinstance(value, np.ndarray) and len(value):
            own[key] = value[0].item()
    return fields.overruled(own)


def layers(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers; layer: one without a window.  fields: as they are in the file."""
    windowed = _flags(fields, "attention.sliding_window_pattern", count)
    shared = fields.whole("attention.shared_kv_layers", 0, count - 1, 0)
    heads, widths = _numbers(fields, _HEADS, count), _numbers(fields, _WIDTH, count)
    swa = fields.whole("attention.key_length_swa", 1, WIDEST)
    fields.whole("attention.value_length_swa", swa, swa, swa)
    fields.whole("rope.dimension_count_swa", swa, swa, swa)
    window = fields.whole("attention.sliding_window", 1, 2**40) if any(windowed) else 0
    size, mixer = fields.whole("embedding_length_per_layer_input", 0, WIDEST, 0), layer.mixer
    assert isinstance(mixer, AttentionConfig)
    made = []
    for i, of in enumerate(sources(windowed, count - shared)):
        own = replace(mixer, scalar=1, v_norm=True, kv_from=of, kv_heads=heads[i])
        if windowed[i]:
            own = replace(own, window=window, rope=1, head_dim=swa)
        alike = of is None and f"blk.{i}.attn_v.weight" not in file.tensors
        scaled = f"blk.{i}.layer_output_scale.weight" in file.tensors
        own = replace(own, values_are_keys=alike)
        made.append(replace(layer, mixer=own, ffn=widths[i], per_layer=size, scaled=scaled))
    return tuple(made)


def _each(fields: Fields, key: str, count: int, kinds: str) -> list[Any] | None:
    """Returns the first `count` values of an array of one of numpy's kinds; None where it is no array."""
    value = fields.get(key)
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.kind not in kinds or len(value) < count:
        raise fields.unlike(key, f"one for each of {count} layers")
    found: list[Any] = value[:count].tolist()
    return found


def _numbers(fields: Fields, key: str, count: int) -> list[int]:
    """Returns a number for each layer; there may be one for all."""
    found = _each(fields, key, count, "iu")
    if found is None:
        return [fields.whole(key, 1, WIDEST)] * count
    if not all(0 < one <= WIDEST for one in found):
        raise fields.unlike(key, f"numbers from 1 to {WIDEST}")
    return found


def _flags(fields: Fields, key: str, count: int) -> list[bool]:
    """Returns whether something is so of each layer; there may be one for all, or none: no."""
    found = _each(fields, key, count, "biu")
    return [fields.flag(key)] * count if found is None else [bool(one) for one in found]
