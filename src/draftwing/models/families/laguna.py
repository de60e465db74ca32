"""Laguna: gates of attention by softplus, layers with a window that have other heads and turn them otherwise, and the
experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import RopeConfig
from draftwing.models.families.deepseek import IN_GGUF, dense_layers, experts
from draftwing.models.family import ExpertNames, Family, InGGUF, each_of, first_of, numbers, renamed
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING, rope

_OF_WINDOWS = "rope_parameters_of_windows"  # where `_keys` puts them
_HEADS, _WINDOW = "num_attention_heads_per_layer", 512
_GATES = {"per-head": 1, "per_head": 1, "per-element": 0, "per_element": 0}  # rows, 0: as many as a head has elements
_NAMES = {"n_routed_experts": "num_experts", "routed_scaling_factor": "moe_routed_scaling_factor"}
_ROPES = {  # of a config that has none
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _keys(fields: Fields) -> dict[str, Any]:
    for key, served in (
        ("moe_router_logit_softcapping", 0), ("moe_apply_router_weight_on_input", False), ("norm_topk_prob", True),
        ("attention_bias", False), ("n_shared_experts", 1),
    ):  # fmt: skip
        fields.check(key, (served,))
    if fields.get("rope_parameters") is None:
        fields = fields.overruled({"rope_parameters": _ROPES})
    given = fields.inner("rope_parameters")
    if given.get(FULL) is None:
        raise fields.unlike("rope_parameters", f"{FULL}, and {SLIDING} of layers with a window")
    found = {
        "rope_parameters": dict(given.inner(FULL).items()),
        _OF_WINDOWS: dict(given.inner(SLIDING).items()),
        "partial_rotary_factor": None,  # beside them, of which nobody reads it
        "n_shared_experts": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": fields.whole("num_experts_per_tok", high=WIDEST, default=8),
        "moe_intermediate_size": fields.whole("moe_intermediate_size", high=WIDEST, default=512),
    }
    return found | fields.renamed(_NAMES)


def _rope_of_windows(fields: Fields) -> RopeConfig:
    head_dim = fields.whole("attention.key_length" if fields.prefix else "head_dim", high=WIDEST, default=128)
    if fields.prefix:  # of a GGUF file
        turned = fields.whole("rope.dimension_count_swa", 2, head_dim, head_dim)
        made = RopeConfig(fields.number("rope.freq_base_swa", 1, 1e15, 1e4))
    else:
        given = fields.inner(_OF_WINDOWS)
        turned = int(head_dim * given.number("partial_rotary_factor", 0, 1, 1.0))
        made = rope(given, 1e4, fields.whole("max_position_embeddings"), 1.0)
    return replace(made, dims=turned if turned < head_dim else 0)


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    shared = fields.whole("shared_expert_intermediate_size", 0, WIDEST, 512)
    return replace(experts(fields, layers), shared=shared)


def _rows_of_gate(fields: Fields) -> int:
    """Returns how many rows of gates a head has, 0: one for each element. Raises CheckpointError where keys differ, of
    which libraries read one or the other."""
    said = fields.get("gating")
    kinds = ["per-head" if said is True or not fields.has("gating") else said, *fields.texts("gating_types")]
    rows = {_GATES.get(kind, -1) if isinstance(kind, str) else -1 for kind in kinds}
    if len(rows) > 1 or -1 in rows:
        raise fields.unsupported("gating", said)
    return rows.pop()


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    kinds = fields.texts("layer_types") or [FULL] * count
    if len(kinds) != count or not {*kinds} <= {FULL, SLIDING}:
        raise fields.unlike("layer_types", f"{FULL} or {SLIDING} for each of {count} layers")
    window = fields.whole("sliding_window", int(SLIDING in kinds), 2**40, _WINDOW)
    heads = fields.get(_HEADS) or [fields.whole("num_attention_heads", high=WIDEST)] * count
    known = isinstance(heads, list) and all(type(one) is int and 0 < one <= WIDEST for one in heads)
    if not known or len(heads) != count:
        raise fields.unlike(_HEADS, f"a number of heads for each of {count} layers")
    return _made(fields, layer, heads, [window * (kind == SLIDING) for kind in kinds], _rows_of_gate(fields))


def _made(
    fields: Fields, layer: LayerConfig, heads: list[int], windows: list[int], rows: int
) -> tuple[LayerConfig, ...]:
    """heads, windows: of each layer, 0: no window.  rows: of a head's gates, 0: one for each element."""
    attention = layer.mixer
    assert isinstance(attention, AttentionConfig)
    attention = replace(attention, softplus=True, gate_rows=rows or attention.head_dim)
    other = replace(attention, rope=1, rotary=_rope_of_windows(fields).dims)
    return tuple(
        replace(layer, mixer=replace(other if window else attention, heads=own, window=window))
        for own, window in zip(heads, windows, strict=True)
    )


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers: of files with a window and no pattern all have it but every fourth, from the first on."""
    window, key = fields.whole("attention.sliding_window", 0, 2**40, 0), "attention.sliding_window_pattern"
    pattern = each_of(fields, key, count, "biu") or [i % fields.whole(key, default=4) for i in range(count)]
    heads = numbers(fields, "attention.head_count", count)
    gates = file.tensors.get("blk.0.attn_gate.weight")
    rows = int(gates is not None and gates.shape[0] == heads[0])
    return _made(fields, layer, heads, [window * bool(one) for one in pattern], rows)


FAMILIES = {
    "LagunaForCausalLM": Family(
        "laguna",
        qk_norm=True,
        gated=True,
        gate_rows="head",
        head_dim=128,
        theta=5e5,
        turns_parts=True,
        keys=_keys,
        layers=_layers,
        other_rope=_rope_of_windows,
        experts=_experts,
        dense_layers=dense_layers,
        expert_names=ExpertNames(correction="mlp.experts.e_score_correction_bias"),
        layer_names={"self_attn.gate_proj": "self_attn.g_proj"},
        apart=renamed({".mlp.shared_experts.": ".mlp.shared_expert.", ".mlp.gate.e_score_": ".mlp.experts.e_score_"}),
        neutral={"decoder_sparse_step": (1,), "mlp_only_layers": None, "first_k_dense_replace": None},
        gguf=InGGUF(
            "laguna",
            names={"attn_gate": "self_attn.gate_proj"},
            experts=IN_GGUF,
            fields=first_of,
            layers=_in_gguf,
            own_windows=True,
        ),
    ),
}
