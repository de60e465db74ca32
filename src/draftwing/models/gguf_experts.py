"""What the metadata of a GGUF file say of experts."""

from __future__ import annotations

from typing import Any

from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import ExpertConfig
from draftwing.models.config import Family
from draftwing.models.expert_fields import DEEPSEEKS
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, max_experts
from draftwing.ops.contracts import Routing

OSS_LIMIT = 7.0  # of the activation of gpt-oss, which files do not say
# Values of `expert_gating_func`: none said, a softmax, sigmoids, and a softmax of those chosen, which is one of all,
# renormalised.
_UNSAID, _SOFTMAX, SIGMOID, _SOFTMAX_OF_CHOSEN = 0, 1, 2, 3
# Metadata that changes the arithmetic, with the values at which it does not: of models whose routers have a softmax.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
}
_NEUTRAL_IN_V2: dict[str, tuple[Any, ...]] = {"expert_weights_norm": (False,)}  # as `expert_fields` has it


def experts(file: GGUFFile, fields: Fields, family: Family, dense_ffn: bool) -> ExpertConfig | None:
    """Returns the experts of layers that have them; None where the file speaks of none. dense_ffn: whether they may be
    as wide as a file says of an MLP."""
    oss, by_sigmoids = family.experts == "gpt_oss", family.experts in ("deepseek", "minimax")
    deepseek = family.experts in DEEPSEEKS
    gating = (_UNSAID, SIGMOID) if by_sigmoids else (_UNSAID, _SOFTMAX, *[_SOFTMAX_OF_CHOSEN] * oss)
    neutral = {} if by_sigmoids else _NEUTRAL_IN_V2 if deepseek else _NEUTRAL
    for key, served in {"expert_gating_func": gating, **neutral}.items():
        fields.check(key, served)
    count = fields.whole("expert_count", 0, max_experts(fields.whole("block_count", high=MAX_LAYERS)), 0)
    if not count:
        return None
    if not family.experts:
        raise fields.unsupported("expert_count", count)
    top_k = fields.whole("expert_used_count", high=count)
    ffn = fields.whole("feed_forward_length", high=WIDEST, default=0) if dense_ffn else 0
    shared = shared_width(file, fields) if family.shared or by_sigmoids or deepseek else 0
    return ExpertConfig(
        count,
        _of_groups(fields, top_k, by_sigmoids) if deepseek else Routing(top_k, sigmoid=by_sigmoids),
        ffn=fields.whole("expert_feed_forward_length", high=WIDEST, default=ffn or None),
        router_bias=oss,
        bias=oss,
        limit=OSS_LIMIT if oss else 0.0,
        shared=shared,
        shared_gate=family.shared,
        wide_router=by_sigmoids or deepseek,
        beside=family.experts == "gemma",
    )


def _of_groups(fields: Fields, top_k: int, sigmoid: bool) -> Routing:
    groups = fields.whole("expert_group_count", 0, default=1) or 1
    return Routing(
        top_k,
        # Converters of `deepseek2` say nothing where it is not so.
        renormalise=fields.flag("expert_weights_norm", fields.prefix != "deepseek2."),
        sigmoid=sigmoid,
        groups=groups,
        top_groups=fields.whole("expert_group_used_count", 0, groups, 1) or 1,
        scale=fields.number("expert_weights_scale", 0, 1e3, 1.0) or 1.0,
    )


def shared_width(file: GGUFFile, fields: Fields) -> int:
    """Returns the width of the expert that all rows go to, 0 where there is none."""
    info = next((info for name, info in file.tensors.items() if name.endswith(".ffn_gate_shexp.weight")), None)
    stored = 0 if info is None else info.shape[0]
    return fields.whole("expert_shared_feed_forward_length", stored, stored, stored)
