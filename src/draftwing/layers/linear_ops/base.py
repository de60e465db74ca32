"""What a weight format offers: how a checkpoint stores the weight of a `Linear`, and how it is multiplied with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.gemm.contract import BlockGemm, Gemm
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.stored import BlockRows, MXRows, QuantizedRows
from draftwing.ops.table import LayerOps
from draftwing.parallel.cut import Cut, Order
from draftwing.parallel.ranks import Ranks


class ParamSlice(NamedTuple):
    """Where a tensor of a checkpoint goes: `[start, start + size)` of a parameter's axis `axis`; size 0: it is a
    number, which goes to `start`. cut: what of it does,
    None: all. added: to the stored values. order: in which its rows or columns go there, where that is another one.
    is_log: -exp of the stored values goes there. times: what they are multiplied with."""

    param: str
    start: int
    size: int
    axis: int = 0
    cut: Cut | None = None
    added: float = 0.0
    order: Order | None = None
    is_log: bool = False
    times: float = 1.0

    @property
    def changes(self) -> bool:
        """Returns whether other values go there than those that are stored."""
        return self.is_log or self.added != 0 or self.times != 1

    def of(self, param: Tensor) -> Tensor:
        """Returns the part of the parameter, a view."""
        param = param.detach()
        return param.narrow(self.axis, self.start, self.size) if self.size else param[self.start]

    def made(self, tensor: Tensor) -> Tensor:
        """Returns what goes there of a stored tensor, but for its type."""
        if self.is_log:
            tensor = -tensor.exp()
        tensor = tensor * self.times if self.times != 1 else tensor
        return tensor + self.added if self.added else tensor

    def stored(self, own: Tensor) -> Tensor:
        """Returns the tensor as it is stored. own: what `of` gives."""
        own = own - self.added if self.added else own
        own = own / self.times if self.times != 1 else own
        own = (-own).log() if self.is_log else own
        return own if self.order is None else self.order.back(own)


def must_keep_bits(why: str) -> None:
    raise ConfigError(f"--enable-deterministic-inference: {why}. Set --dtype, or leave the option out")


class PackMode(NamedTuple):
    """What the packed weight is for."""

    deterministic: bool = False  # a row must have the same bits in any batch, on a GPU too
    draft_8bit: bool = False  # it may be multiplied in 8 bits: errors cost acceptance, never text
    keep_weight: bool = False  # single rows of the weight will be read
    rows_only: bool = False  # it is an embedding's, and never multiplied with
    shared_apart: bool = False  # an expert of all rows has matrices of its own, which adapters may change
    name: str = "linear"  # of the layer, for messages
    refuse: Callable[[str], object] = must_keep_bits  # is told of weights that are not `deterministic`, and why

    def if_exact(self, exact: bool, expected: str) -> PackMode:
        """Returns the mode for a weight. exact: whether it can be deterministic; expected: what else it had to be."""
        if exact or not self.deterministic:
            return self
        self.refuse(expected)
        return self._replace(deterministic=False)


class LinearBase(nn.Module):
    """A linear layer as formats see it: its sizes, and the parameters that its format registers.

    whole_features: outputs of the matrix in whose order it is summed: its own, or of all ranks together.
    """

    in_features: int
    out_features: int
    whole_features: int
    weight: nn.Parameter  # of a dense format, as long as it is there
    bias: nn.Parameter | None
    op: LinearOp


class LinearOp:
    """The GEMM of one `Linear`, whose parameters it reads. As made it serves training and tests; `packed`, serving.

    `dense_weight` is all that one has to write; the rest is there to be overridden by what is faster.
    """

    takes_fp8 = False  # whether products are of activations in fp8, which may come so (`Fp8Rows`)
    gemms: Sequence[Gemm] = ()  # once packed: the first that takes the rows of a call runs

    def __init__(self, layer: LinearBase) -> None:
        self.layer = layer

    @property
    def first_gemm(self) -> Gemm | None:
        """Returns what calls of several operations in one are told of it (`ops.whole_layers`)."""
        return self.gemms[0] if self.gemms else None

    @property
    def sizes(self) -> Counter[str]:
        """Returns bytes of a weight that is no parameter, by type."""
        return Counter()

    @property
    def stored(self) -> Tensor | None:
        """Returns the weight [out, in] where it lies as such, or None."""
        return None

    @property
    def sums_over(self) -> Ranks | None:
        """Returns the ranks over which outputs are summed; None: they are this rank's own."""
        return None

    def stored_rows(self, start: int, rows: int) -> list[tuple[int, BlockRows]] | None:
        """Rows [start, start + rows) of a weight that is not packed, as `keep` took them, each part with the row that
        it begins with; None where `dense_weight` has them."""
        return None

    def groups(self) -> PackedGroups | MXRows | None:
        """Returns the weight, not packed yet, as it stays quantised in groups; None where it is dequantised."""
        return None

    def keep(self, part: ParamSlice, value: Tensor | BlockRows | QuantizedRows | MXRows) -> bool:
        """Takes rows of the weight as a checkpoint stores them, or lets them be copied into the parameter: False."""
        return False

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """x [M, in] @ weight^T + bias [out] + residual [M, out] -> [M, out]. Here in plain torch, with gradients.

        overwrite: the result may be written into `residual`.  Once packed, a row must have the same bits in any batch,
        or speculation changes the text; plain torch does not keep to that.
        """
        y = F.linear(x, self.dense_weight(), bias)
        return y if residual is None else y + residual

    def last(self, x: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x [M, in] -> the last so many outputs, [M, outputs], or all of them where it takes hardly longer to compute
        these, too."""
        return self(x, bias)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns silu(gate) * up [M, out / 2] of a weight whose first half makes the gates, or None: then the caller
        does it with what a call gives."""
        return None

    def dense_weight(self) -> Tensor:
        """Returns [out, in] in the dtype of x; a copy where it is not stored as such."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """ids [..., K] -> rows of `dense_weight`, [..., K, in]"""
        return self.dense_weight()[ids]

    def exact_logits(self, hidden: Tensor, ids: Tensor, ops: LayerOps) -> Tensor:
        """hidden [..., in], ids [..., K] -> the outputs `ids` summed in float32, [..., K] float32."""
        return ops.exact_logits(hidden, self.dense_weight(), ids)

    def copy_from(self, other: LinearOp) -> None:
        """Takes the values of another layer's packed operation of the same kind and sizes, in the memory where its own
        are; parameters are the layer's. Only where it `can_copy`."""
        raise NotImplementedError

    @property
    def can_copy(self) -> bool:
        return type(self).copy_from is not LinearOp.copy_from

    def can_append(self, other: LinearOp) -> bool:
        """Returns whether `append` takes it."""
        return False

    def append(self, other: LinearOp) -> None:
        """Takes the rows of another weight behind its own; before either is packed."""
        raise NotImplementedError

    def part(self, layer: LinearBase, rows: Sequence[range], columns: range) -> LinearOp | None:
        """Returns the operation of a layer with these rows of the weight, one beneath the other, and these columns, or
        None where it is not cut so; before it is packed."""
        return None

    def packed(self, ops: LayerOps, mode: PackMode) -> LinearOp | None:
        """Returns the operation for inference on this device, which may drop the layer's parameters; raises ConfigError
        for a mode that it cannot keep to. None: the fastest of those for dense weights, with `dense_weight` as of
        now."""
        return None


class PackedOp(LinearOp):
    """A weight for inference, as the device's GEMMs take it."""

    def __init__(self, layer: LinearBase, gemms: Sequence[Gemm]) -> None:
        """gemms: the last one takes any number of rows."""
        super().__init__(layer)
        self.gemms = gemms

    def __call__(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        rows = x.shape[0] if isinstance(x, Tensor) else x.rows
        for gemm in self.gemms:
            if rows <= gemm.max_rows and (y := gemm.linear(x, bias, residual, overwrite)) is not None:
                return y
        raise AssertionError("the last GEMM takes any number of rows")

    def gated(self, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor | None:
        rows = x.shape[0] if isinstance(x, Tensor) else x.rows
        return next(gemm for gemm in self.gemms if rows <= gemm.max_rows).gated(x, bias)


class WeightFormat:
    """How a checkpoint stores the weights of the layers' `Linear`s. Formats are frozen dataclasses of their settings,
    for configs that have them are compared."""

    takes_blocks: ClassVar[bool] = False  # whether operations keep `BlockRows`

    @property
    def block(self) -> int:
        """Returns of how many columns a matrix has a multiple, where it can, for the sake of its blocks."""
        return 1

    @property
    def reads_on(self) -> torch.device | None:
        """Returns where quantised matrices are put together from a checkpoint's tensors; None: where those come to, the
        CPU."""
        return None

    @property
    def of_vocabulary(self) -> WeightFormat:
        """Returns the format of a model's embedding and head, where this is that of its layers."""
        return self

    @property
    def of_rows(self) -> WeightFormat:
        """Returns the format of a matrix of which single rows are read, and nothing else."""
        return self

    @property
    def of_experts(self) -> WeightFormat:
        """Returns the format of experts, where this is that of a layer's other matrices."""
        return self

    def min_bytes(self, dtype: torch.dtype, quantized: bool) -> float:
        """Returns what a weight takes at least. dtype: of activations; quantized: the checkpoint has quantised
        matrices."""
        return 0.5 if self.takes_blocks else dtype.itemsize

    def create(self, layer: LinearBase, dtype: torch.dtype, device: torch.device) -> LinearOp:
        """Registers the layer's parameters, not filled. dtype: of x, the bias and the result."""
        raise NotImplementedError

    def slices(self, layer: str, start: int, rows: int) -> dict[str, ParamSlice]:
        """Returns where the tensors of a stored matrix go that is outputs `[start, start + rows)` of a `Linear`.

        layer: its name. Returns suffix of the stored name (`weight`) -> slice. A parameter takes tensors of its own
        dtype, or of any floating point one if it is of such.
        """
        return {"weight": ParamSlice(f"{layer}.weight", start, rows)}


SAFE_KIND = "Q8_0"  # for rows that a kind of larger blocks does not take, types without a kernel, and draft heads
SMALLEST = 32  # values of the smallest block


class PackedBlocks(PackedOp):
    """The device's GEMM, which has its own copy of the blocks."""

    def __init__(self, layer: LinearBase, ops: LayerOps, parts: list[BlockRows], dtype: torch.dtype) -> None:
        self._gemm = ops.block_gemm(parts, dtype)
        super().__init__(layer, [self._gemm])
        self._sizes = sizes_of(parts)
        self._last: dict[int, BlockGemm] = {}  # of the outputs that were asked for alone

    @property
    def sizes(self) -> Counter[str]:
        return self._sizes

    def last(self, x: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        part = self._last.get(outputs)
        if part is None:
            part = self._last[outputs] = self._gemm.last(outputs)
        y = part.linear(x, None if bias is None else bias[-part.outputs :])
        assert y is not None
        return y[:, -outputs:]

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, PackedBlocks)
        self._gemm.copy_from(other._gemm)

    def dense_weight(self) -> Tensor:
        return self._gemm.dense()

    def rows(self, ids: Tensor) -> Tensor:
        return self._gemm.rows(ids)

    def exact_logits(self, hidden: Tensor, ids: Tensor, ops: LayerOps) -> Tensor:
        return (self.rows(ids).float() * hidden.unsqueeze(-2).float()).sum(-1)


def sizes_of(parts: Iterable[BlockRows]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for rows in parts:
        sizes[rows.kind] += rows.data.nbytes
    return sizes
