"""Mamba, Falcon Mamba and Mamba-2: state-space layers alone, without attention and without MLPs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from draftwing.layers.config import LayerConfig, MixerConfig
from draftwing.layers.mamba import Mamba2Config
from draftwing.layers.mamba1 import Mamba1Config
from draftwing.models.families.granite_hybrid import check_steps
from draftwing.models.family import MOST_TAPS, Family, renamed
from draftwing.models.fields import WIDEST, Fields

_POSITIONS = 1 << 17  # which nothing depends on, and configs do not say: as many as large models of others have


def _inner(fields: Fields) -> int:
    """Returns how many values a token has in a layer."""
    inner = fields.whole("expand", high=MOST_TAPS, default=2) * fields.whole("hidden_size", high=WIDEST)
    fields.check("intermediate_size", (inner,))
    return inner


def _keys(fields: Fields) -> dict[str, Any]:
    """Says what a model has none of."""
    return {
        "max_position_embeddings": fields.whole("max_position_embeddings", default=_POSITIONS),
        "num_attention_heads": 1,
        "intermediate_size": _inner(fields),
    }


def _alone(layer: LayerConfig, count: int, mixer: MixerConfig) -> tuple[LayerConfig, ...]:
    return (replace(layer, mixer=mixer, ffn=0),) * count


def _mamba1(fields: Fields, layer: LayerConfig, count: int, normed: bool = False) -> tuple[LayerConfig, ...]:
    rank = -(-layer.hidden // 16)
    if fields.get("time_step_rank") != "auto":
        rank = fields.whole("time_step_rank", high=WIDEST, default=rank)
    net = Mamba1Config(
        _inner(fields),
        fields.whole("state_size", high=WIDEST, default=16),
        rank,
        fields.whole("conv_kernel", high=MOST_TAPS, default=4),
        fields.flag("use_conv_bias", True),
        "bare" if normed else False,
        fields.number("mixer_rms_eps", 0, 1, 1e-6) if normed else 0.0,
    )
    return _alone(layer, count, net)


def _mamba2(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    check_steps(fields)
    heads, size, inner = fields.whole("num_heads", high=WIDEST, default=128), fields.get("head_dim"), _inner(fields)
    size = 64 if size is None else size
    if heads * size != inner:
        raise fields.unlike("num_heads", f"heads of head_dim values, {inner} together")
    net = Mamba2Config(
        fields.whole("n_groups", high=WIDEST, default=8),
        heads,
        size,
        fields.whole("state_size", high=WIDEST, default=128),
        fields.whole("conv_kernel", high=MOST_TAPS, default=4),
        conv_bias=fields.flag("use_conv_bias", True),
    )
    return _alone(layer, count, net)


_PARTS = {
    "conv1d", "conv1d.bias", "A_log", "D", "in_proj", "x_proj", "dt_proj", "out_proj", "dt_bias", "norm",
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "eps": 1e-5,
    "eps_key": "layer_norm_epsilon",
    "turns": False,
    "tied": True,
    "keys": _keys,
    "layer_names": {**{f"mamba.{part}": f"mixer.{part}" for part in _PARTS}, "input_layernorm": "norm"},
    "final_norm": "model.norm_f",
    "apart": renamed({"model.embeddings.": "model.embed_tokens.", "model.embedding.": "model.embed_tokens."}),
    "neutral": {
        **dict.fromkeys(
            ("chunk_size", "d_inner", "fused_add_norm", "n_layer", "norm_before_gate", "pad_vocab_size_multiple",
             "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_init_scheme",
             "time_step_max", "time_step_min", "time_step_rank", "time_step_scale", "use_associative_scan",
             "use_falcon_mambapy", "use_mambapy")
        ),
        "rms_norm": (True,),
        "ssm_cfg": ({},),
        "use_bias": (False,),
    },
}  # fmt: skip
FAMILIES = {
    "MambaForCausalLM": Family("mamba", **_MAMBA, layers=_mamba1),
    "FalconMambaForCausalLM": Family("falcon_mamba", **_MAMBA, layers=partial(_mamba1, normed=True)),
    "Mamba2ForCausalLM": Family("mamba2", **{**_MAMBA, "tied": False}, layers=_mamba2),
}
