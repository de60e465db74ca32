"""Families with latent attention: what their configs say of it, and the matrix that it takes apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf_file import dequantized
from draftwing.layers.config import LayerConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.rope import yarn_attention_factor
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import rope_fields
from draftwing.ops.types import BlockRows, MXRows, QuantizedRows
from draftwing.parallel.cut import Cut

Value = TypeVar("Value", bound=Tensor | BlockRows | QuantizedRows | MXRows)
JOINED, KEYS, VALUES = ".kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight"


def latent_layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers of DeepSeek's models and their like; layer: one with experts."""

    def size(key: str, low: int = 1, default: int | None = None) -> int:
        return fields.whole(key, low, WIDEST, default)

    assert layer.experts is not None
    # Relatives differ in what they take for granted.
    fields.number("routed_scaling_factor", 1e-3, 1e3)
    groups = ("n_group", "topk_group") if layer.experts.routing.sigmoid else ()
    for key in (*groups, *(() if fields.texts("mlp_layer_types") else ("first_k_dense_replace",))):
        fields.whole(key, 0)
    scaling = rope_fields(fields)
    factor, all_dim = 1.0, scaling.number("mscale_all_dim", 0, 1e3, 0.0)
    if scaling.text("rope_type", scaling.text("type", "default")) != "default" and all_dim:
        factor = yarn_attention_factor(scaling.number("factor", 1e-3, 1e6), all_dim) ** 2
    mixer = LatentAttentionConfig(
        size("num_attention_heads"),
        size("qk_nope_head_dim"),
        size("qk_rope_head_dim"),
        size("v_head_dim"),
        size("kv_lora_rank"),
        size("q_lora_rank", 0, 0),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias"),
        factor=factor,
    )
    return (replace(layer, mixer=mixer),) * count


# What these families have in common, as `Family` has it.
LATENT: dict[str, Any] = {
    "experts": "deepseek",
    "layers": latent_layers,
}


def apart(
    tensors: Iterable[tuple[str, Value]], mixer: LatentAttentionConfig, cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, Value | Tensor]]:
    """Yields (name, value) of every tensor, or of its `parts`. mixer: of the whole model.  cuts: what this rank has of
    parts, by their names."""
    for name, value in tensors:
        if not name.endswith(JOINED):
            yield name, value
            continue
        for own, part in parts(name, value, mixer):
            assert isinstance(part, Tensor)
            yield own, cuts[own].of_tensor(own, part) if own in cuts else part


def parts(name: str, value: Value, mixer: LatentAttentionConfig) -> Iterator[tuple[str, Value | Tensor]]:
    """Yields (name, value) of a tensor. In place of the matrix that makes keys and values of latents: of those that
    make latents' counterparts of queries [heads * latent, plain], and values of latents [heads * values, latent].
    mixer: of the whole model."""
    if not name.endswith(JOINED):
        yield name, value
        return
    whole = _dense(value)
    expected = mixer.heads * (mixer.plain + mixer.values), mixer.latent
    if whole.shape != expected:
        raise CheckpointError(f"{name}: expected shape {list(expected)}, found {list(whole.shape)}")
    keys, values = _by_head(whole, mixer)
    own = name.removesuffix(JOINED)
    yield own + KEYS, keys.transpose(1, 2).reshape(-1, mixer.plain)
    if isinstance(value, BlockRows):  # whose rows stay as they are
        yield own + VALUES, value._replace(data=_by_head(value.data, mixer)[1].flatten(0, 1))
    else:
        yield own + VALUES, values.flatten(0, 1)


def _by_head(whole: Tensor, mixer: LatentAttentionConfig) -> tuple[Tensor, Tensor]:
    """[heads * (plain + values), n] -> what is each head's for keys, and for values, [heads, .., n]"""
    keys, values = whole.unflatten(0, (mixer.heads, -1)).split((mixer.plain, mixer.values), 1)
    return keys, values


def _dense(value: Tensor | BlockRows | QuantizedRows | MXRows) -> Tensor:
    if isinstance(value, BlockRows):
        return torch.from_numpy(dequantized(value.data.numpy(), value.kind))
    return value if isinstance(value, Tensor) else value.dense(torch.float32)
