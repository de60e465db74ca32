"""Command R and R7B: LayerNorm, and attention beside the MLP; R7B with windows, where other layers turn nothing."""

from __future__ import annotations

from typing import Any

from draftwing.models.family import Family, InGGUF, Whole, unscaled, without_window
from draftwing.models.fields import Fields

_SCALE = "logit_scale"  # which others divide by


def _keys(fields: Fields) -> dict[str, Any]:
    return {**unscaled(fields), "logits_scaling": 1 / fields.number(_SCALE, 1e-3, 1e3, 0.0625)}


def _metadata(fields: Fields) -> Fields:
    return fields.overruled({_SCALE: 1 / fields.number(_SCALE, 1e-3, 1e3, 1.0)})


_COHERE: dict[str, Any] = {
    "centred": True, "parallel": True, "rope_interleaved": True, "multipliers": True, "tied": True, "keys": _keys,
    "eps": 1e-5, "eps_key": "layer_norm_eps",
    "neutral": {
        "use_parallel_block": (True,), "use_gated_activation": (True,), "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        **dict.fromkeys(("layer_switch", "use_parallel_embedding", "use_embedding_sharing")),
    },
}  # fmt: skip
FAMILIES = {
    "Cohere2ForCausalLM": Family(
        "cohere2",
        **_COHERE,
        sliding_window=4096,
        window_pattern=4,
        nope=without_window,
        wholes={
            "AyaVisionForConditionalGeneration": Whole("aya_vision", {}, "cohere2"),
            "Cohere2VisionForConditionalGeneration": Whole("cohere2_vision", {}),
        },
        gguf=InGGUF("cohere2", fields=_metadata),
    ),
    "CohereForCausalLM": Family(
        "cohere",
        **_COHERE,
        theta=5e5,
        wholes={"AyaVisionForConditionalGeneration": Whole("aya_vision", {}, "cohere")},
        gguf=InGGUF("command-r", fields=_metadata),
    ),
}
