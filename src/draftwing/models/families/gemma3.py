"""Gemma 1; Gemma 2, with capped scores and logits, windows in every other layer, and norms before and after each part;
VaultGemma, the same with norms before alone; and Gemma 3, with norms before and after and five layers with a window for
each without one."""

from __future__ import annotations

from typing import Any

from draftwing.layers.attention import AttentionConfig
from draftwing.models.families.gemma_images import mean_tower
from draftwing.models.family import Family, InGGUF, Whole
from draftwing.models.fields import Fields

_OF_27B = 46, 62  # layers of the models whose scale is not that of their heads' size, which GGUF files do not say


def _scalar(attention: AttentionConfig, hidden: int, layers: int) -> int:
    return hidden // attention.heads if layers in _OF_27B else attention.head_dim


_SIZES = {
    "head_dim": 256, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 262208,
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    """Old files name the exact activation, for which everybody takes the approximation with tanh."""
    named = fields.get("hidden_act") or fields.get("hidden_activation") or "gelu"
    return {"hidden_activation": "gelu_pytorch_tanh" if named == "gelu" else named}


def _capped(fields: Fields) -> dict[str, Any]:
    """Says what Gemma 2 is where a config, or a file from before the keys, has none of them."""
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {key: value for key, value in usual.items() if not fields.has(key)}


def _metadata(fields: Fields) -> Fields:
    window = {} if fields.has("attention.sliding_window") else {"attention.sliding_window": 4096}
    return fields.overruled(_capped(fields) | window)


_GEMMA: dict[str, Any] = {
    "head_dim": 256, "wide_norms": True, "norm_offset": 1.0, "activation": "gelu", "scaled_embeddings": True,
    "tied": True,
}  # fmt: skip
_GEMMA2: dict[str, Any] = _GEMMA | {
    "sliding_window": 4096, "window_pattern": 2, "pattern_key": False, "attention_scalar": 256, "score_cap": True,
    "soft_cap": True, "keys": _capped,
    "neutral": {"hidden_act": None, "sliding_window_size": None},  # beside keys that are read
}  # fmt: skip
FAMILIES = {
    "GemmaForCausalLM": Family("gemma", **_GEMMA, keys=_keys, neutral={"hidden_act": None}, gguf=InGGUF("gemma")),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        **_GEMMA2,
        out_norms=True,
        gguf=InGGUF("gemma2", scalar=_scalar, fields=_metadata),
    ),
    "VaultGemmaForCausalLM": Family(
        "vaultgemma", **_GEMMA2, layer_names={"post_attention_layernorm": "pre_feedforward_layernorm"}
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        **_GEMMA,
        qk_norm=True,
        sliding_window=4096,
        window_pattern=6,
        theta=1e6,
        local_theta=1e4,
        out_norms=True,
        attention_scalar=256,
        soft_cap=True,
        wholes={"Gemma3ForConditionalGeneration": Whole("gemma3", _SIZES, tower=mean_tower)},
        gguf=InGGUF("gemma3", scalar=_scalar, windowless=True),
    ),
}
