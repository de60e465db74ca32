"""MiMo: as Qwen2, with prediction layers, whose names those of heads trained here have, too. MiMo-V2-Flash: values that
are shorter than keys, sinks and more key heads in layers with a window, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.families.deepseek import experts
from draftwing.models.family import Family
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING, rope

_OF_WINDOWS, _TURNED = "rope_parameters_of_windows", 0.334  # the first: where `_keys` puts them
_SEEN, _SWA = 129, "swa_"  # tokens that a query sees, its own among them; how keys of layers with a window begin
_VALUES = 0.707  # what values are multiplied with where a config does not say it; null is 1
_LIKE_OTHERS = "num_attention_heads", "head_dim", "v_head_dim"


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads a config as it was published, or as transformers writes it, with names of layers and of their parts."""
    share = fields.number("partial_rotary_factor", 0, 1, _TURNED)
    made = {
        kind: {"rope_theta": fields.number(f"{begin}rope_theta", 1, 1e15, theta), "partial_rotary_factor": share}
        for kind, begin, theta in ((FULL, "", 5e6), (SLIDING, _SWA, 1e4))
    }
    given = fields.inner("rope_parameters")
    fields.check("n_shared_experts", (0,))  # of which transformers and the model's own code have none
    for key in _LIKE_OTHERS:
        own = fields.whole(key, high=WIDEST)
        fields.check(f"{_SWA}{key}", (own,))
    scale = fields.get("routed_scaling_factor")
    usual = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1}
    return fields.renamed({"rms_norm_eps": "layernorm_epsilon"}) | {
        "rope_parameters": dict(given.inner(FULL).items()) or made[FULL],
        _OF_WINDOWS: dict(given.inner(SLIDING).items()) or made[SLIDING],
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0 if scale is None else scale,
        **{key: value for key, value in usual.items() if fields.get(key) is None},
    }


def _rope_of_windows(fields: Fields) -> RopeConfig:
    given, head_dim = fields.inner(_OF_WINDOWS), fields.whole("head_dim", high=WIDEST)
    turned = int(head_dim * given.number("partial_rotary_factor", 0, 1, _TURNED))
    found = rope(given, 1e4, fields.whole("max_position_embeddings"), 1.0)
    return replace(found, dims=turned if turned < head_dim else 0)


def _said(fields: Fields, names: str, marks: str, kinds: tuple[str, str], usual: list[bool]) -> list[bool]:
    """Returns whether each layer is of the second kind. names: the key of their names.  marks: the key of a 0 or 1 for
    each in place of them.  Raises CheckpointError where one is of neither kind, or their number is wrong."""
    named = fields.texts(names)
    found, known = (named, kinds) if named else (fields.get(marks), (0, 1))
    if found is None:
        return usual
    if not isinstance(found, list) or len(found) != len(usual) or any(one not in known for one in found):
        expected = f"{known[0]} or {known[1]} for each of {len(usual)} layers"
        raise fields.unlike(names if named else marks, expected)
    return [one == known[1] for one in found]


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    attention, full = layer.mixer, [i == 0 or (i + 1) % 6 == 0 for i in range(count)]
    assert isinstance(attention, AttentionConfig)
    before = fields.whole("sliding_window_size", 0, 2**40, -1)
    window = fields.whole("sliding_window", 1, 2**40, _SEEN)
    scale = fields.number("attention_value_scale", 1e-3, 1e3, 1.0 if fields.has("attention_value_scale") else _VALUES)
    values = fields.whole("v_head_dim", high=attention.head_dim)
    sinks = fields.flag("add_full_attention_sink_bias"), fields.flag("add_swa_attention_sink_bias", True)
    attention = replace(attention, values=values, value_scale=scale, sinks=sinks[0])
    other = replace(
        attention,
        kv_heads=fields.whole(f"{_SWA}num_key_value_heads", high=WIDEST, default=2 * attention.kv_heads),
        window=window if before < 0 else before + 1,
        sinks=sinks[1],
        rope=1,
        rotary=_rope_of_windows(fields).dims,
    )
    windowed = _said(fields, "layer_types", "hybrid_layer_pattern", (FULL, SLIDING), [not one for one in full])
    return tuple(replace(layer, mixer=other if one else attention) for one in windowed)


def _dense(fields: Fields, count: int) -> Collection[int]:
    usual = [i > 0 for i in range(count)]
    sparse = _said(fields, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"), usual)
    return [i for i, one in enumerate(sparse) if not one]


FAMILIES = {
    "MiMoForCausalLM": Family(
        "mimo",
        qkv_bias=True,
        o_bias=False,
        sliding_window=4096,
        window_switch="upper",
        neutral={"qkv_bias": (True,)},
        predicts="mtp_layers",
    ),
    "MiMoV2FlashForCausalLM": Family(
        "mimo_v2_flash",
        o_bias=False,
        eps=1e-5,
        theta=5e6,
        turns_parts=True,
        rotary=_TURNED,
        keys=_keys,
        layers=_layers,
        other_rope=_rope_of_windows,
        experts=experts,
        dense_layers=_dense,
        layer_names={"self_attn.sinks": "self_attn.attention_sink_bias"},
        neutral={"attention_chunk_size": None, "first_k_dense_replace": None},
    ),
}
