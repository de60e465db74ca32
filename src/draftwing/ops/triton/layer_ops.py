"""The operations of layers, in Triton, with the GEMM of `ops.cuda`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.ops import fp8_blocks, groups
from draftwing.ops.contracts import DeviceExpertGemm, Gemm, HeadProducts, PeerSums
from draftwing.ops.cuda import gemm, gemm_dense, gemm_fp8, gemm_groups, gemm_heads, gemm_tall, wgmma
from draftwing.ops.cuda.peer_memory import Exchange, NoPeers
from draftwing.ops.cuda.side_stream import side_stream
from draftwing.ops.fp8_blocks import FP8_FROM, Fp8Blocks
from draftwing.ops.gemms import (
    GROUP_ROWS,
    DequantisedGemm,
    GroupGemm,
    KernelGemm,
    TorchGemm,
    dense_gemms,
)
from draftwing.ops.groups import PackedGroups
from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.triton import expert_gemm, experts, layers, norms, peer_sums, rope
from draftwing.ops.triton.largest import largest
from draftwing.ops.types import BlockRows, MXRows, QuantizedRows
from draftwing.ops.upload import uploaded


class TritonLayerOps(LayerOps):
    """Overrides those of `LayerOps` that GPUs have kernels for."""

    device: torch.device
    norm_adds_residual = True
    mixes_under_norms = True
    merges_matrices = True
    convolves_by_tap = True  # threads have a channel each

    rms_norm = staticmethod(norms.rms_norm)
    mix_norm = staticmethod(experts.mix_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    rms_norm_fp8 = staticmethod(norms.rms_norm_fp8)
    add_rms_norm_fp8 = staticmethod(norms.add_rms_norm_fp8)
    silu_mul = staticmethod(layers.silu_mul)
    gate = staticmethod(layers.gate)
    gate_fp8 = staticmethod(layers.gate_fp8)
    soft_cap = staticmethod(layers.soft_cap)
    gelu_mul = staticmethod(layers.gelu_mul)
    concat_rope = staticmethod(rope.concat_rope)
    fuse_inputs = staticmethod(norms.fuse_inputs)
    sum_parts = staticmethod(layers.sum_parts)
    share_rows = staticmethod(layers.share_rows)
    clamped_swiglu = staticmethod(experts.clamped_swiglu)
    mix = staticmethod(experts.mix)

    def peer_sums(self, rank: int, ranks: int, exchange: Exchange) -> PeerSums | str:
        try:
            return peer_sums.PeerSums(rank, ranks, exchange, self.device)
        except NoPeers as error:
            return str(error)

    route = staticmethod(experts.route)
    every_expert = staticmethod(experts.every_expert)

    @property
    def reads_routes(self) -> bool:  # type: ignore[override]
        return False

    def empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def expert_gemm(self, weight: Tensor | PackedGroups | MXRows, count: int) -> DeviceExpertGemm | None:
        return expert_gemm.ExpertGemm(weight, count) if expert_gemm.takes(weight, count) else None

    def head_products(
        self, weight: Tensor | Sequence[BlockRows], heads: int, dtype: torch.dtype
    ) -> gemm_heads.HeadGemm | None:
        if not isinstance(weight, Tensor) or not gemm_heads.takes(weight, heads, dtype):
            return None
        return gemm_heads.HeadGemm(weight, heads)

    def head_queries(
        self, products: HeadProducts, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0
    ) -> Tensor:
        if isinstance(products, gemm_heads.HeadGemm):
            return products.queries(plain, turned, cos, sin, factor)
        return super().head_queries(products, plain, turned, cos, sin, factor)

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Torch's sum on a GPU takes another order when there are more rows."""
        return layers.chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2)).view(ids.shape)

    largest = staticmethod(largest)

    def every_logit(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return layers.chosen_logits(hidden, weight, None)

    def share_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor, begin: int) -> Tensor:
        return layers.chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2), begin).view(ids.shape)

    def gemms(
        self, weight: Tensor | PackedGroups | Fp8Blocks, bias: Tensor | None = None, deterministic: bool = False
    ) -> list[Gemm]:
        if isinstance(weight, Fp8Blocks):
            return [KernelGemm(gemm_fp8.fp8_gemm(self.device), weight)]
        if isinstance(weight, PackedGroups):
            return self._group_gemms(weight, deterministic)
        if not gemm.takes(weight):
            return [TorchGemm(weight)]
        medium = gemm_dense.dense_gemm(weight.device) if gemm_dense.takes(weight) else None
        few = gemm.small_m_gemm(weight.device, weight.dtype)
        return dense_gemms(weight, few, medium, gemm_dense.MOST, deterministic)

    def _group_gemms(self, weight: PackedGroups, deterministic: bool) -> list[Gemm]:
        device, dtype, width = weight.codes.device, weight.scales.dtype, gemm_groups.width_of(weight)
        kernels = gemm_groups.group_gemm(device, dtype, width)
        exact = gemm.small_m_gemm(device, dtype) if deterministic else None
        side = side_stream(self.device) if self.device.type == "cuda" else None
        found: list[Gemm] = [GroupGemm(kernels, weight, GROUP_ROWS)]
        if exact is None and (tall := gemm_tall.tall_gemm(device, dtype, width)) is not None:
            found.append(GroupGemm(tall, weight))
        return [*found, DequantisedGemm(kernels, weight, exact, side)]

    def keeps_bits(self, weight: Tensor) -> bool:
        return gemm.takes(weight) or super().keeps_bits(weight)

    @property
    def keeps_groups(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def fp8_from(self) -> int | None:  # type: ignore[override]
        there = self.device.type == "cuda" and wgmma.runs_on(torch.cuda.get_device_capability(self.device))
        return FP8_FROM if there else None

    def pack_fp8(self, rows: QuantizedRows) -> Fp8Blocks:
        return fp8_blocks.pack(rows, self.device)

    def pack_groups(self, rows: QuantizedRows, dtype: torch.dtype) -> PackedGroups:
        return groups.pack(rows, dtype, self.device)

    def quantize_groups(self, weight: Tensor, scheme: str, dynamic: bool = False) -> QuantizedRows:
        return groups.quantized(uploaded(weight, self.device), scheme, dynamic)
