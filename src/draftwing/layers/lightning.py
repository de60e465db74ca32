"""Lightning attention (Qin et al. 2024, arXiv 2401.04658; MiniMax 2025, arXiv 2501.08313) in place of a layer's
attention: the state of a head fades by one factor, which is the same for all tokens.

It runs on the operation of gated delta nets as Mamba-2 does (`ops.delta_net.spec`), with a key head for each head, one
step size for all tokens, and a convolution that leaves the newest token as it is, whose SiLU the operation takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.kv.pool import DeltaSpec
from draftwing.layers.config import MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.delta_net import OPEN, DeltaMixer
from draftwing.layers.linear import Linear
from draftwing.layers.norm import row_squares
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.parallel.cut import Cut, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads

_STEP = 2.0**-9  # what is added to a state, so that sums over a long text, which a norm divides, fit into float16
_EPS = 1e-6 * (OPEN * _STEP) ** 2  # of a mean of squares of what the operation gives, which is so many times as large


@dataclass(frozen=True)
class LightningConfig(MixerConfig):
    """slopes: of each head of this rank, how fast the logarithm of what is left of a state falls.  values: of all heads
    of the model, 0: there is one rank."""

    slopes: tuple[float, ...]
    head_dim: int
    values: int = 0

    def keeps(self) -> DeltaSpec:
        heads = len(self.slopes)
        return DeltaSpec(heads, heads, self.head_dim, self.head_dim, conv_width=2, corrects=0)

    @property
    def inner(self) -> int:
        """Values of all heads of this rank."""
        return len(self.slopes) * self.head_dim

    def weights(self, hidden: int) -> int:
        return 5 * hidden * self.inner

    def spread(self, ranks: Ranks) -> LightningConfig:
        """Returns the sizes of one rank: some heads. The norm is over the heads of all."""
        if ranks.size > 1 and ranks.invariant:
            raise ConfigError("--enable-tp-invariance: expected no lightning attention, whose norm is over all ranks")
        own = self._own(ranks)
        return replace(self, slopes=self.slopes[own.start : own.stop], values=self.inner if ranks.size > 1 else 0)

    def _own(self, ranks: Ranks) -> range:
        heads = len(self.slopes)
        return own_heads(ranks, heads, heads, "heads of lightning attention")[0]

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        heads, size, whole = self._own(ranks), self.head_dim, self.inner
        runs = [((3 * head + part) * size, size) for part in range(3) for head in heads]
        made = len(heads) * size
        share, all_rows = Cut(0, Share(heads.start * size, made, whole)), Cut(0, Share(0, 3 * made, 3 * made))
        return [
            StoredMatrix("self_attn.qkv_proj", "qkv", 0, 3 * made, False, all_rows, ordered(0, runs, 3 * whole)),
            StoredMatrix("self_attn.output_gate", "gate", 0, made, False, share),
            StoredMatrix("self_attn.out_proj", "out", 0, hidden, False, share._replace(axis=1)),
            StoredVector("self_attn.norm.weight", "norm", made, share if ranks.size > 1 else None),
        ]

    def build(self, place: Placement) -> Lightning:
        return Lightning(self, place)


class Lightning(DeltaMixer):
    """Its projections: queries, keys and values are one GEMM, gates another."""

    def __init__(self, config: LightningConfig, place: Placement) -> None:
        super().__init__(config.keeps(), place)
        self._ranks, self._values = place.layer.ranks, config.values
        self.qkv, self.gate = place.linear(3 * config.inner), place.linear(config.inner)
        self.out = place.out("out", config.inner)
        self.before_attention, heads = 2, len(config.slopes)
        self.conv, self.norm = place.wide(self.spec.channels, 1, 2), place.wide(config.inner)
        self.decay, self.dt_bias, self.skip = place.wide(heads), place.wide(heads), place.wide(heads)
        # Of every row: gates of which the operation makes no difference, and step sizes.
        rows = (torch.zeros(1, size, dtype=place.dtype, device=place.device) for size in (config.inner, heads))
        self.open, self.steps = (nn.Parameter(row, False) for row in rows)
        one, step = torch.tensor(1.0), torch.tensor(_STEP, dtype=torch.float64)
        self.unsaid = {"open": OPEN * one, "steps": 0 * one, "skip": 0 * one, "conv": torch.tensor([0.0, 1.0])}
        self.unsaid |= {"decay": -torch.tensor(config.slopes) / _STEP, "dt_bias": step.expm1().log().float()}

    def linears(self) -> list[Linear]:
        return [self.qkv, self.gate, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        qkv, z = self.qkv(x), self.gate(x)
        constants = self.conv[:, 0], self.decay, self.dt_bias, self.norm[:0]
        weights = DeltaWeights(*constants, self._eps, self.spec, skip=self.skip)
        steps, gates = self.steps.expand(len(z), -1), self.open.expand(len(z), -1)
        made = attend.delta(self.pool_layer, DeltaInputs(qkv, gates, steps, steps), weights)
        assert isinstance(made, Tensor)
        return self.out(self.ops.gate(z, self._normed(made)), residual)

    def _normed(self, x: Tensor) -> Tensor:
        """x [M, values of this rank's heads] -> the same under a norm over the heads of all ranks."""
        if not self._values:
            return self.ops.rms_norm(x, self.norm, _EPS)
        mean = self.ops.sum_parts(self._ranks.gather(row_squares(self.ops, x)), None, None) / self._values
        return (x.float() / (mean + _EPS).sqrt() * self.norm).to(x.dtype)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
