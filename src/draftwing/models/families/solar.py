"""Solar Open: the experts of GLM-4.5 in every layer, and Llama's attention."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.deepseek import NAMES, experts
from draftwing.models.family import Family
from draftwing.models.fields import Fields

_DEFAULTS = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}


def _keys(fields: Fields) -> dict[str, Any]:
    said = {key: fields.whole(key, default=value) for key, value in _DEFAULTS.items()}
    return {**said, "intermediate_size": said["moe_intermediate_size"]}  # of MLPs, which no layer has


FAMILIES = {
    "SolarOpenForCausalLM": Family(
        "solar_open",
        o_bias=False,
        eps=1e-5,
        head_dim=128,
        theta=1e6,
        sliding_window=None,
        keys=_keys,
        experts=experts,
        expert_names=NAMES,
        neutral={"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    ),  # GGUF: as GLM-4.5
}
