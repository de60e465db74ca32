"""State-space layers (Mamba-2: Dao and Gu 2024, arXiv 2405.21060) in place of a layer's attention.

They run on the operation of gated delta nets, without the correction (`ops.delta_net.spec`): C, B and x are its
queries, keys and values, and a group of heads that share C and B is a key head. Checkpoints have x, B, C in this order;
here C and B come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.kv.pool import DeltaSpec
from draftwing.layers.config import MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.delta_net import DeltaMixer, Runs
from draftwing.layers.linear import Linear
from draftwing.layers.norm import row_squares
from draftwing.layers.part_configs import check_sizes, check_taps
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.parallel.cut import Cut, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads, ranks_of_group

PARTS = ("z", "x", "B", "C", "dt")  # of the first matrix, as a checkpoint has them


@dataclass(frozen=True)
class Mamba2Config(MixerConfig):
    """A state-space layer with the sizes of this rank.

    groups: of heads that share B and C.  norm: whether there is one, over the heads of a group; gates_first: behind the
    gates, else before them.  conv_bias: whether the convolution has biases.  in_parts: whether the first matrix comes
    in `PARTS`.  among: the ranks that have heads of the one group of which this rank has some; None: its groups are
    whole.  group_values: values of all heads of that group.
    """

    groups: int
    heads: int
    head_dim: int
    state_size: int
    conv_width: int
    norm: bool = True
    gates_first: bool = True
    conv_bias: bool = True
    in_parts: bool = False
    among: range | None = None
    group_values: int = 0

    def keeps(self) -> DeltaSpec:
        return DeltaSpec(self.groups, self.heads, self.state_size, self.head_dim, self.conv_width, corrects=0)

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.head_dim

    @property
    def made(self) -> int:
        """Outputs of the first matrix."""
        return self.keeps().channels + self.inner + self.heads

    def weights(self, hidden: int) -> int:
        return hidden * (self.made + self.inner)

    def check(self) -> None:
        check_sizes(self, ("groups", "heads", "head_dim", "state_size"), " of a state-space layer")
        if self.heads % self.groups:
            raise CheckpointError(
                "the number of a state-space layer's heads must be a multiple of the number of its groups, found "
                f"{self.heads} and {self.groups}"
            )
        check_taps(self.conv_width)

    def spread(self, ranks: Ranks) -> Mamba2Config:
        """Returns the sizes of one rank: some groups, with their heads, or some heads of one."""
        heads, groups = self._own(ranks)
        if self.groups >= ranks.size:
            return replace(self, groups=len(groups), heads=len(heads))
        if self.norm and not self.gates_first:
            raise ConfigError(
                f"--tp-size {ranks.size}: expected at most {self.groups}, a rank for each group of the model's "
                f"state-space layers, which have norms before their gates; found {ranks.size}"
            )
        if self.norm and ranks.invariant:
            raise ConfigError(
                f"--enable-tp-invariance: expected a --tp-size of at most {self.groups}, a rank for each group of the "
                f"model's state-space layers, which have norms; found {ranks.size}"
            )
        among, group_values = ranks_of_group(ranks, self.groups), self.inner // self.groups
        return replace(self, groups=1, heads=len(heads), among=among, group_values=group_values)

    def _own(self, ranks: Ranks) -> tuple[range, range]:
        """Returns the heads and groups of one rank."""
        return own_heads(ranks, self.heads, self.groups, "state-space heads")

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        own, (heads, groups) = self.spread(ranks), self._own(ranks)
        conv = ordered(0, self._channels(heads, groups), self.keeps().channels)
        values = Cut(0, Share(heads.start * self.head_dim, own.inner, self.inner))
        per_head = Cut(0, Share(heads.start, own.heads, self.heads)) if ranks.size > 1 else None
        some = values if ranks.size > 1 else None
        return [
            *self._into(own, heads, groups),
            StoredMatrix("mamba.out_proj", "out", 0, hidden, False, values._replace(axis=1)),
            StoredVector("mamba.conv1d.weight", "conv", own.keeps().channels, order=conv),
            StoredVector("mamba.A_log", "decay", own.heads, per_head, is_log=True),
            StoredVector("mamba.dt_bias", "dt_bias", own.heads, per_head),
            StoredVector("mamba.D", "skip", own.heads, per_head),
            *([StoredVector("mamba.norm.weight", "norm", own.inner, some)] if self.norm else []),
            *([StoredVector("mamba.conv1d.bias", "conv_bias", own.keeps().channels, order=conv)] * self.conv_bias),
        ]

    def parts(self) -> dict[str, tuple[int, int]]:
        """Returns where each of `PARTS` begins in the first matrix, and how many rows it has."""
        shared = self.groups * self.state_size
        sizes = self.inner, self.inner, shared, shared, self.heads
        return {
            part: (start, size) for part, start, size in zip(PARTS, accumulate(sizes, initial=0), sizes, strict=False)
        }

    def _into(self, own: Mamba2Config, heads: range, groups: range) -> Iterator[StoredMatrix]:
        """own: of this rank, which has these heads, of these groups."""
        order, first = ("C", "B", "x", "z", "dt"), 0
        runs = [self._run(part, heads, groups) for part in order]
        if not self.in_parts:
            runs = [(self.parts()[part][0] + start, size) for part, (start, size) in zip(order, runs, strict=True)]
            whole = Cut(0, Share(0, self.made, self.made))
            yield StoredMatrix("mamba.in_proj", "into", 0, own.made, False, whole, ordered(0, runs, self.made))
            return
        for part, (start, size) in zip(order, runs, strict=True):
            cut = Cut(0, Share(start, size, self.parts()[part][1]))
            yield StoredMatrix(f"mamba.in_proj.{part}", "into", first, size, False, cut)
            first += size

    def _channels(self, heads: range, groups: range) -> Runs:
        """Yields where C, B and x of these heads and groups lie, x of all heads first."""
        for part, first in (("C", self.inner + self.groups * self.state_size), ("B", self.inner), ("x", 0)):
            start, size = self._run(part, heads, groups)
            yield first + start, size

    def _run(self, part: str, heads: range, groups: range) -> tuple[int, int]:
        """Returns where what these heads and groups have of a part begins, and its size."""
        owners, count = (groups, self.groups) if part in "BC" else (heads, self.heads)
        each = self.parts()[part][1] // count
        return owners.start * each, len(owners) * each

    def build(self, place: Placement) -> Mamba2:
        return Mamba2(self, place)


class Mamba2(DeltaMixer):
    """Its projections: C, B, x, gates and step sizes are one GEMM."""

    def __init__(self, config: Mamba2Config, place: Placement) -> None:
        super().__init__(config.keeps(), place)
        self._ranks, self._among = place.layer.ranks, config.among if config.norm else None
        self._group_values = config.group_values
        self._inner, self._gates_first = config.inner, config.gates_first
        self.into = place.linear(config.made)
        self.out = place.out("out", config.inner)
        channels, wide = self.spec.channels, place.wide
        self.conv, self.conv_bias = wide(channels, 1, config.conv_width), wide(channels) if config.conv_bias else None
        self.decay, self.dt_bias, self.skip = wide(config.heads), wide(config.heads), wide(config.heads)
        self.norm = wide(config.inner if config.norm else 0)

    def linears(self) -> list[Linear]:
        return [self.into, self.out]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        channels = self.spec.channels
        cbx, z, dt = self.into(x).tensor_split((channels, channels + self._inner), 1)
        norm = self.norm if self._among is None else self.norm[:0]
        weights = DeltaWeights(
            self.conv[:, 0], self.decay, self.dt_bias, norm, self._eps, self.spec,
            conv_bias=self.conv_bias, skip=self.skip, gates_first=self._gates_first,
        )  # fmt: skip
        made = attend.delta(self.pool_layer, DeltaInputs(cbx, z, dt, dt), weights)
        if self._among is not None:
            assert isinstance(made, Tensor)
            made = self._normed(made, self._among)
        return self.out(made, residual)

    def _normed(self, x: Tensor, among: range) -> Tensor:
        """x [M, values of this rank's heads] behind the gates -> the same under a norm over all heads of the group."""
        squares = self._ranks.gather(row_squares(self.ops, x))[among.start : among.stop]
        mean = self.ops.sum_parts(squares, None, None) / self._group_values
        return (x.float() / (mean + self._eps).sqrt() * self.norm).to(x.dtype)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
