"""Attention and a state-space layer beside each other, which read the same and whose results are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftwing.kv.pool import KVSpec
from draftwing.layers.attention import Attention, AttentionConfig
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.layers.mamba import Mamba2, Mamba2Config
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import LayerOps
from draftwing.parallel.ranks import Ranks


@dataclass(frozen=True)
class HybridConfig(MixerConfig):
    """Both with the sizes of this rank."""

    attention: AttentionConfig
    net: Mamba2Config

    @property
    def rotates(self) -> tuple[int, int] | None:
        return self.attention.rotates

    def keeps(self) -> KVSpec:
        return self.attention.keeps()._replace(state=self.net.keeps())

    def weights(self, hidden: int) -> int:
        return self.attention.weights(hidden) + self.net.weights(hidden)

    def check(self) -> None:
        self.attention.check()
        self.net.check()

    def spread(self, ranks: Ranks) -> HybridConfig:
        return HybridConfig(self.attention.spread(ranks), self.net.spread(ranks))

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        both = ("attention", self.attention.stored(hidden, ranks)), ("net", self.net.stored(hidden, ranks))
        return [part._replace(param=f"{name}.{part.param}") for name, parts in both for part in parts]

    def build(self, place: Placement) -> Hybrid:
        return Hybrid(self, place)


class Hybrid(Mixer):
    """What attention gives, and what the state-space layer does."""

    needs_chunks = False

    def __init__(self, config: HybridConfig, place: Placement) -> None:
        super().__init__()
        self.pool_layer = place.pool_layer
        self.attention = Attention(config.attention, place._replace(prefix="attention."))
        self.net = Mamba2(config.net, place._replace(prefix="net."))

    def use(self, ops: LayerOps) -> None:
        super().use(ops)
        self.attention.use(ops)
        self.net.use(ops)

    def linears(self) -> list[Linear]:
        return [*self.net.linears(), *self.attention.linears()]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        made = self.net(x, cos, sin, attend, residual)
        return self.attention(x, cos, sin, attend, made)

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        self.net.write(x, cos, sin, attend)
        self.attention.write(x, cos, sin, attend)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
