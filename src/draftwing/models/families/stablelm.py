"""StableLM: Llama with LayerNorm, perhaps attention beside the MLP. Not 12B, whose heads have norms of their own."""

from __future__ import annotations

from dataclasses import replace

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import Fields


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return (replace(layer, parallel=fields.flag("use_parallel_residual")),) * count


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Files say it of all, and those without a second norm are what it is true of."""
    if (norm := "blk.0.attn_q_norm.weight") in file.tensors:
        raise CheckpointError(f"{file.path}: {norm} (a norm for each head) is not supported")
    fields.flag("use_parallel_residual")
    return (replace(layer, parallel="blk.0.ffn_norm.weight" not in file.tensors),) * count


FAMILIES = {
    "StableLmForCausalLM": Family(
        "stablelm",
        qkv_bias="use_qkv_bias",
        o_bias=False,
        eps=1e-5,
        eps_key="layer_norm_eps",
        centred=True,
        norm_bias=True,
        sliding_window=None,
        turns_parts=True,
        rotary=0.25,
        layers=_layers,
        neutral={"qk_layernorm": (False,)},
        gguf=InGGUF("stablelm", layers=_in_gguf),
    ),
}
