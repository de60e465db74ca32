"""MiniCPM, 1 to 4: Llama with factors of embeddings, of what layers add and of logits; MiniCPM3 with latent
attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.families.deepseek import LATENT_NAMES, in_gguf, latent_attention, turned
from draftwing.models.family import Family, InGGUF, unscaled
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields

_SCALE_EMB, _SCALE_DEPTH, _BASE = 12.0, 1.4, 256  # of those that were published; older files in GGUF say none of them


def _factors(fields: Fields, emb: float, depth: float, base: int) -> dict[str, Any]:
    """Returns factors under the names that they have elsewhere. emb, depth, base: where a config has none. Null is no
    factor, but for `scale_emb`."""
    hidden, layers = fields.whole("hidden_size", high=WIDEST), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    depth = fields.number("scale_depth", 1e-3, 1e3, math.sqrt(layers) if fields.has("scale_depth") else depth)
    null = hidden if fields.has("dim_model_base") else base
    return {
        **unscaled(fields),
        "embedding_multiplier": fields.number("scale_emb", 1e-3, 1e3, emb),
        "residual_multiplier": depth / math.sqrt(layers),
        "logits_scaling": hidden / (fields.whole("dim_model_base", 0, WIDEST, null) or hidden),
    }


def _keys(fields: Fields) -> dict[str, Any]:
    hidden, heads = (fields.whole(key, high=WIDEST) for key in ("hidden_size", "num_attention_heads"))

    def size(key: str, usual: int, null: int) -> int:
        return null if fields.has(key) and fields.get(key) is None else fields.whole(key, 0, WIDEST, usual)

    return {
        **_factors(fields, _SCALE_EMB, _SCALE_DEPTH, _BASE),
        "q_lora_rank": size("q_lora_rank", 768, 0),
        "kv_lora_rank": size("kv_lora_rank", 256, 256),
        "qk_nope_head_dim": size("qk_nope_head_dim", 64, 64),
        "qk_rope_head_dim": size("qk_rope_head_dim", 32, 32),
        "v_head_dim": size("v_head_dim", hidden // heads, hidden // heads),
        "rope_interleave": False,
    }


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return (replace(layer, mixer=latent_attention(fields)),) * count


def _scales(fields: Fields) -> Fields:
    """Returns the metadata with factors, which older files leave out."""
    hidden, layers = fields.whole("embedding_length", high=WIDEST), fields.whole("block_count", high=MAX_LAYERS)
    usual = {
        "embedding_scale": _SCALE_EMB,
        "residual_scale": _SCALE_DEPTH / math.sqrt(layers),
        "logit_scale": hidden / _BASE,
    }
    return fields.overruled({key: value for key, value in usual.items() if fields.get(key) is None})


def _metadata(fields: Fields) -> Fields:
    return _scales(turned(fields))


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Files need not say how wide values are: all heads of them are as wide as the stream."""
    heads = fields.whole("attention.head_count", high=WIDEST)
    values = fields.whole("attention.value_length", 1, WIDEST, max(layer.hidden // heads, 1))
    made = in_gguf(file, fields.overruled({"attention.value_length": values}), layer, count)
    mixer = made[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    return (replace(layer, mixer=replace(mixer, interleaved=False)),) * count


FAMILIES = {
    "MiniCPMForCausalLM": Family(
        "minicpm",
        tied=True,
        multipliers=True,
        sliding_window=None,
        keys=lambda fields: _factors(fields, 1.0, 1.0, 1),
        neutral={"mup_denominator": None},  # of draft heads
        gguf=InGGUF("minicpm", fields=_scales, permuted=True, longrope=True),
    ),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        eps=1e-5,
        tied=True,
        multipliers=True,
        sliding_window=None,
        keys=_keys,
        layers=_layers,
        neutral={"head_dim": None, "qk_head_dim": None},
        gguf=InGGUF("minicpm3", names=LATENT_NAMES, fields=_metadata, layers=_in_gguf, longrope=True),
    ),
}
