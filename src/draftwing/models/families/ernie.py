"""ERNIE 4.5, dense: Llama whose heads turn elements that lie beside each other."""

from __future__ import annotations

from draftwing.models.family import Family, InGGUF

FAMILIES = {
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        head_dim=128,
        eps=1e-5,
        theta=5e5,
        tied=True,
        rope_interleaved=True,
        gguf=InGGUF("ernie4_5"),
    ),
}
