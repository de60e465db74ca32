"""ChatGLM3 and GLM-4-9B as their own code has them: the arithmetic of GLM-4, with other names and fewer matrices.
Files of both kinds are one architecture in GGUF."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.glm import DENSE
from draftwing.models.family import Family, InGGUF, renamed
from draftwing.models.fields import WIDEST, Fields, Values

_KEYS = {
    "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size", "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon", "max_position_embeddings": "seq_length",
}  # fmt: skip
_NAMES = {
    "transformer.encoder.": "", ".rotary_pos_emb.": ".rotary_emb.", "model.final_layernorm.": "model.norm.",
    "transformer.embedding.word_embeddings.": "embed_tokens.", "model.transformer.output_layer.": "lm_head.",
}  # fmt: skip
_NEUTRAL: dict[str, Values] = {  # what others do
    "add_bias_linear": (False,), "apply_residual_connection_post_layernorm": (False,), "rmsnorm": (True,),
    "post_layer_norm": (True,), "original_rope": (True,), "prefix_projection": (False,), "quantization_bit": (0,),
    "pre_seq_len": (),
    **dict.fromkeys(("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
                     "fp32_residual_connection", "interleaved_qkv")),
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    heads = fields.whole("num_attention_heads", high=WIDEST)
    shared = fields.whole("multi_query_group_num", high=WIDEST, default=1)
    return fields.renamed(_KEYS) | {
        "num_key_value_heads": shared if fields.flag("multi_query_attention") else heads,
        "head_dim": fields.whole("kv_channels", high=WIDEST, default=128),
        "attention_bias": fields.flag("add_qkv_bias"),
        "rope_theta": 1e4 * fields.number("rope_ratio", 1e-3, 1e6, 1.0),
    }


_OWN: dict[str, Any] = DENSE | {
    "eps": 1e-5, "fused_qkv": True, "keys": _keys, "apart": renamed(_NAMES), "neutral": _NEUTRAL,
    "layer_names": {
        "self_attn.qkv_proj": "self_attention.query_key_value", "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
    },
}  # fmt: skip
FAMILIES = {
    "ChatGLMModel": Family(
        "chatglm",
        **_OWN,
        gguf=InGGUF("chatglm", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
    "ChatGLMForConditionalGeneration": Family("chatglm", **_OWN),
}
