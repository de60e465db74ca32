"""Puts the tensors of quantised matrices together as they come from a checkpoint, in any order: `assembled`, and one
function for each layout. Errors name the tensor, what was expected of it and what was found.

`KVScales` takes the scales of a KV pool in 8 bits out of them: a number for the keys and one for the values of a layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, listed
from draftwing.models.quantised.config import Layout, Quantization, Scheme
from draftwing.ops.gemm.stored import QuantizedRows, e2m1
from draftwing.ops.upload import uploaded

# Suffixes that only tensors of a quantised matrix have; `weight` may be one.
PARTS = frozenset(
    {"qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape",
     "weight_zero_point", "weight_g_idx", "weight_scale_2", "weight_global_scale"}
)  # fmt: skip
# Of activations and of the KV pool, which stay in a floating point type.
NOT_READ = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale",
     "q_scale", "prob_output_scale", "kv_scale", "k_zero_point", "v_zero_point", "activation_scale"}
)  # fmt: skip
# Of what values in fp8 are multiplied with: transformers has the second of whole matrices, too, others the first.
SCALES = "weight_scale", "weight_scale_inv"


def _parted(name: str) -> tuple[str, str]:
    """Returns the module of a tensor and what it is of it: bitsandbytes has some below the weight."""
    module, dot, rest = name.partition(".weight.")
    return (module, f"weight.{rest}") if dot else (name.rpartition(".")[0], name.rpartition(".")[2])


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Returns whether only a quantised matrix has such a tensor."""
    suffix = _parted(name)[1]
    return suffix in PARTS or suffix.startswith("weight.") or (suffix == "weight" and tensor.element_size() == 1)


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
        module, suffix = _parted(name)
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
        if suffix in SCALES and scheme.scale in SCALES and scheme.real:
            suffix = scheme.scale
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


# ---- a matrix --------------------------------------------------------------------------------------------------------

# Of the eight columns in a word of AWQ's, where each lies: their nibbles are in the order 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

Parts = Mapping[str, Tensor]  # by suffix; all that the scheme names


def read_matrix(module: str, parts: Parts, scheme: Scheme) -> Tensor | QuantizedRows:
    """Returns the matrix of a module whose tensors are all there; raises CheckpointError."""
    if scheme.layout == "bnb":
        return _of_blocks(module, parts, scheme)
    rows = _READERS[scheme.layout](module, parts, scheme)
    if not bool(rows.scales.isfinite().all()):
        raise CheckpointError(f"{module}.{scheme.scale}: expected finite values, found some that are not")
    if rows.zeros is not None and not bool(rows.zeros.any()):
        return rows._replace(zeros=None)
    return rows


def unpacked(words: Tensor, bits: int) -> Tensor:
    """words [rows, W] int32 -> codes [rows, W * 32 / bits] uint8: a stream of bits, the lowest first.

    bits: 2, 3, 4 or 8."""
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 3:  # three bytes hold eight codes
        low, middle, high = stream.unflatten(1, (-1, 3)).int().unbind(-1)
        triple = low | middle << 8 | high << 16
        return torch.stack([triple >> 3 * i & 7 for i in range(8)], -1).flatten(1).to(torch.uint8)
    mask = (1 << bits) - 1
    return torch.stack([stream >> shift & mask for shift in range(0, 8, bits)], -1).flatten(1)


def _awq(module: str, parts: Parts, scheme: Scheme) -> QuantizedRows:
    words = _matrix(module, "qweight", parts, torch.int32)  # [columns, rows / 8]
    columns, rows = words.shape[0], words.shape[1] * 8
    wide, groups = _groups(scheme.wide, columns)
    zeros = _matrix(module, "qzeros", parts, torch.int32, (groups, rows // 8))
    scales = _scales(module, parts, scheme, (groups, rows))

    def ordered(words: Tensor) -> Tensor:  # [n, rows / 8] -> [rows, n]
        return unpacked(words, 4).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1).t()

    return QuantizedRows(
        _signed(ordered(words), 4), 4, scales.t(), ordered(zeros).to(torch.int16) - 8, 1, wide, None
    )  # fmt: skip


def _gptq(module: str, parts: Parts, scheme: Scheme) -> QuantizedRows:
    bits, half = scheme.bits, 1 << scheme.bits - 1
    words = _matrix(module, "qweight", parts, torch.int32)  # [columns * bits / 32, rows]
    rows, columns = words.shape[1], words.shape[0] * 32 // bits
    for what, size in (("rows", rows * bits), ("columns", words.shape[0] * 32)):
        if size % 32 or (what == "columns" and size % bits):
            raise CheckpointError(
                f"{module}.qweight: expected {what} that fill words of 32 bits, found {list(words.shape)}, {bits} bits"
            )
    wide, groups = _groups(scheme.wide, columns)
    zeros = unpacked(_matrix(module, "qzeros", parts, torch.int32, (groups, rows * bits // 32)), bits).to(torch.int16)
    scales = _scales(module, parts, scheme, (groups, rows))
    group_of = _order(module, "g_idx", parts, columns, groups, wide) if scheme.act_order else None
    if scheme.symmetric:
        # A symmetric quantiser has one zero, which is stored as it is or less 1, whatever version the config names.
        if not any(bool((zeros == zero).all()) for zero in (half - 1, half)):
            raise CheckpointError(
                f"{module}.qzeros: expected {half - 1} or {half} everywhere, for quantization_config.sym is true; "
                f"found values from {int(zeros.min())} to {int(zeros.max())}"
            )
        own_zeros = None
    else:
        own_zeros = (zeros + (scheme.zero_offset - half)).t()
    return QuantizedRows(
        _signed(unpacked(words.t(), bits), bits), bits, scales.t(), own_zeros, 1, wide, group_of
    )  # fmt: skip


def _packed(module: str, parts: Parts, scheme: Scheme) -> QuantizedRows:
    """Unpacks `pack-quantized` of compressed-tensors: along the columns, and zeros along the rows."""
    bits, half = scheme.bits, 1 << scheme.bits - 1
    words = _matrix(module, "weight_packed", parts, torch.int32)  # [rows, ceil(columns * bits / 32)]
    shape = parts["weight_shape"]
    rows, columns = words.shape[0], 0
    if not shape.is_floating_point() and shape.shape == (2,):
        rows, columns = shape.tolist()
    if rows != words.shape[0] or columns < 1 or -(-columns * bits // 32) != words.shape[1]:
        raise CheckpointError(
            f"{module}.weight_shape: expected the rows and columns of {bits}-bit codes in weight_packed "
            f"{list(words.shape)}, found {shape.flatten()[:4].tolist()}"
        )
    tall, wide, grid = _grid(scheme, rows, columns)
    zeros = None
    if not scheme.symmetric:
        stored = _matrix(module, "weight_zero_point", parts, torch.int32, (-(-grid[0] * bits // 32), grid[1]))
        zeros = unpacked(stored.t(), bits).t()[: grid[0]].to(torch.int16) - half
    group_of = _order(module, "weight_g_idx", parts, columns, grid[1], wide) if scheme.act_order else None
    codes = _signed(unpacked(words, bits)[:, :columns], bits)
    return QuantizedRows(codes, bits, _scales(module, parts, scheme, grid), zeros, tall, wide, group_of)


def _plain(module: str, parts: Parts, scheme: Scheme) -> QuantizedRows:
    codes = _matrix(module, "weight", parts, torch.float8_e4m3fn if scheme.real else torch.int8)
    tall, wide, grid = _grid(scheme, *codes.shape)
    zeros = None
    if not scheme.symmetric:
        zeros = _matrix(module, "weight_zero_point", parts, torch.int8, grid).to(torch.int16)
    scales = _scales(module, parts, scheme, grid)
    return QuantizedRows(codes, scheme.bits, scales, zeros, tall, wide, None, scheme.dynamic)


def _fp4(module: str, parts: Parts, scheme: Scheme) -> QuantizedRows:
    """Reads NVFP4: values of 4 bits (e2m1), 16 of which share a scale in float8, which has one of its own."""
    first, _, second = scheme.parts
    pairs, whole = _matrix(module, first, parts, torch.uint8), parts[second]
    rows, columns = pairs.shape[0], 2 * pairs.shape[1]
    scales = _matrix(module, scheme.scale, parts, torch.float8_e4m3fn, (rows, -(-columns // scheme.wide))).float()
    if whole.numel() != 1 or not whole.is_floating_point():
        raise CheckpointError(
            f"{module}.{second}: expected one number in floating point, found {list(whole.shape)} in "
            f"{_name(whole.dtype)}"
        )
    factor = whole.float().reshape(())
    return QuantizedRows(e2m1(pairs), 5, (scales / factor if scheme.divided else scales * factor) / 2, None, 1,
                         scheme.wide, None)  # fmt: skip


def _of_blocks(module: str, parts: Parts, scheme: Scheme) -> Tensor:
    """Dequantises blocks of bitsandbytes: [rows, columns] float32. Values follow each other over the ends of rows."""
    *_, state = scheme.parts

    def wrong(expected: str, suffix: str = "weight") -> CheckpointError:
        found = parts[suffix]
        return CheckpointError(f"{module}.{suffix}: expected {expected}, found {list(found.shape)} in {found.dtype}")

    try:
        said = json.loads(bytes(parts[state].cpu().to(torch.uint8).tolist()))
        sizes = *said["shape"], said["blocksize"], said.get("nested_blocksize", 1)
        rows, columns, block, nested = map(int, sizes)
        offset = float(said.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise wrong(f"sizes as JSON ({str(error)[:80]})", state) from None
    codes, count = parts["weight"].flatten(), rows * columns
    if min(rows, columns, block, nested) < 1 or codes.dtype != torch.uint8 or len(codes) != -(-count // 2):
        raise wrong(f"two codes a byte of {rows} x {columns} values")
    scales = parts[scheme.scale].flatten()
    if len(scales) != -(-count // block):
        raise wrong(f"{-(-count // block)} scales", scheme.scale)
    if scheme.nested:
        of_scales = parts["weight.nested_absmax"].float().flatten().repeat_interleave(min(nested, len(scales)))
        values = parts["weight.nested_quant_map"].float().flatten()
        if scales.dtype != torch.uint8 or len(values) != 256 or len(of_scales) < len(scales):
            raise wrong("codes of 8 bits, whose maps and scales are there", scheme.scale)
        scales = values[scales.int()] * of_scales[: len(scales)] + offset
    values = parts["weight.quant_map"].float().flatten()
    if len(values) != 16 or not scales.is_floating_point():
        raise wrong("16 values", "weight.quant_map")
    made = values[torch.stack((codes >> 4, codes & 15), 1).flatten()[:count].int()]
    return (made * scales.float().repeat_interleave(min(block, count))[:count]).view(rows, columns)


_READERS: dict[Layout, Callable[[str, Parts, Scheme], QuantizedRows]] = {
    "awq": _awq, "gptq": _gptq, "packed": _packed, "plain": _plain, "fp4": _fp4,
}  # fmt: skip


def _signed(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 from 0 -> int8 around 0, contiguous"""
    return (codes.contiguous() ^ 128).view(torch.int8) if bits == 8 else codes.to(torch.int8) - (1 << bits - 1)


def _groups(wide: int, columns: int) -> tuple[int, int]:
    """Returns columns of a group, and groups."""
    wide = min(wide or columns, columns)
    return wide, -(-columns // wide)


def _grid(scheme: Scheme, rows: int, columns: int) -> tuple[int, int, tuple[int, int]]:
    """Rows and columns of a group, and groups of each."""
    tall, down = _groups(scheme.tall, rows)
    wide, across = _groups(scheme.wide, columns)
    return tall, wide, (down, across)


def _matrix(
    module: str, suffix: str, parts: Parts, dtype: torch.dtype | None, shape: tuple[int, int] | None = None
) -> Tensor:
    """dtype: None: any of floating point.  shape: which values in one line may have, too; None: any."""
    found = parts[suffix]
    if found.dim() < 2 and shape is not None and 1 in shape and found.numel() == shape[0] * shape[1]:
        found = found.reshape(shape)
    right = found.is_floating_point() if dtype is None else found.dtype == dtype
    if not right or found.dim() != 2 or not found.numel() or (shape is not None and tuple(found.shape) != shape):
        wanted = "a matrix" if shape is None else f"shape {list(shape)}"
        kind = "floating point" if dtype is None else _name(dtype)
        raise CheckpointError(
            f"{module}.{suffix}: expected {wanted} in {kind}, found {list(found.shape)} in {_name(found.dtype)}"
        )
    return found


def _scales(module: str, parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    found = _matrix(module, scheme.scale, parts, None, shape)
    return found if found.element_size() > 1 else found.float()


def _order(module: str, suffix: str, parts: Parts, columns: int, groups: int, wide: int) -> Tensor | None:
    """Returns the group of each column, or None where they follow each other."""
    found = parts[suffix]
    if found.shape != (columns,) or found.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(
            f"{module}.{suffix}: expected shape {[columns]} in int32, found {list(found.shape)} in {_name(found.dtype)}"
        )
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise CheckpointError(
            f"{module}.{suffix}: expected groups from 0 to {groups - 1}, found {int(found.min())} to {int(found.max())}"
        )
    group_of = found.long()
    return None if torch.equal(group_of, torch.arange(columns, device=group_of.device) // wide) else group_of


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the KV pool -----------------------------------------------------------------------------------------------------

Value = TypeVar("Value")
# Writers put them next to the attention, a mixer of Nemotron, or next to its projections; one alone is of both.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.(?:self_attn|mixer)\."
    r"(?:(k|v|kv)_scale|(?:attn|qkv_proj)\.(k|v)_scale|(k|v)_proj\.(?:\4_scale|output_scale))"
)


class KVScales:
    """What keys and values of each layer are divided by before they are rounded to 8 bits; 1 where nobody says."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, float]] = {}
        self._unusable: str | None = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def taken(self, tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
        """Yields all other tensors. Names have the `model.` prefix."""
        for name, value in tensors:
            match = _NAME.fullmatch(name)
            if match is None or not isinstance(value, Tensor):
                yield name, value
                continue
            layer, which = int(match[1]), match[2] or match[3] or match[4]
            scale = float(value.float()) if value.numel() == 1 else math.nan
            if not 0 < scale < math.inf and self._unusable is None:
                found = f"{scale:g}" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
                self._unusable = f"{name}: expected one positive number, found {found}"
            self._found.setdefault(layer, {}).update(dict.fromkeys(which, scale))

    def of(self, layers: Iterable[int]) -> list[tuple[float, float]]:
        """Returns those of these layers of the model. Raises CheckpointError for what is no number."""
        if self._unusable is not None:
            raise CheckpointError(f"{self._unusable}. Leave out --kv-cache-dtype fp8_e4m3")
        known = (self._found.get(layer, {}) for layer in layers)
        return [(one.get("k", 1.0), one.get("v", 1.0)) for one in known]
