"""Jamba: state-space layers of Mamba-1 in place of most attention, which turns nothing, and experts by a softmax in
place of some MLPs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.mamba1 import Mamba1Config
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.granite_hybrid import IN_GGUF, has_conv_bias
from draftwing.models.family import (
    ATTENTION,
    MOST_TAPS,
    RECURRENT,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
    attends_by_heads,
    layers_by_attention,
    layers_by_kind,
    softmax_experts,
)
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields


def _every(fields: Fields, layers: int, what: str, period: int, offset: int) -> list[bool]:
    """Returns which layers have that. period, offset: where the config does not say."""
    period = fields.whole(f"{what}_layer_period", high=MAX_LAYERS, default=period)
    offset = fields.whole(f"{what}_layer_offset", 0, period - 1, offset)
    return [i % period == offset for i in range(layers)]


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    hidden = layer.hidden
    net = Mamba1Config(
        fields.whole("mamba_expand", high=MOST_TAPS, default=2) * hidden,
        fields.whole("mamba_d_state", high=WIDEST, default=16),
        -(-hidden // 16)
        if fields.get("mamba_dt_rank") in (None, "auto")
        else fields.whole("mamba_dt_rank", high=WIDEST),
        fields.whole("mamba_d_conv", high=MOST_TAPS, default=4),
        fields.flag("mamba_conv_bias", True),
    )
    kinds = [ATTENTION if attends else RECURRENT for attends in _every(fields, count, "attn", 8, 4)]
    return layers_by_kind(
        fields.overruled({"layer_types": None}), layer, kinds, {ATTENTION: layer.mixer, RECURRENT: net}
    )


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    given = (fields.get(key) for key in ("num_experts", "num_local_experts"))
    count, top = next((one for one in given if one is not None), 16), fields.get("num_experts_per_tok")
    if count == 1:
        return None
    fields = fields.overruled({"num_experts": count, "num_experts_per_tok": 2 if top is None else top})
    return softmax_experts(fields, layers, "num_experts", "intermediate_size", renormalise=False)


def _dense_layers(fields: Fields, layers: int) -> Collection[int]:
    return {i for i, has in enumerate(_every(fields, layers, "expert", 2, 1)) if not has}


def _keys(fields: Fields) -> dict[str, Any]:
    return {"num_key_value_heads": fields.whole("num_key_value_heads", high=WIDEST, default=8)}


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def _metadata(fields: Fields) -> Fields:
    """Returns metadata in which one expert is none, as its layers are dense."""
    if fields.whole("expert_count", 0, default=0) != 1:
        return fields
    return fields.overruled({"expert_count": 0, "expert_used_count": 0})


def mamba1_in_gguf(
    file: GGUFFile, fields: Fields, norms: bool | Literal["bare"] = True, norm_eps: float = 0.0
) -> Mamba1Config:
    """Returns the state-space layers of a file. norms, norm_eps: as `Mamba1Config` has them."""
    return Mamba1Config(
        fields.whole("ssm.inner_size", high=WIDEST),
        fields.whole("ssm.state_size", high=WIDEST),
        fields.whole("ssm.time_step_rank", high=WIDEST),
        fields.whole("ssm.conv_kernel", high=MOST_TAPS),
        has_conv_bias(file),
        norms,
        norm_eps,
    )


def _in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return layers_by_attention(file, layer, attends_by_heads(fields, count), mamba1_in_gguf(file, fields))


MAMBA1_IN_GGUF = IN_GGUF | {"ssm_x": "mamba.x_proj", "ssm_dt": "mamba.dt_proj"}
_NAMES = {f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")}
FAMILIES = {
    "JambaForCausalLM": Family(
        "jamba",
        qkv_bias=False,
        o_bias=False,
        turns=False,
        keys=_keys,
        layers=_layers,
        experts=_experts,
        dense_layers=_dense_layers,
        expert_names=ExpertNames("feed_forward.router", "feed_forward.experts"),
        layer_names={
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "post_attention_layernorm": "pre_ff_layernorm",
        },
        final_norm="model.final_layernorm",
        gguf=InGGUF(
            "jamba",
            names=MAMBA1_IN_GGUF | _NAMES,
            top_names={"output_norm.weight": "model.final_layernorm.weight"},
            experts=ExpertMetadata(grouped=True, renormalised=False, as_mlp=True),
            fields=_metadata,
            layers=_in_gguf,
            turns=False,
        ),
        neutral={
            **dict.fromkeys(("num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "use_associative_scan")),
            "mamba_proj_bias": (False,),
            "mamba_inner_layernorms": (True,),
            **dict.fromkeys(("rope_theta", "n_ctx", "calc_logits_for_entire_prompt")),
        },
    ),
}
