"""Nemotron-4 and Minitron: Llama with LayerNorm, whose weights are stored less 1, and MLPs without a gate."""

from __future__ import annotations

from draftwing.models.family import Family, InGGUF

FAMILIES = {
    "NemotronForCausalLM": Family(
        "nemotron",
        eps=1e-5,
        eps_key="norm_eps",
        centred=True,
        norm_bias=True,
        norm_offset=1.0,
        activation="relu2",
        sliding_window=None,
        turns_parts=True,
        rotary=0.5,
        gguf=InGGUF("nemotron"),
    ),
}
