"""Gemma 3n: layers over several streams, of which they compute one, with embeddings by layer; the last ones read keys
of earlier ones, and some have gates of which few are above 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.gguf_file import GGUFFile
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.part_configs import AltUpConfig
from draftwing.models.families.gemma4 import sources
from draftwing.models.family import Family, InGGUF, Whole, each_of, first_of, numbers
from draftwing.models.fields import WIDEST, Fields
from draftwing.models.positions import FULL, SLIDING

_PATTERN = 5  # one in so many layers has no window, where `layer_types` does not say
_WIDTHS, _KEY = "_widths", "activation_sparsity_pattern"  # the first: as `_keys` names those of layers
_SPARSE = 10  # layers with such gates, where a config does not say and there are more
_USUAL = {
    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "sliding_window": 512, "num_kv_shared_layers": 15, "altup_num_inputs": 4, "laurel_rank": 64,
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("altup_active_idx", (0,))
    fields.check("altup_correct_scale", (True,))
    said = {key: value for key, value in _USUAL.items() if not fields.has(key)}
    widths = fields.get("intermediate_size")
    return said | ({_WIDTHS: widths, "intermediate_size": widths[0]} if isinstance(widths, list) and widths else {})


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    kinds = fields.texts("layer_types") or [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)]
    if len(kinds) != count or not {*kinds} <= {FULL, SLIDING}:
        raise fields.unlike("layer_types", f"{FULL} or {SLIDING} for each of {count} layers")
    shares = fields.get(_KEY)
    if shares is None:
        shares = [0.95 if i < _SPARSE < count else 0.0 for i in range(count)]
    shares = shares if isinstance(shares, list) else [shares] * count
    if len(shares) != count or not all(type(one) in (int, float) and 0 <= one < 1 for one in shares):
        raise fields.unlike(_KEY, f"numbers from 0 to below 1, one for each of {count} layers")
    widths = fields.get(_WIDTHS) or [layer.ffn] * count
    if len(widths) != count or not all(type(one) is int and 0 < one <= WIDEST for one in widths):
        raise fields.unlike("intermediate_size", f"numbers from 1 to {WIDEST}, one for each of {count} layers")
    return _made(
        replace(layer, per_layer=fields.whole("hidden_size_per_layer_input", high=WIDEST)),
        AltUpConfig(fields.whole("altup_num_inputs", 2, 32), fields.whole("laurel_rank", high=WIDEST)),
        [fields.whole("sliding_window", high=2**40) if kind == SLIDING else 0 for kind in kinds],
        sources(kinds, count - fields.whole("num_kv_shared_layers", 0, count - 1)),
        [(width, NormalDist().inv_cdf(share) if share else None) for width, share in zip(widths, shares, strict=True)],
    )


def _made(
    layer: LayerConfig,
    streams: AltUpConfig,
    windows: list[int],
    read: list[int | None],
    mlps: list[tuple[int, float | None]],
) -> tuple[LayerConfig, ...]:
    """windows: of each layer, 0: none.  read: as of `sources`.  mlps: of each the width, and `LayerConfig.sparsity`."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionConfig)
    mixer = replace(mixer, scalar=1, v_norm=True)
    mixers = [
        replace(mixer, window=window, rope=int(window > 0), kv_from=of)
        for window, of in zip(windows, read, strict=True)
    ]
    return tuple(
        replace(layer, mixer=mixer, streams=streams, ffn=width, sparsity=sparsity)
        for mixer, (width, sparsity) in zip(mixers, mlps, strict=True)
    )


# ---- GGUF files ------------------------------------------------------------------------------------------------------

_SCALES = "activation_sparsity_scale"
_NAMES = {
    "altup_correct_coef": "altup.correction_coefs", "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm", "post_norm": "post_per_layer_input_norm",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
}  # fmt: skip
_TENSORS = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    fields.whole("altup.active_idx", 0, 0, 0)
    pattern = each_of(fields, "attention.sliding_window_pattern", count, "biu")
    windowed = [bool((i + 1) % _PATTERN) if pattern is None else bool(pattern[i]) for i in range(count)]
    window = fields.whole("attention.sliding_window", 1, 2**40)
    scales = each_of(fields, _SCALES, count, "f")
    if scales is None or not all(-10 < one < 10 or one == -np.inf for one in scales):
        raise fields.unlike(_SCALES, f"numbers, one for each of {count} layers")
    widths = numbers(fields, "feed_forward_length", count)
    rank = next((info.shape[0] for name, info in file.tensors.items() if name.endswith(".laurel_l.weight")), 0)
    return _made(
        replace(layer, per_layer=fields.whole("embedding_length_per_layer_input", 1, WIDEST)),
        AltUpConfig(fields.whole("altup.num_inputs", 2, 32), rank),
        [window * one for one in windowed],
        sources(windowed, count - fields.whole("attention.shared_kv_layers", 0, count - 1, 0)),
        [*zip(widths, [one if one > -10 else None for one in scales], strict=True)],
    )


def _matrices(file: GGUFFile, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yields each of the matrices that files have in one tensor."""
    for name, theirs in _TENSORS.items():
        if f"{name}.weight" in file.tensors:
            for i, one in enumerate(file.dequantized(f"{name}.weight")):
                yield f"model.{theirs}.{i}.weight", torch.from_numpy(one)


_SIZES = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
}  # fmt: skip
FAMILIES = {
    "Gemma3nForCausalLM": Family(
        "gemma3n_text",
        qk_norm=True,
        head_dim=256,
        theta=1e6,
        local_theta=1e4,
        wide_norms=True,
        out_norms=True,
        activation="gelu",
        scaled_embeddings=True,
        tied=True,
        soft_cap=True,
        layers=_layers,
        keys=_keys,
        neutral={"altup_coef_clip": None, "query_pre_attn_scalar": None},
        wholes={"Gemma3nForConditionalGeneration": Whole("gemma3n", _SIZES)},
        gguf=InGGUF(
            "gemma3n",
            names=_NAMES,
            fields=first_of,
            layers=_in_gguf,
            own_windows=True,
            more=_matrices,
        ),
    ),
}
