"""ERNIE 4.5, dense and with experts: Llama whose heads turn elements that lie beside each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.family import ExpertMetadata, ExpertNames, Family, InGGUF
from draftwing.models.fields import WIDEST, Fields, Values, max_experts
from draftwing.ops.experts.routing import Routing
from draftwing.parallel.cut import Stored

_TOP_K = "num_experts_per_tok"
_CORRECTION = "mlp.moe_statics.e_score_correction_bias"


def _keys(fields: Fields) -> dict[str, Any]:
    fields.check("moe_use_aux_free", (True,))
    return {_TOP_K: fields.whole(_TOP_K, default=6), **fields.renamed({_TOP_K: "moe_k"})}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns experts that are chosen by a softmax with a correction of each, and others for all rows."""
    count = fields.whole("moe_num_experts", high=max_experts(layers), default=64)
    ffn = fields.whole("moe_intermediate_size", high=WIDEST, default=1536)
    shared = ffn * fields.whole("moe_num_shared_experts", 0, WIDEST // ffn, 2)
    routing = Routing(fields.whole(_TOP_K, high=count), corrected=True)
    fields.number("moe_norm_min", 0, 1e-6, 1e-12)  # no sum of so many shares is as small
    return ExpertConfig(count, routing, ffn, shared=shared, wide_router=True)


def _dense_layers(fields: Fields, layers: int) -> Collection[int]:
    first, every = fields.whole("moe_layer_start_index", 0, default=1), fields.whole("moe_layer_interval", default=1)
    last = fields.whole("moe_layer_end_index", -1, default=-1)
    last = layers - 1 if last == -1 else last
    return {i for i in range(layers) if (i + 1) % every or not first <= i <= last}


def _apart(name: str, value: Stored) -> Iterable[tuple[str, Stored]]:
    """Corrections are one row of a matrix."""
    flat = isinstance(value, Tensor) and name.endswith(_CORRECTION)
    return [(name, value.flatten() if flat else value)]  # type: ignore[union-attr]


_ERNIE: dict[str, Any] = {
    "qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias", "eps": 1e-5, "theta": 5e5, "tied": True,
    "rope_interleaved": True,
}  # fmt: skip
_NEUTRAL: dict[str, Values] = {"compression_ratio": (1,)}  # of positions
FAMILIES = {
    "Ernie4_5ForCausalLM": Family("ernie4_5", **_ERNIE, head_dim=128, neutral=_NEUTRAL, gguf=InGGUF("ernie4_5")),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        **_ERNIE,
        keys=_keys,
        experts=_experts,
        dense_layers=_dense_layers,
        neutral={
            **_NEUTRAL,
            "use_rmsnorm": (True,),
            "moe_gate": ("topk",),
            "moe_capacity": None,
            "add_tail_layers": None,
        },
        expert_names=ExpertNames(shared="mlp.shared_experts", correction=_CORRECTION),
        apart=_apart,
        gguf=InGGUF(
            "ernie4_5-moe",
            experts=ExpertMetadata(
                neutral={"expert_weights_scale": (0, 1)},
                corrected=True,
                shared=True,
                more={"wide_router": True},
            ),
        ),
    ),
}
