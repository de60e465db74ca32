"""Norms of heads of values, which the kernel that writes keys does."""

from __future__ import annotations

import pytest
import torch
from pool_batches import CPU, KERNELS, chunk_batch, native

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops import make_ops
from draftwing.ops.attention import ChunkSpan, HeadNorms

pytestmark = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")


@pytest.mark.parametrize(
    ("dtype", "half"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.int8, False), (torch.int8, True)],
)
def test_values_that_are_normed(dtype: torch.dtype, half: bool) -> None:
    """Heads of 512, as of Gemma 4's layers without a window: the bits of the norm, and of a pool that is told of it."""
    count, dim = 20, 512
    generator, ops = torch.Generator().manual_seed(0), make_ops(CPU)
    qkv = torch.randn(count, 8, dim, generator=generator).to(torch.bfloat16 if half else torch.float32)
    weight = torch.rand(dim, generator=generator) + 0.5
    table = torch.arange(1, count + 1)[None]
    cos, sin = rope_table(RopeConfig(), dim, count, qkv.dtype, "cpu").unsqueeze(2).unbind(1)
    batch = chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0])
    found, expected = (KVPool([KVSpec(2, dim)], count, dtype, CPU) for _ in range(2))
    norms = HeadNorms(weight, weight, 1e-6)
    native(found).bind(batch, 0).fused_write(0, qkv.clone(), cos, sin, norms._replace(values=True))
    qkv[:, 6:] = ops.rms_norm(qkv[:, 6:], torch.ones(dim), 1e-6)
    native(expected).bind(batch, 0).fused_write(0, qkv, cos, sin, norms)
    assert torch.equal(found.kv[0], expected.kv[0])
