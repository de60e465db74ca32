"""Adapters of several matrices that are stored as one: of all experts, and of latents' `kv_b_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import EXPERTS, HEADS, SHARED

JOINED, KEYS, VALUES = ".kv_b_proj", ".k_b_proj", ".v_b_proj"
_OF_EXPERTS = re.compile(r"(?:^|\.)experts\.|_exps\.")
_OF_SHARED = re.compile(r"\bshared_(?:experts?|mlp)\.|_shexp\.")
_OF_HEADS = re.compile(r"\.kv_b_proj\b|\.[kv]_b_proj\.\d+$|\.attn_(?:kv|k|v)_b\.")
# Of all experts, as `apart` names the parts of such a module: PEFT wraps it once more for each further parameter.
_FUSED = re.compile(r"model\.layers\.(\d+)\.(?:.+\.)?experts(?:\.base_layer)*\.(\d+)")

Pair = tuple[Tensor, Tensor]  # factors [r, inputs] and [outputs, r]


def kind_of(name: str) -> str | None:
    """Returns which of `WIDE` a matrix is of, or `SHARED`, by a name of it, or of a tensor of its adapter."""
    kinds = ((EXPERTS, _OF_EXPERTS), (SHARED, _OF_SHARED), (HEADS, _OF_HEADS))
    return next((kind for kind, names in kinds if names.search(name)), None)


def kinds_of(names: Iterable[str]) -> set[str]:
    """Returns those kinds that some of these are of."""
    return {kind for kind in map(kind_of, names) if kind is not None}


def apart(down: Tensor, up: Tensor, rank: int, module: str) -> Iterator[tuple[str, Pair]]:
    """Yields the factors of each expert, as `module.3`, of those of a parameter of all: down [experts * rank, inputs],
    expert by expert, up [outputs, rank * experts], by each factor those of all experts. Raises CheckpointError."""
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or rank < 1 or len(down) % rank:
        raise CheckpointError(
            f"{module}: expected factors of all experts [experts * {rank}, inputs] and [outputs, {rank} * experts]; "
            f"found {list(down.shape)} and {list(up.shape)}"
        )
    ups = up.unflatten(1, (rank, -1))
    for expert, own in enumerate(down.split(rank)):
        yield f"{module}.{expert}", (own, ups[:, :, expert])


def of_experts(config: ModelConfig, module: str, down: Tensor, up: Tensor) -> Iterator[tuple[str, Pair]]:
    """Yields (name, factors) of a matrix, or of a part of `apart` by an expert's names in a checkpoint: which matrix it
    is, is told by shapes. Raises CheckpointError for shapes of neither."""
    match = _FUSED.fullmatch(module)
    layer = config.layers[int(match[1])] if match is not None and int(match[1]) < len(config.layers) else None
    experts = None if layer is None else layer.experts
    if match is None or layer is None or experts is None:
        yield module, (down, up)
        return
    names, size, ffn = config.family.expert_names, experts.latent or config.hidden_size, experts.ffn
    made, found = ffn * (2 if layer.gated else 1), (len(up), down.shape[1])
    prefix = f"model.layers.{match[1]}.{names.experts}.{match[2]}"
    if size == ffn == made:  # without gates
        raise CheckpointError(
            f"{module}: the model's experts have up_proj and down_proj of one shape, which a file of target_parameters "
            "does not tell apart; expected an adapter with a pair for each expert's matrix"
        )
    if found == (size, ffn):
        yield f"{prefix}.{names.down}", (down, up)
    elif found == (made, size) and not layer.gated:
        yield f"{prefix}.{names.up}", (down, up)
    elif found == (made, size):
        parts = (up[0::2], up[1::2]) if config.family.interleaved else up.split(ffn)
        for name, part in zip((names.gate, names.up), parts, strict=True):
            yield f"{prefix}.{name}", (down, part)
    else:
        raise CheckpointError(
            f"{module}: the adapter is of a matrix {list(found)}, an expert's of the model are {[made, size]} and "
            f"{[size, ffn]}: expected an adapter of this model, with lora_A by inputs (of PEFT 0.19 or later)"
        )


def of_heads(mixer: LatentAttentionConfig, module: str, down: Tensor, up: Tensor) -> Iterator[tuple[str, Pair]]:
    """Yields (name, factors) of a matrix, or in place of latents' `kv_b_proj` of each head's two in the absorbed form:
    a query meets the transpose of what makes keys. mixer: of the whole model. Raises CheckpointError."""
    if not module.endswith(JOINED):
        yield module, (down, up)
        return
    found, expected = [len(up), down.shape[1]], [mixer.heads * (mixer.plain + mixer.values), mixer.latent]
    if found != expected:
        raise CheckpointError(
            f"{module}: the adapter is of a matrix {found}, the model's is {expected}: expected an adapter of this "
            "model; found one of another"
        )
    own = module.removesuffix(JOINED)
    for head, both in enumerate(up.unflatten(0, (mixer.heads, -1))):
        keys, values = both.split((mixer.plain, mixer.values))
        yield f"{own}{KEYS}.{head}", (keys.T, down.T)
        yield f"{own}{VALUES}.{head}", (down, values)
