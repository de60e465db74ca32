"""Step-3.5-Flash and the text of Step-3.7-Flash: layers with a window that have other heads and turn them otherwise, a
gate of attention for each head, and the experts of DeepSeek-V3, with limits in some layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.families.deepseek import experts
from draftwing.models.family import ExpertNames, Family, Whole, dense_by_kinds, renamed
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING, rope

_OF_WINDOWS, _DENSE = "rope_parameters_of_windows", 3  # where `_keys` puts them; how many first layers have an MLP
_OTHER, _EACH, _THETA, _HEAD_DIM = "attention_other_setting", "per_layer_config", 1e4, 128
_NAMES = {
    "num_experts_per_tok": "moe_top_k", "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts", "routed_scaling_factor": "moe_router_scaling_factor",
}  # fmt: skip
_USUAL = {
    "num_key_value_heads": 8, "num_experts_per_tok": 8, "n_routed_experts": 288, "moe_intermediate_size": 1280,
}  # fmt: skip
_LIMITS = "swiglu_limits", "swiglu_limits_shared"
# What others say, with the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "gating": (True, "per-head"), "use_head_wise_attn_gate": (True,), "moe_router_activation": ("sigmoid",),
    "use_moe_router_bias": (True,), "norm_expert_weight": (True,), "yarn_only_types": ([FULL],),
    "attention_bias": (False,), "mlp_bias": (False,), "n_shared_experts": (1,),
}  # fmt: skip


def _each(fields: Fields, key: str, default: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Returns one for each layer, of a list that may go on with those of prediction layers, or of one for all."""
    count, value = fields.whole("num_hidden_layers", high=MAX_LAYERS), fields.get(key)
    value = default if value is None else value
    if not isinstance(value, list):
        value = [value] * count
    if len(value) < count or not all(type(one) in kinds for one in value):
        raise fields.unlike(key, f"one for each of {count} layers")
    return value[:count]


def _kinds(fields: Fields) -> list[str]:
    kinds = _each(fields, "layer_types", FULL, (str,))
    for kind in {*kinds} - {FULL, SLIDING}:
        raise fields.unsupported("layer_types", kind)
    return kinds


def _ropes(fields: Fields, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Returns what says how layers of each kind turn heads, of keys by layer. Scaling is that of full attention."""
    bases = _each(fields, "rope_theta", _THETA, (int, float))
    shares = _each(fields, "partial_rotary_factors", 1.0, (int, float))
    found = dict[str, dict[str, Any]]()
    for kind, base, share in zip(kinds, bases, shares, strict=True):
        own = {"rope_theta": base, "partial_rotary_factor": share}
        if found.setdefault(kind, own) != own:
            raise fields.unlike("rope_theta", "one base and partial_rotary_factors for all layers of a kind")
    scaling = fields.inner("rope_scaling")
    if FULL in found:
        found[FULL] |= dict(scaling.items())
    return found


def _keys(fields: Fields) -> dict[str, Any]:
    for key, known in _SERVED.items():
        fields.check(key, known)
    fields.check("query_pre_attn_scalar", (fields.whole("head_dim", high=WIDEST, default=_HEAD_DIM),))
    kinds, given = _kinds(fields), fields.inner("rope_parameters")
    if any(isinstance(given.get(kind), dict) for kind in (FULL, SLIDING)):
        made = {kind: dict(given.inner(kind).items()) for kind in (FULL, SLIDING) if given.get(kind) is not None}
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"):  # of which transformers reads nothing then
            fields.check(key, ())
    else:
        made = _ropes(fields, kinds)
        if any(fields.inner("rope_scaling").get(key) != value for key, value in given.items()):
            raise fields.unlike("rope_parameters", f"{FULL} and {SLIDING}, or the same as rope_scaling")
    usual = {"rope_theta": _THETA}
    said = fields.renamed(_NAMES)
    return {
        **{key: value for key, value in _USUAL.items() if fields.get(key) is None}, **said,
        "n_shared_experts": 0, "rope_theta": None, "rope_scaling": None,
        "rope_parameters": made.get(FULL) or made.get(SLIDING) or usual, _OF_WINDOWS: made.get(SLIDING) or usual,
    }  # fmt: skip


def _rope_of_windows(fields: Fields) -> RopeConfig:
    given, head_dim = fields.inner(_OF_WINDOWS), fields.whole("head_dim", high=WIDEST, default=_HEAD_DIM)
    turned = int(head_dim * given.number("partial_rotary_factor", 0, 1, 1.0))
    found = rope(given, _THETA, fields.whole("max_position_embeddings"), 1.0)
    return replace(found, dims=turned if turned < head_dim else 0)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return replace(experts(fields, layers), shared=fields.whole("share_expert_dim", high=WIDEST, default=1280))


def _dense_layers(fields: Fields, layers: int) -> Collection[int]:
    if fields.get("mlp_layer_types") is not None:
        fields.get("moe_layers_enum")  # of which transformers reads nothing then
        own = fields.overruled({"mlp_layer_types": _each(fields, "mlp_layer_types", "", (str,))})
        return dense_by_kinds(own, layers) or ()
    said = fields.get("moe_layers_enum")
    if said is None:
        return range(min(_DENSE, layers))
    every = said.split(",") if isinstance(said, str) else said
    if not isinstance(every, list) or not all(str(one).strip().isdecimal() for one in every):
        raise fields.unlike("moe_layers_enum", "numbers of layers, with commas between them")
    return {*range(layers)} - {int(one) for one in every}


def _heads(fields: Fields, kinds: list[str], usual: int) -> list[int]:
    """Returns those of each layer. usual: where nothing says otherwise."""
    given, key = fields.inner(_OTHER), "num_attention_heads"
    other = fields.whole("num_sliding_attention_heads", high=WIDEST, default=given.whole(key, 1, WIDEST, usual))
    if fields.get(_EACH) is None:
        return [other if kind == SLIDING else usual for kind in kinds]
    return [fields.inner(_EACH).inner(str(i)).whole(key, 1, WIDEST, usual) for i in range(len(kinds))]


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    kinds, attention, given = _kinds(fields), layer.mixer, fields.inner(_OTHER)
    assert isinstance(attention, AttentionConfig) and layer.experts is not None
    given.check("attention_type", (SLIDING,))
    given.check("num_attention_groups", (attention.kv_heads,))
    for key in ("head_dim", "true_head_dim"):
        given.check(key, (attention.head_dim,))
    window = fields.whole("sliding_window", int(SLIDING in kinds), 2**40, 0)
    other = replace(attention, window=window, rope=1, rotary=_rope_of_windows(fields).dims)
    limits = [[one or 0.0 for one in _each(fields, key, None, (int, float, type(None)))] for key in _LIMITS]
    if not all(one == 0 or 1e-3 <= one <= 1e6 for part in limits for one in part):
        raise fields.unlike(_LIMITS[0], f"limits from 0.001 to 1e6, or 0 for none; the same of {_LIMITS[1]}")
    return tuple(
        replace(
            layer,
            mixer=replace(other if kind == SLIDING else attention, heads=heads),
            silu_limit=of_all,
            experts=replace(layer.experts, silu_limit=of_chosen),
        )
        for kind, heads, of_chosen, of_all in zip(kinds, _heads(fields, kinds, attention.heads), *limits, strict=True)
    )


FAMILIES = {
    "Step3p5ForCausalLM": Family(
        "step3p5",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        head_dim=_HEAD_DIM,
        eps=1e-5,
        wide_norms=True,
        norm_offset=1.0,
        gated=True,
        gate_rows="head",
        turns_parts=True,
        keys=_keys,
        layers=_layers,
        other_rope=_rope_of_windows,
        experts=_experts,
        dense_layers=_dense_layers,
        expert_names=ExpertNames("moe.gate", "moe.experts", shared="share_expert", correction="moe.router_bias"),
        layer_names={"self_attn.gate_proj": "self_attn.g_proj"},
        apart=renamed({f".moe.{part}_proj.weight": f".moe.experts.{part}_proj" for part in ("gate", "up", "down")}),
        neutral={
            **dict.fromkeys(("need_fp32_gate", "use_moe", "moe_every_n_layer")),
            "moe_layer_offset": (0,),
            "att_impl_type": ("GQA",),
            "sink": (False,),
            "use_mfa": (False,),
            "use_qk_norm": (True,),
            "zero_centered": (True,),
            "use_rope_layers": ([],),
        },
        wholes={"Step3p7ForConditionalGeneration": Whole("step3p7", {})},
    ),
}
