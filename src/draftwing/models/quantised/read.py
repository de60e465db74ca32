"""Puts the tensors of quantised matrices together as they come from a checkpoint, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.models.quantised.config import Quantization, Scheme
from draftwing.models.quantised.layouts import read_matrix
from draftwing.ops.types import QuantizedRows
from draftwing.ops.upload import uploaded

# Suffixes that only tensors of a quantised matrix have; `weight` may be one.
PARTS = frozenset(
    {"qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape",
     "weight_zero_point", "weight_g_idx", "weight_scale_2", "weight_global_scale"}
)  # fmt: skip
# Of activations and of the KV pool, which stay in a floating point type.
NOT_READ = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale",
     "q_scale", "prob_output_scale", "kv_scale", "k_zero_point", "v_zero_point"}
)  # fmt: skip


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Returns whether only a quantised matrix has such a tensor."""
    suffix = name.rpartition(".")[2]
    return suffix in PARTS or (suffix == "weight" and tensor.element_size() == 1)


def assembled(
    quantization: Quantization | None, tensors: Iterable[tuple[str, Tensor]], device: torch.device | None = None
) -> Iterator[tuple[str, Tensor | QuantizedRows]]:
    """(name, value) of every tensor, with the `model.` prefix; those of a quantised matrix become one value, named
    `weight`. Raises CheckpointError for what does not fit together, or to the config.

    device: where matrices are put together; None: where their tensors are.
    """
    if quantization is None:
        yield from tensors
        return
    scheme_of = cache(quantization.scheme_of)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, _, suffix = name.rpartition(".")
        if suffix in NOT_READ:
            continue
        if not is_quantised(name, tensor):
            yield name, tensor
            continue
        scheme = scheme_of(module)
        if scheme is None:
            raise CheckpointError(
                f"{name}: expected a matrix that is not quantised, as quantization_config has it, found a tensor in "
                f"{str(tensor.dtype).removeprefix('torch.')} of one that is"
            )
        if suffix not in scheme.parts:
            _check_extra(name, tensor, scheme)
            continue
        parts = waiting.setdefault(module, {})
        if suffix in parts:
            raise CheckpointError(f"{name} is in the checkpoint twice")
        parts[suffix] = tensor if device is None else uploaded(tensor, device)
        if len(parts) == len(scheme.parts):
            yield f"{module}.weight", read_matrix(module, waiting.pop(module), scheme)
    missing = sorted(
        f"{module}.{part}{' in 8 bits' if part == 'weight' else ''}"
        for module, parts in waiting.items()
        for part in _missing(scheme_of(module), parts)
    )
    if missing:
        raise CheckpointError(
            f"tensors missing from the checkpoint: expected {listed(missing)}, as quantization_config "
            f"({quantization.method}) has it"
        )


def _missing(scheme: Scheme | None, parts: Iterable[str]) -> set[str]:
    return set() if scheme is None else set(scheme.parts) - set(parts)


def _check_extra(name: str, tensor: Tensor, scheme: Scheme) -> None:
    """A tensor that the scheme has no use for may only say what holds anyway."""
    suffix = name.rpartition(".")[2]
    if suffix == "weight_zero_point" and scheme.layout in ("packed", "plain") and not bool(tensor.any()):
        return
    if suffix == "g_idx" and scheme.layout == "gptq" and tensor.dim() == 1 and len(tensor):
        wide = scheme.wide or len(tensor)
        if torch.equal(tensor.long(), torch.arange(len(tensor)) // wide):
            return
        raise CheckpointError(f"{name}: expected groups of {wide} columns in order, for desc_act is false")
    raise CheckpointError(f"{name}: expected only {', '.join(scheme.parts)} there, as quantization_config has it")
