"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from draftwing.models.family import Family, InGGUF

FAMILIES = {
    "SeedOssForCausalLM": Family(
        "seed_oss",
        bias=True,
        o_bias="attention_out_bias",
        head_dim=128,
        gguf=InGGUF("seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    ),
}
