"""Command R and R7B: LayerNorm, and attention beside the MLP; R7B with windows, where other layers turn nothing; North,
the same with experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.deepseek import IN_GGUF, dense_layers
from draftwing.models.family import ExpertNames, Family, InGGUF, Whole, unscaled, without_window
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, max_experts
from draftwing.models.positions import FULL, SLIDING
from draftwing.ops.experts.routing import Routing

_SCALE = "logit_scale"  # which others divide by


def _keys(fields: Fields) -> dict[str, Any]:
    return {**unscaled(fields), "logits_scaling": 1 / fields.number(_SCALE, 1e-3, 1e3, 0.0625)}


def _metadata(fields: Fields) -> Fields:
    return fields.overruled({_SCALE: 1 / fields.number(_SCALE, 1e-3, 1e3, 1.0)})


# ---- with experts ----------------------------------------------------------------------------------------------------

_FIRST, _DENSE_WINDOWS = "first_k_dense_replace", "prefix_dense_sliding_window_pattern"


def _moe_keys(fields: Fields) -> dict[str, Any]:
    """Says what configs leave out of the kinds of layers: one in so many has no window, of those with an MLP and of the
    others. Their `intermediate_size` is that of experts."""
    fields.check("rms_norm_eps", ())
    count, ffn = fields.whole("num_hidden_layers", high=MAX_LAYERS), fields.whole("intermediate_size", high=WIDEST)
    first = fields.whole(_FIRST, 0, count, 0)
    every = fields.whole("sliding_window_pattern", default=4)
    spans = [(i, fields.whole(_DENSE_WINDOWS, default=1)) for i in range(first)]
    spans += [(i, every) for i in range(count - first)]
    usual = {
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (count - first),
        "layer_types": [SLIDING if (i + 1) % every else FULL for i, every in spans],
    }
    said = {key: fields.texts(key) or value for key, value in usual.items()}
    wide = fields.whole("prefix_dense_intermediate_size", high=WIDEST, default=ffn)
    return _keys(fields) | said | {"moe_intermediate_size": ffn, "intermediate_size": wide}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns experts by a softmax of those chosen, or by sigmoids. Their sum may be halved with what that for all rows
    gives, of which `_factors` is the other half."""
    count, ffn = fields.whole("num_experts", high=max_experts(layers), default=8), fields.whole("moe_intermediate_size")
    fields.check("expert_selection_fn", ("softmax", "sigmoid"))
    sigmoid, renormalise = fields.get("expert_selection_fn") == "sigmoid", fields.flag("norm_topk_prob", True)
    routing = Routing(
        fields.whole("num_experts_per_tok", high=count, default=2),
        renormalise=renormalise or not sigmoid,
        sigmoid=sigmoid,
        scale=_share(fields),
    )
    shared = ffn * fields.whole("num_shared_experts", 0, WIDEST // ffn, 0)
    return ExpertConfig(count, routing, ffn, shared=shared, wide_router=sigmoid, uncorrected=sigmoid)


def _share(fields: Fields) -> float:
    key = "shared_expert_combination_strategy"
    fields.check(key, ("average", "sum"))
    halved = fields.text(key, "average") == "average" and fields.whole("num_shared_experts", 0, WIDEST, 0) > 0
    return 0.5 if halved else 1.0


def _factors(fields: Fields) -> Mapping[str, float]:
    return {} if _share(fields) == 1 else {"mlp.shared_experts.down_proj": _share(fields)}


def _turns_nothing(fields: Fields, windows: Sequence[int]) -> Collection[int]:
    """Returns layers without a window, but for those with an MLP where none of these has one."""
    if fields.prefix:  # of a GGUF file
        turned: Collection[int] = range(fields.whole("leading_dense_block_count", 0, MAX_LAYERS, 0))
    else:
        turned = dense_layers(fields, len(windows)) if fields.whole(_DENSE_WINDOWS, default=1) == 1 else ()
    return set(without_window(fields, windows)) - set(turned)


_COHERE: dict[str, Any] = {
    "centred": True, "parallel": True, "rope_interleaved": True, "multipliers": True, "tied": True, "keys": _keys,
    "eps": 1e-5, "eps_key": "layer_norm_eps",
    "neutral": {
        "use_parallel_block": (True,), "use_gated_activation": (True,), "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        **dict.fromkeys(("layer_switch", "use_parallel_embedding", "use_embedding_sharing")),
    },
}  # fmt: skip
_IN_GGUF = IN_GGUF._replace(
    neutral={"expert_shared_count": (0,)}, renormalised=False, shared=False,
    more={"wide_router": True, "uncorrected": True},
)  # fmt: skip
FAMILIES = {
    "Cohere2MoeForCausalLM": Family(
        "cohere2_moe",
        **_COHERE | {"keys": _moe_keys},
        head_dim=128,
        sliding_window=4096,
        window_pattern=4,
        pattern_key=False,
        nope=_turns_nothing,
        experts=_experts,
        dense_layers=dense_layers,
        expert_names=ExpertNames(shared="mlp.shared_experts"),
        factors=_factors,
        gguf=InGGUF(
            "cohere2moe",
            fields=_metadata,
            experts=_IN_GGUF,
        ),
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        **_COHERE,
        sliding_window=4096,
        window_pattern=4,
        nope=without_window,
        wholes={
            "AyaVisionForConditionalGeneration": Whole("aya_vision", {}, "cohere2"),
            "Cohere2VisionForConditionalGeneration": Whole("cohere2_vision", {}),
        },
        gguf=InGGUF("cohere2", fields=_metadata),
    ),
    "CohereForCausalLM": Family(
        "cohere",
        **_COHERE,
        theta=5e5,
        wholes={"AyaVisionForConditionalGeneration": Whole("aya_vision", {}, "cohere")},
        gguf=InGGUF("command-r", fields=_metadata),
    ),
}
