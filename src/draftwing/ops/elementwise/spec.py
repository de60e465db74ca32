"""What layers do with each element besides products and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows, packed_rows, quantised


class ElementwiseOps:
    """Activations, gates and sums. Here with gradients, for tensors of any dtype."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> silu(gate) * up, [M, ffn]; silu(gate) is rounded before it is multiplied."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> gelu(gate) * up, [M, ffn], by the approximation with tanh; gelu(gate) is rounded
        before it is multiplied."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def gelu(self, x: Tensor, exact: bool) -> Tensor:
        """x of any shape -> gelu(x), by the approximation with tanh unless it is exact."""
        return F.gelu(x, approximate="none" if exact else "tanh")

    def relu_squared(self, x: Tensor) -> Tensor:
        """x of any shape -> relu(x)²"""
        return F.relu(x).square()

    def xielu(self, x: Tensor, how: Tensor) -> Tensor:
        """x of any shape, how [4]: rise, fall, beta, eps -> rise * x² + beta * x where x > 0, else fall *
        (exp(min(x, eps)) - 1 - x) + beta * x, in float32 or wider and rounded once."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rise, fall, beta, eps = how.to(wide.dtype).unbind()
        falling = fall * (torch.expm1(torch.minimum(wide, eps)) - wide)
        return (torch.where(wide > 0, rise * wide.square(), falling) + beta * wide).to(x.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """x of any shape, which may be overwritten -> cap * tanh(x / cap), in float32 or wider and rounded once"""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (cap * torch.tanh(wide / cap)).to(x.dtype)

    def add_scaled(self, x: Tensor, y: Tensor | None, scale: Tensor | float = 1.0) -> Tensor:
        """x, y [M, n], scale a number, or [1] of their dtype -> (x + y) * scale, [M, n], the sum rounded before; y
        None: x * scale."""
        total = x if y is None else x + y
        return total * scale if isinstance(scale, Tensor) or scale != 1 else total

    def gate(self, gate: Tensor, x: Tensor, softplus: bool = False) -> Tensor:
        """gate [M, n] or [M, 1], x [M, n] -> sigmoid(gate) * x; of x by itself its SiLU. Or softplus(gate) * x"""
        return (F.softplus(gate) if softplus else torch.sigmoid(gate)) * x

    def gate_fp8(self, gate: Tensor, x: Tensor, softplus: bool = False) -> Fp8Rows:
        """Returns `gate` of both, as products with activations in fp8 read it."""
        return packed_rows(*quantised(self.gate(gate, x, softplus)))

    def recur(self, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """made [M, 3 * n]: k, f and o, state [M, n] -> tanh(o), and sigmoid(k) * state + (1 - sigmoid(k)) * tanh(f)"""
        keep, fresh, out = made.chunk(3, 1)
        keep = torch.sigmoid(keep)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(fresh)

    def gru(self, read: Tensor, kept: Tensor, state: Tensor) -> Tensor:
        """Returns the next state of a gated recurrent unit, as torch has it: read, kept [M, 3 * n], products of the
        input and of state [M, n], for what is reset, what stays and what is new."""
        (r, z, n), (hr, hz, hn) = read.chunk(3, 1), kept.chunk(3, 1)
        stay = torch.sigmoid(z + hz)
        return (1 - stay) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + stay * state

    def block_conv(
        self, x: Tensor, factors: Tensor, base: Tensor, side: int, rows: int, residual: Tensor | None = None
    ) -> Tensor:
        """Convolves along blocks of so many rows: x [M, n], factors [M, 2 * taps * groups], base [2, taps, n], side 0
        or 1 of both, residual [M, n] -> residual[t] + sum over taps k of (base[k] + factors[t, k]) * x[t - k], [M, n],
        where groups of channels that lie together share a factor, and nothing is before a block. In float32 or wider,
        in this order, and rounded once."""
        exact = torch.promote_types(x.dtype, torch.float32)
        (_, taps, size), count = base.shape, x.shape[0] // rows
        groups = factors.shape[1] // (2 * taps)
        own = factors.to(exact).view(count, rows, 2, taps, groups)[:, :, side]
        own = own.repeat_interleave(size // groups, -1) + base[side].to(exact)  # [B, rows, taps, n]
        blocks = x.to(exact).view(count, rows, size)
        out = torch.zeros_like(blocks) if residual is None else residual.to(exact).view(count, rows, size)
        for k in range(taps):
            out = out + own[:, :, k] * F.pad(blocks, (0, 0, k, 0))[:, :rows]
        return out.reshape(-1, size).to(x.dtype)

    def sum_parts(self, parts: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """parts [P, M, n] + bias [n] + residual [M, n] -> [M, n], in this order in float32, rounded once."""
        first, *others = parts.unbind()
        total = first.float()
        for other in (*others, bias, residual):
            total = total if other is None else total + other
        return total.to(parts.dtype)
