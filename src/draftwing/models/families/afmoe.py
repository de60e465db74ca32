"""Trinity (AFMoE): the experts of DeepSeek-V3, gates of what attention gives, norms before and after each part; layers
without a window turn nothing."""

from __future__ import annotations

from typing import Any

from draftwing.models.families.deepseek import IN_GGUF, dense_layers, experts
from draftwing.models.family import ExpertNames, Family, InGGUF, unscaled, without_window
from draftwing.models.fields import WIDEST, Fields

# What is called otherwise in other configs.
_NAMES = {
    "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "scoring_func": "score_func",
    "norm_topk_prob": "route_norm", "routed_scaling_factor": "route_scale", "first_k_dense_replace": "num_dense_layers",
    "sliding_window_pattern": "global_attn_every_n_layers",
}  # fmt: skip
_USUAL = {
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
}  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    # Of the last three others pass over one or another.
    for key, served in (("attention_bias", False), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        fields.check(key, (served,))
    found = fields.renamed(_NAMES)
    said = found | {key: value for key, value in _USUAL.items() if key not in found and not fields.has(key)}
    scale = fields.whole("hidden_size", high=WIDEST) ** 0.5
    return {**said, **unscaled(fields), "embedding_multiplier": scale if fields.flag("mup_enabled") else 1.0}


def _metadata(fields: Fields) -> Fields:
    """Files do not say that embeddings are scaled, as those of all published models are."""
    return fields.overruled({"embedding_scale": fields.whole("embedding_length", high=WIDEST) ** 0.5})


FAMILIES = {
    "AfmoeForCausalLM": Family(
        "afmoe",
        qk_norm=True,
        gated=True,
        gate_rows="element",
        eps=1e-5,
        head_dim=128,
        wide_norms=True,
        out_norms=True,
        multipliers=True,
        sliding_window=1024,
        window_pattern=4,
        nope=without_window,
        keys=_keys,
        experts=experts,
        dense_layers=dense_layers,
        expert_names=ExpertNames("mlp.router.gate", shared="mlp.shared_experts", correction="mlp.expert_bias"),
        layer_names={
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        neutral={
            "num_expert_groups": (1,),
            "num_limited_groups": (1,),
            "load_balance_coeff": None,
            "use_grouped_mm": None,
        },
        gguf=InGGUF("afmoe", names={"attn_gate": "self_attn.gate_proj"}, experts=IN_GGUF, fields=_metadata),
    ),
}
