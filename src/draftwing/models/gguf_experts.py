"""What the metadata of a GGUF file say of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwing.errors import CheckpointError
from draftwing.gguf_file import GGUFFile
from draftwing.layers.config import ExpertConfig
from draftwing.models.config import Family
from draftwing.models.fields import MAX_LAYERS, WIDEST, Fields, max_experts
from draftwing.ops.contracts import Routing
from draftwing.requests.refusals import show

OSS_LIMIT = 7.0  # of the activation of gpt-oss, which files do not say
# Values of `expert_gating_func`: none said, a softmax, sigmoids, and a softmax of those chosen, which is one of all,
# renormalised.
_UNSAID, _SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 0, 1, 2, 3
# Of models whose routers have a softmax: metadata that changes the arithmetic, with the values at which it does not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
}


def experts(file: GGUFFile, fields: Fields, family: Family, dense_ffn: bool) -> ExpertConfig | None:
    """The experts of layers that have them; None where the file speaks of none. dense_ffn: whether they may be as wide
    as a file says of an MLP."""
    oss, by_sigmoids = family.experts == "gpt_oss", family.experts in ("deepseek", "minimax")
    _check(file, fields, (_UNSAID, _SIGMOID) if by_sigmoids else (_UNSAID, _SOFTMAX, *[_SOFTMAX_OF_CHOSEN] * oss))
    count = fields.whole("expert_count", 0, max_experts(fields.whole("block_count", high=MAX_LAYERS)), 0)
    if not count:
        return None
    if not family.experts:
        raise CheckpointError(f"{file.path}: {fields.prefix}expert_count = {count} is not supported")
    top_k = fields.whole("expert_used_count", high=count)
    ffn = fields.whole("feed_forward_length", high=WIDEST, default=0) if dense_ffn else 0
    shared = shared_width(file, fields) if family.shared or by_sigmoids else 0
    return ExpertConfig(
        count,
        _routing(fields, top_k, family.experts == "deepseek") if by_sigmoids else Routing(top_k),
        ffn=fields.whole("expert_feed_forward_length", high=WIDEST, default=ffn or None),
        router_bias=oss,
        bias=oss,
        limit=OSS_LIMIT if oss else 0.0,
        shared=shared,
        shared_gate=family.shared,
        wide_router=by_sigmoids,
        beside=family.experts == "gemma",
    )


def _check(file: GGUFFile, fields: Fields, gating: tuple[int, ...]) -> None:
    """Refuses what has no code here. gating: the values of `expert_gating_func` that are served."""
    neutral = {"expert_gating_func": gating} | ({} if _SIGMOID in gating else _NEUTRAL)
    for key, known in neutral.items():
        value = fields.get(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in known):
            raise CheckpointError(f"{file.path}: {fields.prefix}{key} = {show(value)} is not supported")


def _routing(fields: Fields, top_k: int, deepseek: bool) -> Routing:
    if not deepseek:
        return Routing(top_k, sigmoid=True)
    groups = fields.whole("expert_group_count", 0, default=1) or 1
    return Routing(
        top_k,
        renormalise=fields.flag("expert_weights_norm", True),
        sigmoid=True,
        groups=groups,
        top_groups=fields.whole("expert_group_used_count", 0, groups, 1) or 1,
        scale=fields.number("expert_weights_scale", 0, 1e3, 1.0) or 1.0,
    )


def shared_width(file: GGUFFile, fields: Fields) -> int:
    """Returns the width of the expert that all rows go to, 0 where there is none."""
    info = next((info for name, info in file.tensors.items() if name.endswith(".ffn_gate_shexp.weight")), None)
    stored = 0 if info is None else info.shape[0]
    return fields.whole("expert_shared_feed_forward_length", stored, stored, stored)
