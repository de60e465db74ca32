"""InternLM3: Llama, with keys of its own for biases."""

from __future__ import annotations

from draftwing.models.family import Family

FAMILIES = {
    "InternLM3ForCausalLM": Family(
        "internlm3",
        o_bias="mlp_bias",
        eps=1e-5,
        head_dim=128,
        sliding_window=None,
        keys=lambda fields: fields.renamed({"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
    ),
}
