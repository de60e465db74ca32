"""Short convolutions between gates in place of a layer's attention, as LFM2 has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftwing.kv.pool import StateSpec
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.layers.part_configs import check_taps
from draftwing.ops.attention.attend import Attend
from draftwing.parallel.cut import Cut, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_channels


@dataclass(frozen=True)
class ShortConvConfig(MixerConfig):
    """channels: of this rank.  width: taps, the newest token's among them."""

    channels: int
    width: int

    def keeps(self) -> StateSpec:
        return StateSpec((self.channels,), None)

    def weights(self, hidden: int) -> int:
        return 4 * hidden * self.channels

    def check(self) -> None:
        check_taps(self.width)

    def spread(self, ranks: Ranks) -> ShortConvConfig:
        return replace(self, channels=own_channels(ranks, self.channels, "convolutions"))

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        own, all_of_them = self.spread(ranks).channels, self.channels
        first = ranks.rank * own
        three = ordered(0, [(at * all_of_them + first, own) for at in range(3)], 3 * all_of_them)
        share = Share(first, own, all_of_them)
        return [
            StoredMatrix("conv.in_proj", "into", 0, 3 * own, False, Cut(0, Share(0, 3 * own, 3 * own)), three),
            StoredMatrix("conv.out_proj", "out", 0, hidden, False, Cut(1, share)),
            StoredVector("conv.conv.weight", "conv", own, Cut(0, share) if ranks.size > 1 else None),
        ]

    def build(self, place: Placement) -> ShortConv:
        return ShortConv(self, place)


class ShortConv(Mixer):
    """out(c * conv(b * x)), where b, c and x are one GEMM and the convolution is of each channel by itself."""

    needs_chunks = False

    def __init__(self, config: ShortConvConfig, place: Placement) -> None:
        super().__init__()
        self.pool_layer = place.pool_layer
        wide = torch.promote_types(place.dtype, torch.float32)
        self.into = place.linear(3 * config.channels)
        self.conv = nn.Parameter(torch.zeros(config.channels, 1, config.width, dtype=wide, device=place.device))
        self.out = place.out("out", config.channels)

    def linears(self) -> list[Linear]:
        return [self.into, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        return self.out(attend.short_conv(self.pool_layer, self.into(x), self.conv[:, 0]), residual)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
