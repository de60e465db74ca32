"""`LayerConfig`: what a decoder layer is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError
from draftwing.kv.pool import DeltaSpec, SlotSpec, StateSpec
from draftwing.layers.linear import Linear, row_parallel
from draftwing.layers.linear_ops.base import WeightFormat
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.layers.linear_ops.parallel import JoinedOutputs
from draftwing.layers.part_configs import (
    NORM,
    Activation,
    ExpertConfig,
    NgramConfig,
    NormConfig,
    StreamsConfig,
)
from draftwing.ops.attention.attend import Attend
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.columns import Columns, every_rank
from draftwing.parallel.cut import Cut, Order
from draftwing.parallel.ranks import ALONE, Absent, Ranks
from draftwing.parallel.shares import width_share


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer, with the sizes of this rank where a model is spread over several.

    mixer: the part in which tokens read of earlier ones, or `NoMixer`.  ffn: width of its MLP, 0: there is none.
    experts: in place of an MLP of `ffn`, or beside it.  activation: of the MLP's gate, or of one without a gate.
    in_norms, out_norms: whether there are norms before mixer and MLP, and behind them, before the residual stream is
    added.  parallel: whether the MLP stands beside the mixer, and reads what that reads; own_norm: it has a norm of its
    own then, of the same stream.  residual_scale: of what mixer and MLP give, before it is added. per_layer: size of an
    embedding of the token that this layer alone reads (`layers.embedding`), 0: there is none.  scaled: whether its
    output has a factor.  normed_residual: whether mixer and MLP add to what they read, not to the stream before its
    norm.  sparsity: standard deviations above the mean of a row's gates below which they count as 0, None: they are as
    they are.  silu_limit: what SiLU of a gate is at most, and its up in size, of the MLP or of the expert of all rows,
    0: there is none.  streams: in place of one residual stream (`layers.streams`, `layers.altup`). ngram: what it adds
    to them first, beside a mixer that keeps its state by row.  block: columns between two matrices of an MLP that one
    rank has together.  weight_format: of its matrices, see `ModelConfig.spread`.  inputs: of the matrices whose inputs
    are gathered, by their name in the layer, what each rank has of these; none but where results have the bits of one
    rank.
    """

    hidden: int
    mixer: MixerConfig
    ffn: int
    norm: NormConfig = NORM
    mlp_bias: bool = False
    experts: ExpertConfig | None = None
    activation: Activation = "silu"
    in_norms: bool = True
    out_norms: bool = False
    parallel: bool = False
    own_norm: bool = False
    residual_scale: float = 1.0
    per_layer: int = 0
    scaled: bool = False
    normed_residual: bool = False
    sparsity: float | None = None
    silu_limit: float = 0.0
    streams: StreamsConfig | None = None
    ngram: NgramConfig | None = None
    block: int = 1
    weight_format: WeightFormat = DENSE
    ranks: Ranks = field(default=ALONE, compare=False)
    inputs: tuple[tuple[str, Columns], ...] = ()

    @property
    def mixes(self) -> bool:
        """Returns whether it has a mixer."""
        return not isinstance(self.mixer, NoMixer)

    @property
    def has_mlp(self) -> bool:
        """Returns whether it has an MLP, or experts."""
        return self.ffn > 0 or self.experts is not None

    @property
    def gated(self) -> bool:
        """Returns whether its MLP has a gate."""
        return self.activation in ("silu", "gelu")

    @property
    def weights(self) -> int:
        """Returns how many values its matrices have."""
        experts, values, parts = self.experts, 2 * self.hidden * self.per_layer, 3 if self.gated else 2
        if experts is None or experts.beside:
            values += parts * self.hidden * self.ffn
        if experts is not None:
            size = experts.latent or self.hidden
            values += parts * size * experts.ffn * len(experts.held) + 2 * self.hidden * experts.latent
            values += self.hidden * (parts * experts.shared + experts.shared_gate + experts.count)
        if self.streams is not None:
            values += 2 * self.streams.weights(self.hidden)
            values += 0 if self.ngram is None else (self.streams.count + 1) * self.hidden * self.ngram.size
        return self.mixer.weights(self.hidden) + values

    @property
    def products(self) -> int:
        """Returns about how many products a token takes: of a mixture's experts those that it goes to."""
        experts = self.experts
        if experts is None:
            return self.weights
        idle = max(len(experts.held) - experts.routing.top_k, 0)
        return self.weights - (3 if self.gated else 2) * idle * (experts.latent or self.hidden) * experts.ffn

    def keeps(self) -> SlotSpec | None:
        """Returns what it keeps in the pool of each token, None: nothing."""
        spec = self.mixer.keeps()
        if self.ngram is None or self.streams is None:
            return spec
        assert isinstance(spec, DeltaSpec)
        return StateSpec((self.hidden + self.streams.count + self.ngram.DIGITS,), None, spec)

    def check(self) -> None:
        """Raises CheckpointError for sizes that cannot be."""
        if self.ffn < 0:
            raise CheckpointError(f"ffn must be at least 0, found {self.ffn}")
        if self.experts is not None:
            self.experts.check()
            if self.experts.shared and self.mlp_bias:
                raise CheckpointError("mlp_bias (or use_bias) of an expert for all rows is not supported")
        self.mixer.check()

    def spread(self, ranks: Ranks) -> LayerConfig:
        """Returns the sizes of one rank, which has a share of the mixer and of the MLP. Raises ConfigError for what
        cannot be spread over so many."""
        size = ranks.size
        if size == 1:
            return replace(self, ranks=ranks) if ranks.invariant else self
        if self.sparsity is not None:
            raise ConfigError(f"--tp-size {size}: the model has gates that are compared with all others; expected 1")
        mixer, experts, kind = self.mixer.spread(ranks), self.experts, "intermediate size"
        widths = [self.ffn]
        if experts is not None:
            kind, widths = f"experts' {kind}", [experts.shared, self.ffn * experts.beside]
            if not ranks.expert_parallel:
                widths.append(experts.ffn)
            experts = experts.spread(ranks, self.block)
        for width in widths:
            last = width_share(Absent(size, size - 1), width, self.block)
            if last.start + last.size < width:
                raise ConfigError(
                    f"--tp-size {size}: expected a number that divides the model's {kind} of {width}; found {size}"
                )
        inputs = self._gathered(ranks) if ranks.invariant else ()
        ffn = width_share(ranks, self.ffn, self.block).size
        return replace(self, mixer=mixer, ffn=ffn, experts=experts, ranks=ranks, inputs=inputs)

    def _gathered(self, ranks: Ranks) -> tuple[tuple[str, Columns], ...]:
        """Returns `inputs` of so many ranks."""
        every, runs = every_rank(ranks), dict[str, list[Sequence[tuple[int, int]]]]()
        whole = dict[str, int]()
        for each in every:
            for part in self.mixer.stored(self.hidden, each):
                if isinstance(part, StoredMatrix) and part.reads_columns:
                    runs.setdefault(part.param, []).append(part.runs)
                    whole[part.param] = part.cut.share.whole if part.order is None else part.order.whole
        found = [(name, Columns.of(runs[name], whole[name])) for name in runs]
        experts = self.experts
        widths = {"mlp": self.ffn} | ({} if experts is None else {"experts": experts.ffn, "shared": experts.shared})
        shares = {name: [width_share(each, width, self.block) for each in every] for name, width in widths.items()}
        return (*found, *((name, Columns.of_shares(shares[name])) for name in shares if widths[name]))

    def last_matrix(self, name: str, inputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        """Makes a matrix whose outputs are the layer's, and of whose inputs this rank has so many. name: as `inputs`
        has it."""
        columns, form = dict(self.inputs).get(name), self.weight_format
        if columns is None:
            return row_parallel(Linear(inputs, self.hidden, bias, dtype, device, form), self.ranks)
        joins = JoinedOutputs(self.ranks, columns, self.hidden)
        linear = Linear(columns.whole, joins.share.size, bias, dtype, device, form)
        linear.joins = joins
        return linear


class StoredMatrix(NamedTuple):
    """A matrix of a checkpoint, which is some outputs of a `Linear`. Names are below the layer, and below the mixer."""

    checkpoint: str
    param: str
    first: int  # output
    rows: int
    bias: bool
    cut: Cut  # what of it this rank reads
    order: Order | None = None  # of what is read, in place of a cut
    of_heads: bool = False  # its format is `blocks_or_dense`

    @property
    def reads_columns(self) -> bool:
        """Returns whether a rank has some of its columns, of all rows."""
        return self.cut.axis == 1 or (self.order is not None and self.order.axis == 1)

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """Returns which columns or rows a rank has, in their order."""
        return (self.cut.share[:2],) if self.order is None else self.order.runs

    def by_outputs(self, ranks: Ranks) -> StoredMatrix:
        """Returns it with some rows of all columns, where it has some columns of all rows and ranks want the bits of
        one."""
        if not ranks.invariant or ranks.size == 1 or not self.reads_columns:
            return self
        share = ranks.output_share(self.rows)
        return self._replace(rows=share.size, cut=Cut(0, share), order=None)


class StoredVector(NamedTuple):
    """Any other tensor of a checkpoint, which is a parameter. Names are below the layer, and below the mixer."""

    checkpoint: str
    param: str
    rows: int
    cut: Cut | None = None  # None: all of it
    is_norm: bool = False  # `NormConfig.offset` is added
    order: Order | None = None  # of what is read, in place of a cut
    is_log: bool = False  # -exp of it is the parameter
    first: int = 0  # row of the parameter


class Mixer(nn.Module):
    """The part of a layer in which a token reads of those before it, by the injected `Attend`."""

    # Whether prompts must come as the host's `Batch.chunks`, with no other batch in the forward, as for `Attend.state`.
    # In the graphs of `PrefillGraphs`, and beside rows that decode, it is not so.
    needs_chunks = True
    before_attention = 1  # how many of `linears`
    takes_fp8 = False  # whether `forward` takes activations in fp8, too
    ops: LayerOps = PLAIN  # of the device, once packed
    # Of matrices that `merge` has put elsewhere, by name: the name of the one that has them now, and their first row.
    merged: Mapping[str, tuple[str, int]] = MappingProxyType({})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        """x [M, in_size]; cos, sin [M, 1, head_dim] of the rotary embedding that the config names; residual [M, hidden]
        is added -> [M, hidden]"""
        raise NotImplementedError

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Leaves in the pool what `forward` leaves there, for queries whose results nobody wants."""
        self.forward(x, cos, sin, attend)

    def use(self, ops: LayerOps) -> None:
        """Lets the device do what lies between its matrices as it does it best."""
        self.ops = ops

    def merge(self, ops: LayerOps) -> None:
        """Makes matrices of the same input one where the device multiplies faster then; before they are packed."""

    def linears(self) -> list[Linear]:
        """Returns its matrices in the order of their calls; attention follows the first `before_attention`."""
        raise NotImplementedError


class Placement(NamedTuple):
    """Where a mixer stands.

    layer: whose mixer it is.  pool_layer: where it finds its entries, counted from the model's first.  dtype, device:
    of its parameters.  in_size: of its input.
    """

    layer: LayerConfig
    pool_layer: int
    dtype: torch.dtype
    device: torch.device
    in_size: int
    prefix: str = ""  # of the names of its parts, in the layer's mixer

    def linear(self, outputs: int, inputs: int = 0, bias: bool = False) -> Linear:
        """Makes a matrix in the layer's format. inputs: 0: those of the mixer."""
        return Linear(inputs or self.in_size, outputs, bias, self.dtype, self.device, self.layer.weight_format)

    def wide(self, *shape: int) -> nn.Parameter:
        """Makes a parameter in float32."""
        return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.device), False)

    def out(self, name: str, inputs: int, bias: bool = False) -> Linear:
        """Makes the last matrix, which the mixer has by this name. Its outputs are the layer's, of all ranks."""
        return self.layer.last_matrix(f"{self.prefix}{name}", inputs, bias, self.dtype, self.device)


class MixerConfig(ABC):
    """What a mixer is built from: a frozen dataclass, one for each kind of mixer.

    rotates: which of `ModelConfig.ropes` turns its heads, and their size; None where positions turn nothing.  kv_from:
    the layer whose entries in the pool it reads instead of writing its own, None: it has its own.
    """

    kv_from: int | None = None

    @property
    def rotates(self) -> tuple[int, int] | None:
        return None

    @abstractmethod
    def keeps(self) -> SlotSpec | None:
        """Returns what it keeps in the pool of each token, None: nothing."""

    @abstractmethod
    def weights(self, hidden: int) -> int:
        """Returns the number of values in its matrices."""

    @abstractmethod
    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        """Returns which tensors of a checkpoint fill it on this rank; called of the config of the whole model."""

    @abstractmethod
    def build(self, place: Placement) -> Mixer:
        """Makes the mixer, its weights not filled."""

    def check(self) -> None:  # noqa: B027 (most have nothing to check)
        """Raises CheckpointError for sizes that cannot be."""

    def spread(self, ranks: Ranks) -> MixerConfig:
        """Returns the sizes of one of several ranks. Raises ConfigError where it cannot be spread over so many."""
        raise ConfigError(f"--tp-size {ranks.size}: the model has layers that cannot be spread; expected 1")


@dataclass(frozen=True)
class NoMixer(MixerConfig):
    """Of a layer that is an MLP alone, or nothing."""

    def keeps(self) -> None:
        return None

    def weights(self, hidden: int) -> int:
        return 0

    def stored(self, hidden: int, ranks: Ranks) -> Sequence[StoredMatrix | StoredVector]:
        return ()

    def spread(self, ranks: Ranks) -> NoMixer:
        return self

    def build(self, place: Placement) -> Mixer:
        return Nothing()


class Nothing(Mixer):
    """Stands where a layer has no mixer."""

    needs_chunks = False
    before_attention = 0
    pool_layer = -1

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor | None = None) -> Tensor:
        assert residual is not None  # of a layer without an MLP, too
        return residual

    def linears(self) -> list[Linear]:
        return []

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        return
