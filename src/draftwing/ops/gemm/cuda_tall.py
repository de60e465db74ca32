"""GEMMs of more than 128 rows with a quantised weight on CUDA: the Python side of gemm_tall.cu.

Results are those of the matrix that `GroupGemm.dense` gives, in other sums: the bits of a row may depend on the batch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from draftwing.ops.cuda.nvrtc import Kernel, Module, compile_source
from draftwing.ops.gemm.cuda import (
    FILES,
    has_few_left,
    kernel_lines,
    kernel_of,
    key_of,
    options_for,
    programs,
    read_files,
)
from draftwing.ops.gemm.cuda_groups import PackedGemm, Width, order_kernels, order_lines, ordered, weights_line
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.shapes import Shapes, read_shapes

_OPTIONS = options_for(torch.bfloat16)


def shapes_for(bits: int, capability: tuple[int, int], dtype: torch.dtype) -> Shapes:
    """Returns shapes by kind and the most rows of x that they are for. Without an entry, `add_long` is `add`; without
    one for as many rows there is no kernel."""
    return read_shapes(f"{bits}bit-many", capability, dtype)


class TallGemm(PackedGemm[Tensor | None]):
    """The kernels of one width on one device, for bfloat16. Where a GEMM has none, its result is None."""

    def __init__(self, device: torch.device, width: Width, shapes: Shapes) -> None:
        self._width, self._device = width, device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._shapes = dict(sorted(shapes.items(), key=lambda item: item[0][1]))

    @functools.cached_property
    def _loaded(self) -> tuple[dict[tuple[str, int], Kernel], dict[int, Kernel]]:
        """Kernels, and those of `order_kernels`; not for a weight that few rows are multiplied with."""
        modules = [
            (Module(read_source(self._width, part), _OPTIONS, self._device), part) for part in programs(self._shapes)
        ]
        kernels = {
            key: kernel_of(module, key, shape, self._width.part)
            for module, part in modules for key, shape in part.items()
        }  # fmt: skip
        return kernels, order_kernels(modules)

    def _run(
        self, kind: str, x: Tensor, weight: PackedGroups, bias: Tensor | None, residual: Tensor | None, width: int
    ) -> Tensor | None:
        rows, depth = x.shape
        key = self.only or self._key(kind, rows, width)
        if key is None:
            return None
        x = x.contiguous()
        assert depth == weight.columns and (residual is None or residual.is_contiguous())
        (kernels, order), shape = self._loaded, self._shapes[key]
        panels = ordered(order[shape.tokens], shape.tokens, x)
        out = x.new_empty(rows, width)
        kernels[key](
            shape.grid(kind, rows, width, self._processors), panels, weight.codes, weight.scales, weight.zeros, bias,
            residual, out, rows, width, depth,
        )  # fmt: skip
        return out

    def _key(self, kind: str, rows: int, width: int) -> tuple[str, int] | None:
        key = next((key for key in self._shapes if key[0] == kind and rows <= key[1]), None)
        if key is None:
            return self._key("add", rows, width) if kind == "add_long" else None
        key = key_of(self._shapes, *key, width, self._processors)
        few = has_few_left(self._shapes[key], kind, rows, width, self._processors)
        return other if few and (other := (f"{key[0]}_uneven", key[1])) in self._shapes else key


def read_source(width: Width, shapes: Shapes) -> str:
    """Returns what is compiled."""
    parts = [*read_files((*FILES, "gemm_groups.cu", "gemm_bulk.cu", "gemm_tall.cu")), weights_line(width)]
    parts += [f"GROUP_KERNEL({line})\n" for line in kernel_lines(shapes)]
    return "".join([*parts, *order_lines(shapes.values())])


def compile_ahead(dtype: torch.dtype, width: Width, capability: tuple[int, int], shapes: Shapes | None = None) -> None:
    """Puts what `tall_gemm` compiles into the user's cache folder, for devices of this compute capability."""
    for part in programs(shapes_for(width.bits, capability, dtype) if shapes is None else shapes):
        compile_source(read_source(width, part), _OPTIONS, capability)


@functools.cache
def tall_gemm(device: torch.device, dtype: torch.dtype, width: Width) -> TallGemm | None:
    """Its first product compiles. That raises OSError without NVRTC. None where there are no kernels."""
    shapes = shapes_for(width.bits, torch.cuda.get_device_capability(device), dtype)
    return TallGemm(device, width, shapes) if shapes else None
