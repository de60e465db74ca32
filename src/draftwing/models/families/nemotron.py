"""Nemotron-4 and Minitron: Llama with LayerNorm, whose weights are stored less 1, and MLPs without a gate; Jais 2, the
same with biases of all matrices."""

from __future__ import annotations

from typing import Any

from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields


def _biased(fields: Fields) -> dict[str, Any]:
    return {key: fields.flag(key, True) for key in ("attention_bias", "mlp_bias")}


_NORMS: dict[str, Any] = {"eps": 1e-5, "centred": True, "norm_bias": True, "activation": "relu2"}
FAMILIES = {
    "Jais2ForCausalLM": Family("jais2", **_NORMS, eps_key="layer_norm_eps", keys=_biased, gguf=InGGUF("jais2")),
    "NemotronForCausalLM": Family(
        "nemotron",
        **_NORMS,
        eps_key="norm_eps",
        norm_offset=1.0,
        sliding_window=None,
        turns_parts=True,
        rotary=0.5,
        gguf=InGGUF("nemotron"),
    ),
}
