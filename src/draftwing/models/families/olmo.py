"""OLMo 2 and 3: norms behind each part alone, and norms of all queries and of all keys; OLMoE, with experts;
FlexOlmo, with both."""

from __future__ import annotations

from typing import Any

from draftwing.layers.config import ExpertConfig
from draftwing.models.family import ExpertMetadata, Family, InGGUF, softmax_experts
from draftwing.models.fields import Fields

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


FAMILIES = {
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
