"""Attention compiled for GPUs that are not there: tiles fit into shared memory, and products go 16 keys at a time."""

from __future__ import annotations

import importlib.util

import pytest
from absent_gpu import compiled

pytestmark = pytest.mark.slow

# Tiling, type of the pool, compute capability, and bytes of a block there: 8.6 has the least of those that Triton
# kernels run on.
TARGETS = [
    ("TILING_HOPPER", "bfloat16", 90, 227 << 10), ("TILING_HOPPER", "float8_e4m3fn", 90, 227 << 10),
    ("TILING", "bfloat16", 86, 99 << 10),
]  # fmt: skip
LAUNCHING = """
from draftwing.ops.attention import FULL, AttentionKind, Ragged
from draftwing.ops.triton import attention
from draftwing.ops.triton import attention_common
every = sys.argv[4] == "every"
windowed = AttentionKind(128, empty(32, dtype=torch.float32))
kinds = [(1, 32, 6, True, FULL)]
if every:
    kinds += [(*case, FULL) for case in ((1, 1, 1, True), (1, 4, 4, True), (1, 7, 4, False), (16, 32, 6, False))]
if sys.argv[1:3] == ["90", "bfloat16"]:
    kinds += [(1, nodes, depth, True, windowed) for nodes, depth in [(32, 6), (1, 1)][: 1 + every]]
for batch, nodes, depth, exact, kind in kinds:
    kv = empty(4096, 8, 2, 128, dtype=getattr(torch, sys.argv[2]))
    attention.tree_attention(
        empty(batch * nodes, 32, 128, dtype=half), kv, empty(batch + 1, 8192), empty(batch), empty(batch),
        empty(batch, nodes, depth), empty(batch, nodes), empty(batch * nodes, 4096, dtype=half),
        attention.Workspace(torch.device("meta")), exact, nodes, getattr(attention_common, sys.argv[3]),
        kind=kind, inputs_ready=True,
    )
if every:
    attention.tree_attention(  # as drafters have it: nothing is read early
        empty(32, 32, 128, dtype=half), kv, empty(2, 8192), empty(1), empty(1), empty(1, 32, 6), empty(1, 32),
        empty(32, 4096, dtype=half), attention.Workspace(torch.device("meta")), True, 32,
        getattr(attention_common, sys.argv[3]),
    )
for exact in (True, False)[: 1 + every]:  # 16 trees of 4 nodes on average
    ragged = Ragged(empty(16), empty(16), empty(17), 32, 4)
    attention.tree_attention(
        empty(64, 32, 128, dtype=half), kv, empty(17, 8192), empty(64), empty(64), empty(64, 1, 6), empty(64, 1),
        empty(64, 4096, dtype=half), attention.Workspace(torch.device("meta")), exact, 32,
        getattr(attention_common, sys.argv[3]), ragged, inputs_ready=True,
    )
"""


@pytest.mark.further(pool="float8_e4m3fn")
@pytest.mark.further(capability=86)
@pytest.mark.further(cases="every")
@pytest.mark.parametrize("cases", ["largest", "every"])
@pytest.mark.parametrize(("tiling", "pool", "capability", "limit"), TARGETS)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_attention_fits(tmp_path, tiling: str, pool: str, capability: int, limit: int, cases: str) -> None:
    launches = compiled(LAUNCHING, tmp_path, capability, pool, tiling, cases)
    windowed = (capability, pool) == (90, "bfloat16")
    many = 10 + 3 * windowed if cases == "every" else 3 + 2 * windowed
    assert len(launches) == many, "a large tree takes two launches"
    assert max(int(shared) for shared, *_ in launches) <= limit, launches
    # Neighbours along a product that a lane holds. With 4 two instructions have 32 keys between them, and a row's bits
    # would depend on what lies next to its own chunk of 16.
    assert all(widths == ["2"] for _, *widths in launches), launches


LATENTS = """
from draftwing.ops.attention import AttentionKind
from draftwing.ops.triton import attention, attention_common, attention_prefill
tiling = getattr(attention_common, sys.argv[3])
kv, kind = empty(4096, 1, 1, 576, dtype=getattr(torch, sys.argv[2])), AttentionKind(scalar=192, values=512)
for nodes, depth, exact in [(1, 1, True), (8, 5, True), (8, 5, False), (60, 6, True)]:
    attention.tree_attention(
        empty(nodes, 16, 576, dtype=half), kv, empty(2, 8192), empty(1), empty(1), empty(1, nodes, depth),
        empty(1, nodes), empty(nodes, 16 * 512, dtype=half), attention.Workspace(torch.device("meta")), exact, nodes,
        tiling, kind=kind, inputs_ready=True,
    )
for exact in (True, False):
    attention_prefill.prefill_attention(
        empty(512, 16, 576, dtype=half), kv, empty(2, 8192), empty(1), empty(32, 5, dtype=torch.int32),
        empty(512, 16 * 512, dtype=half), exact, tiling, kind=kind,
    )
"""


@pytest.mark.exhaustive  # of other heads the same is seen in less time
@pytest.mark.parametrize(
    ("tiling", "pool", "capability"),
    [
        ("TILING_WIDEST", "bfloat16", 86),
        ("TILING_LATENT_HOPPER", "bfloat16", 90),
        ("TILING_LATENT_HOPPER", "float8_e4m3fn", 90),
    ],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_latents_fit(tmp_path, tiling: str, pool: str, capability: int) -> None:
    launches = compiled(LATENTS, tmp_path, capability, pool, tiling)
    limit = next(most for *_, of, most in TARGETS if of == capability)
    assert len(launches) == 6 and max(int(shared) for shared, *_ in launches) <= limit, launches
    assert all(widths == ["2"] for _, *widths in launches), launches
