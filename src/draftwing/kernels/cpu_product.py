"""Products of few rows with a weight that oneDNN has packed: kernels/cpu_product.c, where this CPU can run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwing.kernels.cpu import load

_INPUTS, _OUTPUTS = 32, 64  # multiples of these fill the layout that the kernel reads


class PackedProduct:
    """x @ weight.T + bias + residual, rounded once, for a weight [outputs, inputs] in bfloat16."""

    def __init__(self, raw: Any, packed: Tensor, block: int) -> None:
        """packed: what `_reorder_linear_weight` gave; block: inputs that are summed together, a multiple of 2."""
        assert takes(packed) and block > 0 and block % 2 == 0
        self.raw, self.block = raw, block
        self._packed = packed  # whose memory this is
        self.address = torch.ops.mkldnn.data_ptr(packed)
        self.outputs, self.inputs = packed.shape

    def __call__(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x [M, inputs], bias [outputs], residual [M, outputs] -> [M, outputs], all bfloat16 on the CPU."""
        rows, outputs = x.shape[0], self.outputs
        assert x.shape[1] == self.inputs and x.dtype == torch.bfloat16
        x = x.contiguous()
        out = x.new_empty(rows, outputs)
        if residual is not None:
            assert residual.shape == out.shape and residual.dtype == out.dtype
            residual = residual.contiguous()
        self.raw.product(
            out.data_ptr(), x.data_ptr(), self.address, 0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(), rows, self.inputs, outputs, self.block,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def takes(packed: Tensor) -> bool:
    """Whether this may be the layout that the kernel reads; that it is one has to be tried."""
    outputs, inputs = packed.shape
    if packed.dtype != torch.bfloat16 or outputs % _OUTPUTS or inputs % _INPUTS:
        return False
    return bool(torch.ops.mkldnn._nbytes(packed) == 2 * outputs * inputs)


def packed_product(packed: Tensor, block: int) -> PackedProduct | None:
    """For a weight that oneDNN has packed; None where the kernel does not run, or the weight is none of its."""
    kernels = load()
    if kernels is None or not kernels.raw.has_product or not takes(packed):
        return None
    return PackedProduct(kernels.raw, packed, block)
