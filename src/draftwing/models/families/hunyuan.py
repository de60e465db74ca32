"""Hunyuan, dense and with experts: Llama whose heads are normed when they are turned; and Hunyuan V3: the experts of
DeepSeek-V3, and heads that are normed before that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.families.deepseek import IN_GGUF, dense_layers, experts
from draftwing.models.family import ExpertMetadata, ExpertNames, Family, InGGUF, renamed, softmax_experts
from draftwing.models.fields import WIDEST, Fields, Values
from draftwing.models.positions import rope_fields

_PER_LAYER = "moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"  # may be lists


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads the factor of NTK-aware scaling as the base that it makes."""
    given = rope_fields(fields)
    alpha = given.number("alpha", 0, 1e6, 0.0)
    if not alpha or given.text("rope_type", given.text("type", "default")) != "dynamic":
        return {}
    heads = fields.whole("num_attention_heads", high=WIDEST)
    dim = fields.whole("head_dim", 4, WIDEST, fields.whole("hidden_size", high=WIDEST) // heads)
    theta = given.number("rope_theta", 1, 1e15, fields.number("rope_theta", 1, 1e15, 10000.0))
    kept = {key: value for key, value in given.items() if key not in ("alpha", "type")}
    stretched = theta * alpha ** (dim / (dim - 2))
    made = {"rope_parameters": {**kept, "rope_type": "default", "rope_theta": stretched}}
    return made if fields.get("rope_parameters") else {**made, "rope_scaling": None}


def _of_all(fields: Fields) -> dict[str, Any]:
    """Reads numbers of each layer as one."""
    said = {}
    for key in _PER_LAYER:
        value = fields.get(key)
        if isinstance(value, list):
            if any(one != value[0] for one in value):
                raise fields.unsupported(key, value)
            said[key] = value[0] if value else None
    one = fields.overruled(said)
    one.check("num_shared_expert", (1,))
    one.check("moe_intermediate_size", (one.get("intermediate_size"),))
    found = one.renamed({"num_experts_per_tok": "moe_topk"})
    return {**said, **_keys(fields), "num_experts_per_tok": one.whole("num_experts_per_tok", default=1), **found}


def _experts(fields: Fields, layers: int) -> ExpertConfig:
    ffn = fields.whole("intermediate_size", high=WIDEST)
    return softmax_experts(fields, layers, "num_experts", "intermediate_size", shared=ffn, wide_router=True)


# What is called otherwise in other configs.
_V3_NAMES = {
    "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor", "norm_topk_prob": "route_norm",
}  # fmt: skip


def _v3_keys(fields: Fields) -> dict[str, Any]:
    for name in ("route_norm", "norm_topk_prob"):  # others read neither, and always norm
        fields.check(name, (True,))
    usual = {"router_scaling_factor": 2.826, "num_experts_per_tok": 8, "num_experts": 192}
    found = {key: value for key, value in usual.items() if not fields.has(key)}
    return found | fields.overruled(found).renamed(_V3_NAMES)


def _v3_experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns them; transformers makes an MLP's width of a shared one without any."""
    found = experts(fields, layers)
    return found if found.shared else replace(found, shared=fields.whole("intermediate_size", high=WIDEST))


_HUNYUAN: dict[str, Any] = {
    "qk_norm": True, "norms_after": True, "eps": 1e-5,
    "layer_names": {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
}  # fmt: skip
_NEUTRAL: dict[str, Values] = {
    "use_qk_norm": (True,), "use_cla": (False,), "use_rotary_pos_emb": (True,), "norm_type": ("rms", "hf_rms"),
    "add_classification_head": (False,), "position_embedding_xdrope": (False,), "mlp_bias": (False,),
    "use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,), "moe_layer_num_skipped": (0,), "moe_drop_tokens": (False,),
    "moe_random_routing_dropped_token": (False,), "use_mla": (False,), "group_limited_greedy": (False,),
    "routed_scaling_factor": (1,),
    **dict.fromkeys(("attention_head_dim", "cla_share_factor", "class_num", "eod_token_id", "im_end_id", "im_start_id",
                     "im_newline_id", "mask_init_id", "org_vocab_size", "pool_type", "text_end_id", "text_start_id",
                     "dense_list", "pad_id", "skip_cls_token", "num_media_embeds", "enable_lm_head_fp32",
                     "video_end_id", "video_start_id")),
}  # fmt: skip
FAMILIES = {
    "HYV3ForCausalLM": Family(
        "hy_v3",
        qk_norm=True,
        eps=1e-5,
        head_dim=128,
        theta=11158840.0,
        keys=_v3_keys,
        apart=renamed({".mlp.shared_experts.": ".mlp.shared_mlp."}),  # of adapters
        experts=_v3_experts,
        dense_layers=dense_layers,
        predicts="numbered",
        expert_names=ExpertNames("mlp.router.gate", shared="mlp.shared_mlp", correction="mlp.expert_bias"),
        neutral={
            "qk_norm": (True,),
            "enable_moe_fp32_combine": None,
            "moe_router_use_sigmoid": (True,),
            "moe_router_enable_expert_bias": (True,),
        },
        gguf=InGGUF("hy_v3", experts=IN_GGUF),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        **_HUNYUAN,
        keys=_keys,
        neutral={**_NEUTRAL, "num_experts": (1,), **dict.fromkeys(_PER_LAYER[:1] + _PER_LAYER[2:])},
        gguf=InGGUF("hunyuan-dense"),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe",
        **_HUNYUAN,
        keys=_of_all,
        experts=_experts,
        neutral=_NEUTRAL,
        expert_names=ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp"),
        gguf=InGGUF(
            "hunyuan-moe",
            experts=ExpertMetadata(
                neutral={"expert_shared_count": (0, 1), "expert_weights_scale": (0, 1)},
                shared=True,
                more={"wide_router": True},
            ),
        ),
    ),
}
