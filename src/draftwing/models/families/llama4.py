"""Llama 4: attention within chunks in most layers, others that turn nothing and scale queries, and experts whose inputs
are scaled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import NOPE, RopeConfig
from draftwing.models.families.smollm3 import nope_layers
from draftwing.models.family import ATTENTION, UNSAID, ExpertMetadata, ExpertNames, Family, InGGUF, Whole
from draftwing.models.fields import LARGEST, WIDEST, Fields, max_experts
from draftwing.ops.experts.routing import Routing

_CHUNKED = "chunked_attention"
_WITHOUT_NORMS = 128  # experts
_TUNING = "attn_temperature_tuning"  # a number in older configs


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads the width of MLPs, which that of experts is named like."""
    fields.check("moe_intermediate_size", ())
    return {
        "moe_intermediate_size": fields.whole("intermediate_size", high=WIDEST, default=8192),
        "intermediate_size": fields.whole("intermediate_size_mlp", high=WIDEST, default=16384),
    }


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    if fields.whole("num_experts_per_tok", default=1) != 1:
        raise fields.unsupported("num_experts_per_tok", fields.get("num_experts_per_tok"))
    count, ffn = fields.whole("num_local_experts", high=max_experts(layers)), fields.whole("moe_intermediate_size")
    return ExpertConfig(count, Routing(1), ffn, shared=ffn, scales_inputs=True)


def _dense_layers(fields: Fields, layers: int) -> Collection[int]:
    """Returns all but `moe_layers`, else all but one in so many."""
    step, named = fields.whole("interleave_moe_layer_step", default=1), fields.get("moe_layers")
    if named is None:
        return {i for i in range(layers) if (i + 1) % step}
    if not isinstance(named, list) or not all(type(one) is int and 0 <= one < layers for one in named):
        raise fields.unlike("moe_layers", f"a list of numbers of layers below {layers}")
    return set(range(layers)) - set(named)


def _other_rope(fields: Fields) -> RopeConfig:
    """Returns what scales queries of layers that turn nothing."""
    tuned = fields.get(_TUNING)
    if (tuned is None and fields.has(_TUNING)) or type(tuned) not in (type(None), bool, int):
        raise fields.unlike(_TUNING, "true or false")
    scale, floor = fields.number("attn_scale", 0, 1e3, 0.1), fields.whole("floor_scale", 1, LARGEST, 8192)
    if not (True if tuned is None else tuned):
        return NOPE
    return replace(NOPE, query_beta=scale, query_shift=1, original_max_positions=floor)


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    attention = layer.mixer
    assert isinstance(attention, AttentionConfig)
    chunk = 0
    if not fields.has("attention_chunk_size") or fields.get("attention_chunk_size") is not None:
        chunk = fields.whole("attention_chunk_size", high=1 << 40, default=8192)
    nope = nope_layers(fields, (0,) * count)
    kinds = fields.texts("layer_types") or [ATTENTION if i in nope or not chunk else _CHUNKED for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {ATTENTION, _CHUNKED}:
        raise fields.unlike("layer_types", f"{ATTENTION} or {_CHUNKED} for each of {count} layers")
    if _CHUNKED in kinds and not chunk:
        raise fields.unlike("attention_chunk_size", f"a number of positions, for layers with {_CHUNKED}")
    norms = fields.flag("use_qk_norm", True)
    turned = replace(attention, qk_norm=norms, norms_after=norms, bare_norms=norms)
    scaled = replace(attention, rope=1, scaled_queries=_other_rope(fields).query_beta > 0)
    mixers = [scaled if i in nope else turned for i in range(count)]
    return tuple(
        replace(layer, mixer=replace(mixer, chunk=chunk if kind == _CHUNKED else 0))
        for mixer, kind in zip(mixers, kinds, strict=False)
    )


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Files say nothing of chunks, of norms, of layers that turn nothing and of scales: all published models have those
    that a config has by default, but that one with 128 experts has no norms."""
    fields.check("attention.sliding_window", (8192,))
    fields.get("interleave_moe_layer_step")  # as tensors have it
    return _layers(fields.overruled({"use_qk_norm": fields.get("expert_count") != _WITHOUT_NORMS}), layer, count)


FAMILIES = {
    "Llama4ForCausalLM": Family(
        "llama4_text",
        mlp_bias=False,
        head_dim=128,
        theta=500000.0,
        eps=1e-5,
        rope_interleaved=True,
        experts=_experts,
        dense_layers=_dense_layers,
        layers=_layers,
        other_rope=_other_rope,
        keys=_keys,
        across=True,
        neutral={"for_llm_compressor": None},
        wholes={"Llama4ForConditionalGeneration": Whole("llama4", {})},
        expert_names=ExpertNames("feed_forward.router", "feed_forward.experts", shared="feed_forward.shared_expert"),
        gguf=InGGUF(
            "llama4",
            layers=_in_gguf,
            own_windows=True,
            experts=ExpertMetadata((UNSAID,), shared=True, more={"scales_inputs": True}),
        ),
        layer_names={f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    ),
}
