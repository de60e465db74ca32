"""The operations of layers, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops import fp8_blocks, groups
from draftwing.ops.contracts import (
    BlockGemm,
    Gemm,
    HeadProducts,
    HeadTopK,
    LayerWeights,
    MixtureWeights,
    PeerSums,
    Routed,
    WholeLayers,
    WholeMixture,
)
from draftwing.ops.fp8_blocks import Fp8Blocks, Fp8Rows, packed_rows, quantised
from draftwing.ops.gemms import KernelGemm, OneDnnGemm, TorchGemm
from draftwing.ops.groups import PackedGroups
from draftwing.ops.torch import onednn
from draftwing.ops.torch.experts import ExpertOps
from draftwing.ops.torch.fp8 import TorchFp8Gemm
from draftwing.ops.types import BlockRows, QuantizedRows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, heads, head_dim]; cos, sin [M, 1, head_dim] from `rope_table`, the sine with its sign. Out of place."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class LayerOps(ExpertOps):
    """Norms, gated activation, rows of a table, and which GEMMs there are.

    These methods are differentiable and take tensors of any dtype; those of other devices are for inference.
    """

    norm_adds_residual = False  # whether `add_rms_norm` is one kernel, which then adds residuals better than a GEMM
    mixes_under_norms = False  # whether `mix_norm` is one kernel
    merges_matrices = False  # whether one GEMM of more outputs, or experts, is faster than two
    convolves_by_tap = False  # whether a delta net's weights of a tap are to lie beside each other

    def empty_cache(self) -> None:
        """Gives the device what no tensor holds any more."""

    def mix_norm(
        self, y: Tensor, routed: Routed, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `mix`, and `rms_norm` of it: [M, n] each."""
        x = self.mix(y, routed, residual)
        return x, self.rms_norm(x, weight, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> x / sqrt(mean(x²) + eps) * weight, the mean in float32.

        Beside a weight in float32 nothing of a half-precision x is rounded before the end, but in training."""
        if weight.dtype == torch.float32 and x.itemsize < 4 and not weight.requires_grad:
            return self.rms_norm(x.float(), weight, eps).to(x.dtype)
        if x.device.type != "cpu":
            # In training the weight is in float32 with a half-precision x, which torch's fused kernel does not take.
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        # On the CPU F.rms_norm is a dozen small operations, layer_norm one. Beside its own negation a row has mean 0
        # and the mean of squares as its variance. The result is rounded before it is weighted, as in transformers.
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, both.shape[-1:], eps=eps)[..., : x.shape[-1]] * weight

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """Returns `rms_norm` of x [M, size], and what products with activations in fp8 read of it."""
        normed = self.rms_norm(x, weight, eps)
        return packed_rows(*quantised(normed))._replace(x=normed)

    def add_rms_norm_fp8(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
        """Returns x + delta [M, size] and `rms_norm_fp8` of it."""
        total = x + delta
        return total, self.rms_norm_fp8(total, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, delta [M, size], weight [size] -> x + delta [M, size] and its norm [M, size]."""
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> silu(gate) * up, [M, ffn]; silu(gate) is rounded before it is multiplied."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> gelu(gate) * up, [M, ffn], by the approximation with tanh; gelu(gate) is rounded
        before it is multiplied."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """x of any shape, which may be overwritten -> cap * tanh(x / cap), in float32 or wider and rounded once"""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (cap * torch.tanh(wide / cap)).to(x.dtype)

    def fuse_inputs(
        self,
        ids: Tensor | None,
        table: Tensor,
        feature: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        positions: Tensor | None = None,
        feature_first: bool = False,
    ) -> Tensor:
        """Returns what a draft head's first GEMM reads: the embedding of a token next to a feature, each perhaps
        normed.

        ids [M] int64, table [vocab, size], feature [M, size], norms: weights [size] of the embedding's norm and of the
        feature's -> [M, 2 * size]. positions [M]: where it is 0 the embedding counts as zero. ids None: row i of the
        table is the embedding of row i.
        """
        token = table if ids is None else F.embedding(ids, table)
        if positions is not None:
            token = token.masked_fill((positions == 0).unsqueeze(1), 0.0)
        if norms is not None:
            token, feature = self.rms_norm(token, norms[0], eps), self.rms_norm(feature, norms[1], eps)
        return torch.cat((feature, token) if feature_first else (token, feature), -1)

    def concat_columns(self, *parts: Tensor) -> Tensor:
        """parts [M, n_i] of one dtype, rows may be apart -> [M, sum of n_i]"""
        return torch.cat(parts, 1)

    def add_scaled(self, x: Tensor, y: Tensor | None, scale: Tensor | float = 1.0) -> Tensor:
        """x, y [M, n], scale a number, or [1] of their dtype -> (x + y) * scale, [M, n], the sum rounded before; y
        None: x * scale."""
        total = x if y is None else x + y
        return total * scale if isinstance(scale, Tensor) or scale != 1 else total

    def concat_rope(self, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0) -> Tensor:
        """plain [M, heads, n], turned [M, heads, m], both perhaps apart, cos, sin [M, 1, m] -> [M, heads, n + m]: the
        first as they are, the others turned by `rotate`, all times `factor` in float32 and rounded."""
        out = torch.cat((plain, rotate(turned, cos, sin)), 2)
        return out if factor == 1 else (out.float() * factor).to(out.dtype)

    def head_queries(
        self, products: HeadProducts, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0
    ) -> Tensor:
        """products: of `head_products`, plain [M, heads, in], the rest as in `concat_rope` -> [M, heads, out + m]:
        `concat_rope` of the products and `turned`."""
        return self.concat_rope(products(plain), turned, cos, sin, factor)

    def gate(self, gate: Tensor, x: Tensor) -> Tensor:
        """gate, x [M, n] -> sigmoid(gate) * x; of x by itself its SiLU"""
        return torch.sigmoid(gate) * x

    def gate_fp8(self, gate: Tensor, x: Tensor) -> Fp8Rows:
        """Returns `gate` of both, as products with activations in fp8 read it."""
        return packed_rows(*quantised(self.gate(gate, x)))

    def recur(self, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """made [M, 3 * n]: k, f and o, state [M, n] -> tanh(o), and sigmoid(k) * state + (1 - sigmoid(k)) * tanh(f)"""
        keep, fresh, out = made.chunk(3, 1)
        keep = torch.sigmoid(keep)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(fresh)

    def gru(self, read: Tensor, kept: Tensor, state: Tensor) -> Tensor:
        """Returns the next state of a gated recurrent unit, as torch has it: read, kept [M, 3 * n], products of the
        input and of state [M, n], for what is reset, what stays and what is new."""
        (r, z, n), (hr, hz, hn) = read.chunk(3, 1), kept.chunk(3, 1)
        stay = torch.sigmoid(z + hz)
        return (1 - stay) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + stay * state

    def sum_parts(self, parts: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """parts [P, M, n] + bias [n] + residual [M, n] -> [M, n], in this order in float32, rounded once."""
        first, *others = parts.unbind()
        total = first.float()
        for other in (*others, bias, residual):
            total = total if other is None else total + other
        return total.to(parts.dtype)

    def peer_sums(self, rank: int, ranks: int, exchange: Callable[[bytes], list[bytes]]) -> PeerSums | str:
        """Returns what sums few rows over the ranks; all of them ask together, and get the same. A text says why there
        is no such thing, an empty one that the device does not know of it.

        exchange: what this rank gives -> what each of them gave.
        """
        return ""

    def take_rows(self, source: Tensor, index: Tensor) -> Tensor:
        """source [R, ...], index [M] int64 -> source[index], [M, ...]"""
        return source.index_select(0, index)

    def row_reader(self, source: BlockRows, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """Returns what reads single rows of blocks, of which the others stay in their file: ids [M] int64 -> [M,
        columns] in `dtype`, float32 or bfloat16. None: the device has nothing better than numpy."""
        return None

    def upload_matrix(self, rows: Callable[[Tensor], Tensor], count: int) -> Tensor | None:
        """Returns a matrix [count, n] of which `rows` gives the rows of ids [M], on the device, for `take_rows`; None
        where the device shares the host's memory, and rows are read from where they are."""
        return None

    def put_rows(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target [R, T], index [M] int64, source [M, T]: target[index] = source"""
        target.index_copy_(0, index, source)

    def cluster_tokens(self, scores: Tensor, chosen: int, ordering: Tensor) -> Tensor:
        """scores [M, C], ordering [V] int64, the tokens of C clusters one after the other -> those of each row's
        `chosen` clusters with the best scores, [M, chosen * V / C]"""
        return ordering.view(scores.shape[1], -1)[scores.topk(chosen, -1).indices].flatten(1)

    def spread_logits(self, found: Tensor, ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
        """found [M, n] float32, the logits of tokens ids [M, n] -> [M, vocab] in dtype: 1 below a row's smallest logit
        for all others"""
        found = found.to(dtype)
        return (found.amin(1, keepdim=True) - 1).expand(-1, vocab).scatter(1, ids, found)

    def share_rows(self, source: Tensor, index: Tensor, begin: int) -> Tensor:
        """source [R, size], the rows [begin, begin + R) of a whole, index [M] int64 into the whole -> [M, size], 0
        where the row is not in `source`."""
        own = index - begin
        mine = (own >= 0) & (own < len(source))
        return torch.where(mine.unsqueeze(-1), self.take_rows(source, own.clamp(0, len(source) - 1)), 0)

    def share_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor, begin: int) -> Tensor:
        """Computes `exact_logits` of a whole whose rows [begin, begin + vocab) `weight` has; 0 for others."""
        own = ids - begin
        mine = (own >= 0) & (own < len(weight))
        return torch.where(mine, self.exact_logits(hidden, weight, own.clamp(0, len(weight) - 1)), 0)

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """hidden [..., size], weight [vocab, size], ids [..., K] int64 -> hidden @ weight[ids], [..., K] float32."""
        return (weight[ids].float() * hidden.unsqueeze(-2).float()).sum(-1)

    def largest(self, logits: Tensor, count: int) -> Tensor:
        """logits [M, vocab] -> ids of a row's largest, descending, [M, count] int64. Of at most 128 neighbours an
        operation may take the largest alone, so that it finds the largest of so many groups."""
        return logits.topk(count, 1).indices

    def every_logit(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Computes `exact_logits` of all rows of the weight, [M, vocab] float32. hidden [M, size]"""
        every = torch.arange(len(weight), device=hidden.device)
        return self.exact_logits(hidden, weight, every.expand(len(hidden), -1))

    def wide_gemm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, inputs], weight [outputs, inputs] -> x @ weight^T [M, outputs], summed and kept in float32 or wider."""
        if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return x.to(wide) @ weight.to(wide).t()

    def wide_gemm_is_slow(self, weight: Tensor) -> bool:
        """Returns whether a GEMM in the weight's own dtype takes a fraction of the time of `wide_gemm`."""
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    # -- what some devices have -------------------------------------------------------------------------------------

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False
    ) -> list[Gemm]:
        """Returns products with this weight, those for few rows first; the last one takes any number of rows.

        bias: that it will have. deterministic: a row must have the same bits in any batch, which only weights allow
        that it `keeps_bits` of. `PackedGroups`: only where it `keeps_groups`.
        """
        if isinstance(weight, Fp8Blocks):
            return [KernelGemm(TorchFp8Gemm(), weight)]
        assert isinstance(weight, Tensor)
        return [OneDnnGemm(weight, torch.get_num_threads()) if onednn.takes(weight) else TorchGemm(weight)]

    def keeps_bits(self, weight: Tensor) -> bool:
        """Returns whether there are GEMMs with this matrix that give a row the same bits in any batch."""
        return weight.device.type != "cuda"

    block_kinds: frozenset[str] = frozenset()  # types of quantised blocks that there are GEMMs for

    def block_gemm(self, parts: Sequence[BlockRows], dtype: torch.dtype) -> BlockGemm:
        """Returns the GEMM of a weight whose rows are those of `parts`, one after the other; of `block_kinds`, of the
        same number of columns. The parts are copied. dtype: of x and of the result."""
        raise NotImplementedError

    def quantize(self, weight: Tensor, kind: str) -> BlockRows:
        """weight [rows, columns] floating point -> the same in blocks of one of `block_kinds`."""
        raise NotImplementedError

    keeps_groups = False  # whether there are GEMMs for `PackedGroups`

    fp8_from: int | None = None  # values of a weight from which products with activations in fp8 are faster; None: none

    def pack_fp8(self, rows: QuantizedRows) -> Fp8Blocks:
        """rows, to which `fp8_blocks.unsupported_reason` has nothing to say, on this device."""
        return fp8_blocks.pack(rows, rows.codes.device)

    def pack_groups(self, rows: QuantizedRows, dtype: torch.dtype) -> PackedGroups:
        """rows, to which `groups.unsupported_reason` has nothing to say, on this device. dtype: of activations."""
        return groups.pack(rows, dtype, rows.codes.device)

    def quantize_groups(self, weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
        """weight [rows, columns] floating point -> its codes as `groups.quantized` has them, on this device."""
        return groups.quantized(weight, scheme, dynamic)

    def head_products(
        self, weight: Tensor | Sequence[BlockRows], heads: int, dtype: torch.dtype
    ) -> HeadProducts | None:
        """weight [heads * out, in], or the parts of one in blocks, which are copied; None where the device multiplies
        them as those of experts. dtype: of x and of the result."""
        return None

    def whole_mixture(self, weights: MixtureWeights) -> WholeMixture | None:
        """Returns the whole mixture in one call, or None where the device has none for these weights."""
        return None

    def whole_layers(self, layers: Sequence[LayerWeights], kept: Sequence[int] = ()) -> WholeLayers | None:
        """Returns what runs decoder layers that follow each other in one call, None where this device, or these layers,
        have none.

        kept: layers whose outputs the caller wants, counted from 1, besides that of the last.
        """
        return None

    def head_top_k(
        self, gemm: Gemm | None, bias: Tensor | None, norm: tuple[Tensor, float] | None, names: Tensor | None
    ) -> HeadTopK | None:
        """Returns the end of a draft head for few rows in one call: norm, GEMM and the best of its outputs; or None.

        gemm: `LinearOp.first_gemm`; norm: weight and eps; names [outputs] int64: what the outputs are called.
        """
        return None


PLAIN = LayerOps()  # what modules use until they are packed
