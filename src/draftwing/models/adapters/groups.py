"""Adapters of several matrices that are stored as one: of all experts, of latents' `kv_b_proj`, and of queries, keys
and values; and of matrices that transformers calls otherwise than a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.models.config import ModelConfig
from draftwing.models.decoder import EXPERTS, HEADS, SHARED
from draftwing.models.family import Family

JOINED, KEYS, VALUES = ".kv_b_proj", ".k_b_proj", ".v_b_proj"
_OF_EXPERTS = re.compile(r"(?:^|\.)experts\.|_exps\.")
_OF_SHARED = re.compile(r"\bshared_(?:experts?|mlp)\.|_shexp\.")
_OF_HEADS = re.compile(r"\.kv_b_proj\b|\.[kv]_b_proj\.\d+$|\.attn_(?:kv|k|v)_b\.")
# Of all experts, as `apart` names the parts of such a module: PEFT wraps it once more for each further parameter.
_FUSED = re.compile(r"model\.layers\.(\d+)\.(?:.+\.)?experts(?:\.base_layer)*\.(\d+)")
_LAYER = re.compile(r"(model\.layers\.(\d+))\.(.+)")
_FUSED_QKV, _QKV = "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_INSIDE = "forget_gate."  # of delta nets, a module of transformers' own around matrices of decays

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


class _Fused(NamedTuple):
    """A part of `apart`: of which layer, number and expert; rows of the residual stream, and those made of a row."""

    layer: LayerConfig
    number: str
    expert: str
    size: int
    made: int
    ffn: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Returns outputs and inputs of the first and of the last matrix."""
        return (self.made, self.size), (self.size, self.ffn)


def _fused(config: ModelConfig, module: str) -> _Fused | None:
    match = _FUSED.fullmatch(module)
    layer = config.layers[int(match[1])] if match is not None and int(match[1]) < len(config.layers) else None
    if match is None or layer is None or layer.experts is None:
        return None
    size, ffn = layer.experts.latent or config.hidden_size, layer.experts.ffn
    return _Fused(layer, match[1], match[2], size, ffn * (2 if layer.gated else 1), ffn)


def is_transposed(config: ModelConfig, module: str, down: Tensor, up: Tensor) -> bool:
    """Returns whether shapes show factors of a transposed matrix: PEFT takes what parameters have last for inputs, or,
    of older versions, what they have first, and some models have parameters the other way round."""
    fused, found = _fused(config, module), (len(up), down.shape[1])
    return fused is not None and found not in fused.shapes and found[::-1] in fused.shapes


def of_experts(
    config: ModelConfig, module: str, down: Tensor, up: Tensor, transposed: bool = False
) -> Iterator[tuple[str, Pair]]:
    """Yields (name, factors) of a matrix, or of a part of `apart` by an expert's names in a checkpoint: which matrix it
    is, is told by shapes. transposed: whether parts are of transposed matrices.  Raises CheckpointError for shapes of
    neither."""
    fused = _fused(config, module)
    if fused is None:
        yield module, (down, up)
        return
    if transposed:
        down, up = up.T, down.T
    names, (made, size), ffn = config.family.expert_names, fused.shapes[0], fused.ffn
    found, gated = (len(up), down.shape[1]), fused.layer.gated
    prefix = f"model.layers.{fused.number}.{names.experts}.{fused.expert}"
    if size == ffn == made:  # without gates
        raise CheckpointError(
            f"{module}: the model's experts have up_proj and down_proj of one shape, which a file of target_parameters "
            "does not tell apart; expected an adapter with a pair for each expert's matrix"
        )
    if found == (size, ffn):
        yield f"{prefix}.{names.down}", (down, up)
    elif found == (made, size) and not gated:
        yield f"{prefix}.{names.up}", (down, up)
    elif found == (made, size):
        parts = (up[0::2], up[1::2]) if config.family.interleaved else up.split(ffn)
        for name, part in zip((names.gate, names.up), parts, strict=True):
            yield f"{prefix}.{name}", (down, part)
    else:
        raise CheckpointError(
            f"{module}: the adapter is of a matrix {list(found)}, an expert's of the model are {[made, size]} and "
            f"{[size, ffn]}: expected an adapter of this model; found one of another"
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


def stored_name(family: Family, name: str) -> str:
    """Returns what a checkpoint calls a matrix of a layer, or of one head of it, by its name in transformers."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, own, names = match[1], match[3].replace(_INSIDE, ""), family.expert_names
    parts = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    shared = {f"mlp.shared_experts.{part}": f"{names.shared}.{theirs}" for part, theirs in parts.items()}
    for ours, theirs in {**family.layer_names, **shared}.items():
        if own == ours or own.startswith(f"{ours}."):
            own = theirs + own.removeprefix(ours)
            break
    return f"{layer}.{own}"


def parted(config: ModelConfig) -> ModelConfig:
    """Returns the config of a model whose checkpoint has queries, keys and values as one matrix, and transformers has
    not, with the matrices of transformers."""
    if not config.family.parted:
        return config
    layers = tuple(
        replace(one, mixer=replace(one.mixer, fused=False)) if isinstance(one.mixer, AttentionConfig) else one
        for one in config.layers
    )
    return replace(config, layers=layers)


def of_queries(config: ModelConfig, module: str, down: Tensor, up: Tensor) -> Iterator[tuple[str, Pair]]:
    """Yields (name, factors) of a matrix, or in place of that of queries, keys and values, as a checkpoint calls it, of
    these. config: as `parted` makes it.  Raises CheckpointError."""
    match, fused = _LAYER.fullmatch(module), config.family.layer_names.get(_FUSED_QKV)
    if not config.family.parted or match is None or match[3] != fused or int(match[2]) >= len(config.layers):
        yield module, (down, up)
        return
    mixer = config.layers[int(match[2])].mixer
    assert isinstance(mixer, AttentionConfig)
    sizes = [heads * mixer.head_dim for heads in (mixer.heads, mixer.kv_heads, mixer.kv_heads)]
    if len(up) != sum(sizes):
        raise CheckpointError(
            f"{module}: the adapter is of a matrix of {len(up)} outputs, the model's has {sum(sizes)}: expected an "
            "adapter of this model; found one of another"
        )
    for name, part in zip(_QKV, up.split(sizes), strict=True):
        yield f"{match[1]}.{name}", (down, part)
