"""Gemma 1; and Gemma 3, with five layers with a window for each without one, and norms before and after each part."""

from __future__ import annotations

from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.models.family import Family, InGGUF, Whole
from draftwing.models.fields import Fields

_OF_27B = 62  # layers of the one model whose scale is not that of its heads' size, which GGUF files do not say


def _scalar(attention: AttentionConfig, hidden: int, layers: int) -> int:
    return hidden // attention.heads if layers == _OF_27B else attention.head_dim


_SIZES = {
    "head_dim": 256, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 262208,
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    """Old files name the exact activation, for which everybody takes the approximation with tanh."""
    named = fields.get("hidden_act") or fields.get("hidden_activation") or "gelu"
    return {"hidden_activation": "gelu_pytorch_tanh" if named == "gelu" else named}


FAMILIES = {
    "GemmaForCausalLM": Family(
        "gemma",
        head_dim=256,
        wide_norms=True,
        norm_offset=1.0,
        activation="gelu",
        scaled_embeddings=True,
        tied=True,
        keys=_keys,
        neutral={"hidden_act": None},
        gguf=InGGUF("gemma"),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        qk_norm=True,
        head_dim=256,
        sliding_window=4096,
        window_pattern=6,
        theta=1e6,
        local_theta=1e4,
        wide_norms=True,
        norm_offset=1.0,
        out_norms=True,
        activation="gelu",
        scaled_embeddings=True,
        attention_scalar=256,
        tied=True,
        neutral={"sliding_window_pattern": None},  # beside `layer_types`
        wholes={"Gemma3ForConditionalGeneration": Whole("gemma3", _SIZES)},
        gguf=InGGUF("gemma3", scalar=_scalar),
    ),
}
