"""Stand-ins without data for what an engine has on a GPU, by which `precompile` finds out what that launches: a device,
layers that are as others are, and weights that stay quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftwing.engine.devices.base import Download
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.layers.config import LayerConfig
from draftwing.layers.experts import ExpertLinear, ExpertMLP
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearBase, LinearOp, PackMode
from draftwing.layers.linear_ops.groups import Fp8Linear, alike, joined, part_of
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import schemes_of
from draftwing.models.quantised.config import Quantization, Scheme
from draftwing.ops.fp8.spec import FP8_FROM, TALL, WIDE, Fp8Rows
from draftwing.ops.gemm.cuda_groups import Width
from draftwing.ops.gemm.groups import WHOLE, PackedGroups, groups_of_row, shift_of
from draftwing.ops.gemm.stored import MX_BLOCK, MXRows
from draftwing.ops.table import LayerOps

_ANY_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
_SHARED_EXPERT = "model.layers.0.mlp.shared_expert.gate_proj"
# By what options call them.
MADE = {"fp8": Width(8, False, WHOLE, True), "w4a16": Width(4, False, 1), "int8": Width(8, False, WHOLE)}


def leave_out(model: DecoderModel) -> None:
    """Lets layers do nothing that are as others are: they launch the same kernels. Two of each kind stay, and the last:
    a layer may do some of the work of the next."""
    kinds: list[LayerConfig] = []
    for i, config in enumerate(model.config.spread(model.ranks)[:-1]):
        if kinds.count(config) == 2:
            model.layers[i] = _NoLayer()
        else:
            kinds.append(config)


class _NoLayer(nn.Module):
    """Stands in place of a `DecoderLayer`."""

    end = None

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x

    def under(self, norm: nn.Module, normed: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return x, normed

    def take_normed(self) -> None:
        """Gives nothing under a norm."""


class NoDevice(CpuDevice):
    """Takes everything and does nothing."""

    kind = "meta"
    has_own_memory = True

    def upload(self, host: Any) -> Tensor:
        return torch.empty(len(host), dtype=torch.int64, device=self.device)

    def upload_into(self, out: Tensor, host: Any) -> None:
        pass

    def download(self, tensor: Tensor) -> Download:
        shape = tuple(tensor.shape)
        return Download(lambda: np.zeros(shape, np.int64), 0.0)

    def record(self, fn: Any, pool: str = "") -> Any:
        return (lambda: None), fn()

    def peak(self, fn: Any) -> int:
        fn()
        return 0


# -- weights of experts that stay quantised, without data: their form decides which kernels are launched ---------------


def width_of(scheme: Scheme) -> Width | None:
    """Returns the width of weights that stay as they are stored, None of those that are dequantised."""
    if scheme.layout in ("fp4", "bnb"):
        return None
    zeros = not scheme.symmetric and not scheme.real
    return Width(8 if scheme.real or scheme.bits > 4 else 4, zeros, shift_of(scheme.wide), scheme.real)


def hold_experts(model: DecoderModel, dtype: torch.dtype, asked: str, stored: Quantization | None) -> None:
    """Puts stand-ins for the experts of a model on the meta device that is to be packed. asked: `--quantization`."""
    if asked == "none":
        return
    held: list[tuple[str, Linear]] = []
    for part in model.modules():
        if isinstance(part, ExpertLinear):
            held.append((_ANY_EXPERT, part))
        elif isinstance(part, ExpertMLP) and part.shared is not None and (stored is None or stored.method != "mxfp4"):
            held += [(_SHARED_EXPERT, linear) for linear in part.shared.linears()]
    for name, linear in held:
        weight = _held(name, linear.out_features, linear.in_features, dtype, asked, stored)
        if weight is not None:
            linear.op = Held(linear, weight, dtype)


class Held(LinearOp):
    def __init__(self, layer: LinearBase, weight: PackedGroups | MXRows, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self._weight, self._dtype = weight, dtype

    def groups(self) -> PackedGroups | MXRows | None:
        return self._weight

    def can_append(self, other: LinearOp) -> bool:
        return isinstance(other, Held) and alike([self._weight, other._weight])

    def append(self, other: LinearOp) -> None:
        assert isinstance(other, Held)
        whole = joined([self._weight, other._weight])
        assert isinstance(whole, PackedGroups | MXRows)
        self._weight = whole

    def part(self, layer: LinearBase, rows: Sequence[range], columns: range) -> LinearOp | None:
        parts = part_of({0: self._weight}, rows, columns)
        whole = None if parts is None else joined([*parts])
        return Held(layer, whole, self._dtype) if isinstance(whole, PackedGroups | MXRows) else None

    def dense_weight(self) -> Tensor:
        return torch.empty(self.layer.out_features, self.layer.in_features, dtype=self._dtype, device="meta")


def _held(
    name: str, rows: int, columns: int, dtype: torch.dtype, asked: str, stored: Quantization | None
) -> PackedGroups | MXRows | None:
    if stored is not None and stored.method == "mxfp4":
        return MXRows(_bytes(rows, columns // 2), _bytes(rows, columns // MX_BLOCK))
    scheme = None if stored is None else stored.scheme_of(name)
    width = MADE.get(asked) if scheme is None else width_of(scheme)
    if width is None or rows % 16 or columns % 64:
        return None
    scales = torch.empty(rows // 16, groups_of_row(columns, width.shift), 8, 2, dtype=dtype, device="meta")
    zeros = torch.empty_like(scales) if width.zeros else None
    codes = _bytes(rows // 16, columns * 2 * width.bits)
    return PackedGroups(codes, scales, zeros, width.bits, width.shift, None, width.fp8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


# -- weights for activations in fp8, without data: kernels before them store what they read --------------------------


def hold_fp8(model: DecoderModel, asked: str) -> None:
    """Puts stand-ins for their products into a model on the meta device that is to be packed. asked:
    `--quantization`."""
    schemes = schemes_of(model.config, model.ranks)
    for name, part in model.layers.named_modules(prefix="layers"):
        if type(part) is not Linear or part.in_features % WIDE or part.out_features % TALL:
            continue
        if isinstance(part.op, Held):  # the expert of all rows, which may join the others
            continue
        if part.in_features * part.whole_features < FP8_FROM:
            continue
        scheme = schemes.get(f"{name}.weight")
        if asked == "fp8" if scheme is None else scheme.dynamic:
            part.op = HeldFp8(part)


def multiplies_fp8(model: DecoderModel) -> bool:
    """Returns whether any of its weights is for activations in fp8."""
    return any(isinstance(part, Linear) and isinstance(part.op, HeldFp8) for part in model.modules())


class HeldFp8(Fp8Linear):
    def __init__(self, layer: Linear) -> None:
        LinearOp.__init__(self, layer)

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp:
        return self

    def __call__(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        return self._made(x, self.layer.out_features)

    def gated(self, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        return self._made(x, self.layer.out_features // 2)

    def dense_weight(self) -> Tensor:
        return self.layer.weight

    def _made(self, x: Tensor | Fp8Rows, columns: int) -> Tensor:
        rows = x.rows if isinstance(x, Fp8Rows) else len(x)
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
