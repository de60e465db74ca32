"""DeepSeek-V2, V3 and V3.2: latent attention, and experts in groups. V2, V3 and relatives are one in GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import LayerConfig
from draftwing.layers.indexer import IndexConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.part_configs import ExpertConfig
from draftwing.layers.rope import yarn_attention_factor
from draftwing.models.family import (
    SIGMOID,
    SOFTMAX,
    UNSAID,
    ExpertMetadata,
    ExpertNames,
    Family,
    InGGUF,
    Whole,
    dense_by_kinds,
)
from draftwing.models.fields import WIDEST, Fields, Values, max_experts
from draftwing.models.positions import rope_fields
from draftwing.ops.experts.routing import Routing

_YARN_LOG = "rope.scaling.yarn_log_multiplier"  # 0.1 * mscale_all_dim; mscale is the same then


def latent_attention(fields: Fields) -> LatentAttentionConfig:
    """Returns latent attention, of the keys that all have who have it."""

    def size(key: str, low: int = 1, default: int | None = None) -> int:
        return fields.whole(key, low, WIDEST, default)

    scaling = rope_fields(fields)
    factor, all_dim = 1.0, scaling.number("mscale_all_dim", 0, 1e3, 0.0)
    if scaling.text("rope_type", scaling.text("type", "default")) != "default" and all_dim:
        factor = yarn_attention_factor(scaling.number("factor", 1e-3, 1e6), all_dim) ** 2
    return LatentAttentionConfig(
        size("num_attention_heads"),
        size("qk_nope_head_dim"),
        size("qk_rope_head_dim"),
        size("v_head_dim"),
        size("kv_lora_rank"),
        size("q_lora_rank", 0, 0),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias"),
        factor=factor,
    )


def _layers(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers with latent attention; layer: one with experts."""
    assert layer.experts is not None
    # Relatives differ in what they take for granted.
    fields.number("routed_scaling_factor", 1e-3, 1e3)
    groups = ("n_group", "topk_group") if layer.experts.routing.sigmoid else ()
    for key in (*groups, *(() if fields.texts("mlp_layer_types") else ("first_k_dense_replace",))):
        fields.whole(key, 0)
    return (replace(layer, mixer=latent_attention(fields)),) * count


def turned_apart(fields: Fields) -> dict[str, Any]:
    """Returns what says how positions are turned without the share of a head that is, which is beside the rest of it
    here."""
    given, share = rope_fields(fields), "partial_rotary_factor"
    if given.get(share) is None:
        return {}
    return {given.inside.rstrip("."): {key: value for key, value in given.items() if key != share}}


def _mistral_keys(fields: Fields) -> dict[str, Any]:
    """Says what Mistral 4's configs need not."""
    usual = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
    return turned_apart(fields) | {key: value for key, value in usual.items() if not fields.has(key)}


def _mistral_experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns those of Mistral 4: by a softmax of all, whose shares are renormalised, without groups."""
    fields.check("n_group", (1,))
    found = experts(fields, layers)
    return replace(found, routing=replace(found.routing, sigmoid=False, corrected=False))


def _dense_latent(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return (replace(layer, mixer=latent_attention(fields)),) * count


def indexed_layers(
    fields: Fields, layer: LayerConfig, count: int, interleaved: bool = False, kinds: Sequence[str] = ()
) -> tuple[LayerConfig, ...]:
    """Returns layers with latent attention to what an indexer picks. interleaved: `indexer_rope_interleave` when the
    config has none.  kinds: of each layer, "full" with an indexer, "shared" without: all have one where there are no
    kinds."""
    index = IndexConfig(
        fields.whole("index_n_heads", high=WIDEST),
        fields.whole("index_head_dim", high=WIDEST),
        fields.whole("index_topk"),
        fields.flag("indexer_rope_interleave", interleaved),
    )
    fields.check("rope_interleave", (True,))  # which nobody reads of these
    chosen = fields.whole("n_routed_experts")
    if fields.whole("num_experts", default=chosen) != chosen:
        raise fields.unlike("num_experts", f"{chosen}, as n_routed_experts says")
    of_kind = {"full": index, "shared": replace(index, shared=True)}
    dense = _layers(fields, layer, count)[0]
    assert isinstance(dense.mixer, LatentAttentionConfig)
    made = {kind: replace(dense, mixer=replace(dense.mixer, index=index)) for kind, index in of_kind.items()}
    return tuple(made[kind] for kind in kinds or ["full"] * count)


def experts(fields: Fields, layers: int) -> ExpertConfig:
    """Returns experts that are chosen by sigmoids, as V3 and GLM have them."""
    fields.check("scoring_func", ("sigmoid",))
    fields.check("topk_method", ("noaux_tc",))
    count = fields.whole("n_routed_experts", high=max_experts(layers))
    top_k = fields.whole("num_experts_per_tok", high=count)
    ffn = fields.whole("moe_intermediate_size", high=WIDEST)
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


def _experts_by_softmax(fields: Fields, layers: int) -> ExpertConfig:
    """Returns those of V2: by a softmax of all, which is not renormalised."""
    fields.check("scoring_func", ("softmax",))
    fields.check("rope_interleave", (True,))  # which nobody reads of V2
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


def dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Returns layers with an MLP in place of experts, by `mlp_layer_types` or `first_k_dense_replace`."""
    if fields.whole("moe_layer_freq", default=1) != 1:
        raise fields.unsupported("moe_layer_freq", fields.get("moe_layer_freq"))
    found = dense_by_kinds(fields, layers)
    first = fields.whole("first_k_dense_replace", 0, layers, min(1, layers)) if found is None else 0
    return frozenset(range(first)) if found is None else found


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def _is_dense(file: GGUFFile, fields: Fields) -> bool:
    """Returns whether a file has no experts, as those of Youtu have none."""
    return fields.whole("expert_count", 0, default=0) == 0


def _is_v2(file: GGUFFile, fields: Fields) -> bool:
    """Returns whether a file has the router of V2, not that of V3 and GLM-4.7-Flash. Files need not say."""
    if _is_dense(file, fields):
        return False
    function = fields.whole("expert_gating_func", 0, 255, 0)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    return not (function == SIGMOID or (corrected and not function))


def turned(fields: Fields) -> Fields:
    """Returns the metadata with heads of the elements that are turned: what is said of heads is of latents, or not."""
    size = fields.whole("rope.dimension_count", 2, WIDEST)
    return fields.overruled({f"attention.{part}_length": size for part in ("key", "value")})


def latent_in_gguf(file: GGUFFile, fields: Fields, block: int = 0) -> LatentAttentionConfig:
    """Returns the latent attention of a file. block: one that has it."""

    def size(key: str, low: int = 1, high: int = WIDEST) -> int:
        return fields.whole(f"attention.{key}", low, high)

    latent, turned = size("kv_lora_rank"), fields.whole("rope.dimension_count", 2, WIDEST)
    key = "key_length"
    if fields.has("attention.key_length_mla"):  # and then these are of what a token keeps
        size(key, latent + turned, latent + turned)
        size("value_length", latent, latent)
        key = "key_length_mla"
    factor, all_dim = 1.0, round(10 * fields.number(_YARN_LOG, 0, 1e3, 0.0), 6)  # it was rounded to float32
    if fields.text("rope.scaling.type", "none") == "yarn":
        factor = yarn_attention_factor(fields.number("rope.scaling.factor", 1e-3, 1e6), all_dim) ** 2
    return LatentAttentionConfig(
        size("head_count"),
        size(key, turned + 1) - turned,
        turned,
        size(key.replace("key", "value")),
        latent,
        0 if f"blk.{block}.attn_q.weight" in file.tensors else size("q_lora_rank"),
        bias=f"blk.{block}.attn_kv_a_mqa.bias" in file.tensors,
        factor=factor,
    )


def in_gguf(file: GGUFFile, fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    return (replace(layer, mixer=latent_in_gguf(file, fields)),) * count


def indexed_in_gguf(
    file: GGUFFile, fields: Fields, layer: LayerConfig, count: int, interleaved: bool = False
) -> tuple[LayerConfig, ...]:
    """Returns layers with an indexer where the file has its tensors, else with another layer's picks."""

    def size(key: str) -> int:
        return fields.whole(f"attention.indexer.{key}", high=WIDEST)

    index = IndexConfig(size("head_count"), size("key_length"), size("top_k"), interleaved)
    latent = latent_in_gguf(file, fields)
    full, key = [f"blk.{i}.indexer.attn_k.weight" in file.tensors for i in range(count)], "attention.indexer.types"
    said = fields.get(key)
    if not full[0] or (said is not None and np.atleast_1d(said).tolist() not in (full, full[:1] * all(full))):
        raise fields.unlike(key, "1 of each layer with tensors of an indexer, of which the first is one")
    of_kind = {own: replace(layer, mixer=replace(latent, index=replace(index, shared=not own))) for own in set(full)}
    return tuple(of_kind[own] for own in full)


# Of experts by sigmoids. Converters of `deepseek2` say nothing of norms where there are none.
IN_GGUF = ExpertMetadata(
    (UNSAID, SIGMOID), neutral={}, sigmoid=True, grouped=True, shared=True, more={"wide_router": True}
)
LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_STORED: dict[str, Any] = {
    "names": LATENT_NAMES,
    "fields": turned,
    "layers": in_gguf,
    "yarn_log": _YARN_LOG,
}
NAMES = ExpertNames(shared="mlp.shared_experts")
_NEUTRAL: dict[str, Values] = {
    "qk_head_dim": None,  # the sum of both parts
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": None,  # beside `mlp_layer_types`
}
# The same with an indexer.
INDEXED_IN_GGUF: dict[str, Any] = _STORED | {
    "names": LATENT_NAMES
    | {
        "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.attn_q_b": "self_attn.indexer.wq_b",
        "indexer.proj": "self_attn.indexer.weights_proj",
        "indexer.k_norm": "self_attn.indexer.k_norm",
    },
    "layers": indexed_in_gguf,
    "experts": IN_GGUF._replace(renormalised=False),
}
# What all with latent attention have in common, as `Family` has it.
LATENT: dict[str, Any] = {
    "experts": experts,
    "dense_layers": dense_layers,
    "layers": _layers,
    "neutral": _NEUTRAL,
    "expert_names": NAMES,
}
# The same with an indexer.
INDEXED: dict[str, Any] = LATENT | {
    "layers": indexed_layers,
    "neutral": {**_NEUTRAL, "layer_types": None},  # one name for all
}
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        **LATENT | {"experts": _experts_by_softmax},
        gguf=InGGUF(
            "deepseek2",
            **_STORED,
            when=_is_v2,
            experts=IN_GGUF._replace(
                gating=(UNSAID, SOFTMAX), neutral={"expert_weights_norm": (False,)}, sigmoid=False, renormalised=False
            ),
        ),
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        layers=_dense_latent,
        tied=True,
        neutral={**_NEUTRAL, "embedding_initializer_range": None},
        gguf=InGGUF("deepseek2", **_STORED, when=_is_dense),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        **LATENT,
        predicts="numbered",
        wholes={
            f"{name}ForConditionalGeneration": Whole(kind, {})
            for name, kind in (("KimiK25", "kimi_k25"), ("Kimi_K25", "kimi_k25"), ("KimiVL", "kimi_vl"))
        },
        gguf=InGGUF("deepseek2", **_STORED, experts=IN_GGUF._replace(renormalised=False)),
    ),
    "Mistral4ForCausalLM": Family(
        "mistral4",
        **LATENT | {"experts": _mistral_experts},
        keys=_mistral_keys,
        query_scale="apart",
        scaled=True,
        wholes={"Mistral3ForConditionalGeneration": Whole("mistral3", {}, "mistral4")},
        gguf=InGGUF("mistral4", **_STORED, experts=IN_GGUF._replace(gating=(UNSAID, SOFTMAX), sigmoid=False)),
    ),
    "DeepseekV32ForCausalLM": Family(
        "deepseek_v32", **INDEXED, predicts="numbered", gguf=InGGUF("deepseek32", **INDEXED_IN_GGUF)
    ),
}
