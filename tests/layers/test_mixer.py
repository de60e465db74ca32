"""What mixers say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig, MixerConfig, Placement
from draftwing.layers.delta_net import DeltaNetConfig
from draftwing.layers.indexer import IndexConfig
from draftwing.layers.latent import LatentAttentionConfig
from draftwing.layers.lightning import LightningConfig
from draftwing.layers.short_conv import ShortConvConfig
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, AttentionKind

CPU, HIDDEN, ROWS = torch.device("cpu"), 64, 3


class Noting(Attend):
    """Notes that it is asked, among the calls of matrices."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _note(self, *shape: int) -> Tensor:
        self.calls.append("attention")
        return torch.zeros(ROWS, *shape)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        return self._note(q.shape[1] * v.shape[2])

    def write_index(self, layer: int, keys: Tensor) -> None:
        assert keys.shape == (ROWS, 32)

    @property
    def picked(self) -> Attend:
        return self

    def sees_at_most(self, topk: int) -> bool:
        return False

    def pick(self, layer: int, q: Tensor, weights: Tensor, topk: int) -> None:
        assert (q.shape, weights.shape, topk) == ((ROWS, 3, 32), (ROWS, 3), 7)

    def short_conv(self, layer: int, made: Tensor, taps: Tensor) -> Tensor:
        return self._note(len(taps))

    def delta(self, layer: int, inputs: Any, weights: Any) -> Tensor:
        return self._note(inputs.z.shape[1])


class NotedOp:
    def __init__(self, op: Any, calls: list[Any]) -> None:
        self.op, self.calls, self.takes_fp8 = op, calls, op.takes_fp8

    def __call__(self, *args: Any) -> Any:
        self.calls.append(self.op)
        return self.op(*args)


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(4, 2, 16),
        LatentAttentionConfig(2, 16, 8, 16, 32, query_latent=16),
        LatentAttentionConfig(2, 16, 8, 16, 32),
        LatentAttentionConfig(2, 16, 8, 16, 32, query_latent=16, index=IndexConfig(3, 32, 7)),
        LatentAttentionConfig(2, 16, 8, 16, 32, query_latent=16, index=IndexConfig(3, 32, 7, shared=True)),
        DeltaNetConfig(2, 4, 8, 16, 4),
        DeltaNetConfig(2, 4, 8, 16, 4, sigmoid=True),
        LightningConfig((1.0, 0.5), 16),
        ShortConvConfig(32, 3),
    ],
    ids=lambda config: type(config).__name__,
)
def test_matrices_are_in_the_order_of_their_calls(config: MixerConfig) -> None:
    """And attention follows those that are said to be before it."""
    mixer, attend = config.build(Placement(LayerConfig(HIDDEN, config, 96), 0, torch.float32, CPU, HIDDEN)), Noting()
    for part in mixer.parameters():
        part.data.zero_()
    mixer.requires_grad_(False)
    size = config.rotates[1] if config.rotates is not None else 0
    linears, before = mixer.linears(), mixer.before_attention
    expected: list[Any] = [linear.op for linear in linears]
    expected.insert(before, "attention")
    for linear in linears:
        linear.op = NotedOp(linear.op, attend.calls)  # type: ignore[assignment]
    mixer(torch.zeros(ROWS, HIDDEN), torch.ones(ROWS, 1, size), torch.zeros(ROWS, 1, size), attend)
    assert attend.calls == expected
