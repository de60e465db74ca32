"""What a config.json says of experts."""

from __future__ import annotations

from typing import Any, Literal

from draftwing.layers.config import ExpertConfig
from draftwing.models.fields import WIDEST, Fields, max_experts
from draftwing.ops.contracts import Routing
from draftwing.ops.torch.experts import SWIGLU_ALPHA

# Whose keys speak of experts; "": nobody's.
Kind = Literal["", "mixtral", "qwen", "gpt_oss", "deepseek", "deepseek_v2", "minimax", "gemma"]
DEEPSEEKS: tuple[Kind, ...] = ("deepseek", "deepseek_v2")
_COUNTS = ("num_experts", "num_local_experts")  # keys of how many there are


def experts(fields: Fields, kind: Kind, shared: bool, layers: int) -> ExpertConfig | None:
    """Returns the experts of layers that have them, None where none has. shared: whether there is one more, for all
    rows, in keys of Qwen."""
    if not kind:
        return None
    if kind == "gemma":
        return _beside(fields, layers)
    if kind == "deepseek_v2":
        return _deepseek_v2(fields, layers)
    if kind in ("deepseek", "minimax"):
        return _by_sigmoids(fields, kind == "deepseek", layers)
    # One key in files of old, the other in those of newer libraries.
    key = next(iter([key for key in _COUNTS if fields.get(key) is not None]), _COUNTS[kind != "qwen"])
    count = fields.whole(key, high=max_experts(layers))
    qwen, clamped = kind == "qwen", kind == "gpt_oss"
    if clamped and fields.number("swiglu_alpha", 0, 1e3, SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise fields.unlike("swiglu_alpha", str(SWIGLU_ALPHA))
    return ExpertConfig(
        count,
        Routing(
            fields.whole("num_experts_per_tok", high=count),
            renormalise=fields.flag("norm_topk_prob", shared) if qwen else True,
        ),
        ffn=fields.whole("moe_intermediate_size" if qwen else "intermediate_size", high=WIDEST),
        router_bias=clamped,
        bias=clamped,
        limit=fields.number("swiglu_limit", 1e-3, 1e6, 7.0) if clamped else 0.0,
        shared=fields.whole("shared_expert_intermediate_size", high=WIDEST) if shared else 0,
        shared_gate=shared,
    )


def _beside(fields: Fields, layers: int) -> ExpertConfig | None:
    """Of Gemma 4: beside the MLP of every layer, or of none."""
    if not fields.flag("enable_moe_block"):
        return None
    count = fields.whole("num_experts", high=max_experts(layers))
    ffn = fields.whole("moe_intermediate_size", high=WIDEST)
    return ExpertConfig(count, Routing(fields.whole("top_k_experts", high=count)), ffn, beside=True)


def _by_sigmoids(fields: Fields, deepseek: bool, layers: int) -> ExpertConfig:
    """deepseek: by keys of DeepSeek and GLM; else of MiniMax."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.check(key, (only,))
    key = "n_routed_experts" if deepseek else "num_local_experts"
    count = fields.whole(key, high=max_experts(layers))
    top_k = fields.whole("num_experts_per_tok", high=count)
    ffn = fields.whole("moe_intermediate_size" if deepseek else "intermediate_size", high=WIDEST)
    if not deepseek:
        return ExpertConfig(count, Routing(top_k, sigmoid=True), ffn, wide_router=True)
    groups = fields.whole("n_group", high=count, default=1)
    routing = Routing(
        top_k,
        renormalise=fields.flag("norm_topk_prob", True),
        sigmoid=True,
        groups=groups,
        top_groups=fields.whole("topk_group", high=groups, default=1),
        scale=fields.number("routed_scaling_factor", 1e-3, 1e3, 1.0),
    )
    return ExpertConfig(count, routing, ffn, shared=_shared(fields, ffn, 1), wide_router=True)


def _deepseek_v2(fields: Fields, layers: int) -> ExpertConfig:
    """By a softmax of all, which is not renormalised."""
    fields.check("scoring_func", ("softmax",))
    if fields.flag("norm_topk_prob"):  # libraries differ in what it does
        raise fields.unsupported("norm_topk_prob", True)
    method, groups, top_groups = fields.text("topk_method", "greedy"), 1, 1
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", method)
    count = fields.whole("n_routed_experts", high=max_experts(layers))
    if method != "greedy":
        groups = fields.whole("n_group", high=count)
        top_groups = fields.whole("topk_group", high=groups)
    routing = Routing(
        fields.whole("num_experts_per_tok", high=count),
        renormalise=False,
        groups=groups,
        top_groups=top_groups,
        scale=fields.number("routed_scaling_factor", 1e-3, 1e3),
    )
    ffn = fields.whole("moe_intermediate_size", high=WIDEST)
    return ExpertConfig(count, routing, ffn, shared=_shared(fields, ffn, 2), wide_router=True)


def _shared(fields: Fields, ffn: int, default: int) -> int:
    """Returns the width of experts for all rows, which are as wide as others and lie beside each other as one. default:
    how many, where the config does not say."""
    return ffn * fields.whole("n_shared_experts", 0, WIDEST // ffn, default)


def dense_layers(fields: Fields, kind: Kind, layers: int) -> frozenset[int]:
    """Returns layers with an MLP of their own in a model with experts: by `first_k_dense_replace`, or by
    `mlp_only_layers` and `decoder_sparse_step`."""
    if kind in DEEPSEEKS:
        if fields.whole("moe_layer_freq", default=1) != 1:
            raise fields.unsupported("moe_layer_freq", fields.get("moe_layer_freq"))
        kinds = fields.texts("mlp_layer_types")
        if kinds:
            if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
                raise fields.unlike("mlp_layer_types", f"dense or sparse for each of {layers} layers")
            return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
        return frozenset(range(fields.whole("first_k_dense_replace", 0, layers, min(1, layers))))
    if kind != "qwen":
        return frozenset()
    step, named = fields.whole("decoder_sparse_step", default=1), fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise fields.unlike("mlp_only_layers", "a list of layer numbers")
    return frozenset(i for i in range(layers) if i in named or (i + 1) % step)


# Of MiniMax-M2: what relatives of it say otherwise, with the values that are served.
_MINIMAX: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}


MINIMAX_HEAD_DIM = 128  # where a config has none


def minimax_keys(fields: Fields) -> dict[str, Any]:
    """Returns the share of a head that is turned, of which MiniMax-M2 says the size."""
    for key, known in _MINIMAX.items():
        fields.check(key, known)
    kinds = fields.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == 1 for kind in kinds)):
        raise fields.unsupported("attn_type_list", kinds)
    if fields.get("rotary_dim") is None:
        return {}
    head_dim = fields.whole("head_dim", high=WIDEST, default=MINIMAX_HEAD_DIM)
    key, share = "partial_rotary_factor", fields.whole("rotary_dim", high=head_dim) / head_dim
    if fields.get(key) not in (None, share):
        raise fields.unlike(key, f"{share:g}, which rotary_dim says, or none")
    return {key: share}
