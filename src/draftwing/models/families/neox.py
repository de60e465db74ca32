"""GPT-NeoX and Pythia: attention beside an MLP that has no gate, each behind a LayerNorm of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields

_BESIDE = "use_parallel_residual"
_PREFIX = "model.gpt_neox."
_TOP = {"embed_in": "embed_tokens", "final_layer_norm": "norm"}


def _keys(fields: Fields) -> dict[str, Any]:
    return {
        "rope_theta": fields.number("rotary_emb_base", 1, 1e15, 10000.0),
        "partial_rotary_factor": fields.number("rotary_pct", 0, 1, 0.25),
        "num_key_value_heads": None,
    }


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    beside = fields.flag(_BESIDE, True)
    return (replace(layer, parallel=beside, own_norm=beside),) * count


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return _layers(fields, layer, count)


def _apart(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Gives tensors the names that they have in Llama, and leaves masks out."""
    if name.endswith((".attention.bias", ".attention.masked_bias")):
        return []
    if name.startswith("model.embed_out."):
        return [(name.replace("model.embed_out", "lm_head"), value)]
    own, _, suffix = name.removeprefix(_PREFIX).removeprefix("model.").rpartition(".")
    return [(f"model.{_TOP.get(own, own)}.{suffix}", value)]


FAMILIES = {
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        mlp_bias=True,
        bias=True,
        eps=1e-5,
        eps_key="layer_norm_eps",
        centred=True,
        norm_bias=True,
        activation="ungated_exact_gelu",
        sliding_window=None,
        turns_parts=True,
        rotary=0.25,
        fused_qkv="heads",
        keys=_keys,
        layers=_layers,
        layer_names={
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        apart=_apart,
        gguf=InGGUF("gptneox", names={"attn_qkv": "self_attn.qkv_proj"}, layers=_in_gguf),
    ),
}
