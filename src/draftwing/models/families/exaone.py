"""EXAONE 3: Llama, with other names. EXAONE 4: norms behind each part alone; where some layers have a window, the
others turn nothing. K-EXAONE: the experts of DeepSeek-V3, and norms before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from draftwing.models.families.deepseek import IN_GGUF, dense_layers, experts
from draftwing.models.family import ExpertNames, Family, InGGUF, Whole, renamed
from draftwing.models.fields import Fields
from draftwing.models.positions import FULL, SLIDING
from draftwing.requests.refusals import show


def _keys(fields: Fields) -> dict[str, Any]:
    """Reads a pattern such as LLLG as the number of its layers."""
    pattern = fields.get("sliding_window_pattern")
    if fields.has("sliding_window") and fields.get("sliding_window") is None:  # no layer has one
        return {"layer_types": None, "sliding_window_pattern": 1}
    if not isinstance(pattern, str):
        return {}
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise fields.unlike("sliding_window_pattern", "a number of layers, or as many letters L with one G behind")
    return {"sliding_window_pattern": len(pattern)}


def _nope(fields: Fields, windows: Sequence[int]) -> Collection[int]:
    """Returns the layers without a window, where the model has a size of windows at all."""
    sized = fields.get("sliding_window") is not None or any(windows)
    return {i for i, window in enumerate(windows) if not window} if sized else ()


_OLDER = {"num_hidden_layers": "num_layers", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
_OLDER_NAMES = {
    "transformer.h.": "layers.", "transformer.wte.": "embed_tokens.", "transformer.ln_f.": "norm.",
    ".attn.attention.": ".self_attn.", ".self_attn.out_proj.": ".self_attn.o_proj.", ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.", ".mlp.c_fc_0.": ".mlp.gate_proj.", ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}  # fmt: skip


def _older_keys(fields: Fields) -> dict[str, Any]:
    return fields.renamed(_OLDER)


# What is called otherwise in other configs.
_MOE_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _moe_keys(fields: Fields) -> dict[str, Any]:
    usual = {"num_experts": 64, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "moe_intermediate_size": 1024}
    found = {key: value for key, value in usual.items() if not fields.has(key)}
    said = {**_keys(fields), **found, **fields.overruled(found).renamed(_MOE_NAMES)}
    sizes, window = fields.get("sliding_windows"), fields.get("sliding_window")
    if sizes is None:
        return said
    if not fields.has("sliding_window") and isinstance(sizes, list):
        window = next((size for size in sizes if size), None)
    each = [window if kind == SLIDING else 0 for kind in fields.texts("layer_types")]
    if not isinstance(sizes, list) or [size or 0 for size in sizes] != each:
        raise fields.unlike("sliding_windows", f"by layer_types {show(window)} for layers with a window, 0 for others")
    return {**said, "sliding_window": window}


_WITH_WINDOWS: dict[str, Any] = {
    "qkv_bias": False, "o_bias": False, "qk_norm": True, "eps": 1e-5, "sliding_window": 4096, "window_pattern": 4,
    "nope": _nope,
}  # fmt: skip
FAMILIES = {
    "ExaoneForCausalLM": Family(
        "exaone",
        eps=1e-5,
        theta=5e5,
        sliding_window=None,
        keys=_older_keys,
        apart=renamed(_OLDER_NAMES),
        gguf=InGGUF("exaone"),
    ),
    **dict.fromkeys(
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        Family(
            "exaone_moe",
            **_WITH_WINDOWS,
            keys=_moe_keys,
            experts=experts,
            dense_layers=dense_layers,
            predicts="mtp",
            predicts_dense=True,
            predicts_kind=FULL,
            expert_names=ExpertNames(shared="mlp.shared_experts", correction="mlp.e_score_correction_bias"),
            gguf=InGGUF("exaone-moe", experts=IN_GGUF),
            neutral={"is_moe_layer": None, "first_k_dense_replace": None},  # beside `mlp_layer_types`
        ),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        **_WITH_WINDOWS,
        in_norms=False,
        out_norms=True,
        keys=_keys,
        wholes={"Exaone4_5_ForConditionalGeneration": Whole("exaone4_5", {})},
        gguf=InGGUF("exaone4", windowless=True),
    ),
}
