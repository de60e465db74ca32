"""DeciLM (Llama Nemotron Super and Ultra): Llama whose layers differ in heads of keys and in the width of the MLP, and
may have no attention, or no MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, NoMixer
from draftwing.models.family import Family, InGGUF
from draftwing.models.fields import WIDEST, Fields

_BLOCKS, _MULTIPLE = "block_configs", 256  # of widths


def _parts(fields: Fields) -> Iterator[tuple[int, int]]:
    """Yields of each layer how many heads share keys, 0: it does not attend; and the width of its MLP, 0: none."""
    blocks = fields.get(_BLOCKS)
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise fields.unlike(_BLOCKS, "a list of objects, one for each layer")
    hidden = fields.whole("hidden_size", high=WIDEST)
    for i, block in enumerate(blocks):
        of_layer = Fields(block, fields.where, inside=f"{_BLOCKS}.{i}.")
        attention, ffn = of_layer.inner("attention"), of_layer.inner("ffn")
        shared = 0 if attention.flag("no_op") else attention.whole("n_heads_in_group", high=WIDEST)
        width = 0 if ffn.flag("no_op") else int(2 * ffn.number("ffn_mult", 1e-3, 1e3) * hidden / 3)
        for key, value in (*of_layer.unread(), *attention.unread(), *ffn.unread()):
            if value is not False:  # another part in place of one, windows and so on
                raise fields.unsupported(key, value)
        yield shared, -(-width // _MULTIPLE) * _MULTIPLE


def _keys(fields: Fields) -> dict[str, Any]:
    return {"intermediate_size": max((width for _, width in _parts(fields)), default=0) or None}


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    heads, parts = fields.whole("num_attention_heads", high=WIDEST), [*_parts(fields)]
    for shared, _ in parts:
        if shared and heads % shared:
            raise fields.unlike("num_attention_heads", f"a multiple of n_heads_in_group, which is {shared}")
    return _made(fields, layer, count, [(heads // shared if shared else 0, width) for shared, width in parts])


def _made(fields: Fields, layer: LayerConfig, count: int, parts: list[tuple[int, int]]) -> tuple[LayerConfig, ...]:
    """parts: of each layer heads of keys and the width of its MLP, 0 where it has none."""
    attention = layer.mixer
    assert isinstance(attention, AttentionConfig)
    if len(parts) != count or not any(heads for heads, _ in parts):
        raise CheckpointError(f"{fields.where}: expected parts of each of {count} layers, some with attention")
    return tuple(
        replace(layer, mixer=replace(attention, kv_heads=heads) if heads else NoMixer(), ffn=width)
        for heads, width in parts
    )


# ---- GGUF files ------------------------------------------------------------------------------------------------------

_HEADS, _KV_HEADS, _WIDTH = "attention.head_count", "attention.head_count_kv", "feed_forward_length"


def _each(fields: Fields, key: str) -> list[int]:
    """Returns a number of each layer, of which a file may have one for all."""
    value = fields.get(key)
    every = np.atleast_1d(value) if isinstance(value, np.ndarray | int) else np.array([""])
    if every.dtype.kind not in "iu" or not 0 <= every.min() <= every.max() <= WIDEST or not every.max():
        raise fields.unlike(key, f"numbers up to {WIDEST}, one for each layer")
    found: list[int] = every.tolist()
    return found


def _metadata(fields: Fields) -> Fields:
    """Returns the metadata with one number for all layers."""
    return fields.overruled({key: max(_each(fields, key)) for key in (_HEADS, _KV_HEADS, _WIDTH)})


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    of_queries, of_keys, widths = (
        every * count if len(every) == 1 else every
        for every in (_each(fields, key) for key in (_HEADS, _KV_HEADS, _WIDTH))
    )
    if {*of_queries} - {0, max(of_queries)}:
        raise fields.unlike(_HEADS, "the same of all layers with attention")
    if any(heads and not kv for heads, kv in zip(of_queries, of_keys, strict=False)):
        raise fields.unlike(_KV_HEADS, "more than 0 where there are heads of queries")
    kept = [kv if heads else 0 for heads, kv in zip(of_queries, of_keys, strict=False)]
    return _made(fields, layer, count, [*zip(kept, widths, strict=False)])


FAMILIES = {
    "DeciLMForCausalLM": Family(
        "nemotron-nas",
        o_bias="attention_bias",
        sliding_window=None,
        keys=_keys,
        layers=_layers,
        gguf=InGGUF("deci", fields=_metadata, layers=_in_gguf, permuted=True),
    ),
}
