"""A matrix product: a shape, a bias, and an operation that owns the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from draftwing.layers.adapters import AdaptedWeight
from draftwing.layers.linear_ops.base import LinearBase, LinearOp, PackMode, WeightFormat
from draftwing.layers.linear_ops.dense import DENSE, pack_dense
from draftwing.layers.linear_ops.parallel import JoinedOutputs, RowParallel, VocabParallel
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.ranks import Ranks


class Linear(LinearBase):
    """y = x @ weight.T + bias (+ residual).

    The format registers the parameters that it stores (a dense one `weight` [out_features, in_features]); bias:
    [out_features] or None. `pack` replaces `op`, once, by what serves best, after which parameters may be gone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = self.whole_features = out_features
        self.op: LinearOp = weight_format.create(self, dtype, device)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), False) if bias else None
        # What ranks make of the packed operation.
        self.wrap_packed: Callable[[LinearOp, LayerOps], LinearOp] | None = None
        self.joins: JoinedOutputs | None = None  # what is gathered before and behind it
        self.adapted: AdaptedWeight | None = None  # what adapters add, where there may be some
        self._ops = PLAIN
        self._packed = False

    def pack(self, ops: LayerOps, mode: PackMode | None = None) -> None:
        """Prepares the loaded weight for inference; does nothing the second time. Raises ConfigError for a mode that
        the device has no GEMM for."""
        if not self._packed:
            self._ops, self._packed = ops, True
            if self.joins is not None:
                self.joins.use(ops)
            mode = mode or PackMode()
            self.op = self.op.packed(ops, mode) or pack_dense(self, ops, mode)
            if self.wrap_packed is not None:
                self.op = self.wrap_packed(self.op, ops)

    def append(self, other: Linear, ops: LayerOps) -> None:
        """Takes the outputs of another layer without biases, which `op.can_append`, behind its own; before either is
        packed."""
        assert self.bias is None and other.bias is None
        self.op.append(other.op)
        self.out_features += other.out_features
        self.whole_features += other.whole_features
        # Torch would cut the next matrix from the block of the one that was, too small for one of its own kind, and
        # what is left of a cut block can never be given back.
        ops.empty_cache()

    def part(self, rows: Sequence[range], columns: range) -> Linear | None:
        """Returns a layer with these rows of the weight, one beneath the other, and these columns, or None where the
        weight is not cut so; of a layer without a bias, before it is packed."""
        assert self.bias is None
        meta = torch.device("meta")
        one = Linear(len(columns), sum(map(len, rows)), False, torch.get_default_dtype(), meta)
        op = self.op.part(one, rows, columns)
        if op is None:
            return None
        one.op = op
        return one

    def use(self, ops: LayerOps) -> None:
        """Lets `ops` do what is done to the result; the weight stays as it is, and may be trained."""
        self._ops = ops

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """x [M, in_features], residual [M, out_features] -> [M, out_features].

        overwrite: once packed, the result may be written into `residual`.
        """
        if isinstance(x, Fp8Rows) and (not self.op.takes_fp8 or self.joins is not None):
            assert x.x is not None
            x = x.x
        if self.joins is not None:
            x, residual = self.joins.all_inputs(x), self.joins.own(residual)  # type: ignore[arg-type]
        begun = None if self.adapted is None else self.adapted.begin(x)  # type: ignore[arg-type]  # as `takes_fp8` has it
        y = self.op(x, self.bias, residual, overwrite)  # type: ignore[arg-type]  # quantised where it `takes_fp8`
        if self.adapted is not None:
            self.adapted.add(y, x, begun)  # type: ignore[arg-type]
        return y if self.joins is None else self.joins.all_outputs(y)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def last(self, x: Tensor, outputs: int) -> Tensor:
        """x [M, in_features] -> the last so many outputs, [M, outputs], or all of them."""
        if self.adds:
            return self(x)
        return self.op.last(x, self.bias, outputs)

    @property
    def adds(self) -> bool:
        """Returns whether adapters add to its products in the forward that runs."""
        return self.adapted is not None and self.adapted.queries.adds

    @property
    def takes_fp8(self) -> bool:
        """Returns whether its products are of activations in fp8, which may come so now: not where adapters read them,
        nor where they are gathered."""
        return self.op.takes_fp8 and self.joins is None and not self.adds

    def gated(self, x: Tensor | Fp8Rows, gelu: bool = False) -> Tensor:
        """x [M, in_features] -> silu(gate) * up, [M, out_features / 2]; the weight makes gates, then ups. gelu: by
        GELU instead."""
        if gelu:
            return self._ops.gelu_mul(self(x))
        if self.adds:
            return self._ops.silu_mul(self(x))
        takes_it = isinstance(x, Tensor) or self.op.takes_fp8
        out = self.op.gated(x, self.bias) if takes_it else None  # type: ignore[arg-type]
        return self._ops.silu_mul(self(x)) if out is None else out

    def dense_weight(self) -> Tensor:
        """Returns [out_features, in_features]; a copy where the operation does not store it as such."""
        return self.op.dense_weight()

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of the weight: ids [..., K] -> [..., K, in_features]"""
        return self.op.rows(ids)

    def exact_logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [..., in_features], ids [..., K] -> the outputs `ids` summed in float32, [..., K] float32"""
        logits = self.op.exact_logits(hidden, ids, self._ops)
        return logits if self.bias is None else logits + self.bias[ids]


def row_parallel(linear: Linear, ranks: Ranks) -> Linear:
    """Returns the layer, whose inputs are this rank's share, with outputs that are sums over the ranks once it is
    packed."""
    if ranks.size > 1:
        linear.wrap_packed = lambda op, ops: RowParallel(op, ops, ranks)
    return linear


def vocab_parallel(linear: Linear, ranks: Ranks, whole: int) -> Linear:
    """Returns the layer, whose outputs are this rank's share of `whole`, with all of them once it is packed. A bias is
    that of all."""
    if ranks.size > 1:
        linear.wrap_packed = lambda op, ops: VocabParallel(op, ops, ranks, whole)
    return linear


def operations(module: nn.Module) -> Iterator[LinearOp]:
    """Returns the operations of all `Linear`s of the module, each once."""
    return (part.op for part in module.modules() if isinstance(part, Linear))
