"""State-space layers of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752) in place of a layer's attention, perhaps with norms
of step sizes, B and C (Lieber et al. 2024, arXiv 2403.19887).

They run on the operation of gated delta nets as Mamba-2 does: each channel is a value head of one element, and each
element of its state has a decay of its own (`DeltaSpec.by_state`). B, C and step sizes are made of what the convolution
gives, so this is a short convolution of its own, whose inputs the layer keeps by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.kv.pool import DeltaSpec, StateSpec
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.layers.norm import norm_of
from draftwing.layers.part_configs import check_sizes, check_taps
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_channels

_NORMS = ("dt", "b", "c")


@dataclass(frozen=True)
class Mamba1Config(MixerConfig):
    """channels: that have a state each, of `state_size`, on this rank.  step_rank: values of which their step sizes are
    made.  norms: whether there are those of step sizes, B and C, "bare": without weights.  norm_eps: of these, 0: that
    of the layer's."""

    channels: int
    state_size: int
    step_rank: int
    conv_width: int
    conv_bias: bool = True
    norms: bool | Literal["bare"] = True
    norm_eps: float = 0.0

    def keeps(self) -> StateSpec:
        net = DeltaSpec(1, self.channels, self.state_size, 1, conv_width=1, corrects=0, by_state=True)
        return StateSpec((self.channels,), None, net)

    @property
    def small(self) -> tuple[int, int, int]:
        """Sizes of step sizes before their last matrix, of B and of C."""
        return self.step_rank, self.state_size, self.state_size

    def weights(self, hidden: int) -> int:
        return self.channels * (3 * hidden + sum(self.small) + self.step_rank)

    def check(self) -> None:
        check_sizes(self, ("channels", "state_size", "step_rank"), " of a state-space layer")
        check_taps(self.conv_width)

    def spread(self, ranks: Ranks) -> Mamba1Config:
        return replace(self, channels=own_channels(ranks, self.channels, "state-space layers"))

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        """Each rank has some channels; step sizes, B and C are made of all of them on each."""
        own, wide, small = self.spread(ranks).channels, self.channels, sum(self.small)
        share = Share(ranks.rank * own, own, wide)
        some = Cut(0, share) if ranks.size > 1 else None
        both = ordered(0, [(at + share.start, own) for at in (0, wide)], 2 * wide)
        vectors = {"conv1d.weight": "conv", "dt_proj.bias": "dt_bias", "D": "skip"}
        vectors |= {"conv1d.bias": "conv_bias"} if self.conv_bias else {}
        return [
            StoredMatrix("mamba.in_proj", "into", 0, 2 * own, False, Cut(0, Share(0, 2 * own, 2 * own)), both),
            StoredMatrix("mamba.x_proj", "small", 0, small, False, Cut(0, Share(0, small, small))),
            StoredMatrix("mamba.dt_proj", "step", 0, own, False, Cut(0, share)),
            StoredMatrix("mamba.out_proj", "out", 0, hidden, False, Cut(1, share)),
            *(StoredVector(f"mamba.{name}", param, own, some) for name, param in vectors.items()),
            StoredVector("mamba.A_log", "decay", own, some, is_log=True),
            *(
                StoredVector(f"mamba.{name}_layernorm.weight", f"norms.{name}.weight", size, is_norm=True)
                for name, size in zip(_NORMS, self.small, strict=True)
                if self.norms is True
            ),
        ]

    def build(self, place: Placement) -> Mamba1:
        return Mamba1(self, place)


class Mamba1(Mixer):
    """The convolution and the state-space layer are the injected `Attend.short_conv` and `Attend.delta`."""

    before_attention = 3

    def __init__(self, config: Mamba1Config, place: Placement) -> None:
        super().__init__()
        self.pool_layer, self._spec, self._sizes = place.pool_layer, config.keeps().state, config.small
        self._ranks = place.layer.ranks
        self.into = place.linear(2 * config.channels)
        self.small = place.linear(sum(config.small), config.channels * self._ranks.size)
        self.step = place.linear(config.channels, config.step_rank)
        self.out = place.out("out", config.channels)
        norm = replace(place.layer.norm, eps=config.norm_eps or place.layer.norm.eps, bare=config.norms == "bare")
        sizes = zip(_NORMS, config.small, strict=True) if config.norms else ()
        self.norms = nn.ModuleDict({name: norm_of(norm, size, place.dtype, place.device) for name, size in sizes})

        def wide(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=place.device), False)

        self.conv = wide(config.channels, 1, config.conv_width)
        self.conv_bias = wide(config.channels) if config.conv_bias else None
        self.decay, self.dt_bias = wide(config.channels, config.state_size), wide(config.channels)
        self.skip, self.no_norm = wide(config.channels), torch.empty(0)

    def use(self, ops: LayerOps) -> None:
        super().use(ops)
        for norm in self.norms.values():
            norm.pack(ops)  # type: ignore[operator]

    def linears(self) -> list[Linear]:
        return [self.into, self.small, self.step, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        u, z = self.into(x).chunk(2, 1)
        gates = torch.ones_like(u)
        # In float64, as what lies between what is kept: a value's bits then do not depend on where it stands.
        made = attend.short_conv(self.pool_layer, torch.cat((gates, gates, u), 1), self.conv[:, 0]).double()
        u = F.silu(made if self.conv_bias is None else made + self.conv_bias).to(x.dtype)
        of_all = u if self._ranks.size == 1 else self._ranks.gather_side_by_side(u, self.ops)
        parts = [part.contiguous() for part in self.small(of_all).split(self._sizes, 1)]
        dt, b, c = (self.norms[name](part) for name, part in zip(_NORMS, parts, strict=True)) if self.norms else parts
        weights = DeltaWeights(self.conv[:, 0], self.decay, self.dt_bias, self.no_norm, 0.0, self._spec, skip=self.skip)
        step = self.step(dt)
        return self.out(
            attend.delta(self.pool_layer, DeltaInputs(torch.cat((c, b, u), 1), z, step, step), weights), residual
        )

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
