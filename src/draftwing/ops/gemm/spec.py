"""Which GEMMs there are for a weight, and products of weights and activations in fp8 in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.fp8 import spec as fp8_blocks
from draftwing.ops.fp8.spec import WIDE, Fp8Blocks, Fp8Rows, quantised
from draftwing.ops.gemm import groups, onednn
from draftwing.ops.gemm.contract import BlockGemm, Gemm
from draftwing.ops.gemm.gemms import KernelGemm, OneDnnGemm, TorchGemm
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.stored import BlockRows, QuantizedRows


class GemmOps:
    """Chooses GEMMs for weights, and packs weights for them."""

    merges_matrices = False  # whether one GEMM of more outputs, or experts, is faster than two
    keeps_groups = False  # whether there are GEMMs for `PackedGroups`
    fp8_from: int | None = None  # values of a weight from which products with activations in fp8 are faster; None: none
    block_kinds: frozenset[str] = frozenset()  # types of quantised blocks that there are GEMMs for

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False,
        whole: int = 0,
    ) -> list[Gemm]:  # fmt: skip
        """Returns products with this weight, those for few rows first; the last one takes any number of rows.

        bias: that it will have. deterministic: a row must have the same bits in any batch, which only weights allow
        that it `keeps_bits` of. `PackedGroups`: only where it `keeps_groups`. whole: rows of the matrix of which this
        is a share, in whose order it is summed, 0: it is all; raises ConfigError where a share is not summed so.
        """
        if isinstance(weight, Fp8Blocks):
            return [KernelGemm(TorchFp8Gemm(), weight)]
        assert isinstance(weight, Tensor)
        if onednn.takes(weight) and not onednn.summed_as(weight, whole, torch.get_num_threads()):
            raise ConfigError(
                f"--enable-tp-invariance: on this CPU products with {len(weight)} of {whole} rows of a matrix of "
                f"{weight.shape[1]} columns are summed in another order than with all of them. Leave the option out"
            )
        return [OneDnnGemm(weight, torch.get_num_threads()) if onednn.takes(weight) else TorchGemm(weight)]

    def keeps_bits(self, weight: Tensor) -> bool:
        """Returns whether there are GEMMs with this matrix that give a row the same bits in any batch."""
        return weight.device.type != "cuda"

    def block_gemm(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> BlockGemm:
        """Returns the GEMM of a weight whose rows are those of `parts`, one after the other; of `block_kinds`, of the
        same number of columns. The parts are copied. dtype: of x and of the result."""
        raise NotImplementedError

    def quantize(self, weight: Tensor, kind: str) -> BlockRows:
        """weight [rows, columns] floating point -> the same in blocks of one of `block_kinds`."""
        raise NotImplementedError

    def pack_fp8(self, rows: QuantizedRows) -> Fp8Blocks:
        """rows, to which `fp8_blocks.unsupported_reason` has nothing to say, on this device."""
        return fp8_blocks.pack(rows, rows.codes.device)

    def pack_groups(self, rows: QuantizedRows, dtype: torch.dtype) -> PackedGroups:
        """rows, to which `groups.unsupported_reason` has nothing to say, on this device. dtype: of activations."""
        return groups.pack(rows, dtype, rows.codes.device)

    def quantize_groups(self, weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
        """weight [rows, columns] floating point -> its codes as `groups.quantized` has them, on this device."""
        return groups.quantized(weight, scheme, dynamic)

    def wide_gemm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, inputs], weight [outputs, inputs] -> x @ weight^T [M, outputs], summed and kept in float32 or wider."""
        if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return x.to(wide) @ weight.to(wide).t()

    def wide_gemm_is_slow(self, weight: Tensor) -> bool:
        """Returns whether a GEMM in the weight's own dtype takes a fraction of the time of `wide_gemm`."""
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


class TorchFp8Gemm:
    """A row is multiplied by itself, so it has the same bits among any number of them."""

    def linear(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N] bfloat16, rounded once."""
        y = self._sums(x, weight, bias)
        return (y if residual is None else y + residual.float()).bfloat16()

    def gated(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N] bfloat16"""
        gate, up = self._sums(x, weight, bias).chunk(2, 1)
        return (F.silu(gate) * up).bfloat16()

    def _sums(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """-> [M, N] float32"""
        codes, scales = x.plain() if isinstance(x, Fp8Rows) else quantised(x)
        values = codes.float() * scales.repeat_interleave(WIDE, 1)
        matrix = weight.dense(torch.float32)
        y = torch.stack([(matrix * row).sum(1) for row in values]) if len(values) else values.new_zeros(0, weight.rows)
        return y if bias is None else y + bias.float()
