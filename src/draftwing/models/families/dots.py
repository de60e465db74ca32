"""dots.llm1: the experts of DeepSeek-V3, and attention with norms of heads."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.deepseek import IN_GGUF, NAMES, dense_layers, experts
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import WIDEST, Fields


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads `noaux_tc`, which files have under two keys, as sigmoids, and defaults that are not DeepSeek's."""
    fields.check("scoring_func", ("sigmoid", "noaux_tc"))
    return {
        "scoring_func": "sigmoid",
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "moe_intermediate_size": fields.whole("moe_intermediate_size", high=WIDEST, default=1408),
        "first_k_dense_replace": fields.whole("first_k_dense_replace", 0, default=0),
        "use_sliding_window": not fields.has("sliding_window") or fields.get("sliding_window") is not None,
        "max_window_layers": fields.whole("max_window_layers", 0, default=62),
    }


FAMILIES = {
    "Dots1ForCausalLM": Family(
        "dots1",
        qk_norm=True,
        sliding_window=4096,
        window_switch="upper",
        keys=_keys,
        experts=experts,
        dense_layers=dense_layers,
        expert_names=NAMES,
        gguf=InGGUF("dots1", experts=IN_GGUF),
    ),
}
