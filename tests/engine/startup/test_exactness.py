"""Deterministic inference without our kernels is tried out before it is promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing import LLM
from draftwing.engine.devices import base as devices
from draftwing.engine.startup.warm_up import keeps_bits
from draftwing.errors import ConfigError
from draftwing.kv.pool import KVPool
from draftwing.ops.attention.attend import Attend, AttnBackend
from draftwing.ops.attention.batch import Batch
from draftwing.ops.attention.cpu import NativeAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.gemm import onednn

pytestmark = pytest.mark.skipif(load_extension() is None, reason="the C kernels were not built")
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_total_tokens": 512,
                           "max_running_requests": 4, "speculative_algorithm": "none"}  # fmt: skip
DETERMINISTIC = OPTIONS | {"enable_deterministic_inference": True}
BIT = 1 + 2**-22  # a last bit or two


class Tried(CpuOps):
    """Kernels that are exact, and do not say so."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.exact_by_design = False


class NormByRows(Tried):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        norm = self.rms_norm

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return norm(x, weight, eps) * (BIT if len(x) > 64 else 1)

        def add_rms_norm(
            x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: float = 1.0
        ) -> tuple[Tensor, Tensor]:
            total = self.add_scaled(x, delta * scale)
            return total, rms_norm(total, weight, eps)

        self.rms_norm, self.add_rms_norm = rms_norm, add_rms_norm


class GateByRows(Tried):
    """Of few rows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        gate = self.silu_mul
        self.silu_mul = lambda gate_up: gate(gate_up) * (BIT if 1 < len(gate_up) < 8 else 1)


class AttentionInTrees(Tried):
    """As one that sums over a tree in another order than over a prompt."""

    def attention(self, pool: KVPool, exact: bool = False) -> AttnBackend:
        class Bound(Attend):
            def __init__(self, attend: Attend) -> None:
                self._attend = attend

            def write(self, layer: int, k: Tensor, v: Tensor) -> None:
                self._attend.write(layer, k, v)

            def __call__(self, *given: Any) -> Tensor:
                return self._attend(*given) * BIT

        class Other(NativeAttention):
            def bind(self, batch: Batch, *args: Any, **more: Any) -> Any:
                attend = super().bind(batch, *args, **more)
                return attend if batch.chunks or batch.window == 1 else Bound(attend)

        return Other(pool, load_extension(), self.workers)


def with_ops(monkeypatch: pytest.MonkeyPatch, ops: Callable[[torch.device], CpuOps]) -> None:
    monkeypatch.setattr(devices, "make_ops", ops)


SLOW = [{"dtype": "auto"}, {"max_total_tokens": 60}, {"max_running_requests": 1}]


@pytest.mark.parametrize("more", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_what_is_exact_is_accepted(model: str, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    with_ops(monkeypatch, Tried)
    with LLM(model, **DETERMINISTIC | more) as llm:
        executor = llm.engine.parts.executor
        assert keeps_bits(executor)
        for state in (executor.table.page_table, executor.table.kv_len, executor.table.tokens, executor.table.last):
            assert not state[:-1].any(), "no trace is left"
        assert len(llm.generate([[1, 2, 3]], {"max_new_tokens": 5, "ignore_eos": True})[0].token_ids) == 5


@pytest.mark.slow
@pytest.mark.parametrize("ops", [NormByRows, GateByRows, AttentionInTrees])
def test_what_is_not_is_refused(model: str, monkeypatch: pytest.MonkeyPatch, ops: type[CpuOps]) -> None:
    with_ops(monkeypatch, ops)
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: on this CPU"):
        LLM(model, **DETERMINISTIC)
    with LLM(model, **OPTIONS):  # who does not ask for it is served
        pass


def test_products_that_depend_on_the_number_of_rows_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In halves from 9 rows on."""
    whole = onednn.gemm_alike

    def halves(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, alike: int) -> Tensor:
        if len(x) < 9:
            return whole(x, packed, bias, residual, alike)
        dense, half = packed.to_dense(), x.shape[1] // 2
        y = x[:, :half] @ dense[:, :half].t() + x[:, half:] @ dense[:, half:].t()
        y = y if bias is None else y + bias
        return y if residual is None else y + residual

    with_ops(monkeypatch, Tried)
    monkeypatch.setattr(onednn, "gemm_alike", halves)
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: on this CPU"):
        LLM(model, **DETERMINISTIC)
