"""Falcon: attention beside an MLP that has no gate, few key heads, of 40B and Falcon 2 with groups of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.models.family import Family, InGGUF, renamed
from draftwing.models.fields import WIDEST, Fields

_GROUPED, _NORMS = "new_decoder_architecture", "num_ln_in_parallel_attn"
_NAMES = {
    "model.transformer.word_embeddings.": "model.embed_tokens.", "model.transformer.h.": "model.layers.",
    "model.transformer.ln_f.": "model.norm.", ".ln_attn.": ".input_layernorm.",
    ".ln_mlp.": ".post_attention_layernorm.",
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("alibi", (False,))
    heads = fields.whole("num_attention_heads", high=WIDEST)
    shared = fields.whole("num_kv_heads", high=WIDEST, default=heads)
    grouped, of_all = fields.flag(_GROUPED), fields.flag("multi_query", True)
    width = 4 * fields.whole("hidden_size", high=WIDEST)
    return {
        "num_key_value_heads": shared if grouped else 1 if of_all else heads,
        "intermediate_size": fields.whole("ffn_hidden_size", high=WIDEST, default=width),
        "hidden_act": fields.text("activation", "gelu"),
        "max_position_embeddings": fields.whole("max_position_embeddings", default=2048),
    }


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    grouped, norms = fields.flag(_GROUPED), fields.whole(_NORMS, 1, 2, 2)
    beside = fields.flag("parallel_attn", True) or grouped
    return (replace(layer, parallel=beside, own_norm=grouped and norms == 2),) * count


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers whose attention and MLP read the same. In files of others norms have each other's names."""
    if (name := "blk.0.attn_norm_2.weight") in file.tensors:
        raise CheckpointError(f"{file.path}: {name} is not supported: expected one norm of a layer; take a folder")
    return (replace(layer, parallel=True),) * count


FAMILIES = {
    "FalconForCausalLM": Family(
        "falcon",
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        centred=True,
        norm_bias=True,
        activation="ungated_exact_gelu",
        tied=True,
        sliding_window=None,
        fused_qkv="heads",
        keys=_keys,
        layers=_layers,
        neutral={"apply_residual_connection_post_layernorm": (False,), "ff_factor": None},
        layer_names={
            "self_attn.qkv_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        apart=renamed(_NAMES),
        gguf=InGGUF("falcon", names={"attn_qkv": "self_attn.qkv_proj"}, layers=_in_gguf),
    ),
}
