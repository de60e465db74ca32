"""InternLM3: Llama, with keys of its own for biases; InternLM2: with one matrix of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields

_TOP = {"model.tok_embeddings.": "model.embed_tokens.", "model.output.": "lm_head."}


def _keys(fields: Fields) -> dict[str, Any]:
    return {"attention_bias": fields.flag("bias", True)}


def _named(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    for theirs, ours in _TOP.items():
        name = name.replace(theirs, ours)
    return [(name, value)]


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers with a matrix of each, as converters make them."""
    assert isinstance(layer.mixer, AttentionConfig)
    bias = "blk.0.attn_q.bias" in file.tensors
    return (replace(layer, mixer=replace(layer.mixer, fused=False, qkv_bias=bias)),) * count


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
        keys=_keys,
        apart=_named,
        layer_names={
            "self_attn.qkv_proj": "attention.wqkv",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        gguf=InGGUF("internlm2", layers=_in_gguf, permuted=True),
    ),
}
