"""GLM-4, GLM-4.5 with its like, and GLM-4.7-Flash and GLM-5, which have the layers of DeepSeek-V3 and V3.2."""

from __future__ import annotations

from functools import partial
from typing import Any

from draftwing.layers.config import LayerConfig
from draftwing.models.families.deepseek import (
    IN_GGUF,
    INDEXED,
    INDEXED_IN_GGUF,
    LATENT,
    NAMES,
    dense_layers,
    experts,
    indexed_in_gguf,
    indexed_layers,
)
from draftwing.models.family import Family, InGGUF, Whole
from draftwing.models.fields import MAX_LAYERS, Fields

DENSE: dict[str, Any] = {
    "bias": True, "o_bias": False, "head_dim": 128, "eps": 1.5625e-7, "turns_parts": True, "rotary": 0.5,
    "rope_interleaved": True, "fused_mlp": True,
}  # fmt: skip


def _shared_picks(fields: Fields, layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which some attend to what the last one with an indexer picked: those that `indexer_types`
    names, or a pattern of letters, or all but one in so many."""
    kinds = fields.texts("indexer_types")
    pattern = fields.text("index_topk_pattern", "")
    every = fields.whole("index_topk_freq", high=MAX_LAYERS, default=1)
    offset = fields.whole("index_skip_topk_offset", 0, MAX_LAYERS, 2)
    if not kinds and pattern:
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if not kinds:
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {"full", "shared"} or kinds[0] == "shared":
        key = "indexer_types" if fields.texts("indexer_types") else "index_topk_pattern"
        raise fields.unlike(key, f"full or shared for each of {count} layers, the first of them full")
    return indexed_layers(fields, layer, count, True, kinds)


_OF_VISION = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
_INDEXED: dict[str, Any] = INDEXED | {
    "layers": _shared_picks,
    # Whether drafts of several steps pick once: what they attend to is no matter of the text.
    "neutral": {**INDEXED["neutral"], "index_share_for_mtp_iteration": None},
}
FAMILIES = {
    "GlmForCausalLM": Family("glm", **DENSE),
    "Glm4ForCausalLM": Family(
        "glm4",
        **DENSE,
        out_norms=True,
        layer_names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        wholes={"Glm4vForConditionalGeneration": Whole("glm4v", _OF_VISION, only={"attention_bias": (True,)})},
        gguf=InGGUF("glm4", names={"ffn_up": "mlp.gate_up_proj"}),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        o_bias=False,
        qk_norm="key",
        eps=1e-5,
        turns_parts=True,
        rotary=0.5,
        experts=experts,
        dense_layers=dense_layers,
        neutral={"first_k_dense_replace": None},
        expert_names=NAMES,
        predicts="numbered",
        wholes={"Glm4vMoeForConditionalGeneration": Whole("glm4v_moe", {**_OF_VISION, "attention_bias": True})},
        gguf=InGGUF("glm4moe", names={"post_attention_norm": "post_attention_layernorm"}, experts=IN_GGUF),
    ),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", eps=1e-5, **LATENT, predicts="numbered"),  # GGUF: as V3
    "GlmMoeDsaForCausalLM": Family(
        "glm_moe_dsa",
        eps=1e-5,
        **_INDEXED,
        predicts="numbered",
        gguf=InGGUF("glm-dsa", **INDEXED_IN_GGUF | {"layers": partial(indexed_in_gguf, interleaved=True)}),
    ),
}
