"""Kinds of kernels, by their names, and the least time that a forward's work of each kind may take on an H200."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from step import weights_read
from timing import read_rate

from draftwing.kv.pool import KVSpec, delta_specs
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.experts import ExpertLinear
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.linear import Linear
from draftwing.ops.fp8.spec import FP8_FROM

PEAKS = {2: 989e6, 1: 1979e6}  # operations of an H200 per microsecond, by bytes of both operands' values
# The first that finds its expression in a name. Products between routes and the sum of experts are those of experts.
KINDS = {
    "experts": r"expert_gemm|clamped_swiglu|^(plain|silu|clamped)$",
    "routes and sums of experts": r"route_kernel|^_(tile|count|place|begin)_kernel|every_expert|_mix_",
    "attention": r"prefill_kernel|^tree_kernel|^_group_kernel|flash|fmha",
    "recurrences": r"_walk_kernel|^_inputs_kernel|^_norm_kernel|_group_norm_kernel|_short_conv",
    "quantising, copies of x in order": r"quantise_fp8|^_?order_|unpack_all",
    "products": r"^(plain|add|silu|clamped|dense|fp8|heads)_|_shares_kernel|gemm|cutlass|nvjet|xmma|cublas",
    "norms, activations, positions": r"norm|fuse|rope|concat|latent|turn_heads|silu|gate|relu|soft_cap",
    "logits, sampling, drafts": r"logit|peaks|largest|pick|maximum|count|list|limit|tree|commit|emit|simulate|ngram",
}
OTHER = "others"


def by_kind(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """kernels: names and milliseconds, in their order. -> milliseconds of each kind"""
    found, routed = defaultdict[str, float](float), False
    for name, ms in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)
        if kind == "routes and sums of experts":
            routed = "_mix_" not in name
        found["experts" if kind == "products" and routed else kind] += ms
    return dict(found)


def floors(parts: Any, rows: int, tokens: int, context: int) -> dict[str, float]:
    """Milliseconds of a forward of so many tokens of each of some rows, which then have `context`; of a row's tokens
    the last one has logits. The least of a kind is what its bytes or its operations take, matrix by matrix."""
    model, all_tokens, found = parts.executor.model, rows * tokens, defaultdict[str, float](float)
    experts, distinct = model.config.experts, weights_read(parts, all_tokens)[1]
    for part in model.modules():
        if not isinstance(part, Linear) or (part is model.embed.table and part is not model.lm_head):
            continue
        values = part.out_features * part.in_features
        size = sum(p.nbytes for p in part.parameters(recurse=False)) + part.op.sizes.total()
        size = size or values * model.dtype.itemsize  # the device's own copy
        kind, times, share = "products", rows if part is model.lm_head else all_tokens, 1.0
        if isinstance(part, ExpertLinear) and not part.takes_all:
            kind, share = "experts", (distinct + part.shared) / part.count
            times = all_tokens * (experts.routing.top_k + part.shared) / part.count
        width = 1 if 0.9 < size / values < 1.2 and values >= FP8_FROM and kind == "products" else 2
        found[kind] += max(size * share / read_rate(), 2 * times * values / PEAKS[width]) / 1e3
    for layer in model.config.layers:
        spec, mixer = layer.keeps(), layer.mixer
        if not isinstance(spec, KVSpec) or not isinstance(mixer, AttentionConfig | LatentAttentionConfig):
            continue
        if isinstance(mixer, LatentAttentionConfig):
            window, work = 0, mixer.heads * (mixer.plain + mixer.turned + mixer.values)
        else:
            window, work = mixer.window, 2 * mixer.heads * mixer.head_dim
        seen = [min(at + 1, window or at + 1) for at in range(context - tokens, context)]
        read = rows * max(seen) * math.prod(spec.shape_in(model.dtype)) * model.dtype.itemsize
        found["attention"] += max(read / read_rate(), 2 * rows * work * sum(seen) / PEAKS[2]) / 1e3
    for delta in delta_specs([spec for layer in model.config.layers if (spec := layer.keeps())]).values():
        made = delta.channels + 2 * delta.value_heads * delta.value_dim
        read = 2 * rows * delta.state_bytes(model.dtype) + all_tokens * made * model.dtype.itemsize
        found["recurrences"] += read / read_rate() / 1e3
    return dict(found)


def table(took: dict[str, float], least: dict[str, float]) -> list[str]:
    """Returns a line for each kind: milliseconds, its floor, and that by them."""
    lines = []
    for kind, ms in sorted(took.items(), key=lambda each: -each[1]):
        bound = f"{least[kind]:8.2f} {least[kind] / ms:5.0%}" if kind in least and ms > 0 else ""
        lines.append(f"{kind:34}{ms:8.2f} {bound}")
    return [*lines, f"{'all':34}{sum(took.values()):8.2f} {sum(least.values()):8.2f}"]
