"""Stored tensors that are taken apart: those of all experts into those of each, of latents the matrix that makes keys
and values, and of state-space layers the first one, where its parts have factors of their own.

Experts' gates and ups are one tensor there: all gates, then all ups, or a gate, its up and so on (interleaved). In
MXFP4 (OCP Microscaling Formats 1.0) a matrix is two: `_blocks` [experts, rows, columns / 32, 16] with two values a
byte, and `_scales` [experts, rows, columns / 32], exponents of 2 and 127 more. Others are [experts, rows, columns],
interleaved ones, and some others, the transpose, [experts, columns, rows].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.gguf_file import dequantized
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.mamba import Mamba2Config
from draftwing.ops.gemm.stored import MX_BLOCK, BlockRows, MXRows, QuantizedRows
from draftwing.ops.upload import uploaded
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

FUSED = re.compile(r"(.*\.experts)\.((?:gate_up|gate|up|down)_proj)(|_bias|_blocks|_scales)")

_FIRST = {"gate_up_proj": "gate_proj"}  # of the matrices in one

Value = Tensor | QuantizedRows | MXRows
Part = TypeVar("Part", bound=Tensor | BlockRows | QuantizedRows | MXRows)
IN_PROJ = ".mamba.in_proj.weight"  # of state-space layers
JOINED, KEYS, VALUES = ".kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight"  # of latents


def each_expert(
    tensors: Iterable[tuple[str, Tensor | QuantizedRows]],
    count: int,
    cuts: Mapping[str, Cut],
    device: torch.device | None = None,
    interleaved: bool = False,
    experts: range | None = None,
    hidden: int = 0,
    across: bool = False,
) -> Iterator[tuple[str, Value]]:
    """Yields (name, value) of every tensor, those of all experts as those of each: `experts.3.gate_proj.weight`. Raises
    CheckpointError for what does not fit together.

    count: of experts.  cuts: what this rank has of them, by the names given.  device: where MXFP4 is put together,
    None: where its tensors are.  interleaved: whether they are.  experts: those that come, None: all.  hidden: the
    model's size, by which others are told that are the transpose, too.  across: whether all are.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    held = range(count) if experts is None else experts
    for name, tensor in tensors:
        match = FUSED.fullmatch(name)
        if match is None or not isinstance(tensor, Tensor):
            yield name, tensor
            continue
        prefix, matrix, kind = match.groups()
        if tensor.dim() < 2 or len(tensor) != count:
            raise CheckpointError(f"{name}: expected tensors of {count} experts, found shape {list(tensor.shape)}")
        tensor = tensor[held.start : held.stop]
        first = cuts.get(f"{prefix}.{held.start}.{_FIRST.get(matrix, matrix)}.weight")
        early = first if kind in ("_blocks", "_scales") and _in_blocks(first) else None
        if kind in ("_blocks", "_scales"):
            tensor = tensor if early is None else _own_blocks(name, tensor, early)
            parts = waiting.setdefault(f"{prefix}.{matrix}", {})
            parts[kind] = tensor if device is None else uploaded(tensor, device)
            if len(parts) < 2:
                continue
            whole: Tensor | MXRows = _mx_rows(f"{prefix}.{matrix}", **waiting.pop(f"{prefix}.{matrix}"))
        else:
            other = interleaved or across or _lies_across(tensor, matrix, hidden)
            whole = tensor if kind or not other else _transposed(name, tensor)
        suffix = "bias" if kind == "_bias" else "weight"
        for place, expert in enumerate(held):
            for part, value in _of_expert(whole, place, matrix, interleaved):
                own = f"{prefix}.{expert}.{part}.{suffix}"
                cut = None if early is not None else cuts.get(own)
                yield own, value if cut is None else cut.of(own, value)  # type: ignore[misc]
    if waiting:
        missing = sorted(
            f"{name}{part}" for name, parts in waiting.items() for part in {"_blocks", "_scales"} - set(parts)
        )
        raise CheckpointError(f"tensors missing from the checkpoint: expected {listed(missing)}")


def _in_blocks(cut: Cut | None) -> bool:
    """Returns whether a part is of whole rows, or of blocks of them."""
    return cut is not None and (cut.axis == 0 or not (cut.share.start % MX_BLOCK or cut.share.size % MX_BLOCK))


def _own_blocks(name: str, stored: Tensor, cut: Cut) -> Tensor:
    """stored [experts, rows, columns / 32, ..] -> what a rank has of that, before it is copied anywhere. cut: of the
    first of its matrices, which are interleaved."""
    if stored.dim() < 3:
        return stored
    start, size, whole = cut.share
    if cut.axis == 1:
        if stored.shape[2] * MX_BLOCK != whole:
            raise CheckpointError(f"{name}: expected {whole} columns in MXFP4, found shape {list(stored.shape)}")
        return stored[:, :, start // MX_BLOCK : (start + size) // MX_BLOCK]
    if stored.shape[1] != 2 * whole:
        raise CheckpointError(f"{name}: expected {2 * whole} rows of gates and ups, found shape {list(stored.shape)}")
    return stored[:, 2 * start : 2 * (start + size)]


def _of_expert(
    whole: Tensor | MXRows, expert: int, matrix: str, interleaved: bool
) -> Iterator[tuple[str, Tensor | MXRows]]:
    """Of one expert; whole: of all of them, rows first."""
    one = MXRows(*(part[expert] for part in whole)) if isinstance(whole, MXRows) else whole[expert]
    if matrix != "gate_up_proj":
        yield matrix, one
        return
    if isinstance(one, Tensor) and not interleaved:
        yield from zip(("gate_proj", "up_proj"), one.tensor_split(2), strict=True)
        return
    for start, name in enumerate(("gate_proj", "up_proj")):
        yield name, MXRows(*(part[start::2] for part in one)) if isinstance(one, MXRows) else one[start::2]


def _lies_across(tensor: Tensor, matrix: str, hidden: int) -> bool:
    """Returns whether a tensor of all experts has their columns before their rows, by where the model's size is."""
    rows, columns = tensor.shape[-2:] if tensor.dim() == 3 else (0, 0)
    return hidden == (columns if matrix == "down_proj" else rows) and rows != columns


def _transposed(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 3:
        raise CheckpointError(f"{name}: expected 3 dimensions, found shape {list(tensor.shape)}")
    return tensor.transpose(1, 2)


def _mx_rows(name: str, _blocks: Tensor, _scales: Tensor) -> MXRows:
    """[experts, rows, ..]"""
    for suffix, part, dims in (("_blocks", _blocks, 4), ("_scales", _scales, 3)):
        if part.dtype != torch.uint8 or part.dim() != dims:
            raise CheckpointError(
                f"{name}{suffix}: expected {dims} dimensions in uint8, found {list(part.shape)} in {part.dtype}"
            )
    if _blocks.shape != (*_scales.shape, 16):
        raise CheckpointError(
            f"{name}_blocks: expected shape {[*_scales.shape, 16]}, as _scales has it, found {list(_blocks.shape)}"
        )
    return MXRows(_blocks.flatten(2), _scales)


def of_state_space(net: Mamba2Config, name: str, value: Part) -> Iterator[tuple[str, Part]]:
    """Yields (name, value) of a tensor, or of the parts of a state-space layer's first matrix. net: of the whole
    model."""
    if not name.endswith(IN_PROJ):
        yield name, value
        return
    for part, (start, size) in net.parts().items():
        own = Cut(0, Share(start, size, net.made)).of(name, value)
        yield f"{name.removesuffix('.weight')}.{part}.weight", own  # type: ignore[misc]


# ---- latents ---------------------------------------------------------------------------------------------------------


def without_latents(
    tensors: Iterable[tuple[str, Part]], mixer: LatentAttentionConfig, cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, Part | Tensor]]:
    """Yields (name, value) of every tensor, or `of_latents`. mixer: of the whole model.  cuts: what this rank has of
    parts, by their names."""
    for name, value in tensors:
        if not name.endswith(JOINED):
            yield name, value
            continue
        for own, part in of_latents(name, value, mixer):
            assert isinstance(part, Tensor)
            yield own, cuts[own].of_tensor(own, part) if own in cuts else part


def of_latents(name: str, value: Part, mixer: LatentAttentionConfig) -> Iterator[tuple[str, Part | Tensor]]:
    """Yields (name, value) of a tensor. In place of the matrix that makes keys and values of latents: of those that
    make latents' counterparts of queries [heads * latent, plain], and values of latents [heads * values, latent].
    mixer: of the whole model."""
    if not name.endswith(JOINED):
        yield name, value
        return
    whole = _dense(value)
    expected = mixer.heads * (mixer.plain + mixer.values), mixer.latent
    if whole.shape != expected:
        raise CheckpointError(f"{name}: expected shape {list(expected)}, found {list(whole.shape)}")
    keys, values = _by_head(whole, mixer)
    own = name.removesuffix(JOINED)
    yield own + KEYS, keys.transpose(1, 2).reshape(-1, mixer.plain)
    if isinstance(value, BlockRows):  # whose rows stay as they are
        yield own + VALUES, value._replace(data=_by_head(value.data, mixer)[1].flatten(0, 1))
    else:
        yield own + VALUES, values.flatten(0, 1)


def _by_head(whole: Tensor, mixer: LatentAttentionConfig) -> tuple[Tensor, Tensor]:
    """[heads * (plain + values), n] -> what is each head's for keys, and for values, [heads, .., n]"""
    keys, values = whole.unflatten(0, (mixer.heads, -1)).split((mixer.plain, mixer.values), 1)
    return keys, values


def _dense(value: Tensor | BlockRows | QuantizedRows | MXRows) -> Tensor:
    if isinstance(value, BlockRows):
        return torch.from_numpy(dequantized(value.data.numpy(), value.kind))
    return value if isinstance(value, Tensor) else value.dense(torch.float32)
