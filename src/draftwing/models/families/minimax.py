"""MiniMax-M2: norms of whole queries and keys, and experts chosen by sigmoids."""

from __future__ import annotations

from typing import Any

from draftwing.layers.config import ExpertConfig
from draftwing.models.family import SIGMOID, UNSAID, ExpertMetadata, ExpertNames, Family, InGGUF
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.ops.experts.routing import Routing

_HEAD_DIM = 128  # where a config has none
# What relatives say otherwise, with the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    fields.check("scoring_func", ("sigmoid",))
    fields.check("topk_method", ("noaux_tc",))
    count = fields.whole("num_local_experts", high=max_experts(layers))
    routing = Routing(fields.whole("num_experts_per_tok", high=count), sigmoid=True)
    return ExpertConfig(count, routing, fields.whole("intermediate_size", high=WIDEST), wide_router=True)


def _keys(fields: Fields) -> dict[str, Any]:
    """Returns the share of a head that is turned, of which configs say the size."""
    for key, known in _SERVED.items():
        fields.check(key, known)
    kinds = fields.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == 1 for kind in kinds)):
        raise fields.unsupported("attn_type_list", kinds)
    if fields.get("rotary_dim") is None:
        return {}
    head_dim = fields.whole("head_dim", high=WIDEST, default=_HEAD_DIM)
    key, share = "partial_rotary_factor", fields.whole("rotary_dim", high=head_dim) / head_dim
    if fields.get(key) not in (None, share):
        raise fields.unlike(key, f"{share:g}, which rotary_dim says, or none")
    return {key: share}


FAMILIES = {
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        qkv_bias=False,
        o_bias=False,
        qk_norm="whole",
        head_dim=_HEAD_DIM,
        theta=5e6,
        turns_parts=True,
        experts=_experts,
        keys=_keys,
        neutral={"mlp_intermediate_size": None, "shared_moe_mode": None},
        expert_names=ExpertNames(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
            "w1",
            "w3",
            "w2",
            correction="block_sparse_moe.e_score_correction_bias",
        ),
        gguf=InGGUF(
            "minimax-m2",
            experts=ExpertMetadata(
                gating=(UNSAID, SIGMOID), neutral={}, sigmoid=True, shared=True, more={"wide_router": True}
            ),
        ),
    ),
}
