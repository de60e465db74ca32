"""Rotary embedding of what attention compares."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.gemm.contract import HeadProducts


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, heads, head_dim]; cos, sin [M, 1, head_dim] from `rope_table`, the sine with its sign. Out of place."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RopeOps:
    """Turns parts of heads and joins them with others."""

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
