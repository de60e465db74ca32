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

    def turn_heads(self, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [M, 3 * heads * size] queries, keys and values, cos, sin [M, size / 2] float32 -> the three, each
        [M, heads, size], the first two turned in float32 and rounded once. What is given may be overwritten."""
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        cos, sin = cos[:, None], sin[:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

        return turned(q), turned(k), v

    def head_queries(
        self, products: HeadProducts, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0
    ) -> Tensor:
        """products: of `head_products`, plain [M, heads, in], the rest as in `concat_rope` -> [M, heads, out + m]:
        `concat_rope` of the products and `turned`."""
        return self.concat_rope(products(plain), turned, cos, sin, factor)
