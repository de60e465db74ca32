"""OLMo: LayerNorm without weights; OLMo 2 and 3: norms behind each part alone, and norms of all queries and of all
keys; OLMoE, with experts; FlexOlmo, with both; OLMo Hybrid, with delta nets that may turn values round, of which norms
stand in front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.layers.config import LayerConfig
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    RECURRENT,
    ExpertMetadata,
    Family,
    InGGUF,
    layers_by_kind,
    renamed,
    softmax_experts,
)
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import rope_fields

_THETA = 5e5  # of OLMo 3
_OLMO: dict[str, Any] = {
    "qk_norm": "whole", "wide_norms": True, "in_norms": False, "out_norms": True, "eps": 1e-5,
}  # fmt: skip


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    return softmax_experts(fields, layers, "num_experts", "intermediate_size", fields.flag("norm_topk_prob"))


def _keys(fields: Fields) -> dict[str, Any]:
    """Refuses another base, which some read of layers with a window alone, and others of none."""
    if fields.get("rope_parameters") is None:
        fields.check("rope_theta", (_THETA,))
    return {}


def _hybrid_layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns delta nets with norms in front of each part, and in every fourth layer, or as the config says, attention
    with norms behind."""
    heads = fields.whole("linear_num_key_heads", high=WIDEST, default=fields.whole("num_attention_heads", high=WIDEST))
    key_dim = fields.whole("linear_key_head_dim", high=WIDEST, default=int(0.75 * layer.hidden / heads))
    net = DeltaNetConfig(
        heads,
        fields.whole("linear_num_value_heads", high=WIDEST, default=fields.whole("num_attention_heads", high=WIDEST)),
        key_dim,
        fields.whole("linear_value_head_dim", high=WIDEST, default=2 * key_dim),
        fields.whole("linear_conv_kernel_dim", high=MOST_TAPS, default=4),
        by_part=True,
        reach=1 + fields.flag("linear_allow_neg_eigval", True),
        eps=1e-5,
    )
    kinds = [ATTENTION if i % 4 == 3 or i == count - 1 < 3 else RECURRENT for i in range(count)]
    made = layers_by_kind(fields, layer, kinds, {ATTENTION: layer.mixer, RECURRENT: net})
    return tuple(replace(one, in_norms=True, out_norms=False) if one.mixer is net else one for one in made)


def _turns(fields: Fields) -> bool:
    """Returns whether attention turns its heads: not where the base is null, as it is of published models."""
    given, key = rope_fields(fields), "rope_theta"
    said = next((one for one in (given, fields) if one.has(key)), None)
    return said is None or said.get(key) is not None


_NORMS = {  # of delta nets' layers
    ".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm.",
}  # fmt: skip
FAMILIES = {
    "OlmoHybridForCausalLM": Family(
        "olmo_hybrid",
        **_OLMO | {"eps": 1e-6},
        sliding_window=None,
        turns=_turns,
        layers=_hybrid_layers,
        apart=renamed(_NORMS),
        neutral=dict.fromkeys(
            f"linear_{key}" for key in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
        ),
        layer_names={
            "linear_attn.in_proj_z": "linear_attn.g_proj",
            "linear_attn.in_proj_b": "linear_attn.b_proj",
            "linear_attn.in_proj_a": "linear_attn.a_proj",
            "linear_attn.out_proj": "linear_attn.o_proj",
            "linear_attn.norm": "linear_attn.o_norm",
        },
    ),
    "OlmoForCausalLM": Family(
        "olmo",
        centred=True,
        bare_norms=True,
        eps=1e-5,
        clips=True,
        sliding_window=None,
        gguf=InGGUF("olmo", permuted=True),
    ),
    "Olmo2ForCausalLM": Family("olmo2", **_OLMO, gguf=InGGUF("olmo2")),
    "OlmoeForCausalLM": Family(
        "olmoe",
        qk_norm="whole",
        eps=1e-5,
        experts=_experts,
        gguf=InGGUF("olmoe", experts=ExpertMetadata(grouped=True, renormalised=False, as_mlp=True)),
    ),
    "FlexOlmoForCausalLM": Family("flex_olmo", **_OLMO | {"eps": 1e-6}, theta=_THETA, experts=_experts),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        **_OLMO,
        sliding_window=4096,
        window_pattern=4,
        pattern_key=False,
        theta=_THETA,
        local_theta=0.0,
        keys=_keys,
        gguf=InGGUF("olmo2", when=lambda file, fields: fields.whole("attention.sliding_window", 0, 2**40, 0) > 0),
    ),
}
