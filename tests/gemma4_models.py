"""Small random Gemma 4 models of transformers: as the 31B, as E2B, and as the 26B-A4B."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

VOCAB = 101
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0, "max_position_embeddings": 256,
    "sliding_window": 20, "final_logit_softcapping": 3.0, "bos_token_id": None, "eos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "dense": ALIKE,
    "per-layer": {
        "num_key_value_heads": 1, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "num_hidden_layers": 5, "final_logit_softcapping": None,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "experts": {
        **ALIKE, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "layer_types": None,
    },
}  # fmt: skip


def reference(kind: str, **overrides: Any) -> Any:
    """Of transformers, in float32, with random weights, and values of norms and factors that matter."""
    settings = {**SIZES, **copy.deepcopy(KINDS[kind]), **overrides}
    if "vocab_size" in overrides:
        settings["vocab_size_per_layer_input"] = overrides["vocab_size"]
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings)).float().eval()
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("inv_freq", "embed_scale")):
                continue
            if any(part in name for part in ("norm", "scale", "scalar")):
                values.uniform_(0.5, 1.5)
            else:
                values.normal_(0, 0.15)
    return model
