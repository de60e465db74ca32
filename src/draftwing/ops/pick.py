"""Which kernels a device has for the small operations of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from draftwing.ops import use_triton
from draftwing.ops.cpu.kernels import DTYPES, load

if TYPE_CHECKING:
    from draftwing.ops.cuda.gemm import SkinnyProducts


class LayerKernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


def layer_kernels(weight: Tensor) -> LayerKernels | None:
    """Those for tensors like a layer's loaded `weight`, which give no gradients; None where there are only torch's."""
    if use_triton(weight):
        from draftwing.ops.triton import layers

        return layers
    kernels = load()
    return kernels if kernels is not None and kernels.take(weight) else None


class FuseInputs(Protocol):
    def __call__(
        self,
        ids: Tensor,
        table: Tensor,
        feature: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        positions: Tensor | None = None,
        feature_first: bool = False,
    ) -> Tensor: ...


def fuse_kernel(weight: Tensor) -> FuseInputs | None:
    """The `fuse_inputs` of `ops.triton.layers` or of `ops.cpu.tree`, where one runs on tensors like `weight`."""
    if not use_triton(weight):
        from draftwing.ops.cpu.tree import weight_kernels_for

        native = weight_kernels_for(weight)
        return native.fuse_inputs if native is not None else None
    from draftwing.ops.triton.layers import fuse_inputs

    return fuse_inputs


def exact_logits_kernel(hidden: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """(hidden, weight, ids) -> `DecoderModel.exact_logits`, where there is a kernel of the CPU's for such states."""
    from draftwing.ops.cpu.tree import tree_kernels_for

    native = tree_kernels_for(hidden) if hidden.dtype in DTYPES else None
    return native.exact_logits if native is not None else None


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [R, ...], index [M] int64 -> source[index], which has no gradient. Torch starts slowly on a few rows."""
    from draftwing.ops.cpu.tree import tree_kernels_for

    native = tree_kernels_for(source)
    if native is None or tree_kernels_for(index) is None or not source.is_contiguous():
        return source.index_select(0, index)
    return native.take_rows(source, index)


def skinny_kernels(weight: Tensor) -> SkinnyProducts | None:
    """Those that multiply few rows with a loaded `weight`, where there are any."""
    if not use_triton(weight):
        return None
    from draftwing.ops.cuda.gemm import skinny_products, takes

    return skinny_products(weight.device, weight.dtype) if takes(weight) else None
