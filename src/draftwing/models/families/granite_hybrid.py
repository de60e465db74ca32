"""Granite 4, dense and with experts: Granite's factors, and state-space layers (Mamba-2) in place of most attention.

The MLP of a layer without experts is, in one with them, the expert of all rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.mamba import Mamba2Config
from draftwing.layers.part_configs import ExpertConfig
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
    query_scalar,
    softmax_experts,
)
from draftwing.models.fields import WIDEST, Fields, Values
from draftwing.ops.gemm.stored import MXRows, QuantizedRows
from draftwing.parallel.cut import Cut, Stored
from draftwing.parallel.ranks import Share

_KINDS = {"attention": ATTENTION, "mamba": RECURRENT}  # what older files call them
_EXPERTS = 8  # `num_local_experts` when a file has none
_JOINED = re.compile(r"(.*)\.(shared_mlp|block_sparse_moe)\.(input|output)_linear\.(\w+)")


def mamba2(fields: Fields, inner: int, **more: Any) -> Mamba2Config:
    """Returns the state-space layers of configs that have `mamba_` before each key. inner: values of all heads.  more:
    as `Mamba2Config` has it."""
    check_steps(fields)
    heads = fields.whole("mamba_n_heads", high=WIDEST, default=128)
    if inner % heads:
        raise fields.unlike("mamba_n_heads", f"a divisor of {inner}")
    given = fields.get("mamba_d_head")
    if given not in (None, "auto", inner // heads):
        raise fields.unlike("mamba_d_head", f"{inner // heads}, of {heads} heads with {inner} values")
    return Mamba2Config(
        fields.whole("mamba_n_groups", high=WIDEST, default=1),
        heads,
        inner // heads,
        fields.whole("mamba_d_state", high=WIDEST, default=256),
        fields.whole("mamba_d_conv", high=MOST_TAPS, default=4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        **more,
    )


def check_steps(fields: Fields) -> None:
    """Raises CheckpointError for limits of step sizes, which transformers has for prompts alone."""
    given = fields.get("time_step_limit")
    if given is None:
        return
    if not isinstance(given, list) or len(given) != 2:
        raise fields.unlike("time_step_limit", "two numbers")
    low, high = given
    if low != 0 or (high.get("__float__") if isinstance(high, Mapping) else high) not in ("Infinity", math.inf):
        raise fields.unsupported("time_step_limit", given)


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    net = mamba2(fields, fields.whole("mamba_expand", high=WIDEST, default=2) * layer.hidden)
    return layers_by_kind(fields, layer, [RECURRENT] * count, {ATTENTION: layer.mixer, RECURRENT: net})


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads widths and kinds of layers under the names that they have elsewhere."""
    kinds = fields.texts("layer_types") or fields.texts("layers_block_type")
    return {
        "query_pre_attn_scalar": query_scalar(fields, "attention_multiplier", 1.0),
        "intermediate_size": fields.whole("shared_intermediate_size", high=WIDEST, default=1024),
        "moe_intermediate_size": fields.whole("intermediate_size", high=WIDEST, default=11008),
        "layer_types": [_KINDS.get(kind, kind) for kind in kinds] or None,
    }


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    if fields.whole("num_local_experts", 0, default=_EXPERTS) == 0:
        return None
    usual = fields.overruled({"num_experts_per_tok": fields.whole("num_experts_per_tok", default=2)})
    if fields.get("num_local_experts") is None:
        usual = usual.overruled({"num_local_experts": _EXPERTS})
    return softmax_experts(
        usual, layers, "num_local_experts", "moe_intermediate_size", shared=fields.whole("intermediate_size")
    )


def _turns(fields: Fields) -> bool:
    fields.check("position_embedding_type", ("rope", "nope"))
    return fields.text("position_embedding_type", "nope") == "rope"


def apart(name: str, value: Stored) -> Iterable[tuple[str, Stored]]:
    """Gates and ups of the MLP are one matrix there, and those of all experts one tensor."""
    match = _JOINED.fullmatch(name)
    if match is None:
        return [(name, value)]
    layer, part, matrix, suffix = match.groups()
    if part == "block_sparse_moe":
        which = "gate_up_proj" if matrix == "input" else "down_proj"
        return [(f"{layer}.{part}.experts.{which}{'' if suffix == 'weight' else f'_{suffix}'}", value)]
    if matrix == "output":
        return [(f"{layer}.{part}.down_proj.{suffix}", value)]
    rows = len(value.codes if isinstance(value, QuantizedRows | MXRows) else value)
    halves = [Cut(0, Share(at * rows // 2, rows // 2, rows)) for at in range(2)]
    return [
        (f"{layer}.{part}.{which}.{suffix}", half.of(name, value))
        for which, half in zip(("gate_proj", "up_proj"), halves, strict=True)
    ]


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def mamba2_in_gguf(fields: Fields, **more: Any) -> Mamba2Config:
    """Returns the state-space layers of a file. more: as `Mamba2Config` has it."""
    heads, inner = fields.whole("ssm.time_step_rank", high=WIDEST), fields.whole("ssm.inner_size", high=WIDEST)
    if inner % heads:
        raise fields.unlike("ssm.inner_size", f"a multiple of the {heads} heads")
    return Mamba2Config(
        fields.whole("ssm.group_count", high=WIDEST),
        heads,
        inner // heads,
        fields.whole("ssm.state_size", high=WIDEST),
        fields.whole("ssm.conv_kernel", high=MOST_TAPS),
        **more,
    )


def nets_in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    net = mamba2_in_gguf(fields, conv_bias=has_conv_bias(file))
    return layers_by_attention(file, layer, attends_by_heads(fields, count), net)


def has_conv_bias(file: GGUFFile) -> bool:
    return any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)


IN_GGUF = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
NAMES = ExpertNames("block_sparse_moe.router.layer", "block_sparse_moe.experts", shared="shared_mlp")
NEUTRAL: dict[str, Values] = {
    "mamba_chunk_size": None,  # of sums that are taken otherwise here
    "mamba_proj_bias": (False,),
    "normalization_function": ("rmsnorm",),
    "init_method": None,
    "num_experts_per_tok": None,  # of experts, where there are none
    "moe_intermediate_size": None,
}
FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        attention_scalar=1,
        multipliers=True,
        turns=_turns,
        keys=_keys,
        layers=_layers,
        experts=_experts,
        expert_names=NAMES,
        layer_names={f"mlp.{part}_proj": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        neutral=NEUTRAL,
        apart=apart,
        gguf=InGGUF(
            "granitehybrid",
            names=IN_GGUF,
            experts=ExpertMetadata(shared=True, as_mlp=True),
            layers=nets_in_gguf,
            permuted=True,
            turns=lambda fields: fields.flag("rope.scaling.finetuned"),
        ),
    ),
}
