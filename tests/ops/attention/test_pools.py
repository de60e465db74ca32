"""What a pool keeps of rows on a CPU: the nearest codes in int8, norms of values, latents; and attention over int8."""

from __future__ import annotations

import pytest
import torch
from plain_attention import brute_force
from pool_batches import CPU, KERNELS, LAYER, chunk_batch, make_batch, make_pool, make_tokens, native, random_paths
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.kv.pool import KVPool, KVSpec
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops import make_ops
from draftwing.ops.attention.batch import Batch, ChunkSpan, HeadNorms

# -- int8 -------------------------------------------------------------------------------------------------------------

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built")


def held(kv: Tensor) -> Tensor:
    """[..., n + 4] int8 -> [..., n] float64: what a pool holds."""
    return kv[..., :-4].double() * kv[..., -4:].contiguous().view(torch.float32).double()


@needs_kernels
def test_written_values_are_the_nearest() -> None:
    rows = torch.randn(50, 3, 40, generator=torch.Generator().manual_seed(0)).exp()
    rows[1], rows[2, 0, 3], rows[3, 1, 5], rows[4] = 0.0, torch.nan, -torch.inf, 1e-40
    pool = KVPool([KVSpec(3, 40)], 60, torch.int8, CPU)
    assert pool.kv[0].shape == (61, 3, 2, 44)
    assert KVPool.bytes_per_slot([KVSpec(3, 40)], torch.int8) == 3 * 2 * 44
    pool.write(0, torch.arange(1, 51), rows, -rows)
    found = held(pool.kv[0])[1:51]
    finite = torch.isfinite(rows).all(2)
    step = rows.abs().amax(2, keepdim=True).double() / 127
    assert ((found[:, :, 0] - rows).abs() <= step * 0.5001 + 1e-30)[finite].all()
    assert torch.equal(found[:, :, 0][finite], -found[:, :, 1][finite])
    assert found[2, 0].isnan().all() and found[3, 1].isnan().all() and (~finite).sum() == 2
    pool.clear(torch.tensor([7]))
    assert not pool.kv[0][7].any()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 40])
def test_kernels_write_what_the_pool_does(dim: int, dtype: torch.dtype) -> None:
    """Keys that are turned by no angle, so that nothing but the rounding is left."""
    heads, kv_heads, count = 4, 2, 30
    qkv = torch.cat(make_tokens(count, (heads, kv_heads, dim), dtype, 3), 1) * 5
    qkv[3, heads, 1], qkv[4, -1, 2], qkv[5] = torch.nan, torch.inf, 0.0
    cos, sin = torch.ones(count, 1, dim, dtype=dtype), torch.zeros(count, 1, dim, dtype=dtype)
    table = torch.randperm(60, generator=torch.Generator().manual_seed(1))[None, :count] + 1
    batch = chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0])
    pools = [KVPool([KVSpec(kv_heads, dim)], 60, torch.int8, CPU) for _ in range(2)]
    assert native(pools[0]).bind(batch, 0).fused_write(0, qkv.clone(), cos, sin)
    pools[1].write(0, table[0], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])
    found, expected = (held(pool.kv[0]) for pool in pools)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 128), (3, 1, 24), (8, 1, 32)])
@pytest.mark.further(nodes=[7, 64], shape=[(9, 3, 64), (4, 2, 128), (8, 1, 32)])
@pytest.mark.slower(nodes=[1, 7, 64])
@pytest.mark.parametrize(("nodes", "prefix"), [(1, 700), (12, 237), (7, 255), (64, 500)])
def test_trees_over_int8_equal_brute_force(shape: tuple[int, int, int], nodes: int, prefix: int) -> None:
    pool = make_pool(shape, torch.int8)
    generator = torch.Generator().manual_seed(nodes)
    table = (torch.randperm(1000, generator=generator) + 1)[None, : prefix + nodes + 3]
    old = make_tokens(prefix, shape, torch.int8, 100)
    pool.write(LAYER, table[0, :prefix], old.k, old.v)
    paths, new = random_paths(nodes, generator), make_tokens(nodes, shape, torch.int8, 1)
    batch = make_batch(table, [prefix], table[0, prefix : prefix + nodes], [paths])
    out = native(pool).bind(batch, LAYER)(0, *new)
    for i, path in enumerate(paths):
        slots = table[0, [*range(prefix), *(prefix + node for node in path)]]
        expected = brute_force(new.q[i], *held(pool.kv[LAYER][slots]).unbind(2))
        torch.testing.assert_close(out[i].double(), expected.flatten(), rtol=1e-3, atol=1e-3)


@needs_kernels
def test_a_chunk_reads_what_it_wrote() -> None:
    shape, count = (9, 3, 64), 600
    pool, tokens = make_pool(shape, torch.int8), make_tokens(count, shape, torch.int8, 2)
    table = torch.arange(1, count + 1)[None]
    out = native(pool).bind(chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0]), LAYER)(0, *tokens)
    for i in (0, 1, 255, 256, 400, 599):
        expected = brute_force(tokens.q[i], *held(pool.kv[LAYER][1 : i + 2]).unbind(2))
        torch.testing.assert_close(out[i].double(), expected.flatten(), rtol=1e-3, atol=1e-3)


@needs_kernels
def test_what_is_not_finite_shows() -> None:
    """A value that is no number makes all that read it none, and nothing else."""
    shape, count = (9, 3, 64), 40
    pool, tokens = make_pool(shape, torch.int8), make_tokens(count, shape, torch.int8, 2)
    tokens.v[20, 1, 5] = torch.nan
    table = torch.arange(1, count + 1)[None]
    out = native(pool).bind(chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0]), LAYER)(0, *tokens)
    bad = out.view(count, 3, -1).isnan()
    assert bad[20:, 1].all() and bad.sum() == bad[20:, 1].numel()


@needs_kernels
def test_turned_keys() -> None:
    """The keys are those of a pool in float32, rounded."""
    shape, count = (4, 2, 64), 20
    qkv = torch.cat(make_tokens(count, shape, torch.float32, 5), 1)
    cos, sin = rope_table(RopeConfig(), 64, count, torch.float32, "cpu").unsqueeze(2).unbind(1)
    table = torch.arange(1, count + 1)[None]
    batch = chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0])
    wide, narrow = (KVPool([KVSpec(2, 64)], count, dtype, CPU) for dtype in (torch.float32, torch.int8))
    for pool in (wide, narrow):
        native(pool).bind(batch, 0).fused_write(0, qkv.clone(), cos, sin)
    again = KVPool([KVSpec(2, 64)], count, torch.int8, CPU)
    again.write(0, table[0], *wide.kv[0][1:].unbind(2))
    assert torch.equal(narrow.kv[0], again.kv[0])


@needs_kernels
@pytest.mark.parametrize(("dim", "fits"), [(512, True), (513, False), (576, False)])
def test_keys_that_are_too_long_are_refused(dim: int, fits: bool) -> None:
    """512 products of the largest codes have room in 32 bits."""
    layers = [KVSpec(2, 64), KVSpec(1, dim, shared=True)]
    KVPool(layers, 4, torch.bfloat16, CPU)
    if fits:
        KVPool(layers, 4, torch.int8, CPU)
        return
    with pytest.raises(ConfigError, match=f"at most 512 elements, found {dim}"):
        KVPool(layers, 4, torch.int8, CPU)


@needs_kernels
def test_the_longest_keys_of_large_values() -> None:
    shape, count = (2, 1, 512), 20
    pool, tokens = make_pool(shape, torch.int8), make_tokens(count, shape, torch.int8, 2)
    keys = torch.ones_like(tokens.k)
    keys[::2] *= 0.9
    tokens = tokens._replace(q=torch.ones_like(tokens.q), k=keys)
    table = torch.arange(1, count + 1)[None]
    out = native(pool).bind(chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0]), LAYER)(0, *tokens)
    expected = brute_force(tokens.q[-1], *held(pool.kv[LAYER][1 : count + 1]).unbind(2))
    torch.testing.assert_close(out[-1].double(), expected.flatten(), rtol=1e-3, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("lost", [[20], range(300)])
def test_keys_that_are_not_finite_show(value: float, dtype: torch.dtype, lost: list[int]) -> None:
    """Some of them, or all of a chunk of positions."""
    shape, count = (9, 3, 64), 340
    pool, tokens = make_pool(shape, dtype), make_tokens(count, shape, dtype, 2)
    tokens.k[list(lost), 1] = value if value != value else tokens.k[list(lost), 1].sign() * value
    table = torch.arange(1, count + 1)[None]
    out = native(pool).bind(chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0]), LAYER)(0, *tokens)
    bad = out.view(count, 3, -1).isnan()
    assert not bad[: lost[0]].any() and not bad[:, [0, 2]].any()
    if value != value or dtype == torch.int8:
        assert bad[lost[0] :, 1].all()


# -- norms ------------------------------------------------------------------------------------------------------------


@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "half"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.int8, False), (torch.int8, True)],
)
def test_heads_that_are_normed_when_they_are_turned(dtype: torch.dtype, half: bool) -> None:
    """The bits of turning them, and of the norm, one after the other."""
    count, heads, kv_heads, dim = 20, 6, 2, 48
    generator, ops = torch.Generator().manual_seed(0), make_ops(CPU)
    qkv = torch.randn(count, heads + 2 * kv_heads, dim, generator=generator).to(
        torch.bfloat16 if half else torch.float32
    )
    weights, given = [(torch.rand(dim, generator=generator) + 0.5).to(qkv.dtype) for _ in range(2)], qkv.clone()
    table = torch.arange(1, count + 1)[None]
    cos, sin = rope_table(RopeConfig(), dim, count, qkv.dtype, "cpu").unsqueeze(2).unbind(1)
    batch = chunk_batch(table, (ChunkSpan(0, 0, 0, count),), table[0])
    found, expected = (KVPool([KVSpec(kv_heads, dim)], count, dtype, CPU) for _ in range(2))
    norms, made = HeadNorms(*weights, 1e-6, after=True), qkv.clone()
    out = native(found).bind(batch, 0).fused(0, made, cos, sin, norms)
    turned = KVPool([KVSpec(kv_heads, dim)], count, qkv.dtype, CPU)
    native(turned).bind(batch, 0).fused(0, qkv, cos, sin, None)
    keys = ops.rms_norm(turned.kv[0][table[0], :, 0], weights[1], 1e-6)
    expected.write(0, table[0], keys, qkv[:, -kv_heads:])
    queries = ops.rms_norm(qkv[:, :heads], weights[0], 1e-6)
    assert torch.equal(found.kv[0], expected.kv[0]) and torch.equal(made[:, :heads], queries)
    assert torch.equal(out, native(expected).bind(batch, 0).read(0, queries))
    written = KVPool([KVSpec(kv_heads, dim)], count, dtype, CPU)
    native(written).bind(batch, 0).fused_write(0, given[:, heads:].contiguous(), cos, sin, norms)
    assert torch.equal(written.kv[0], expected.kv[0])


OPS = make_ops(CPU)


def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_latents_are_kept_as_a_pool_keeps_them(kept: torch.dtype, dtype: torch.dtype) -> None:
    size, none = 56, torch.zeros(0, dtype=torch.int64)
    rows, slots = made(3, 1, size, dtype=dtype), torch.tensor([4, 1, 6])
    pools = [KVPool([KVSpec(1, size, shared=True)], 8, kept, CPU) for _ in range(2)]
    pools[0].write(0, slots, rows, rows)
    batch = Batch(
        torch.tensor([0]), none, torch.arange(3), slots, torch.tensor([[4, 1, 6]]),
        chunks=(ChunkSpan(0, 0, 0, 3),), prefix_len=none,
    )  # fmt: skip
    OPS.attention(pools[1]).bind(batch, 0).write(0, rows, rows)
    assert torch.equal(pools[0].kv[0], pools[1].kv[0]) and bool(pools[0].kv[0].any())
