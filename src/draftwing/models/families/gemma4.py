"""Gemma 4: layers that differ in heads, windows, rotary embeddings, and in whose keys they read; perhaps embeddings by
layer, and experts beside MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.gemma_images import tower
from draftwing.models.family import ExpertMetadata, ExpertNames, Family, InGGUF, Whole, each_of, first_of, numbers
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.models.positions import FULL, SLIDING
from draftwing.ops.experts.routing import Routing

_PATTERN = 6  # one in so many layers has no window, where `layer_types` does not say
_ROPES = {  # where a config has none
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _keys(fields: Fields) -> dict[str, Any]:
    """Returns the rotary embeddings of a config that has none. Raises CheckpointError for what is not served."""
    fields.check("use_bidirectional_attention", (False, "vision"))  # "vision": of images' tokens alone
    return {} if fields.get("rope_parameters") is not None else {"rope_parameters": _ROPES}


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    """Returns experts beside the MLP of every layer, or of none."""
    if not fields.flag("enable_moe_block"):
        return None
    count = fields.whole("num_experts", high=max_experts(layers))
    ffn = fields.whole("moe_intermediate_size", high=WIDEST)
    return ExpertConfig(count, Routing(fields.whole("top_k_experts", high=count)), ffn, beside=True)


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    kinds = fields.texts("layer_types") or [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)]
    for kind in set(kinds) - {FULL, SLIDING}:
        raise fields.unsupported("layer_types", kind)
    if len(kinds) != count:
        raise fields.unlike("layer_types", f"one for each of {count} layers")
    kinds = [*kinds[:-1], FULL]  # as the model's own code has it
    shared = fields.whole("num_kv_shared_layers", 0, count - 1, 0)
    wide = shared and fields.flag("use_double_wide_mlp")
    layer = replace(layer, scaled=True, per_layer=_per_layer(fields))
    mixers = [_attention(fields, layer.mixer, kind, i) for i, kind in enumerate(kinds)]
    read = sources(kinds, count - shared)
    return tuple(
        replace(layer, mixer=replace(mixer, kv_from=of), ffn=layer.ffn * (2 if wide and of is not None else 1))
        for mixer, of in zip(mixers, read, strict=True)
    )


def sources(kinds: list[Any], own: int) -> list[int | None]:
    """Returns for each layer whose keys and values it reads: None for the first `own`, then the last of these of its
    kind. Raises CheckpointError where there is none."""
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    if not set(kinds) <= set(last):
        raise CheckpointError(
            f"expected layers of each kind with keys of their own, found none of some among the first {own}"
        )
    return [None if i < own else last[kind] for i, kind in enumerate(kinds)]


def _attention(fields: Fields, mixer: Any, kind: str, index: int) -> AttentionConfig:
    """Returns attention of layer `index`. Scores have no scale, for queries and keys have norms."""
    assert isinstance(mixer, AttentionConfig)
    each = fields.inner("per_layer_config")  # as newer libraries write it, by 5 or "05": what is not as in others
    own = each.inner(next((key for key, _ in each.items() if key.isdecimal() and int(key) == index), str(index)))
    for key, value in own.items():
        if key not in ("head_dim", "num_key_value_heads"):
            raise fields.unsupported(f"per_layer_config.{index}.{key}", value)
    alike, size, heads = kind == FULL and fields.flag("attention_k_eq_v"), mixer.head_dim, mixer.kv_heads
    if kind == FULL and fields.get("per_layer_config") is None:
        size = fields.whole("global_head_dim", 1, WIDEST, 512)
        heads = fields.whole("num_global_key_value_heads", 1, WIDEST, heads) if alike else heads
    size, heads = own.whole("head_dim", 1, WIDEST, size), own.whole("num_key_value_heads", 1, WIDEST, heads)
    mixer = replace(mixer, scalar=1, v_norm=True, head_dim=size, kv_heads=heads, values_are_keys=alike)
    if kind == FULL:
        return mixer
    return replace(mixer, window=fields.whole("sliding_window", 1, 2**40, 512), rope=1)


def _per_layer(fields: Fields) -> int:
    """Returns the size of each layer's own embedding of a token, 0: there is none."""
    key, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    size = 0 if fields.has(key) and fields.get(key) is None else fields.whole(key, 0, WIDEST, 256)
    if size and fields.whole(rows, default=262144) != fields.whole("vocab_size"):
        raise fields.unlike(rows, f"vocab_size, which is {fields.get('vocab_size')}")
    return size


# ---- GGUF files ------------------------------------------------------------------------------------------------------

_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"  # which may be lists, a number for each layer


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers; layer: one without a window."""
    found = each_of(fields, "attention.sliding_window_pattern", count, "biu")
    windowed = [fields.flag("attention.sliding_window_pattern")] * count if found is None else [*map(bool, found)]
    shared = fields.whole("attention.shared_kv_layers", 0, count - 1, 0)
    heads, widths = numbers(fields, _HEADS, count), numbers(fields, _WIDTH, count)
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


_SIZES = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
}  # fmt: skip
_UNIFIED = _SIZES | {"max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
FAMILIES = {
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        qk_norm=True,
        head_dim=256,
        theta=1e6,
        local_theta=1e4,
        wide_norms=True,
        out_norms=True,
        activation="gelu",
        scaled_embeddings=True,
        tied=True,
        soft_cap=True,
        experts=_experts,
        layers=_layers,
        keys=_keys,
        neutral=dict.fromkeys(
            ("num_experts", "top_k_experts", "moe_intermediate_size",  # without `enable_moe_block`
             "use_double_wide_mlp", "vocab_size_per_layer_input", "num_global_key_value_heads", "global_head_dim")
        ),
        wholes={
            "Gemma4ForConditionalGeneration": Whole("gemma4", _SIZES, tower=tower),
            "Gemma4UnifiedForConditionalGeneration": Whole("gemma4_unified", _UNIFIED),
        },
        expert_names=ExpertNames("router.proj", "experts"),
        assistants=("gemma4_assistant", "gemma4_unified_assistant"),
        gguf=InGGUF(
            "gemma4",
            names={
                "post_norm": "post_per_layer_input_norm",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            },
            experts=ExpertMetadata(more={"beside": True}),
            fields=first_of,
            layers=_in_gguf,
            own_windows=True,
            assistant="gemma4-assistant",
        ),
    ),
}  # fmt: skip
