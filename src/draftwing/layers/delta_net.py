"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) in place of a layer's attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.kv.pool import DeltaSpec
from draftwing.layers.config import Mixer, MixerConfig, Placement, StoredMatrix, StoredVector
from draftwing.layers.linear import Linear
from draftwing.layers.part_configs import check_sizes, check_taps
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut, Order, ordered
from draftwing.parallel.ranks import Ranks, Share
from draftwing.parallel.shares import own_heads

OPEN = 32.0  # whose SiLU it is itself, to the last bit, and by which any value is divided without rounding
Runs = Iterator[tuple[int, int]]  # of an axis: start and size of each


@dataclass(frozen=True)
class DeltaNetConfig(MixerConfig):
    """A gated delta net of one layer, with the sizes of this rank, which are those of `DeltaSpec`.

    by_key_head: whether checkpoints have one matrix of all q, k, v and z, those of a key head beside each other, and
    another one of b and a; by_part: whether they have one of each, and convolutions apart; else one of q, k and v, and
    one of each other.  reach: `DeltaSpec.corrects`.  eps: of the norm of what it gives, 0: that of the layer's norms.
    sigmoid: whether gates of what it gives are sigmoids, else SiLU.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    tiled: bool = False
    by_key_head: bool = False
    by_part: bool = False
    reach: int = 1
    eps: float = 0.0
    sigmoid: bool = False

    def keeps(self) -> DeltaSpec:
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width
        return DeltaSpec(*sizes, self.tiled, self.reach)

    @property
    def made(self) -> int:
        """Outputs that are values, of all heads."""
        return self.value_heads * self.value_dim

    def weights(self, hidden: int) -> int:
        return hidden * (self.keeps().channels + 2 * self.made + 2 * self.value_heads)

    def check(self) -> None:
        check_sizes(self, ("key_heads", "value_heads", "key_dim", "value_dim"), " of a delta net")
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                "the number of a delta net's value heads must be a multiple of the number of its key heads, "
                f"found {self.value_heads} and {self.key_heads}"
            )
        check_taps(self.conv_width)

    def spread(self, ranks: Ranks) -> DeltaNetConfig:
        """Returns the sizes of one rank: some key heads, and the value heads that read them."""
        count, each = len(self._own(ranks)), self.value_heads // self.key_heads
        return replace(self, key_heads=count, value_heads=count * each)

    def _own(self, ranks: Ranks) -> range:
        """Returns the key heads of one rank."""
        return own_heads(ranks, self.key_heads, self.key_heads, "delta nets' key heads")[0]

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        own, heads = self.spread(ranks), self._own(ranks)
        inputs = ordered(0, self._qkv(heads), self.keeps().channels)
        per_head = ordered(0, self._values(heads, 1), self.value_heads)
        outputs = ordered(1, self._values(heads, self.value_dim), self.made)
        channels, share = own.keeps().channels, Share(0, own.made, own.made)
        conv = [StoredVector("linear_attn.conv1d.weight", "conv", channels, order=inputs)]

        def matrix(name: str, param: str, first: int, rows: int, order: Order | None) -> StoredMatrix:
            return StoredMatrix(f"linear_attn.{name}", param, first, rows, False, Cut(0, Share(0, rows, rows)), order)

        if self.by_key_head:
            made = [
                matrix("in_proj_qkvz", "qkvz", 0, channels + own.made, self.qkvz_order(heads)),
                matrix("in_proj_ba", "ba", 0, 2 * own.value_heads, self.ba_order(heads)),
            ]
        else:
            of_z = ordered(0, self._values(heads, self.value_dim), self.made)
            made = [matrix("in_proj_qkv", "qkvz", 0, channels, inputs)]
            if self.by_part:
                parts = [*self._parts(heads)]
                made = [matrix(f"{name}_proj", "qkvz", *rows) for name, *rows in parts]  # type: ignore[arg-type]
                conv = [
                    StoredVector(f"linear_attn.{name}_conv1d.weight", "conv", rows, order=order, first=first)
                    for name, first, rows, order in parts
                ]
            made += [
                matrix("in_proj_z", "qkvz", channels, own.made, of_z),
                matrix("in_proj_b", "ba", 0, own.value_heads, per_head),
                matrix("in_proj_a", "ba", own.value_heads, own.value_heads, per_head),
            ]
        return [
            *made,
            StoredMatrix("linear_attn.out_proj", "out", 0, hidden, False, Cut(1, share), outputs),
            *conv,
            StoredVector("linear_attn.A_log", "decay", own.value_heads, order=per_head, is_log=True),
            StoredVector("linear_attn.dt_bias", "dt_bias", own.value_heads, order=per_head),
            StoredVector("linear_attn.norm.weight", "norm", self.value_dim),
        ]

    def _qkv(self, heads: range) -> Runs:
        """Yields the rows of q, k and v of these key heads, and of the value heads that read them."""
        wide = self.key_heads * self.key_dim
        for at in (0, wide):
            yield at + heads.start * self.key_dim, len(heads) * self.key_dim
        yield from self._values(heads, self.value_dim, 2 * wide)

    def _parts(self, heads: range) -> Iterator[tuple[str, int, int, Order | None]]:
        """Yields of q, k and v their name, first row here, rows and order, of these key heads."""
        first = 0
        for name, size in zip("qkv", (self.key_dim, self.key_dim, self.made // self.key_heads), strict=True):
            rows = len(heads) * size
            yield name, first, rows, ordered(0, [(heads.start * size, rows)], self.key_heads * size)
            first += rows

    def _values(self, heads: range, size: int, at: int = 0) -> Runs:
        """Yields the rows of the value heads that read these key heads; each has `size`, the first one's at `at`."""
        each = self.value_heads // self.key_heads
        if self.tiled:
            for tile in range(each):
                yield at + (tile * self.key_heads + heads.start) * size, len(heads) * size
        else:
            yield at + heads.start * each * size, len(heads) * each * size

    def qkvz_order(self, heads: range | None = None) -> Order | None:
        """Returns the order of rows of a checkpoint's one matrix of q, k, v and z. heads: of keys, None: all."""
        heads = range(self.key_heads) if heads is None else heads
        made = self.value_heads // self.key_heads * self.value_dim
        size, at, runs = 2 * (self.key_dim + made), 0, []
        for part in (self.key_dim, self.key_dim, made, made):
            runs += [(head * size + at, part) for head in heads]
            at += part
        return ordered(0, runs, self.key_heads * size)

    def ba_order(self, heads: range | None = None) -> Order | None:
        """Returns the order of rows of a checkpoint's one matrix of b and a. heads: of keys, None: all."""
        heads = range(self.key_heads) if heads is None else heads
        each = self.value_heads // self.key_heads
        runs = [(head * 2 * each + at, each) for at in (0, each) for head in heads]
        return ordered(0, runs, 2 * self.value_heads)

    def build(self, place: Placement) -> GatedDeltaNet:
        return GatedDeltaNet(self, place)


class DeltaMixer(Mixer):
    """A mixer around the injected `Attend.delta`."""

    needs_chunks = False
    conv: nn.Parameter  # [channels, 1, conv_width] float32

    def __init__(self, spec: DeltaSpec, place: Placement) -> None:
        super().__init__()
        self.pool_layer, self.spec, self._eps = place.pool_layer, spec, place.layer.norm.eps

    def use(self, ops: LayerOps) -> None:
        super().use(ops)
        # Weights of a tap lie beside each other: vectors, and threads of a GPU, go over channels.
        self.conv.data = self.conv.permute(2, 1, 0).contiguous().permute(2, 1, 0)


class GatedDeltaNet(DeltaMixer):
    """Its projections: q, k, v and z are one GEMM, b and a another, or the end of it."""

    takes_fp8 = True

    def __init__(self, config: DeltaNetConfig, place: Placement) -> None:
        spec, wide = config.keeps(), place.wide
        super().__init__(spec, place)
        self._eps, self._sigmoid = config.eps or self._eps, config.sigmoid
        self.qkvz = place.linear(spec.channels + config.made)
        self.ba: Linear | None = place.linear(2 * spec.value_heads)
        self.before_attention = 2
        self.out = place.out("out", config.made)
        self.conv, self.norm = wide(spec.channels, 1, spec.conv_width), wide(spec.value_dim)
        self.decay, self.dt_bias = wide(spec.value_heads), wide(spec.value_heads)

    def merge(self, ops: LayerOps) -> None:
        if ops.merges_matrices and self.ba is not None and self.qkvz.op.can_append(self.ba.op):
            self.merged = {"ba": ("qkvz", self.qkvz.out_features)}
            self.qkvz.append(self.ba, ops)
            self.ba, self.before_attention = None, 1

    def linears(self) -> list[Linear]:
        return [*([] if self.ba is None else [self.ba]), self.qkvz, self.out]

    def forward(
        self, x: Tensor | Fp8Rows, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None
    ) -> Tensor:
        values = self.spec.value_heads * self.spec.value_dim
        # The small matrix first: while it is multiplied, a GPU reads the other one ahead.
        made = None if self.ba is None else self.ba(x)
        qkv, z, ba = self.qkvz(x).tensor_split((self.spec.channels, self.spec.channels + values), 1)
        b, a = (ba if made is None else made).chunk(2, 1)
        fp8 = self.out.takes_fp8
        weights = DeltaWeights(
            self.conv[:, 0], self.decay, self.dt_bias, self.norm, self._eps, self.spec, fp8 and not self._sigmoid
        )
        if not self._sigmoid:
            return self.out(attend.delta(self.pool_layer, DeltaInputs(qkv, z, b, a), weights), residual)
        ungated = attend.delta(self.pool_layer, DeltaInputs(qkv, z.new_full(z.shape, OPEN), b, a), weights)
        assert isinstance(ungated, Tensor)
        return self.out((self.ops.gate_fp8 if fp8 else self.ops.gate)(z, ungated / OPEN), residual)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
