"""Phi-3 and Phi-4: Llama with fewer, larger matrices, and two rotary embeddings, for short and for long contexts. Phi-1
to Phi-2: LayerNorm, biases everywhere, and an MLP without a gate beside attention."""

from __future__ import annotations

from typing import Any

from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields
from draftwing.models.positions import rope_fields

_TRAINED = 4096  # positions, where a config does not say


def _keys(fields: Fields) -> dict[str, Any]:
    scaling, key = rope_fields(fields), "original_max_position_embeddings"
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise scaling.unsupported("rope_type", kind)
    found = (fields.get(key), scaling.get(key), _TRAINED)
    return {key: next(one for one in found if one is not None)}


_OLDER = {  # what Llama calls otherwise
    "self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
}  # fmt: skip
FAMILIES = {
    "PhiForCausalLM": Family(
        "phi",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        eps=1e-5,
        eps_key="layer_norm_eps",
        centred=True,
        norm_bias=True,
        parallel=True,
        activation="ungated_gelu",
        sliding_window=None,
        turns_parts=True,
        rotary=0.5,
        neutral={"qk_layernorm": (False,)},
        layer_names=_OLDER,
        final_norm="model.final_layernorm",
        gguf=InGGUF(
            "phi2",
            top_names={f"output_norm.{part}": f"model.final_layernorm.{part}" for part in ("weight", "bias")},
        ),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        o_bias=False,
        eps=1e-5,
        sliding_window=0,
        turns_parts=True,
        fused_qkv=True,
        fused_mlp=True,
        keys=_keys,
        neutral={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
        gguf=InGGUF("phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, longrope=True),
    ),
}
