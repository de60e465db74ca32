"""InternLM3: Llama, with keys of its own for biases; InternLM2: with one matrix of queries, keys and values."""

from __future__ import annotations

from draftwing.models.family import Family, InGGUF, renamed

_TOP = {"model.tok_embeddings.": "model.embed_tokens.", "model.output.": "lm_head."}


FAMILIES = {
    "InternLM3ForCausalLM": Family(
        "internlm3",
        o_bias="mlp_bias",
        eps=1e-5,
        head_dim=128,
        sliding_window=None,
        keys=lambda fields: fields.renamed({"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
    ),
    "InternLM2ForCausalLM": Family(
        "internlm2",
        mlp_bias=False,
        sliding_window=None,
        fused_qkv="heads",
        keys=lambda fields: {"attention_bias": fields.flag("bias", True)},
        apart=renamed(_TOP),
        layer_names={
            "self_attn.qkv_proj": "attention.wqkv",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        gguf=InGGUF("internlm2", permuted=True),
    ),
}
