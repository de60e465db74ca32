"""What layers do with each element, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import CpuRuntime, InC
from draftwing.ops.elementwise.spec import ElementwiseOps
from draftwing.ops.rows.cpu import CpuRowOps


class CpuElementwiseOps(InC, ElementwiseOps):
    """Takes real tensors in float32 or bfloat16, all of one dtype; others go to torch."""

    def __init__(self, runtime: CpuRuntime, rows: CpuRowOps) -> None:
        super().__init__(runtime)
        self._rows = rows

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, False) if gate_up.dtype in DTYPES else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, True) if gate_up.dtype in DTYPES else super().gelu_mul(gate_up)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = gate_up.new_empty(rows, both // 2)
        self.raw.silu_mul(out, gate_up, rows, both // 2, out.dtype == torch.bfloat16, self.workers.address, gelu, 0.0)
        return out

    def gelu(self, x: Tensor, exact: bool) -> Tensor:
        return self._ungated(x, None, 1 + exact) if x.dtype in DTYPES else super().gelu(x, exact)

    def relu_squared(self, x: Tensor) -> Tensor:
        return self._ungated(x, None) if x.dtype in DTYPES else super().relu_squared(x)

    def xielu(self, x: Tensor, how: Tensor) -> Tensor:
        return self._ungated(x, how) if x.dtype in DTYPES and how.dtype == torch.float32 else super().xielu(x, how)

    def _ungated(self, x: Tensor, how: Tensor | None, gelu: int = 0) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        rows = x.numel() // max(size, 1)
        self.raw.ungated(out, x, how, rows, size, x.dtype == torch.bfloat16, self.workers.address, gelu)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().soft_cap(x, cap)
        x = x.contiguous()
        size = x.shape[-1]
        self.raw.soft_cap(x, x, x.numel() // max(size, 1), size, x.dtype == torch.bfloat16, self.workers.address, cap)
        return x

    def add_scaled(self, x: Tensor, y: Tensor | None, scale: Tensor | float = 1.0) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().add_scaled(x, y, scale)
        x, y = x.contiguous(), None if y is None else y.contiguous()
        assert y is None or (y.shape == x.shape and y.dtype == x.dtype)
        assert not isinstance(scale, Tensor) or (scale.dtype == x.dtype and scale.numel() == 1)
        rows, size = x.shape
        out = x.new_empty(rows, size)
        at, factor = (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)
        self.raw.add_scaled(out, x, y, rows, size, x.dtype == torch.bfloat16, self.workers.address, at, factor)
        return out

    def gate(self, gate: Tensor, x: Tensor, softplus: bool = False) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().gate(gate, x, softplus)
        x = x.contiguous()
        gate = gate if gate.is_contiguous() else self._rows.concat_columns(gate)  # which is no operation of torch's
        assert gate.shape in (x.shape, (len(x), 1)) and gate.dtype == x.dtype
        out = torch.empty_like(x)
        rows, size = (len(x), x.shape[1]) if gate.shape != x.shape else (1, x.numel())
        self.raw.gate(out, gate, x, rows, size, gate.shape != x.shape, x.dtype == torch.bfloat16, softplus)
        return out

    def block_conv(
        self, x: Tensor, factors: Tensor, base: Tensor, side: int, rows: int, residual: Tensor | None = None
    ) -> Tensor:
        if x.dtype not in DTYPES or type(x) is not Tensor:
            return super().block_conv(x, factors, base, side, rows, residual)
        x, factors, residual = x.contiguous(), factors.contiguous(), None if residual is None else residual.contiguous()
        (_, taps, size), groups = base.shape, factors.shape[1] // (2 * base.shape[1])
        assert base.is_contiguous() and x.dtype == factors.dtype == base.dtype and len(x) % rows == 0
        assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
        out = torch.empty_like(x)
        self.raw.block_conv(
            out, x, factors, base, residual, len(x), rows, size, taps, groups, side, x.dtype == torch.bfloat16,
            self.workers.address,
        )  # fmt: skip
        return out

    def recur(self, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if made.dtype not in DTYPES or type(made) is not Tensor:
            return super().recur(made, state)
        made, state = made.contiguous(), state.contiguous()
        rows, size = state.shape
        assert made.shape == (rows, 3 * size) and made.dtype == state.dtype
        out, after = torch.empty_like(state), torch.empty_like(state)
        self.raw.recur(out, after, made, state, rows, size, made.dtype == torch.bfloat16)
        return out, after

    def gru(self, read: Tensor, kept: Tensor, state: Tensor) -> Tensor:
        if read.dtype not in DTYPES or type(read) is not Tensor:
            return super().gru(read, kept, state)
        read, kept, state = read.contiguous(), kept.contiguous(), state.contiguous()
        rows, size = state.shape
        assert read.shape == kept.shape == (rows, 3 * size) and read.dtype == kept.dtype == state.dtype
        after = torch.empty_like(state)
        self.raw.gru(after, read, kept, state, rows, size, read.dtype == torch.bfloat16)
        return after
