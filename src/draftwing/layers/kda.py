"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692) in place of a layer's attention: a gated delta net whose
state decays by each channel of the key.

It runs on the operation of gated delta nets (`ops.delta_net.spec`). Decays, and gates of what the net gives, are made
of the hidden state by two matrices each, over as few values between them as a head has, or by one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draftwing.kv.pool import DeltaSpec
from draftwing.layers.config import MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.delta_net import DeltaMixer
from draftwing.layers.linear import Linear
from draftwing.layers.part_configs import check_sizes, check_taps
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads


@dataclass(frozen=True)
class KdaConfig(MixerConfig):
    """Kimi Delta Attention of one layer, with the sizes of this rank.

    heads: of queries, keys and values alike, each of `head_dim`, which is also the size of what lies between the two
    matrices of decays, and of gates.  direct: whether there is one matrix of each, and nothing between.  floor: as
    `DeltaSpec` has it.
    """

    heads: int
    head_dim: int
    conv_width: int
    direct: bool = False
    floor: float = 0.0

    def keeps(self) -> DeltaSpec:
        size = self.head_dim
        return DeltaSpec(self.heads, self.heads, size, size, self.conv_width, by_channel=True, floor=self.floor)

    @property
    def wide(self) -> int:
        """Returns the values of all heads."""
        return self.heads * self.head_dim

    def weights(self, hidden: int) -> int:
        made = 2 * hidden * self.wide if self.direct else 2 * self.head_dim * (hidden + self.wide)
        return hidden * (4 * self.wide + self.heads) + made

    def check(self) -> None:
        check_sizes(self, ("heads", "head_dim"), " of a delta net")
        check_taps(self.conv_width)

    def spread(self, ranks: Ranks) -> KdaConfig:
        """Returns the sizes of one rank: some heads, and all of what lies between two matrices."""
        return replace(self, heads=len(self._own(ranks)))

    def _own(self, ranks: Ranks) -> range:
        return own_heads(ranks, self.heads, self.heads, "delta nets' heads")[0]

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        own, low, first_head = self.spread(ranks), self.head_dim, self._own(ranks).start
        wide, whole = Share(first_head * low, own.wide, self.wide), Cut(0, Share(0, low, low))
        heads = Cut(0, Share(first_head, own.heads, self.heads))
        some, some_heads = (Cut(0, wide), heads) if ranks.size > 1 else (None, None)
        parts: list[StoredMatrix | StoredVector] = []
        for i, name in enumerate("qkv"):
            parts += [
                StoredMatrix(f"self_attn.{name}_proj", "qkv", i * own.wide, own.wide, False, Cut(0, wide)),
                StoredVector(f"self_attn.{name}_conv1d.weight", "conv", own.wide, some, first=i * own.wide),
            ]
        if not self.direct:
            parts += [
                StoredMatrix("self_attn.f_a_proj", "low", 0, low, False, whole),
                StoredMatrix("self_attn.g_a_proj", "low", low, low, False, whole),
            ]
        last, first = ("" if self.direct else "_b"), (0 if self.direct else 2 * low)
        return [
            *parts,
            StoredMatrix("self_attn.b_proj", "low", first, own.heads, False, heads),
            StoredMatrix(f"self_attn.f{last}_proj", "decay_up", 0, own.wide, False, Cut(0, wide)),
            StoredMatrix(f"self_attn.g{last}_proj", "gate_up", 0, own.wide, False, Cut(0, wide)),
            StoredMatrix("self_attn.o_proj", "out", 0, hidden, False, Cut(1, wide)),
            StoredVector("self_attn.A_log", "decay", own.heads, some_heads, is_log=True),
            StoredVector("self_attn.dt_bias", "dt_bias", own.wide, some),
            StoredVector("self_attn.o_norm.weight", "norm", low),
        ]

    def build(self, place: Placement) -> Kda:
        return Kda(self, place)


class Kda(DeltaMixer):
    """Its projections: q, k and v are one GEMM, and what is small another, or the end of it."""

    def __init__(self, config: KdaConfig, place: Placement) -> None:
        super().__init__(config.keeps(), place)
        self._sizes = (0, 0, config.heads) if config.direct else (config.head_dim, config.head_dim, config.heads)
        self._direct = config.direct
        self.qkv = place.linear(self.spec.channels)
        self.low: Linear | None = place.linear(sum(self._sizes))
        between = 0 if config.direct else config.head_dim
        self.decay_up = place.linear(config.wide, between)
        self.gate_up = place.linear(config.wide, between)
        self.before_attention = 4
        self.out, wide = place.out("out", config.wide), place.wide
        self.conv, self.norm = wide(self.spec.channels, 1, config.conv_width), wide(config.head_dim)
        self.decay, self.dt_bias = wide(config.heads), wide(config.wide)

    def merge(self, ops: LayerOps) -> None:
        if ops.merges_matrices and self.low is not None and self.qkv.op.can_append(self.low.op):
            self.merged = {"low": ("qkv", self.qkv.out_features)}
            self.qkv.append(self.low, ops)
            self.low, self.before_attention = None, 3

    def linears(self) -> list[Linear]:
        return [*([] if self.low is None else [self.low]), self.qkv, self.decay_up, self.gate_up, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        low = None if self.low is None else self.low(x)
        qkv, merged = self.qkv(x).tensor_split((self.spec.channels,), 1)
        decay, gate, b = (merged if low is None else low).split(self._sizes, 1)
        if self._direct:
            a, z = self.decay_up(x), self.gate_up(x)
        else:
            a, z = (up(self._dense(part)) for up, part in ((self.decay_up, decay), (self.gate_up, gate)))
        weights = DeltaWeights(self.conv[:, 0], self.decay, self.dt_bias, self.norm, self._eps, self.spec)
        return self.out(attend.delta(self.pool_layer, DeltaInputs(qkv, z, b, a), weights), residual)

    def _dense(self, part: Tensor) -> Tensor:
        """Returns the same without gaps between rows, as matrices take them; one row has none."""
        return part if part.is_contiguous() else self.ops.concat_columns(part)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
