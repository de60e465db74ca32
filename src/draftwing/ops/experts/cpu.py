"""Mixtures of experts in one call: ops/cpu/csrc/experts.c, where all weights of the experts are in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES, load_extension
from draftwing.ops.cpu.runtime import CpuRuntime, Spare
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.experts.routing import MixtureWeights, Routed
from draftwing.ops.experts.spec import ExpertOps
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.gemm.cpu_blocks import BlockedGemm
from draftwing.ops.norms.spec import NormOps

_UNIT = 32  # outputs that a thread takes at least
_SLICE = 512  # rows at a time: of each of their choices some 20 KB are kept on the way


def can_mix(weights: MixtureWeights) -> bool:
    """Returns whether the kernel has GEMMs for these weights."""
    return _in_blocks(weights.gate_up) and _in_blocks(weights.down)


def _in_blocks(gemms: Sequence[Gemm | None]) -> TypeGuard[Sequence[BlockedGemm]]:
    return all(isinstance(gemm, BlockedGemm) and gemm.shared and gemm.outputs % _UNIT == 0 for gemm in gemms)


class NativeMixture:
    """`WholeMixture` of weights that `can_mix`."""

    def __init__(self, weights: MixtureWeights, spare: Spare, workers: Workers) -> None:
        """spare: of all layers."""
        assert can_mix(weights)
        self._spare, self._workers = spare, workers
        self.raw: Any = load_extension()
        self.count, self.routing, self.limit = len(weights.gate_up), weights.routing, weights.limit
        ups = [gemm for gemm in weights.gate_up if isinstance(gemm, BlockedGemm)]
        downs = [gemm for gemm in weights.down if isinstance(gemm, BlockedGemm)]
        self.hidden, self.ffn, self.dtype = ups[0].inputs, downs[0].inputs, ups[0].dtype
        made = self.ffn * (2 if weights.gated else 1)
        assert all(gemm.inputs == self.hidden and gemm.outputs == made for gemm in ups)
        assert all(gemm.inputs == self.ffn and gemm.outputs == self.hidden for gemm in downs)
        assert len(weights.router) == self.count
        self.by_size = weights.router.shape[1]
        # Addresses go stale where a module's weights are moved, so what holds their memory is not the module's tensors.
        tensors = (weights.router, weights.router_bias, weights.correction, *weights.biases, weights.scales)
        *own, scales = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
        assert all(tensor is None or tensor.dtype == self.dtype for tensor in own[3:])
        assert scales is None or (scales.dtype == torch.float32 and scales.shape == (self.count,))
        assert not (weights.limit and (weights.gelu or not weights.gated))
        activation = int(weights.gelu) if weights.gated else 2
        assert weights.router.dtype in (self.dtype, torch.float32)
        assert weights.correction is None or weights.correction.dtype == torch.float32
        assert self.routing.has_correction == (weights.correction is not None)
        self._held = own, scales, ups, downs
        by_scales = 0 if scales is None else scales.data_ptr()
        self._more = by_scales, activation, self.routing.sigmoid, self.by_size
        router, bias, correction = (0 if tensor is None else tensor.data_ptr() for tensor in own[:3])
        self._router = router, bias, weights.router.dtype == torch.bfloat16, correction
        numbers = []
        for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
            for gemm, added in zip((up, down), own[3:], strict=True):
                numbers += [gemm.parts, 0 if added is None else added[expert * gemm.outputs :].data_ptr()]
        self._weights = torch.tensor(numbers)

    def __call__(self, x: Tensor, residual: Tensor | None, scatter: Tensor | None, by: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), self.hidden)
        if residual is not None:
            assert residual.shape == out.shape and residual.dtype == out.dtype
            residual = residual.contiguous()
        self._run(x, by, scatter, out, residual, None)
        return out

    def routes(self, x: Tensor, scatter: Tensor | None, by: Tensor | None = None) -> Routed:
        shape = len(x), self.routing.top_k
        routed = Routed(x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32), self.count)
        self._run(x, by, scatter, None, None, routed)
        return routed

    def _run(
        self, x: Tensor, by: Tensor | None, scatter: Tensor | None, out: Tensor | None, residual: Tensor | None,
        routed: Routed | None,
    ) -> None:  # fmt: skip
        """Fills `out`, or what is in `routed`."""
        rows, workers = len(x), self._workers
        assert x.dtype == self.dtype and x.shape[1] == self.hidden
        x = x.contiguous()
        by = x if by is None else by.contiguous()
        assert by.shape == (rows, self.by_size) and by.dtype == x.dtype
        half, count, routing = x.dtype == torch.bfloat16, self.count, self.routing
        sizes = count, routing.top_k, self.hidden, self.ffn
        size = self.raw.experts_spare(min(rows, _SLICE), half, *sizes, workers.most)

        def at(tensor: Tensor | None, start: int) -> int:
            return 0 if tensor is None else tensor.data_ptr() + start * tensor.stride(0) * tensor.element_size()

        chosen, shares = (None, None) if routed is None else (routed.experts, routed.weights)
        with self._spare.of(size) as spare:
            for start in range(0, rows, _SLICE):
                self.raw.experts(
                    at(out, start), at(x, start), at(residual, start), min(rows - start, _SLICE), half, scatter,
                    *self._router, count, routing.top_k, routing.renormalise, routing.groups, routing.top_groups,
                    self.hidden, self.ffn, self._weights, spare, workers.address, at(by, start), *self._more,
                    at(chosen, start), at(shares, start), self.limit, routing.scale,
                )  # fmt: skip


class CpuExpertOps(ExpertOps):
    """Has whole mixtures."""

    def __init__(self, runtime: CpuRuntime, norms: NormOps) -> None:
        super().__init__(norms, reads_routes=True)
        self._runtime = runtime
        self._raw: Any = load_extension()

    def whole_mixture(self, weights: MixtureWeights) -> NativeMixture | None:
        """Returns the mixture in one call; None for weights that are not all of `GemmOps.block_gemm`, and for a routing
        that C does not know."""
        runtime, known = self._runtime, can_mix(weights) and not weights.routing.near
        return NativeMixture(weights, runtime.spare, runtime.workers) if known else None

    def clamped_swiglu(self, gate_up: Tensor, limit: float) -> Tensor:
        if gate_up.dtype not in DTYPES:
            return super().clamped_swiglu(gate_up, limit)
        gate_up, half = gate_up.contiguous(), gate_up.dtype == torch.bfloat16
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._raw.silu_mul(out, gate_up, *out.shape, half, self._runtime.workers.address, False, limit)
        return out
