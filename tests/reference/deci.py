"""DeciLM, which transformers has not, of its layers of Llama: each of a config of its own, or without one part."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def deci(config: dict[str, Any]) -> LlamaForCausalLM:
    """config: as it is published."""
    kept = {key: value for key, value in config.items() if key not in ("architectures", "block_configs", "model_type")}
    whole = LlamaConfig(**kept | {"intermediate_size": 1, "num_key_value_heads": 1, "pad_token_id": 0})
    model = LlamaForCausalLM(whole)
    for i, block in enumerate(config["block_configs"]):
        own, attention, ffn = deepcopy(whole), block["attention"], block["ffn"]
        if not attention["no_op"]:
            own.num_key_value_heads = config["num_attention_heads"] // attention["n_heads_in_group"]
        if not ffn["no_op"]:
            width = int(2 * ffn["ffn_mult"] * config["hidden_size"] / 3)
            own.intermediate_size = width if width % 256 == 0 else width + 256 - width % 256
        layer = LlamaDecoderLayer(own, i)
        if attention["no_op"]:
            layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
        if ffn["no_op"]:
            layer.mlp, layer.post_attention_layernorm = NoMlp(), nn.Identity()
        model.model.layers[i] = layer
    return model
