"""Bamba: state-space layers (Mamba-2) in place of most attention, each before an MLP."""

from __future__ import annotations

from typing import Any

from draftwing.layers.config import LayerConfig
from draftwing.models.families.granite_hybrid import IN_GGUF, mamba2, nets_in_gguf
from draftwing.models.family import ATTENTION, RECURRENT, Family, InGGUF, layers_by_kind
from draftwing.models.fields import WIDEST, Fields

_ROTARY = 0.5  # which transformers takes, whatever a config says


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("partial_rotary_factor", (_ROTARY,))
    size = fields.whole("hidden_size", high=WIDEST) // fields.whole("num_attention_heads", high=WIDEST)
    fields.check("attn_rotary_emb", (int(size * _ROTARY),))
    return {"num_key_value_heads": fields.whole("num_key_value_heads", high=WIDEST, default=8)}


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    net = mamba2(fields, fields.whole("mamba_expand", high=WIDEST, default=2) * layer.hidden)
    attends = fields.get("attn_layer_indices") or []
    if not isinstance(attends, list) or not all(type(one) is int for one in attends):
        raise fields.unlike("attn_layer_indices", "a list of layer numbers")
    kinds = [ATTENTION if i in attends else RECURRENT for i in range(count)]
    return layers_by_kind(
        fields.overruled({"layer_types": None}), layer, kinds, {ATTENTION: layer.mixer, RECURRENT: net}
    )


FAMILIES = {
    "BambaForCausalLM": Family(
        "bamba",
        eps=1e-5,
        turns_parts=True,
        rotary=_ROTARY,
        keys=_keys,
        layers=_layers,
        layer_names={
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "post_attention_layernorm": "pre_ff_layernorm",
        },
        final_norm="model.final_layernorm",
        gguf=InGGUF(
            "granitehybrid",
            # Granite's files have factors of embeddings.
            when=lambda file, fields: fields.flag("rope.scaling.finetuned") and not fields.has("embedding_scale"),
            names=IN_GGUF,
            top_names={"output_norm.weight": "model.final_layernorm.weight"},
            layers=nets_in_gguf,
            permuted=True,
        ),
        neutral={
            **dict.fromkeys(("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")),
            "mamba_proj_bias": (False,),
        },
    ),
}
