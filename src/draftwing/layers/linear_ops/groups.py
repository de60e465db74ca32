"""Weights that stay quantised on a GPU: codes and scales by group, as a checkpoint's quantiser left them or ours."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from draftwing.layers.linear_ops.base import LinearBase, LinearOp, PackedOp, PackMode, ParamSlice, WeightFormat
from draftwing.layers.linear_ops.dense import Dense, DenseFormat
from draftwing.ops.fp8 import spec as fp8_blocks
from draftwing.ops.fp8.spec import TALL, Fp8Blocks, Fp8Rows
from draftwing.ops.gemm.gemms import DequantisedGemm
from draftwing.ops.gemm.groups import PackedGroups, cut, join, joinable, unpacked, unsupported_reason
from draftwing.ops.gemm.stored import BlockRows, MXRows, QuantizedRows
from draftwing.ops.table import LayerOps, TorchOps


class Fp8Linear(PackedOp):
    """Activations are quantised whatever the number of rows, each row by itself, and a row's sums have one order: it
    has the same bits in plain steps, trees and prompts, with or without deterministic mode."""

    takes_fp8 = True

    def __init__(self, layer: LinearBase, ops: LayerOps, weight: Fp8Blocks) -> None:
        super().__init__(layer, ops.gemms(weight, whole=layer.whole_features))
        self._weight = weight

    def gated(self, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor | None:
        return None if self._weight.rows % (2 * TALL) else super().gated(x, bias)

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, Fp8Linear)
        for mine, part in zip(self._weight, other._weight, strict=True):
            mine.copy_(part)

    @property
    def sizes(self) -> Counter[str]:
        return Counter({"fp8": self._weight.nbytes})

    def dense_weight(self) -> Tensor:
        return self._weight.dense(torch.bfloat16)


logger = logging.getLogger(__name__)
Part = PackedGroups | MXRows | Fp8Blocks  # of a weight as it is held


@dataclass(frozen=True)
class GroupFormat(WeightFormat):
    """Quantised rows as they come, as far as there are kernels for them. Others are quantised as `scheme` says, or stay
    dense. So do embeddings, and the head of a language model."""

    scheme: str | None = None  # of `draftwing.ops.gemm.groups.SCHEMES`
    ops: LayerOps = field(default_factory=TorchOps, compare=False, repr=False)  # of the device that will multiply
    # Values of a weight from which activations are fp8, where it was made for them; None: they never are.
    fp8_from: int | None = None

    @property
    def reads_on(self) -> torch.device | None:
        device: torch.device | None = getattr(self.ops, "device", None)
        return device if self.ops.keeps_groups else None  # a CPU takes seconds for what are milliseconds there

    @property
    def of_vocabulary(self) -> WeightFormat:
        return DenseFormat()

    @property
    def of_rows(self) -> WeightFormat:
        return DenseFormat()

    @property
    def of_experts(self) -> WeightFormat:
        return replace(self, fp8_from=None)

    def min_bytes(self, dtype: torch.dtype, quantized: bool) -> float:
        return 0.5 if quantized or self.scheme is not None else dtype.itemsize

    def create(self, layer: LinearBase, dtype: torch.dtype, device: torch.device) -> LinearOp:
        DenseFormat().create(layer, dtype, device)
        return Groups(layer, self, dtype)


class Groups(Dense):
    """A weight as loaded: quantised rows in parts by where they start; the rest is in the parameter, maybe all."""

    def __init__(self, layer: LinearBase, form: GroupFormat, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self._format, self._dtype = form, dtype
        self._parts: dict[int, Part] = {}
        self.kept: Counter[str] = Counter()  # parts, by what they were
        self.refused: Counter[str] = Counter()

    def keep(self, part: ParamSlice, value: Tensor | BlockRows | QuantizedRows | MXRows) -> bool:
        if not part.param.endswith("weight") or isinstance(value, BlockRows):
            return False
        if isinstance(value, Tensor):
            if self._format.scheme is None or not value.is_floating_point() or value.element_size() == 1:
                return False
            height, width = value.shape
            fits = height % fp8_blocks.TALL == width % fp8_blocks.WIDE == 0
            dynamic = self._format.scheme == "fp8" and self._is_large and fits
            value = self._format.ops.quantize_groups(value, self._format.scheme, dynamic)
        assert part.axis == 0 and part.start not in self._parts
        packed: Part | str = value if isinstance(value, MXRows) else self._packed_part(value)
        if isinstance(packed, str):
            self.refused[f"{value.label}: {packed}"] += 1
            return False
        self._parts[part.start] = packed
        self.kept[value.label + (", for activations in fp8" if isinstance(packed, Fp8Blocks) else "")] += 1
        if sum(rows.rows for rows in self._parts.values()) == self.layer.out_features:
            del self.layer.weight  # nothing is missing
        return True

    @property
    def _is_large(self) -> bool:
        """Returns whether products of the whole weight are faster with activations in fp8."""
        least = self._format.fp8_from
        return least is not None and self.layer.whole_features * self.layer.in_features >= least

    def _packed_part(self, rows: QuantizedRows) -> Part | str:
        """Returns the rows as kernels read them, or why there are none."""
        if rows.dynamic and self._is_large and fp8_blocks.unsupported_reason(rows, self._dtype) is None:
            return self._format.ops.pack_fp8(rows)
        return unsupported_reason(rows, self._dtype) or self._format.ops.pack_groups(rows, self._dtype)

    @property
    def sizes(self) -> Counter[str]:
        return sum((sizes_of(part) for part in self._parts.values()), Counter[str]())

    def can_append(self, other: LinearOp) -> bool:
        if not isinstance(other, Groups) or bool(self._parts) != bool(other._parts):
            return False
        if not self._parts:
            return super().can_append(other)
        whole = not any(hasattr(op.layer, "weight") for op in (self, other))
        return whole and alike([*self._parts.values(), *other._parts.values()])

    def append(self, other: LinearOp) -> None:
        if not self._parts:
            return super().append(other)
        assert isinstance(other, Groups)
        rows = sum(part.rows for part in self._parts.values())
        self._parts |= {rows + start: part for start, part in other._parts.items()}
        other._parts.clear()

    def part(self, layer: LinearBase, rows: Sequence[range], columns: range) -> LinearOp | None:
        own = Groups(layer, self._format, self._dtype)
        if not self._parts:
            super().part(layer, rows, columns)
            return own
        if hasattr(self.layer, "weight"):
            return None
        parts = part_of(self._parts, rows, columns)
        if parts is None:
            return None
        for some in parts:
            own._parts[sum(before.rows for before in own._parts.values())] = some
        del layer.weight
        return own

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp | None:
        whole = self._whole()
        if isinstance(whole, Fp8Blocks):
            return Fp8Linear(self.layer, ops, whole)
        if isinstance(whole, MXRows):  # only experts have kernels for it
            self.layer.weight = nn.Parameter(whole.dense(self._dtype), False)
            return None
        return None if whole is None else PackedLinear(self.layer, ops, whole, mode)

    def groups(self) -> PackedGroups | MXRows | None:
        whole = self._whole()
        assert not isinstance(whole, Fp8Blocks), "as `of_experts` has it"
        return whole

    def _whole(self) -> Part | None:
        if not self._parts:
            return None
        parts = [self._parts[at] for at in sorted(self._parts)]
        whole = None if hasattr(self.layer, "weight") else joined(parts) or joined([*map(self._for_16_bits, parts)])
        if whole is None:
            self._dequantise_all()
        self._parts.clear()
        return whole

    def _for_16_bits(self, part: Part) -> Part:
        """Returns a part for activations in 16 bits, of which kernels read more together, where it can be one."""
        rows = part.quantized() if isinstance(part, Fp8Blocks) else None
        if rows is None or unsupported_reason(rows, self._dtype) is not None:
            return part
        return self._format.ops.pack_groups(rows, self._dtype)

    def dense_weight(self) -> Tensor:
        """Returns the weight, dequantised; a copy where any of it is quantised, and until it is packed."""
        if not self._parts:
            return super().dense_weight()
        device = next(iter(self._parts.values())).codes.device
        weight = getattr(self.layer, "weight", None)
        shape = self.layer.out_features, self.layer.in_features
        made = torch.empty(shape, dtype=self._dtype, device=device) if weight is None else weight.detach().clone()
        for start, part in self._parts.items():
            made[start : start + part.rows] = dequantised(part, self._dtype)
        return made

    def _dequantise_all(self) -> None:
        """What one kernel does not read at once: parts that are dense, or quantised in different ways."""
        self.layer.weight = nn.Parameter(self.dense_weight(), False)
        self._parts.clear()


class PackedLinear(PackedOp):
    """The device's kernels for few rows of activations; for more, those for many where there are any, or the matrix
    dequantised for the time of one GEMM.

    Without deterministic mode these round differently, as the two GEMMs of a dense weight do.
    """

    def __init__(self, layer: LinearBase, ops: LayerOps, weight: PackedGroups, mode: PackMode) -> None:
        exact = ops.keeps_bits(weight.scales.new_empty(1, weight.columns))
        mode = mode.if_exact(exact, f"expected {mode.name} on a device with GEMMs for it")
        whole = layer.whole_features
        super().__init__(layer, ops.gemms(weight, deterministic=mode.deterministic, whole=whole))
        self._weight = weight

    @property
    def dequantised(self) -> DequantisedGemm | None:
        """Returns the GEMM that dequantises the matrix first."""
        return gemm if isinstance(gemm := self.gemms[-1], DequantisedGemm) else None

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, PackedLinear)
        own, theirs = self._weight, other._weight
        assert _traits(own) == _traits(theirs)
        if self.dequantised is not None:
            self.dequantised.settle()
        for mine, part in zip(own, theirs, strict=True):
            if isinstance(mine, Tensor) and isinstance(part, Tensor):
                mine.copy_(part)

    @property
    def sizes(self) -> Counter[str]:
        return sizes_of(self._weight)

    def dense_weight(self) -> Tensor:
        return unpacked(self._weight)


def dequantise_beside_attention(layers: Sequence[tuple[Sequence[LinearOp], Sequence[LinearOp]]]) -> None:
    """Attention to prompts computes much and reads little: while it runs, the matrices up to the next attention are
    dequantised, where the device does anything meanwhile. layers: of each decoder layer the operations before its
    attention, and those behind it, in the order of their calls."""
    for (before, behind), (following, _) in zip(layers, [*layers[1:], ((), ())], strict=True):
        if isinstance(before[-1], PackedLinear) and before[-1].dequantised is not None:
            later = [op.dequantised for op in (*behind, *following) if isinstance(op, PackedLinear)]
            before[-1].dequantised.prefetch_dequant([gemm for gemm in later if gemm is not None])


def part_of(parts: Mapping[int, Part], rows: Sequence[range], columns: range) -> list[PackedGroups] | None:
    """parts: by their first row. Returns these rows and columns, or None where they are not cut so."""
    found = []
    for some in rows:
        start = max(at for at in parts if at <= some.start)
        whole, within = parts[start], range(some.start - start, some.stop - start)
        part = cut(whole, within, columns) if isinstance(whole, PackedGroups) and within.stop <= whole.rows else None
        if part is None:
            return None
        found.append(part)
    return found


def alike(parts: Sequence[Part]) -> bool:
    """Returns whether one kernel reads them all."""
    if len({type(part) for part in parts}) > 1:
        return False
    packed = [part for part in parts if isinstance(part, PackedGroups)]
    return not packed or joinable(packed)


def joined(parts: Sequence[Part]) -> Part | None:
    """Returns the rows of one part after those of another, or None where one kernel cannot read them all."""
    if not alike(parts):
        return None
    packed = [part for part in parts if isinstance(part, PackedGroups)]
    if packed:
        return join(packed)
    blocks = [part for part in parts if isinstance(part, Fp8Blocks)]
    return fp8_blocks.join(blocks) if blocks else MXRows(*map(torch.cat, zip(*parts, strict=True)))


def _traits(weight: PackedGroups) -> list[object]:
    """Returns all but the values."""
    return [list(part.shape) if isinstance(part, Tensor) else part for part in weight]


def dequantised(weight: Part, dtype: torch.dtype) -> Tensor:
    """Returns the matrix, in the type of activations."""
    return unpacked(weight) if isinstance(weight, PackedGroups) else weight.dense(dtype)


def sizes_of(weight: Part) -> Counter[str]:
    """Returns bytes, by type."""
    if isinstance(weight, Fp8Blocks):
        return Counter({"fp8": weight.nbytes})
    if isinstance(weight, MXRows):
        return Counter({weight.label: weight.nbytes})
    return Counter({"fp8" if weight.fp8 else f"int{weight.bits}": weight.nbytes})


def log_groups(module: nn.Module) -> None:
    """Says of a loaded model, not packed yet, which of its matrices stay quantised, and why others do not."""
    ops = [part.op for part in module.modules() if hasattr(part, "op") and isinstance(part.op, Groups)]
    for what, count in sorted(sum((op.kept for op in ops), Counter[str]()).items()):
        logger.info("%d tensors in %s: kept", count, what)
    for what, count in sorted(sum((op.refused for op in ops), Counter[str]()).items()):
        logger.warning("%d tensors in %s, for which there is no kernel", count, what)
