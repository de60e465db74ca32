"""What a config.json says of positions: how far the layers attend, and their rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from draftwing.layers.rope import MAX_POSITIONS, RopeConfig, longrope_attention_factor, yarn_attention_factor
from draftwing.models.fields import LARGEST, Fields
from draftwing.requests.refusals import show

FULL, SLIDING = "full_attention", "sliding_attention"
PROPORTIONAL: Literal["proportional"] = "proportional"
# Whether `use_sliding_window` decides, and then all layers have the window, or those from `max_window_layers` on.
WindowSwitch = Literal["", "all", "upper"]
_FIRST_WINDOWED = 28  # of families with a switch, where the config does not say `max_window_layers`


def windows(
    fields: Fields, layers: int, max_positions: int, default: int | None, switch: WindowSwitch = "", pattern: int = 0
) -> tuple[int, ...]:
    """Returns the sliding window of each layer, 0 where it sees everything; empty where no layer has one.

    default: the window where the config has no such key, 0: there is none then, None: the key is a leftover.  pattern:
    one in so many layers sees everything, the last of each; 0: none.  A window as long as the context cuts nothing off,
    but where layers follow a pattern, those with a window may differ in more.
    """
    kinds = fields.texts("layer_types")
    for kind in set(kinds) - {FULL, SLIDING}:
        raise fields.unsupported("layer_types", kind)
    window = fields.whole("sliding_window", 0, 2**40, -1) if fields.has("sliding_window") else default or -1
    if default is None or (switch and not fields.flag("use_sliding_window")):
        return ()
    if kinds and len(kinds) < layers:
        raise fields.unlike("layer_types", f"one for each of {layers} layers")
    if not kinds and switch == "upper":
        first = fields.whole("max_window_layers", 0, default=_FIRST_WINDOWED)
        kinds = [FULL if i < first else SLIDING for i in range(layers)]
    elif not kinds:
        kinds = [FULL if pattern and not (i + 1) % pattern else SLIDING for i in range(layers)]
    if SLIDING not in kinds[:layers] or (not pattern and (window < 0 or window >= max_positions)):
        return ()
    if window < 1:
        raise fields.unlike("sliding_window", "1 or more")
    return tuple(window if kind == SLIDING else 0 for kind in kinds[:layers])


def window_ahead(fields: Fields, kind: str, default: int | None) -> int:
    """Returns the sliding window of the prediction layer, 0 where it sees everything: by `mtp_layer_types`, and that of
    the model's layers unless `mtp_sliding_windows` has its own.

    kind: where the config does not say.  default: the window where the config has no `sliding_window`.
    """
    kinds, sizes = fields.texts("mtp_layer_types") or [kind], fields.get("mtp_sliding_windows")
    if len(kinds) > 1 or kinds[0] not in (FULL, SLIDING):
        raise fields.unsupported("mtp_layer_types", kinds)
    window = fields.whole("sliding_window", 0, 2**40, default or 0)
    if not sizes:
        return window if kinds[0] == SLIDING else 0
    size = (sizes[0] or 0) if isinstance(sizes, list) and len(sizes) == 1 else None
    if type(size) is not int or size < 0 or (size > 0) != (kinds[0] == SLIDING):
        raise fields.unlike("mtp_sliding_windows", f"one window, of a layer of {kinds[0]}")
    return size


def ropes(
    fields: Fields,
    theta: float,
    local_theta: float | None,
    max_positions: int,
    share: float | None = None,
    query_scale: str = "",
) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rotary embedding of the layers, and that of those with a window, None where it is the same.

    Reads `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both, and may hold them for each type of
    layer. theta: where the config has none.  local_theta: of layers with a window, for families that have one of
    their own, 0: that of all, not scaled.  share: of a head that is turned where the config does not say, None: all of
    it always is.  query_scale: as `Family` has it.
    """
    given = rope_fields(fields)
    _check_beside(fields, given)
    theta, trained = fields.number("rope_theta", 1, 1e15, theta), "original_max_position_embeddings"
    if given.get("long_factor") is not None:  # of two values transformers takes the outer one
        found = (fields.get(trained), given.get(trained), max_positions)
        given = given.overruled({trained: next(one for one in found if one is not None)})
    if local_theta is None:
        if any(isinstance(value, Mapping) for value in given.values()):
            raise fields.unsupported(f"{given.inside.rstrip('.')} per layer type", dict(given.items()))
        beta = given.number("llama_4_scaling_beta", 0, 1e3, 0.0) if query_scale else 0.0
        if share is not None:
            share = fields.number("partial_rotary_factor", 0, 1, share)
        made = rope(given, theta, max_positions, share)
        if beta:
            made = replace(made, query_beta=beta, original_max_positions=given.whole(trained))
            made = replace(made, apart=query_scale == "apart")
        return made, None
    own_base = local_theta > 0
    local_theta = fields.number("rope_local_base_freq", 1, 1e15, local_theta or theta)
    by_kind = any(given.get(kind) is not None for kind in (FULL, SLIDING))
    if not by_kind and fields.get("rope_parameters"):  # of which transformers reads nothing then
        raise fields.unlike("rope_parameters", f"{FULL} and {SLIDING}")
    if own_base and not by_kind and given.get("rope_type") is None and given.get("type") is not None:
        raise given.unlike("type", "rope_type in its place: libraries differ in whether they read it here")
    of_all = given.inner(FULL) if by_kind else given
    return rope(of_all, theta, max_positions), rope(given.inner(SLIDING), local_theta, max_positions)


def rope_fields(fields: Fields) -> Fields:
    """Returns what says how positions are turned, as newer configs call it, or older ones."""
    return fields.inner("rope_scaling" if fields.get("rope_parameters") is None else "rope_parameters")


def rotary_dims(fields: Fields, head_dim: int, share: float) -> int:
    """Returns how many elements of a head are turned, 0: all. share: where the config does not say."""
    given, key = rope_fields(fields), "partial_rotary_factor"
    if share != 1 and fields.has(key) and fields.get(key) is None:  # others then turn all
        raise fields.unlike(key, "a number from 0 to 1")
    share = fields.number(key, 0, 1, share)
    dims = int(head_dim * given.number(key, 0, 1, share))
    if _kind(given) == PROPORTIONAL:  # whose share says which of all pairs are turned by nothing
        return 0
    if not dims:
        raise given.unlike(key, f"a share of which some of a head's {head_dim} elements are turned")
    return 0 if dims == head_dim else dims


def sections_of(fields: Fields, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many pairs of a head are turned by time, height and width, by turns. usual: where a config does not
    say."""
    given, key = rope_fields(fields), "mrope_section"
    given.check("mrope_interleaved", (True,))
    found = given.get(key)
    found = usual if found is None else tuple(found) if isinstance(found, list) else ()
    if len(found) != 3 or not all(type(one) is int and 0 <= one < LARGEST for one in found):
        raise given.unlike(key, "three numbers of pairs")
    return found


def _check_beside(fields: Fields, given: Fields) -> None:
    """Refuses keys beside `given` that say something else: who adds `rope_scaling` to a file with `rope_parameters`
    wants it read."""
    said = _said(given.inner(FULL) if isinstance(given.get(FULL), Mapping) else given)
    beside, theta = fields.inner("rope_scaling"), fields.get("rope_theta")
    if beside.inside != given.inside and [*beside.items()]:  # which others then read alone, but for the base
        if theta not in (None, said.get("rope_theta")):
            raise fields.unlike("rope_theta", "none beside both, or that of rope_parameters")
        if said != ({} if theta is None else {"rope_theta": theta}) | _said(beside):
            raise fields.unlike("rope_scaling", "none beside rope_parameters, or the same")
        for key, _ in beside.items():
            beside.get(key)
    trained, key = said.get("original_max_position_embeddings"), "original_max_position_embeddings"
    if said.get("rope_type") in ("llama3", "yarn") and fields.get(key) not in (None, trained):
        raise fields.unlike(key, f"{show(trained)}, as beside the rope_type")


def _said(given: Fields) -> dict[str, Any]:
    """Returns what an object says, its kind under one name; keys that nobody else asks for stay unread."""
    found = {key: value for key, value in given.items() if value is not None and key != "type"}
    return found | {"rope_type": _kind(given)}


def _kind(scaling: Fields) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def rope(scaling: Fields, theta: float, max_positions: int, share: float | None = None) -> RopeConfig:
    """Returns one rotary embedding; theta: where `scaling` has none.  share: as `ropes` has it."""
    theta, kind = scaling.number("rope_theta", 1, 1e15, theta), _kind(scaling)
    turned = scaling.number("partial_rotary_factor", 0, 1, 1 if share is None else share)
    if kind == PROPORTIONAL:
        return RopeConfig(theta, PROPORTIONAL, scaling.number("factor", 1e-3, 1e6, 1.0), share=turned)
    if share is None and turned != 1:
        raise scaling.unsupported("partial_rotary_factor", turned)
    # Of text alone the three positions of mrope are one. The dynamic rule changes nothing up to the trained context,
    # and contexts beyond that are refused.
    if kind in ("default", "mrope") or (kind == "dynamic" and scaling.get("alpha") is None):
        return RopeConfig(theta)
    if kind in ("longrope", "su"):
        return _longrope(scaling, theta, max_positions)
    if kind not in ("linear", "llama3", "yarn"):
        raise scaling.unsupported("rope_type", kind)
    factor = scaling.number("factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        return _yarn(scaling, theta, factor, max_positions)
    low, high = scaling.number("low_freq_factor", 1e-3, 1e6), scaling.number("high_freq_factor", 1e-3, 1e6)
    if low > high:
        raise scaling.unlike("high_freq_factor", f"at least low_freq_factor, which is {low:g}")
    positions = scaling.number("original_max_position_embeddings", 1, LARGEST)
    return RopeConfig(theta, "llama3", factor, low, high, int(positions))


def _longrope(scaling: Fields, theta: float, max_positions: int) -> RopeConfig:
    short, long = (scaling.numbers(f"{kind}_factor", 1e-3, 1e6) for kind in ("short", "long"))
    original = int(scaling.number("original_max_position_embeddings", 2, LARGEST))
    factor = scaling.number("factor", 1e-3, 1e6, max_positions / original)
    inferred = longrope_attention_factor(factor, original)
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_positions=original,
        divisors=short,
        attention_factor=scaling.number("attention_factor", 0, 1e3, inferred),
        long_divisors=long,
    )


def _yarn(scaling: Fields, theta: float, factor: float, max_positions: int) -> RopeConfig:
    fast, slow = scaling.number("beta_fast", 0, 1e6, 32.0), scaling.number("beta_slow", 0, 1e6, 1.0)
    positions = scaling.number("original_max_position_embeddings", 1, LARGEST, float(max_positions))
    mscale, all_dim = scaling.number("mscale", 0, 1e3, 0.0), scaling.number("mscale_all_dim", 0, 1e3, 0.0)
    inferred = yarn_attention_factor(factor)
    if mscale and all_dim:
        inferred = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    scaling.check("extrapolation_factor", (1,))
    inferred *= scaling.number("attn_factor", 1e-3, 1e3, 1.0)  # by vLLM's name; transformers passes over it
    if theta <= 1:
        raise scaling.unlike("rope_theta", "more than 1")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=int(positions),
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", 0, 1e3, inferred),
    )


def context(rope: RopeConfig, max_positions: int) -> int:
    """Returns how many positions a model has that was trained on `max_positions`, a number that those who add YaRN to a
    config leave as it was."""
    if rope.kind == "yarn":
        max_positions = max(max_positions, int(rope.original_max_positions * rope.factor))
    return min(max_positions, MAX_POSITIONS)


def first_chunk(fields: Fields) -> int:
    """Returns how many tokens dual chunk attention sees as any other does, where a config has it, and else any number:
    it cuts longer texts into chunks so long, and changes positions between them; and scales scores of texts that are
    longer than what a model was trained for."""
    key = "dual_chunk_attention_config"
    chunks = fields.inner(key)
    if fields.get(key) is None:
        return MAX_POSITIONS
    for name, _ in chunks.items():  # the others are of sparse attention to longer texts
        chunks.get(name)
    size = chunks.whole("chunk_size", high=LARGEST)
    alike = size - chunks.whole("local_size", 0, size - 1)
    return min(alike, chunks.whole("original_max_position_embeddings", 0, LARGEST, 0) or alike)
