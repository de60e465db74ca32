"""Tensors that hold a matrix of all experts, as gpt-oss and Qwen3.5 have them: taken apart into those of each expert.

Gates and ups are one tensor there: in gpt-oss a gate, its up and so on, in Qwen3.5 all gates, then all ups. In MXFP4
(OCP Microscaling Formats 1.0) a matrix is two: `_blocks` [experts, rows, columns / 32, 16] with two values a byte, and
`_scales` [experts, rows, columns / 32], exponents of 2 and 127 more. Others are [experts, rows, columns], in gpt-oss
the transpose, [experts, columns, rows].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.ops.types import MXRows, QuantizedRows
from draftwing.ops.upload import uploaded
from draftwing.parallel.cut import Cut

FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")

Value = Tensor | QuantizedRows | MXRows


def taken_apart(
    tensors: Iterable[tuple[str, Tensor | QuantizedRows]],
    count: int,
    cuts: Mapping[str, Cut],
    device: torch.device | None = None,
    halves: bool = False,
    experts: range | None = None,
) -> Iterator[tuple[str, Value]]:
    """Yields (name, value) of every tensor, those of all experts as those of each: `experts.3.gate_proj.weight`. Raises
    CheckpointError for what does not fit together.

    count: of experts.  cuts: what this rank has of them, by the names given.  device: where MXFP4 is put together,
    None: where its tensors are.  halves: whether they are as in Qwen3.5.
    experts: those that come, None: all.
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
        if kind in ("_blocks", "_scales"):
            parts = waiting.setdefault(f"{prefix}.{matrix}", {})
            parts[kind] = tensor if device is None else uploaded(tensor, device)
            if len(parts) < 2:
                continue
            whole: Tensor | MXRows = _mx_rows(f"{prefix}.{matrix}", **waiting.pop(f"{prefix}.{matrix}"))
        else:
            whole = tensor if kind or halves else _transposed(name, tensor)
        suffix = "bias" if kind == "_bias" else "weight"
        for place, expert in enumerate(held):
            for part, value in _parts(whole, place, matrix, halves):
                own = f"{prefix}.{expert}.{part}.{suffix}"
                yield own, cuts[own].of(own, value) if own in cuts else value  # type: ignore[misc]
    if waiting:
        missing = sorted(
            f"{name}{part}" for name, parts in waiting.items() for part in {"_blocks", "_scales"} - set(parts)
        )
        raise CheckpointError(f"tensors missing from the checkpoint: expected {listed(missing)}")


def _parts(whole: Tensor | MXRows, expert: int, matrix: str, halves: bool) -> Iterator[tuple[str, Tensor | MXRows]]:
    """Of one expert; whole: of all of them, rows first."""
    one = MXRows(*(part[expert] for part in whole)) if isinstance(whole, MXRows) else whole[expert]
    if matrix == "down_proj":
        yield "down_proj", one
        return
    if halves and isinstance(one, Tensor):
        yield from zip(("gate_proj", "up_proj"), one.tensor_split(2), strict=True)
        return
    for start, name in enumerate(("gate_proj", "up_proj")):
        yield name, MXRows(*(part[start::2] for part in one)) if isinstance(one, MXRows) else one[start::2]


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
