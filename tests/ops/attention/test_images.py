"""Chunks with images whose tokens see each other, by Triton's kernel: transformers' masks in float64, and the same bits
alone, in a batch, in other tiles, and where a chunk begins within an image."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attention_cases import TINY
from torch import Tensor
from transformers import masking_utils as theirs

from draftwing.kv.pool import FP8, KVPool, KVSpec
from draftwing.ops.attention.batch import AttentionKind, Batch, ChunkSpan
from draftwing.ops.table import TorchOps

chunked = pytest.importorskip("draftwing.ops.attention.triton_prefill")
GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Of two texts: an image in the middle, one at the end of a chunk, two with a token between them; one at the begin.
IMAGES = [((7, 47), (95, 130)), ((0, 20), (21, 60), (80, 85))]
LENGTHS = [140, 90]
# Chunks of them: row of the page table, start, end.
CHUNKS = [(0, 0, 60), (1, 0, 60), (0, 60, 130), (1, 60, 90), (0, 130, 140), (0, 20, 60), (1, 33, 85)]


class Layer(NamedTuple):
    """One layer of a pool with the keys and values of some texts, and their queries."""

    pool: KVPool
    table: Tensor  # [B, L]
    q: list[Tensor]  # [T, heads, dim] of each text
    kv: list[Tensor]  # [T, kv_heads, 2, dim]


def layer_of(
    lengths: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, pool_dtype: torch.dtype,
    device: torch.device,
) -> Layer:  # fmt: skip
    rng, total = torch.Generator().manual_seed(1), sum(lengths)
    slots = torch.randperm(2 * total, generator=rng) + 1
    table = torch.zeros(len(lengths), max(lengths) + 8, dtype=torch.int64)
    pool = KVPool([KVSpec(heads[1], dim)], 2 * total, pool_dtype, device)
    made = (torch.randn(2 * total + 1, heads[1], 2, dim, generator=rng) * 0.7).to(pool_dtype)
    pool.kv[0].copy_(made)
    queries, kept = [], []
    for row, own in enumerate(slots[:total].split(lengths)):
        table[row, : len(own)] = own
        queries.append((torch.randn(len(own), heads[0], dim, generator=rng) * 2).to(dtype))
        kept.append(made[own].double())
    return Layer(pool, table.to(device), queries, kept)


def attend(
    ops: TorchOps, layer: Layer, kind: AttentionKind, chunks: list[tuple[int, int, int]],
    images: list[tuple[tuple[int, int], ...]], exact: bool = True,
) -> list[Tensor]:  # fmt: skip
    """What the queries of each chunk get, together in one batch."""
    device, spans, offset = layer.table.device, list[ChunkSpan](), 0
    for i, (row, start, end) in enumerate(chunks):
        some = tuple(one for one in images[row] if one[0] < end and start < one[1])
        spans.append(ChunkSpan(i, offset, start, end - start, mutual=some))
        offset += end - start
    rows = torch.tensor([row for row, *_ in chunks], device=device)
    none = torch.zeros(offset, dtype=torch.int64, device=device)
    mutual = "all" if any(span.mutual for span in spans) else ""
    batch = Batch(rows, none, none, none, layer.table, none[:1], chunks=tuple(spans), mutual=mutual)
    q = torch.cat([layer.q[row][start:end] for row, start, end in chunks]).to(device)
    found = ops.attention(layer.pool, exact).bind(batch, 0).read(0, q, kind)
    return list(found.cpu().split([end - start for _, start, end in chunks]))


def expected(layer: Layer, row: int, kind: AttentionKind, images: tuple[tuple[int, int], ...]) -> Tensor:
    """In float64, with the mask that transformers makes for Gemma 3's and 4's layers, [T, heads * dim]."""
    q, (k, v) = layer.q[row].double(), layer.kv[row].unbind(2)
    block = torch.full((1, len(q)), -1)
    for number, (start, end) in enumerate(images):
        block[0, start:end] = number
    sees = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(block))
    if kind.window:
        sees = theirs.and_masks(sees, theirs.sliding_window_overlay(kind.window))
    at, zero = torch.arange(len(q)), torch.tensor(0)
    mask = sees(zero, zero, at[:, None], at[None])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * kind.scale(q.shape[2])
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys reach many splits, and tiles are large, so that the interpreter has time for them."""
    own = TINY._replace(prefill_rows=64, fast_rows=64)
    monkeypatch.setattr(chunked, "pick_tiling", lambda kv: own)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("window", [0, 12, 50, 300])
@pytest.mark.parametrize(
    ("dtype", "pool"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)]
)
def test_masks_of_transformers(
    dtype: torch.dtype, pool: torch.dtype, window: int, heads: tuple[int, int], exact: bool, triton_ops: TorchOps
) -> None:
    layer = layer_of(LENGTHS, heads, 32, dtype, pool, triton_ops.device)
    kind = AttentionKind(window=window, scalar=24)
    whole = [expected(layer, row, kind, images) for row, images in enumerate(IMAGES)]
    for (row, start, end), found in zip(CHUNKS, attend(triton_ops, layer, kind, CHUNKS, IMAGES, exact), strict=True):
        close = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), whole[row][start:end], atol=close, rtol=close)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_what_is_beside(
    dtype: torch.dtype, window: int, triton_ops: TorchOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles too; text in front of images has the bits that it has without them."""
    layer, kind = layer_of(LENGTHS, (4, 2), 16, dtype, dtype, triton_ops.device), AttentionKind(window=window)
    together = attend(triton_ops, layer, kind, CHUNKS, IMAGES)
    for i in (1, 2, 5):
        assert torch.equal(attend(triton_ops, layer, kind, [CHUNKS[i]], IMAGES)[0], together[i]), i
    assert torch.equal(together[5], together[0][20:]) and torch.equal(together[6][:27], together[1][33:])
    plain = attend(triton_ops, layer, kind, CHUNKS, [(), ()])
    for i, text in ((0, slice(7)), (0, slice(47, None)), (2, slice(35)), (4, slice(None)), (1, slice(20, 21))):
        assert torch.equal(plain[i][text], together[i][text])
    assert not torch.equal(plain[0], together[0])
    monkeypatch.setattr(chunked, "pick_tiling", lambda kv: TINY)
    others = attend(triton_ops, layer, kind, CHUNKS, IMAGES)
    assert all(torch.equal(*pair) for pair in zip(others, together, strict=True))


LARGE = [((300, 556), (700, 956)), ((0, 256), (1500, 1780))]  # as images of Gemma 3 and 4
LARGE_CHUNKS = [(0, 0, 956), (1, 0, 1400), (0, 956, 1200), (1, 1400, 2000), (1, 1600, 2000)]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("pool", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "dim"), [((8, 4), 256), ((32, 16), 128), ((16, 8), 256), ((32, 4), 512)])
def test_the_real_tiling(
    heads: tuple[int, int], dim: int, pool: torch.dtype, window: int, triton_ops: TorchOps
) -> None:
    """Of Gemma 3 27B, too, whose text goes through the kernel of compute capability 9.0 where no image is."""
    if pool == FP8 and not triton_ops.reads_fp8_pool:
        pytest.skip("the device does not read fp8")
    layer = layer_of([1200, 2000], heads, dim, torch.bfloat16, pool, triton_ops.device)
    kind = AttentionKind(window=window)
    together = attend(triton_ops, layer, kind, LARGE_CHUNKS, LARGE)
    for exact in (True, False):
        made = together if exact else attend(triton_ops, layer, kind, LARGE_CHUNKS, LARGE, False)
        for (row, start, end), found in zip(LARGE_CHUNKS, made, strict=True):
            whole = expected(layer, row, kind, LARGE[row])[start:end]
            torch.testing.assert_close(found.double(), whole, atol=2e-2, rtol=2e-2)
    for chunk, found in zip(LARGE_CHUNKS, together, strict=True):
        assert torch.equal(attend(triton_ops, layer, kind, [chunk], LARGE)[0], found), chunk
    assert torch.equal(together[4], together[3][200:])
    plain = attend(triton_ops, layer, kind, LARGE_CHUNKS, [(), ()])
    for i, text in ((0, slice(300)), (0, slice(556, 700)), (1, slice(256, None)), (2, slice(None)), (3, slice(100))):
        assert torch.equal(plain[i][text], together[i][text]), "text has the bits that it has without images"
