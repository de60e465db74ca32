"""A decoder layer of few rows in one call: kernels/cpu_layer.c, where all four of its products have our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.kernels.cpu_product import PackedProduct

HEAD_UNIT = 32  # threads share the outputs of qkv by heads, and a product is made of so many at a time


class NativeLayer:
    """The weights of a `DecoderLayer` in bfloat16 without norms of heads, as the kernel wants to be told of them."""

    def __init__(
        self,
        norms: tuple[Tensor | None, Tensor],
        eps: float,
        products: Sequence[PackedProduct],
        biases: Sequence[Tensor | None],
    ) -> None:
        """norms: weights before attention, None where that is left to the caller, and before the MLP; products, and
        their biases: qkv, o, gate_up, down."""
        qkv, o, gate_up, down = products
        self.raw, self.eps = qkv.raw, eps
        self.inputs, self.hidden = qkv.inputs, o.outputs
        assert norms[0] is None or self.inputs == self.hidden
        assert gate_up.inputs == down.outputs == self.hidden and gate_up.outputs == 2 * down.inputs
        self._attended = o.inputs  # heads * head_dim
        self.norms_input = norms[0] is not None
        # What it takes of spare memory for a row: the results of all parts but the last.
        self.spare = 2 * self.hidden + qkv.outputs + o.inputs + gate_up.outputs + down.inputs
        # Addresses go stale where a module's weights are moved, so what holds their memory is not the modules' tensors.
        own = [None if tensor is None else tensor.detach() for tensor in (*norms, *biases)]
        self._held = own, products
        numbers = [0 if norm is None else norm.data_ptr() for norm in norms] + [self.hidden, down.inputs]
        for product, bias in zip(products, biases, strict=True):
            address = 0 if bias is None else bias.data_ptr()
            numbers += [product.address, address, product.inputs, product.outputs, product.block, *product.scales]
        self._numbers = torch.tensor(numbers)
        self.address = self._numbers.data_ptr()

    def heads(self, dim: int) -> int:
        """Of the queries, each of size `dim`."""
        return self._attended // dim
