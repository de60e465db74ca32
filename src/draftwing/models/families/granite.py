"""Granite 3: Llama's layers, with factors of embeddings, of what layers add, of scores and of logits."""

from __future__ import annotations

from typing import Any

from draftwing.models.family import Family, InGGUF, query_scalar
from draftwing.models.fields import Fields


def _keys(fields: Fields) -> dict[str, Any]:
    return {"query_pre_attn_scalar": query_scalar(fields, "attention_multiplier", 1.0)}


_GGUF = InGGUF("granite", permuted=True)
FAMILIES = {"GraniteForCausalLM": Family("granite", attention_scalar=1, multipliers=True, keys=_keys, gguf=_GGUF)}
