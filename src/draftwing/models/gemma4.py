"""Gemma 4: what its configs say of layers, which differ in heads, windows, rotary embeddings, and in whose keys they
read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING

_PATTERN = 6  # one in so many layers has no window, where `layer_types` does not say
_ROPES = {  # where a config has none
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4_keys(fields: Fields) -> dict[str, Any]:
    """Returns the rotary embeddings of a config that has none. Raises CheckpointError for what is not served."""
    fields.check("use_bidirectional_attention", (False, "vision"))  # "vision": of images' tokens alone
    return {} if fields.get("rope_parameters") is not None else {"rope_parameters": _ROPES}


def gemma4_layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns the layers; layer: one with a window and experts, where there are any."""
    kinds = fields.texts("layer_types") or [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)]
    for kind in set(kinds) - {FULL, SLIDING}:
        raise fields.unsupported("layer_types", kind)
    if len(kinds) != count:
        raise fields.unlike("layer_types", f"one for each of {count} layers")
    kinds = [*kinds[:-1], FULL]  # as the model's own code has it
    shared = fields.whole("num_kv_shared_layers", 0, count - 1, 0)
    wide = shared and fields.flag("use_double_wide_mlp")
    layer = replace(layer, scaled=True, per_layer=_per_layer(fields))
    mixers = [_attention(fields, layer.mixer, kind, i) for i, kind in enumerate(kinds)]
    read = sources(kinds, count - shared)
    return tuple(
        replace(layer, mixer=replace(mixer, kv_from=of), ffn=layer.ffn * (2 if wide and of is not None else 1))
        for mixer, of in zip(mixers, read, strict=True)
    )


def sources(kinds: list[Any], own: int) -> list[int | None]:
    """Returns for each layer whose keys and values it reads: None for the first `own`, then the last of these of its
    kind. Raises CheckpointError where there is none."""
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    if not set(kinds) <= set(last):
        raise CheckpointError(
            f"expected layers of each kind with keys of their own, found none of some among the first {own}"
        )
    return [None if i < own else last[kind] for i, kind in enumerate(kinds)]


def _attention(fields: Fields, mixer: Any, kind: str, index: int) -> AttentionConfig:
    """Returns attention of layer `index`. Scores have no scale, for queries and keys have norms."""
    assert isinstance(mixer, AttentionConfig)
    each = fields.inner("per_layer_config")  # as newer libraries write it, by 5 or "05": what is not as in others
    own = each.inner(next((key for key, _ in each.items() if key.isdecimal() and int(key) == index), str(index)))
    for key, value in own.items():
        if key not in ("head_dim", "num_key_value_heads"):
            raise fields.unsupported(f"per_layer_config.{index}.{key}", value)
    alike, size, heads = kind == FULL and fields.flag("attention_k_eq_v"), mixer.head_dim, mixer.kv_heads
    if kind == FULL and fields.get("per_layer_config") is None:
        size = fields.whole("global_head_dim", 1, WIDEST, 512)
        heads = fields.whole("num_global_key_value_heads", 1, WIDEST, heads) if alike else heads
    size, heads = own.whole("head_dim", 1, WIDEST, size), own.whole("num_key_value_heads", 1, WIDEST, heads)
    mixer = replace(mixer, scalar=1, v_norm=True, head_dim=size, kv_heads=heads, values_are_keys=alike)
    if kind == FULL:
        return mixer
    return replace(mixer, window=fields.whole("sliding_window", 1, 2**40, 512), rope=1)


def _per_layer(fields: Fields) -> int:
    """Returns the size of each layer's own embedding of a token, 0: there is none."""
    key, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    size = 0 if fields.has(key) and fields.get(key) is None else fields.whole(key, 0, WIDEST, 256)
    if size and fields.whole(rows, default=262144) != fields.whole("vocab_size"):
        raise fields.unlike(rows, f"vocab_size, which is {fields.get('vocab_size')}")
    return size


def unread(layers: tuple[LayerConfig, ...]) -> set[str]:
    """Returns names of tensors that checkpoints may have of layers that read others' keys and values."""
    return {
        f"model.layers.{i}.self_attn.{name}.weight"
        for i, layer in enumerate(layers)
        if layer.mixer.kv_from is not None
        for name in ("k_proj", "v_proj", "k_norm")
    }
