"""A matrix product whose weight can be packed once into the layout that the CPU reads fastest.

Packed, it also gives each row the same bits whatever other rows are in the batch, which is what makes greedy text
with speculation equal text without it in bfloat16. How oneDNN sums depends on the CPU, so `pack` tries it out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.ops.cpu.gemm import BYTE_ROWS, PackedProduct, byte_product, packed_product
from draftwing.ops.pick import skinny_kernels

if TYPE_CHECKING:
    from draftwing.ops.cuda.gemm import SkinnyProducts

# Rows of every product where the order of sums changes with their number: few enough to cost little more than one row,
# for it is the weight that takes time.
_BLOCK = 32
_TRIED = (2, 3, 4, 7, 16, 33, 64, 130)  # numbers of rows that are compared with 300
_MOST_TRIED = 8192  # outputs; the products of more are summed as these are
# Up to this many rows our own kernel beats oneDNN, where it gives the same bits; blocks that oneDNN may sum in.
FEW_ROWS = 8
_BLOCKS = (1024, 512, 2048, 4096, 256, 128, 64)
assert FEW_ROWS <= BYTE_ROWS, "few rows that a product in 8 bits does not take"
# Up to this many rows our own kernel beats cuBLAS (docs/performance.md); it takes any number. Of a vocabulary's
# product, which is long enough for its start and end not to matter, up to fewer.
_SKINNY_ROWS, _ANY_ROWS = 16, 1 << 30
_LONG, _LONG_ROWS = 1 << 16, 8


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight: a CPU tensor of a dtype for which its products are faster than torch's."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


@functools.cache
def rows_summed_alike(in_features: int, out_features: int, dtype: torch.dtype, threads: int) -> int:
    """1 if oneDNN sums a row of such a product in the same order among any number of rows on this CPU, 2 if among any
    but for a row alone, else `_BLOCK`: then the number must always be the same. threads: that torch has.

    Tried out on rows whose terms cancel, so that what is left is the rounding of the partial sums, another one for
    each order. Weights are ones.
    """
    x, linear = _order_probe(in_features, out_features, dtype)
    linear.pack_with(1)
    expected = linear(x)
    residual = torch.zeros_like(expected)

    def agree(begin: int, rows: int) -> bool:
        some, kept = x[begin : begin + rows], expected[begin : begin + rows]
        return torch.equal(linear(some), kept) and torch.equal(linear(some, residual[:rows]), kept)

    if not all(agree(rows, rows) for rows in _TRIED):
        return _BLOCK
    return 1 if all(agree(row, 1) for row in range(4)) else 2


@functools.cache
def summed_in_blocks(in_features: int, out_features: int, threads: int) -> int:
    """Inputs of a block, where oneDNN's sums of such a product in bfloat16 are those of `PackedProduct`: in blocks of
    so many, which are added one after the other. 0 where they are not, or where that does not run.

    Tried out like `rows_summed_alike`, between rows of which there is no difference but for a row alone.
    """
    x, linear = _order_probe(in_features, out_features, torch.bfloat16)
    linear.pack_with(1)
    assert linear._packed is not None
    parts = x[: 4 * FEW_ROWS].split(FEW_ROWS)
    expected = [linear(part) for part in parts]
    for block in _BLOCKS:
        own = packed_product(linear._packed, block)
        if own is not None and all(
            torch.equal(own(part, None, None), y) for part, y in zip(parts, expected, strict=True)
        ):
            return block
    return 0


def _order_probe(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Linear]:
    """Rows [300, in_features] whose terms cancel, and a layer of ones, not packed."""
    linear = Linear(in_features, out_features, False, dtype, torch.device("cpu"))
    linear.weight.fill_(1)
    return _cancelling_rows(in_features, dtype), linear


@functools.lru_cache(maxsize=1)
def _cancelling_rows(in_features: int, dtype: torch.dtype) -> Tensor:
    """Those of `_order_probe`, which take longer to make than to multiply. They are kept for the next product, which
    mostly has as many inputs."""
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    size = torch.randint(0, 20, (300, half), generator=generator).float().exp2()
    terms = (torch.randn(300, half, generator=generator, dtype=torch.float32) * size).to(dtype)
    x = torch.cat((terms, -terms, terms.new_zeros(300, in_features % 2)), 1)
    return x.gather(1, torch.rand(x.shape, generator=generator, dtype=torch.float32).argsort(1))


class Linear(nn.Module):
    """y = x @ weight.T + bias (+ residual).

    weight: [out_features, in_features]; bias: [out_features] or None. After `pack()` on the CPU `weight` is gone,
    unless it was kept for another use (a tied embedding).
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), False) if bias else None
        self._packed: Tensor | None = None
        self._block = 1  # as `rows_summed_alike` has it
        self.few: PackedProduct | None = None  # of few rows, with oneDNN's bits or in 8 bits
        self._skinny: SkinnyProducts | None = None
        self._skinny_rows = 0

    def pack(
        self, keep_weight: bool = False, deterministic: bool = False, name: str = "", eight_bits: bool = False
    ) -> None:
        """Packs the loaded weight, once; does nothing where there is no faster layout.

        deterministic: on a GPU, let a row have the same bits in any batch, as it has on the CPU anyway; raises
        ConfigError, which calls the layer by its `name`, where no kernel of ours takes the weight.
        eight_bits: on the CPU, let few rows be multiplied with a copy of the weight in 8 bits, where there is a kernel:
        faster and less exact, for drafts.
        """
        if self._packed is None and self._skinny is None:
            self._skinny = skinny_kernels(self.weight)
            fast = _LONG_ROWS if self.out_features >= _LONG else _SKINNY_ROWS
            self._skinny_rows = _ANY_ROWS if deterministic else fast
            if deterministic and self._skinny is None and self.weight.is_cuda:
                raise ConfigError(
                    f"--enable-deterministic-inference: expected {name or 'linear'}.weight in bfloat16 or float16, "
                    f"with a multiple of 64 columns, contiguous and aligned to 16 bytes; found {self.weight.dtype}, "
                    f"{list(self.weight.shape)}. "
                    "Set --dtype, or leave the option out"
                )
        if self._packed is not None or not can_pack(self.weight):
            return
        outputs, threads = min(self.out_features, _MOST_TRIED), torch.get_num_threads()
        dtype = self.weight.dtype
        alike = rows_summed_alike(self.in_features, outputs, dtype, threads)
        self.few = byte_product(self.weight) if eight_bits else None
        self.pack_with(alike, keep_weight)
        if self.few is None and alike <= 2 and dtype == torch.bfloat16:
            self.few = self._own_product(summed_in_blocks(self.in_features, outputs, threads))

    def pack_with(self, block: int, keep_weight: bool = False) -> None:
        """Packs for oneDNN; block: as `rows_summed_alike` has it."""
        self._packed, self._block = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach()), block
        if not keep_weight:
            del self.weight

    def _own_product(self, block: int) -> PackedProduct | None:
        """Ours, where it has the bits of oneDNN's for this weight, which may be laid out or cut otherwise."""
        own = packed_product(self._packed, block) if block and self._packed is not None else None
        if own is None:
            return None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(FEW_ROWS, self.in_features, generator=generator).bfloat16()
        residual = torch.randn(FEW_ROWS, self.out_features, generator=generator).bfloat16()
        same = all(torch.equal(own(x, self.bias, added), self._product(x, added)) for added in (None, residual))
        return own if same else None

    def dense_weight(self) -> Tensor:
        """[out_features, in_features]: `weight`, or a copy of it made from the packed one."""
        return self.weight if self._packed is None else self._packed.to_dense()

    def skinny(self, rows: int) -> SkinnyProducts | None:
        """The kernels that a product of this many rows is left to, if it is."""
        return self._skinny if rows <= self._skinny_rows else None

    def forward(self, x: Tensor, residual: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """x [M, in_features], residual [M, out_features] -> [M, out_features].

        overwrite: the result may be written into `residual`, which saves a pass on a GPU; without gradients.
        """
        skinny = self.skinny(x.shape[0])
        if skinny is not None:
            return skinny.linear(x, self.weight, self.bias, residual)
        if self._packed is None:
            if overwrite and residual is not None and self.bias is None:
                return residual.addmm_(x, self.weight.t())
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else y + residual
        rows, block = x.shape[0], self._block
        if rows <= FEW_ROWS and self.few is not None:
            return self.few(x, self.bias, residual)
        if block == 2 and rows == 1:
            return self._product(torch.cat((x, x)), None if residual is None else torch.cat((residual, residual)))[:1]
        if block <= 2:
            return self._product(x, residual)
        return self._in_blocks(x, residual, block)[:rows]

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")

    def _in_blocks(self, x: Tensor, residual: Tensor | None, block: int) -> Tensor:
        """[M, out_features] and more rows that nobody wants, from products of `block` rows each."""
        missing = -x.shape[0] % block
        parts = F.pad(x, (0, 0, 0, missing)).split(block)
        if residual is None:
            return torch.cat([self._product(part, None) for part in parts])
        added = F.pad(residual, (0, 0, 0, missing)).split(block)
        return torch.cat([self._product(*both) for both in zip(parts, added, strict=True)])
