"""Mamba, Falcon Mamba and Mamba-2: state-space layers alone, without attention and without MLPs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig, MixerConfig
from draftwing.layers.mamba import Mamba2Config
from draftwing.layers.mamba1 import Mamba1Config
from draftwing.models.families.granite_hybrid import IN_GGUF, check_steps, has_conv_bias, mamba2_in_gguf
from draftwing.models.families.jamba import MAMBA1_IN_GGUF, mamba1_in_gguf
from draftwing.models.family import MOST_TAPS, Family, InGGUF, renamed
from draftwing.models.fields import WIDEST, Fields

_POSITIONS = 1 << 17  # which nothing depends on, and configs do not say: as many as large models of others have
_MIXER_EPS = 1e-6


def _expanded(fields: Fields) -> int:
    return fields.whole("expand", high=MOST_TAPS, default=2) * fields.whole("hidden_size", high=WIDEST)


def _keys(fields: Fields) -> dict[str, Any]:
    """Says what a model has none of."""
    return {
        "max_position_embeddings": fields.whole("max_position_embeddings", default=_POSITIONS),
        "num_attention_heads": 1,
        "intermediate_size": fields.whole("intermediate_size", high=WIDEST, default=_expanded(fields)),
    }


def _alone(layer: LayerConfig, count: int, mixer: MixerConfig) -> tuple[LayerConfig, ...]:
    return (replace(layer, mixer=mixer, ffn=0),) * count


def _mamba1(fields: Fields, layer: LayerConfig, count: int, normed: bool = False) -> tuple[LayerConfig, ...]:
    rank = -(-layer.hidden // 16)
    if fields.get("time_step_rank") != "auto":
        rank = fields.whole("time_step_rank", high=WIDEST, default=rank)
    net = Mamba1Config(
        fields.whole("intermediate_size", high=WIDEST),  # whatever `expand` says, as Falcon Mamba 7B needs it
        fields.whole("state_size", high=WIDEST, default=16),
        rank,
        fields.whole("conv_kernel", high=MOST_TAPS, default=4),
        fields.flag("use_conv_bias", True),
        "bare" if normed else False,
        fields.number("mixer_rms_eps", 0, 1, _MIXER_EPS) if normed else 0.0,
    )
    return _alone(layer, count, net)


def _mamba2(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    check_steps(fields)
    heads, size = fields.whole("num_heads", high=WIDEST, default=128), fields.whole("head_dim", high=WIDEST, default=64)
    inner = _expanded(fields)
    fields.check("intermediate_size", (inner,))
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


# ---- GGUF files ------------------------------------------------------------------------------------------------------

_NORMED = "ssm.dt_b_c_rms"  # whether step sizes, B and C are normed: of Falcon Mamba


def _metadata(fields: Fields) -> Fields:
    """Returns metadata of one head and no MLP, in place of none, and not more positions than a config means."""
    said = {"attention.head_count": 1, "attention.head_count_kv": None, "feed_forward_length": 1}
    return fields.overruled(said | {"context_length": min(fields.whole("context_length"), _POSITIONS)})


def _mamba1_in_gguf(
    file: GGUFFile, fields: Fields, layer: LayerConfig, count: int, normed: bool = False
) -> tuple[LayerConfig, ...]:
    """Files do not say what norms of Falcon Mamba's add to a mean of squares: it is that of the published model."""
    return _alone(layer, count, mamba1_in_gguf(file, fields, "bare" if normed else False, _MIXER_EPS * normed))


def _mamba2_in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return _alone(layer, count, mamba2_in_gguf(fields, conv_bias=has_conv_bias(file)))


_IN_GGUF: dict[str, Any] = {
    "names": IN_GGUF,
    "top_names": {"output_norm.weight": "model.norm_f.weight"},
    "fields": _metadata,
    "turns": False,
}
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
            ("chunk_size", "d_inner", "d_model", "fused_add_norm", "n_layer", "norm_before_gate",
             "pad_vocab_size_multiple", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor",
             "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_rank", "time_step_scale",
             "use_associative_scan", "use_falcon_mambapy", "use_mambapy")
        ),
        "rms_norm": (True,),
        "ssm_cfg": ({},),
        "use_bias": (False,),
    },
}  # fmt: skip
FAMILIES = {
    "MambaForCausalLM": Family(
        "mamba",
        **_MAMBA,
        layers=_mamba1,
        gguf=InGGUF("mamba", **_IN_GGUF | {"names": MAMBA1_IN_GGUF}, layers=_mamba1_in_gguf),
    ),
    "FalconMambaForCausalLM": Family(
        "falcon_mamba",
        **_MAMBA,
        layers=partial(_mamba1, normed=True),
        gguf=InGGUF(
            "mamba",
            **_IN_GGUF | {"names": MAMBA1_IN_GGUF},
            when=lambda file, fields: fields.flag(_NORMED),
            layers=partial(_mamba1_in_gguf, normed=True),
        ),
    ),
    "Mamba2ForCausalLM": Family(
        "mamba2",
        **{**_MAMBA, "tied": False},
        layers=_mamba2,
        gguf=InGGUF("mamba2", **_IN_GGUF, layers=_mamba2_in_gguf),
    ),
}
