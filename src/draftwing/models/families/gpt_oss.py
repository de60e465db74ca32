"""gpt-oss: windows in every other layer, sinks, and experts in MXFP4 with clamped gates."""

from __future__ import annotations

from dataclasses import replace

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.family import (
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    UNSAID,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
    softmax_experts,
)
from draftwing.models.fields import Fields
from draftwing.ops.experts.spec import SWIGLU_ALPHA

_LIMIT = 7.0  # of the activation, which GGUF files do not say


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    if fields.number("swiglu_alpha", 0, 1e3, SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise fields.unlike("swiglu_alpha", str(SWIGLU_ALPHA))
    found = softmax_experts(fields, layers, "num_local_experts", "intermediate_size", router_bias=True, bias=True)
    return replace(found, limit=fields.number("swiglu_limit", 1e-3, 1e6, _LIMIT))


FAMILIES = {
    "GptOssForCausalLM": Family(
        "gpt_oss",
        head_dim=64,
        sliding_window=128,
        window_pattern=2,
        pattern_key=False,
        theta=150000.0,
        eps=1e-5,
        bias=True,
        scaled=True,
        sinks=True,
        wide_norms=True,
        experts=_experts,
        neutral={"experts_per_token": None, "initial_context_length": None},
        expert_names=ExpertNames("mlp.router"),
        interleaved=True,
        gguf=InGGUF(
            "gpt-oss",
            names={"post_attention_norm": "post_attention_layernorm"},
            experts=ExpertMetadata(
                gating=(UNSAID, SOFTMAX, SOFTMAX_OF_CHOSEN),
                more={"router_bias": True, "bias": True, "limit": _LIMIT},
            ),
            yarn_truncates=False,  # as the model was trained; files do not say
        ),
    ),
}
