"""Tensors of transformers' classes as published checkpoints have them: InternLM2 and ChatGLM, which are Llama and GLM-4
with fewer matrices and other names, and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def internlm2(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Queries that share a key lie before it and its value."""
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", ".o_proj": ".wo", "self_attn": "attention",
        "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {}
    for name, value in tensors.items():
        ours = name
        for llama, own in names.items():
            ours = ours.replace(llama, own)
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            by_key = [part.view(config.num_key_value_heads, -1, part.shape[1]) for part in parts]
            ours, value = ours.replace("q_proj", "wqkv"), torch.cat(by_key, 1).flatten(0, 1)
        if not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[ours] = value.contiguous()
    return found


def chatglm(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
        "model.layers": "transformer.encoder.layers", "model.norm": "transformer.encoder.final_layernorm",
        "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h", "self_attn.q_proj": "self_attention.query_key_value",
    }  # fmt: skip
    found = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    for name, value in tensors.items():
        ours = name
        for glm, own in names.items():
            ours = ours.replace(glm, own)
        if ".q_proj." in name:
            value = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        if not any(part in name for part in (".k_proj.", ".v_proj.")):
            found[ours] = value.contiguous()
    return found


def gpt2(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Published files have no prefix, and masks."""
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(config.n_layer)}
    return masks | {name.removeprefix("transformer."): value for name, value in tensors.items()}


AS_PUBLISHED = {"internlm2": internlm2, "chatglm": chatglm, "gpt2": gpt2}  # by `model_type` of a published config
