"""What whoever holds a GEMM may rely on. Which there are for a weight, `GemmOps.gemms` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from torch import Tensor

from draftwing.ops.types import LogitEditor, NoiseKey

FEW_ROWS = 8  # up to this many the CPU's own GEMMs, which are faster than oneDNN's then, are used
ANY_ROWS = 1 << 30


class Gemm(Protocol):
    """Products with one weight [outputs, inputs], which it holds or reads where it lies."""

    @property
    def max_rows(self) -> int:
        """Returns up to how many rows it is to be asked."""
        ...

    def linear(
        self, x: Any, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor | None:
        """x [M, inputs], `Fp8Rows` where the weight is `Fp8Blocks`, bias [outputs], residual [M, outputs] -> x @
        weight^T + bias + residual [M, outputs], rounded once; None where it has no kernel for so many rows.

        overwrite: the result may be written into `residual`.
        """
        ...

    def gated(self, x: Any, bias: Tensor | None) -> Tensor | None:
        """Returns silu(x @ gate^T) * (x @ up^T) of a weight that has gates and then ups, [M, outputs / 2]; None: the
        caller does it with what `linear` gives. Of one weight's GEMMs either all return it or none: else the bits of a
        row depend on how many there are."""
        ...


class DenseKernels(Protocol):
    """Kernels that give a row the same bits among any number of rows, for matrices as they are."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N], rounded once.

        fresh: the weight is the result of an earlier operation, not a constant.
        """
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, fresh: bool = False) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        ...


class BlockGemm(Gemm, Protocol):
    """The GEMM of a weight in blocks; a row has the same bits among any number."""

    inputs: int
    outputs: int

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows of the weight, [..., inputs]"""
        ...

    def dense(self) -> Tensor:
        """Returns the weight, [outputs, inputs]."""
        ...

    def copy_from(self, other: Self) -> None:
        """Takes the weight of another one of the same parts, in its own memory."""
        ...

    def last(self, outputs: int) -> BlockGemm:
        """Returns the GEMM of the last so many outputs, perhaps of some before them, too: the same bits, in the same
        memory."""
        ...


class HeadTopK(Protocol):
    """The end of a draft head in one call, for up to `FEW_ROWS` rows: norm, GEMM and the best of its outputs."""

    max_topk: int  # outputs of a row that it finds

    def best(
        self, states: Tensor, places: Tensor | None, ids: Tensor, logp: Tensor, noise: NoiseKey | None = None,
        editor: LogitEditor | None = None,
    ) -> None:  # fmt: skip
        """states [.., inputs] -> ids [.., K] int64 and their log probabilities [.., K] float32, best first.

        places [M] int64: the rows of all three that are worked on, None: all. editor, then noise: change the outputs
        before, of B rows of which each has M / B of these side by side.
        """
        ...


class HeadProducts(Protocol):
    """Products of each head with a matrix of its own; a row has the same bits in any batch."""

    @property
    def weight(self) -> Tensor:
        """[heads * out, in], a copy"""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, heads, in], whose rows and heads may be apart -> [M, heads, out]"""
        ...


class SideWork(Protocol):
    """What a device does besides the operations that follow."""

    def start(self, work: Callable[[], object]) -> Any | None:
        """Does this when all that was asked for before is done -> what `join` is given. None: it cannot now, and
        nothing was done."""
        ...

    def join(self, done: Any) -> None:
        """Lets what is asked for from now on wait for it."""
        ...
