"""Granite 3, dense and with experts: Llama's layers, with factors of embeddings, of what layers add, of scores and of
logits. HyperCLOVA X: the same with norms behind each part, too. Granite Swash: the same with sinks, windows in most
layers, and a base of the rotary embedding for each layer, or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.granite_hybrid import NAMES, apart
from draftwing.models.family import ExpertMetadata, Family, InGGUF, Whole, each_of, query_scalar, softmax_experts
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING, rope_fields


def _keys(fields: Fields) -> dict[str, Any]:
    return {"query_pre_attn_scalar": query_scalar(fields, "attention_multiplier", 1.0)}


def _peri_keys(fields: Fields) -> dict[str, Any]:
    """Reads the factor of logits as the divisor that Granite has."""
    fields.check("use_post_norm", (True,))
    fields.check("residual_multiplier", (1,))
    heads = fields.whole("num_attention_heads", high=WIDEST)
    size = fields.whole("head_dim", high=WIDEST, default=fields.whole("hidden_size", high=WIDEST) // heads)
    given = {} if fields.get("attention_multiplier") is not None else {"attention_multiplier": size**-0.5}
    return {**_keys(fields.overruled(given)), "logits_scaling": 1 / fields.number("logits_scaling", 1e-3, 1e3, 1.0)}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return softmax_experts(fields, layers, "num_local_experts", "intermediate_size")


def _shared_experts(fields: Fields, layers: int) -> ExpertConfig:
    width = fields.whole("shared_intermediate_size", 0, WIDEST, 0)
    return softmax_experts(fields, layers, "num_local_experts", "intermediate_size", shared=width)


_BASES = "layer_rope_theta"


def _bases(fields: Fields) -> list[float]:
    """Returns the base of each layer's rotary embedding, 0 of one that turns nothing: none where all have one."""
    given, count = fields.get(_BASES), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    if given is None:
        return []
    whole = isinstance(given, list) and len(given) == count and all(type(one) in (int, float) for one in given)
    if not whole or len({*given} - {0}) > 1 or not all(one == 0 or 1 <= one <= 1e15 for one in given):
        raise fields.unlike(_BASES, f"0, or one base from 1 to 1e+15, for each of {count} layers")
    return [float(one) for one in given]


def _with_windows(fields: Fields) -> dict[str, Any]:
    count, said = fields.whole("num_hidden_layers", high=MAX_LAYERS), _keys(fields)
    if base := max(_bases(fields), default=0.0):
        given = rope_fields(fields)
        said |= {"rope_theta": base, given.inside.rstrip("."): {**dict(given.items()), "rope_theta": base}}
    return (
        said
        if fields.texts("layer_types")
        else {**said, "layer_types": [SLIDING if i % 4 else FULL for i in range(count)]}
    )


def _nope(fields: Fields, windows: Sequence[int]) -> Collection[int]:
    """A file has a pattern of layers that turn something, or all do."""
    if fields.prefix:
        pattern = each_of(fields, "attention.rope_pattern", len(windows), "biu") or ()
        return {i for i, turned in enumerate(pattern) if not turned}
    return {i for i, base in enumerate(_bases(fields)) if not base}


def _metadata(fields: Fields) -> Fields:
    """Reads past the sizes of state-space layers, which files of Granite 4 have, too, where it has no such layer."""
    for part in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        fields.get(f"ssm.{part}")
    return fields


_GRANITE: dict[str, Any] = {"attention_scalar": 1, "multipliers": True, "keys": _keys}
_SWASH: dict[str, Any] = {
    "eps": 1e-5, "sinks": True, "sliding_window": 128, "window_pattern": 4, "pattern_key": False,
    "keys": _with_windows, "nope": _nope,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {**_GRANITE, "expert_names": NAMES, "apart": apart}
FAMILIES = {
    "GraniteForCausalLM": Family(
        "granite",
        **_GRANITE,
        wholes={"LlavaNextForConditionalGeneration": Whole("llava_next", {}, "granite")},
        gguf=InGGUF("granite", permuted=True, fields=_metadata),
    ),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax",
        **{**_GRANITE, "keys": _peri_keys},
        out_norms=True,
        wholes={"HyperCLOVAXVisionV2ForConditionalGeneration": Whole("hyperclovax_vision_v2", {})},
        layer_names={
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        **_EXPERTS,
        experts=_experts,
        gguf=InGGUF("granitemoe", permuted=True, fields=_metadata, experts=ExpertMetadata(shared=True, as_mlp=True)),
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa", **_GRANITE | _SWASH, tied=True, gguf=InGGUF("granite_swa", permuted=True)
    ),
    "GraniteMoeSWAForCausalLM": Family(
        "granitemoe_swa",
        **_EXPERTS | _SWASH | {"expert_names": NAMES._replace(router="block_sparse_moe.router")},
        experts=_shared_experts,
        gguf=InGGUF(
            "granite_swa",
            when=lambda file, fields: fields.whole("expert_count", 0, default=0) > 0,
            permuted=True,
            experts=ExpertMetadata(shared=True, as_mlp=True),
        ),
    ),
    "GraniteMoeSharedForCausalLM": Family("granitemoeshared", **_EXPERTS, experts=_shared_experts),  # GGUF: the same
}
