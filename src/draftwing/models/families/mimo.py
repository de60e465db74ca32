"""MiMo: as Qwen2, with prediction layers, whose names those of heads trained here have, too."""

from __future__ import annotations

from draftwing.models.family import Family

FAMILIES = {
    "MiMoForCausalLM": Family(
        "mimo",
        qkv_bias=True,
        o_bias=False,
        sliding_window=4096,
        window_switch="upper",
        neutral={"qkv_bias": (True,)},
        predicts="mtp_layers",
    ),
}
