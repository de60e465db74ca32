"""Triton attention against a brute force in float64, and its promise about bits; over pools in fp8, too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import ONE_LANE, TINY, Case, attention, chunked, common, make_case
from decoder_configs import decoder_config
from plain_attention import FunctionAttend, brute_force
from torch import Tensor

from draftwing.kv.pool import FP8, KVPool, KVSpec, zeros_as_written
from draftwing.layers.decoder_layer import DecoderLayer
from draftwing.layers.norm import RMSNorm
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops.attention.batch import AttentionKind, Batch, ChunkSpan
from draftwing.ops.attention.triton_tiles import Room, prefill_tiles
from draftwing.ops.rope.spec import rotate

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
paged = pytest.importorskip("draftwing.ops.attention.triton")
triton_tree = pytest.importorskip("draftwing.ops.attention.triton_tree")
rope = pytest.importorskip("draftwing.ops.rope.triton")
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("mended_interpreter")
LATENT = 576  # elements of DeepSeek's latents, of which 512 are the value
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def pool_layer(kv_heads: int, dim: int) -> Tensor:
    return torch.empty(1, kv_heads, 2, dim, dtype=torch.bfloat16, device="meta")


def test_plans() -> None:
    """An 8B Llama's on an H200."""

    def plan(batch: int, queries: int, depth: int, exact: bool, **changes: int) -> Any:
        tiling = common.TILING_HOPPER._replace(**changes)
        return attention.plan(batch, queries, depth, 32, pool_layer(8, 128), 16384, queries, exact, tiling)

    decode, many = plan(1, 1, 1, False), plan(64, 1, 1, False)
    assert (decode.exact, decode.two_launches, decode.rows, decode.lanes) == (True, False, 16, 33)
    assert (many.exact, many.lanes, many.parts) == (True, 1, 0)  # a single key is nothing to be masked
    one = plan(1, 32, 6, False)
    assert (one.exact, one.two_launches, one.rows, one.lanes) == (False, False, 16, 4)
    for several in plan(8, 32, 6, False), plan(16, 32, 6, False):  # a multiprocessor holds one such tile
        assert (several.exact, several.rows, several.lanes) == (False, 64, 1)
    assert plan(1, 32, 6, True)[:4] == (True, True, 128, 16)
    assert plan(16, 32, 6, True) == (True, True, 128, 1, 2)
    near = attention.plan(1, 1, 1, 32, pool_layer(8, 128), 16384, 1, False, common.TILING_HOPPER, reach=128)
    assert (near.lanes, near.parts) == (3, decode.parts), "no lanes for splits that no query reaches"
    assert plan(16, 300, 6, False).exact, "the window has no room"
    assert plan(16, 33, 33, False).exact, "paths are too long to be looked for"
    assert plan(1, 4, 4, True)[:3] == (True, False, 16)  # a chain's rows are one tile
    assert plan(16, 32, 6, True, context_rows=0)[:3] == (True, False, 16)


def test_long_page_tables_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of four requests with 131,072 positions are shared by all multiprocessors of an H200, as those of one."""

    def lanes(memory: int, batch: int) -> int:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
        room = attention.partial_bytes(torch.device("cuda"))
        assert room.bit_count() == 1 and room <= max(attention.PARTIAL_BYTES, memory // attention.PARTIAL_SHARE)
        how = attention.plan(
            batch, 16, 6, 32, pool_layer(8, 128), 131072, 16, True, common.TILING_HOPPER, room=room
        )  # fmt: skip
        assert batch * 16 * 32 * how.parts * 128 * 4 <= room
        return int(how.lanes)

    h200, small = 150_100_000_000, 24_000_000_000
    assert [lanes(h200, batch) for batch in (1, 4, 8, 16)] == [16, 4, 2, 1]
    assert [lanes(small, batch) for batch in (1, 4)] == [16, 1], "partial results would take too much"
    assert attention.partial_bytes(torch.device("cpu")) == attention.PARTIAL_BYTES


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("heads, nodes", [((2, 2), 6), ((6, 2), 1), ((32, 1), 2)])
def test_trees_against_brute_force(heads: tuple[int, int], nodes: int, exact: bool, device: torch.device) -> None:
    case = make_case([37, 70, 0], nodes, device, heads, dim=16)
    torch.testing.assert_close(case.run(exact).double(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_page_tables_of_32_bits(exact: bool, device: torch.device) -> None:
    """Over a pool in which a key's place takes more: slots are the last ones of it."""
    case = make_case([37, 70, 0], 4, device, (4, 2), dim=16, dtype=torch.float16)
    first = (1 << 31) // case.kv[0].numel()
    kv = zeros_as_written((first + len(case.kv), *case.kv.shape[1:]), case.kv.dtype, device)
    kv[first:] = case.kv
    far = replace(case, kv=kv, table=(case.table + first).int())
    assert torch.equal(far.run(exact), case.run(exact))
    assert torch.equal(far.alone(1, 3).as_chunk(5), case.alone(1, 3).as_chunk(5))


@pytest.mark.further(length=[16, 31, 64, 101])
@pytest.mark.parametrize("length", [0, 15, 16, 31, 64, 101, 127, 128, 239])
def test_around_the_edges(length: int, device: torch.device) -> None:
    """In one lane and several, in one launch and two, nodes gathered at once or not: the same bits."""
    case = make_case([length, 0], 6, device, (4, 1), dim=16, chain=length % 2 == 1, seed=length)
    one = case.run(tiling=ONE_LANE._replace(context_rows=0, own=64))
    torch.testing.assert_close(one.double(), case.expected(), atol=2e-5, rtol=1e-4)
    assert torch.equal(case.run(tiling=TINY._replace(context_rows=0), inputs_ready=True), one)
    assert torch.equal(case.run(tiling=TINY, inputs_ready=True), one)
    assert torch.equal(case.run(tiling=ONE_LANE), one)


@pytest.mark.parametrize("heads, nodes", [((7, 1), 5), ((3, 1), 7), ((16, 1), 3)])
def test_bits_where_tiles_cut_groups(heads: tuple[int, int], nodes: int, device: torch.device) -> None:
    case = make_case([97, 0], nodes, device, heads, dim=16)
    two = case.run()
    torch.testing.assert_close(two.double(), case.expected(), atol=2e-5, rtol=1e-4)
    assert torch.equal(case.run(tiling=TINY._replace(context_rows=0)), two)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("dim, slices", [(80, 4), (64, 2)])
@pytest.mark.covering
def test_programs_share_a_merge(dim: int, slices: int, lanes: int, device: torch.device) -> None:
    """Behind long page tables each has some elements of values; the bits are those of one program."""
    case = make_case([37, 239, 0], 6, device, (4, 1), dim=dim)
    tiling = TINY._replace(programs=512, context_programs=3 * lanes)
    how = attention.plan(3, 6, case.path.shape[2], 4, case.kv, case.table.shape[1], 6, True, tiling)
    assert how.two_launches and (how.lanes > 1) == (lanes > 1)
    splits = attention.split_count(case.table.shape[1], tiling)
    assert attention.merge_slices(6, splits, dim, 0, tiling._replace(shared_merge=splits)) == slices
    one = case.run(tiling=tiling._replace(shared_merge=splits + 1))
    torch.testing.assert_close(one.double(), case.expected(), atol=2e-5, rtol=1e-4)
    assert torch.equal(case.run(tiling=tiling._replace(shared_merge=splits)), one)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no CUDA device, and the interpreter runs one program after the other")
@pytest.mark.parametrize("nodes, programs", [(1, 24), (2, 12), (2, 24)])
def test_the_last_programs_of_a_tile_share_its_merge(nodes: int, programs: int, device: torch.device) -> None:
    """They wait for each other, time and again, with the bits of one program, where all programs have splits and where
    some have none."""
    tiling = TINY._replace(programs=programs, waiting=78, shared_part=1)
    for begin in (0, 16, 239, 511, 513, 700):  # of four lanes all have some from 512 on, of eight from 1,024
        case = make_case([1100, begin, 0], nodes, device, (2, 1), dim=64)
        how = attention.plan(3, nodes, case.path.shape[2], 2, case.kv, case.table.shape[1], nodes, True, tiling)
        assert how.lanes == programs // 3 and not how.two_launches
        one = case.run(tiling=tiling._replace(shared_merge=1 << 30))
        torch.testing.assert_close(one.double(), case.expected(), atol=2e-5, rtol=1e-4)
        for _ in range(20):
            assert torch.equal(case.run(tiling=tiling._replace(shared_merge=2)), one)


@triton.jit
def _turn_without_waiting(ticket, lanes, MERGERS: tl.constexpr):
    tl.atomic_add(ticket, 1)  # an earlier program has said already that it has merged
    return tl.program_id(0) - (lanes - MERGERS)


@pytest.mark.skipif(GPU, reason="programs are to run one after the other")
@pytest.mark.parametrize("nodes, programs, mergers", [(1, 24, 4), (2, 12, 2), (2, 24, 4)])
def test_each_program_merges_some_elements(
    nodes: int, programs: int, mergers: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together all of them, with the bits of one program. Here no program waits for others, and merges what an earlier
    launch stored."""
    monkeypatch.setattr(triton_tree, "_merging_turn", _turn_without_waiting)
    tiling = TINY._replace(programs=programs, waiting=78, shared_part=1, shared_merge=1 << 30)
    case, workspace = make_case([1100, 700, 0], nodes, device, (2, 1), dim=80), attention.Workspace(device)
    splits = attention.split_count(case.table.shape[1], tiling)
    shared = tiling._replace(shared_merge=2)
    assert attention.mergers_of(3, programs // 3, 1, splits, 80, 0, shared) == mergers
    one = case.run(tiling=tiling, workspace=workspace)
    torch.testing.assert_close(one.double(), case.expected(), atol=2e-5, rtol=1e-4)
    assert torch.equal(case.run(tiling=shared, workspace=workspace), one)


def test_when_programs_of_one_launch_share_a_merge() -> None:
    """Those of an 8B Llama's chains, never so many that those who wait fill a device."""

    def mergers(
        batch: int, length: int = 131072, lanes: int = 33, rows: int = 16, dim: int = 128, more: int = 0
    ) -> int:
        splits = attention.split_count(length, common.TILING_HOPPER)
        part = rows * common.padded(dim)
        return int(attention.mergers_of(8 * batch, lanes, part, splits, dim, more, common.TILING_HOPPER))

    assert [mergers(batch) for batch in (1, 2, 4, 8, 10, 16)] == [4, 4, 2, 2, 1, 1]
    assert mergers(1, length=8192) == mergers(1, rows=4) == mergers(1, dim=512, more=64) == 1
    assert [mergers(1, lanes=lanes) for lanes in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert all((mergers(batch) - 1) * 8 * batch < 78 for batch in range(1, 300))
    assert attention.mergers_of(8, 33, 2048, 268, 128, 0, common.TILING) == 1, "devices with few multiprocessors"


def test_when_programs_share_a_merge() -> None:
    """Those of an 8B Llama's trees of 16 nodes on an H200."""

    def slices(batch: int, length: int, dim: int = 128, more: int = 0) -> int:
        splits = attention.split_count(length, common.TILING_HOPPER)
        return int(attention.merge_slices(32 * batch, splits, dim, more, common.TILING_HOPPER))

    assert [slices(batch, 131072) for batch in (1, 2, 4, 8)] == [4, 4, 2, 1]
    assert slices(1, 8192) == 1, "there is little to merge"
    assert slices(1, 131072, 64) == 2 and slices(1, 131072, 512, 64) == 1


@pytest.mark.parametrize("lanes", [1, 3])
def test_masked_trees_in_one_lane_and_several(lanes: int, device: torch.device) -> None:
    case = make_case([63, 127, 239, 0], 6, device, (4, 1), dim=16)
    tiling, inputs_ready = TINY._replace(programs=8 * lanes), lanes > 1
    how = attention.plan(4, 6, case.path.shape[2], 4, case.kv, case.table.shape[1], 6, False, tiling)
    assert not how.exact and (how.lanes > 1) == (lanes > 1)
    found = case.run(False, tiling, inputs_ready=inputs_ready)
    torch.testing.assert_close(found.double(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_nan_of_a_node_reaches_its_descendants_alone(exact: bool, chain: bool, device: torch.device) -> None:
    case = make_case([37, 70, 0], 6, device, (4, 2), dim=16, chain=chain)
    before, node = case.run(exact), 2
    case.kv[case.table[case.rows[0], case.prefix[0] + node]] = torch.nan
    after = case.run(exact)
    sees = [node in case.path[0, each, : case.path_len[0, each]].tolist() for each in range(6)]
    assert any(sees) and not all(sees)
    for each, seen in enumerate(sees):
        assert after[each].isnan().all() if seen else torch.equal(after[each], before[each])
    assert torch.equal(after[6:12], before[6:12])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: kernels do not overlap in the interpreter")
@pytest.mark.parametrize("nodes, exact", [(1, True), (16, False), (32, True)])
def test_what_is_read_before_the_kernel_in_front_has_ended(nodes: int, exact: bool, device: torch.device) -> None:
    """Of each layer that kernel writes queries and own keys, which change; what is inputs_ready stays."""
    case = make_case([300, 2300, 0], nodes, device, (32, 8), 128, torch.bfloat16)
    tiling, workspace, count = common.pick_tiling(case.kv), attention.Workspace(device), 3 * nodes
    slots = torch.cat([case.table[case.rows[b], case.prefix[b] : case.prefix[b] + nodes] for b in range(3)])
    cos, sin = rope_table(RopeConfig(), 128, count, torch.bfloat16, device).unbind(1)
    rng = torch.Generator().manual_seed(nodes)
    layers = torch.randn(40, count, 48, 128, generator=rng).to(device, torch.bfloat16)
    found: list[list[Tensor]] = []
    for inputs_ready in (False, True):
        qkv = layers.clone()  # a kernel of torch's, after which everything here comes
        found.append([])
        for each in qkv:
            rope.rope_and_write(each, cos, sin, slots, case.kv)
            out = torch.full((count, 32 * 128), torch.nan, dtype=torch.bfloat16, device=device)
            attention.tree_attention(
                each, case.kv, case.table, case.rows, case.prefix, case.path, case.path_len, out, workspace, exact,
                nodes, tiling, inputs_ready=inputs_ready,
            )  # fmt: skip
            found[-1].append(out[: 2 * nodes])  # the dummy's slot is written several times
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("exact", [True, False])
def test_a_chain_longer_than_units(exact: bool, device: torch.device) -> None:
    case = make_case([41, 0], 40 if exact else 32, device, (1, 1), dim=16, chain=True)
    torch.testing.assert_close(case.run(exact).double(), case.expected(), atol=2e-5, rtol=1e-4)


def test_a_window_too_wide_to_be_masked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([41, 0], 20, device, (2, 1), dim=16, chain=True)
    exact, masked = case.run(), case.run(exact=False)
    monkeypatch.setattr(attention, "WINDOW_BYTES", 32 * 16 * 4 - 1)
    assert torch.equal(case.run(exact=False), exact)
    torch.testing.assert_close(masked, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter's memory has no end")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "dim, nodes", [(64, 300), (128, 140), (256, 70), (256, 300), (512, 40), (512, 300), (LATENT, 16), (LATENT, 300)]
)
def test_wide_windows_fit(dtype: torch.dtype, dim: int, nodes: int, device: torch.device) -> None:
    case = make_case([50, 0], nodes, device, (4, 2), dim, dtype, values=512 if dim == LATENT else 0)
    tiling = common.pick_tiling(case.kv)
    masked, exact = (case.run(how, tiling._replace(programs=1)) for how in (False, True))
    torch.testing.assert_close(masked, exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.further(dim=[512, LATENT], dtype=[torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [48, 128, 512, LATENT])
def test_dtypes_and_head_sizes(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    case = make_case([50, 0], 3, device, (4, 2), dim, dtype, values=512 if dim == LATENT else 0)
    for exact in (True, False):
        tiling = common.pick_tiling(case.kv)._replace(programs=264 if exact else 1) if GPU else None
        torch.testing.assert_close(
            case.run(exact, tiling).double(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype, heads", [(torch.float32, (3, 1)), (torch.float32, (2, 2)), (torch.bfloat16, (4, 1))])
def test_bits_do_not_depend_on_tree_or_batch(dtype: torch.dtype, heads: tuple[int, int], device: torch.device) -> None:
    """A node of a tree, the same query as a plain decode (its path committed), in a batch, and in a prefill chunk."""
    case = make_case([39, 230, 0], 5, device, heads, dim=16, dtype=dtype)
    together = case.run().view(3, 5, -1)
    for b, node in [(0, 4), (1, 3)]:
        alone = case.alone(b, node)
        assert torch.equal(alone.run()[0], together[b, node])
        for length in (1, 21):
            assert torch.equal(alone.as_chunk(length), together[b, node])


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REAL = [  # of chains of 4, and of trees
    (BF16, (32, 8), 128, 4), (BF16, (32, 8), 128, 7), (BF16, (32, 8), 128, 32), (BF16, (32, 8), 128, 60),
    (BF16, (9, 3), 64, 7), (BF16, (9, 3), 64, 60), (BF16, (8, 8), 128, 32), (BF16, (8, 2), 256, 4),
    (BF16, (8, 2), 256, 32), (BF16, (28, 4), 128, 32), (FP16, (32, 8), 128, 32), (FP16, (9, 3), 64, 4),
    (FP16, (8, 8), 256, 60), (FP32, (32, 8), 128, 7), (FP32, (9, 3), 64, 32), (FP32, (8, 8), 256, 4),
    (BF16, (32, 4), 512, 4), (BF16, (8, 1), 512, 32), (BF16, (16, 2), 512, 60), (FP16, (8, 2), 512, 7),
    (FP32, (8, 1), 512, 4), (BF16, (16, 1), LATENT, 4), (BF16, (16, 1), LATENT, 32), (BF16, (20, 1), LATENT, 7),
    (BF16, (128, 1), LATENT, 8), (FP16, (16, 1), LATENT, 60), (FP32, (16, 1), LATENT, 4),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: too large for the interpreter")
@pytest.mark.parametrize("dtype, heads, dim, nodes", REAL)
def test_bits_of_the_real_tiling(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, nodes: int, device: torch.device
) -> None:
    """Lengths around the borders of units, of short and of long splits; tiles of the sizes that this device gets."""
    lengths = [2047, 127, 300, 511, 2050, 2561, 5000, 0]
    latent = 512 if dim == LATENT else 0
    case = make_case(lengths, nodes, device, heads, dim, dtype, chain=nodes == 4, values=latent)
    tiling = common.pick_tiling(case.kv)
    together = case.run(tiling=tiling)
    close = TOLERANCE[dtype]
    torch.testing.assert_close(together.double(), case.expected(), atol=close, rtol=close)
    for changes in ({}, dict(programs=1, context_programs=1), dict(context_rows=0)):
        assert torch.equal(case.run(tiling=tiling._replace(**changes), inputs_ready=True), together), changes
    together = together.view(len(lengths), nodes, -1)
    for b in range(len(lengths) - 1):
        for node in {0, nodes // 2, nodes - 2, nodes - 1}:
            alone = case.alone(b, node)
            assert torch.equal(alone.run(tiling=tiling)[0], together[b, node]), (b, node)
            for length in (1, 100):  # alone in its tile, and in the last of several
                assert torch.equal(alone.as_chunk(length, tiling), together[b, node]), (b, node, length)
            copies = 100  # so many that a tile has one lane
            alone.rows, alone.prefix, alone.q = (
                x.repeat_interleave(copies, 0) for x in (alone.rows, alone.prefix, alone.q)
            )
            alone.path, alone.path_len = alone.path.repeat(copies, 1, 1), alone.path_len.repeat(copies, 1)
            assert (alone.run(tiling=tiling) == together[b, node]).all(), (b, node)


@pytest.mark.parametrize("exact", [True, False])
def test_prefill_chunks_against_brute_force(exact: bool, device: torch.device) -> None:
    case = make_case([70, 45, 0], 3, device, (6, 2))
    spans = [(1, 0, 0, 19), (0, 19, 53, 10), (1, 29, 19, 3)]  # chunks of two rows, one with an earlier chunk
    q = torch.randn(32, 6, 32, generator=torch.Generator().manual_seed(3)).to(device)
    out = torch.full((32, 6 * 32), torch.nan, device=device)
    # As of a graph whose other layers can take pieces of tiles, with tiles that are none.
    tiles = prefill_tiles(spans, 3, chunked.prefill_rows(case.kv, exact, TINY), Room(16, 7, 8)).to(device)
    tiles = torch.cat((tiles, torch.zeros_like(tiles[:3])))
    chunked.prefill_attention(q, case.kv, case.table, case.rows, tiles, out, None, exact, TINY)
    for row, offset, start, length in spans:
        for i in range(length):
            slots = case.table[case.rows[row], : start + i + 1]
            torch.testing.assert_close(
                out[offset + i].double(), brute_force(q[offset + i], *case.kv[slots].unbind(2)), atol=2e-5, rtol=1e-4
            )


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: no interpreter for Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, dim", [((32, 8), 128), ((6, 2), 64), ((5, 5), 128)])
@pytest.mark.parametrize("at_once", [0, 16, 40])
def test_overlapped_chunks_against_brute_force(
    heads: tuple[int, int], dim: int, at_once: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Chunks that begin and end around the borders of tiles and units, in one launch, their tiles whole or in pieces;
    with page tables in 64 and in 32 bits: the same bits."""
    tiling = common.pick_tiling(torch.empty(1, heads[1], 2, dim, dtype=dtype, device=device))
    if not tiling.overlap_unit:
        pytest.skip("the device has no such kernel")
    case = make_case([3100, 700, 130, 70, 0], 1, device, heads, dim, dtype)
    spans = [(0, 0, 3000, 100), (1, 100, 0, 257), (2, 357, 127, 1), (3, 358, 63, 5), (2, 363, 0, 128)]
    count = 491
    q = torch.randn(count, heads[0], dim, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    room = Room(128, at_once, 64 if at_once else 0)
    tiles = prefill_tiles(spans, heads[0] // heads[1], chunked.prefill_rows(case.kv, False), room).to(device)
    assert bool((tiles[:, 5] % 32 > 1).any()) == bool(at_once)
    tiles = torch.cat((tiles, torch.zeros_like(tiles[:3])))  # as graphs have where there are none
    outs = [torch.full((count, heads[0] * dim), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    workspace = attention.Workspace(device)
    for out, table in zip(outs, (case.table, case.table.int()), strict=True):
        chunked.prefill_attention(q, case.kv, table, case.rows, tiles, out, workspace, False, tiling)
    assert torch.equal(*outs)
    for row, offset, start, length in spans:
        for i in {0, length // 2, length - 1}:
            k, v = case.kv[case.table[case.rows[row], : start + i + 1]].unbind(2)
            expected = brute_force(q[offset + i], k, v)
            close = TOLERANCE[dtype]
            torch.testing.assert_close(outs[0][offset + i].double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "dim, norm, v_norm, after",
    [(128, False, False, False), (48, False, False, False), (64, True, False, False), (512, True, True, False),
     (48, True, False, True)],
)  # fmt: skip
def test_rope_and_write(
    dtype: torch.dtype, dim: int, norm: bool, v_norm: bool, after: bool, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(dim)
    heads, kv_heads, count = 6, 2, 5
    qkv = torch.randn(count, heads + 2 * kv_heads, dim, generator=rng).to(device, dtype)
    table = rope_table(RopeConfig(), dim, 40, dtype, device)
    positions = torch.randint(40, (count,), generator=rng).to(device)
    slots = (torch.randperm(9, generator=rng)[:count] + 1).to(device)
    norms = [RMSNorm(dim, 1e-6, dtype, device) for _ in range(2)]
    for layer in norms:
        layer.weight.data.copy_(torch.rand(dim, generator=rng) + 0.5)

    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if norm and not after:
        q, k = norms[0](q), norms[1](k)
    if v_norm:
        v = RMSNorm(dim, 1e-6, dtype, device)(v)
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if after:
        q, k = norms[0](q), norms[1](k)
    expected = torch.zeros(10, kv_heads, 2, dim, device=device, dtype=dtype)
    expected[slots] = torch.stack((k, v), 2)

    kv = torch.zeros_like(expected)
    weights = [layer.weight.data for layer in norms] if norm else [None, None]
    rope.rope_and_write(qkv, cos, sin, slots, kv, *weights, 1e-6, v_norm=v_norm, after=after)
    torch.testing.assert_close(qkv[:, :heads], q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(kv, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert v_norm or torch.equal(kv[:, :, 1], expected[:, :, 1])


@pytest.mark.parametrize("beside", [0, 24])
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_write_latents(dtype: torch.dtype, eight: bool, beside: int, device: torch.device) -> None:
    """Of rows that are apart, to a pool of their type and to one in 8 bits; perhaps a norm beside it."""
    latent, turned, count = 96, 16, 5
    stored = FP8 if eight and dtype.itemsize == 2 else dtype
    rng = torch.Generator().manual_seed(7)
    both = torch.randn(count, beside + latent + turned + 9, generator=rng).to(device, dtype)[:, 9:]
    query, made = both.split((beside, latent + turned), 1)
    query_weight = (torch.rand(beside, generator=rng) + 0.5).to(device, dtype)
    weight = (torch.rand(latent, generator=rng) + 0.5).to(device, dtype)
    table = rope_table(RopeConfig(), turned, 40, dtype, device)
    cos, sin = table[torch.randint(40, (count,), generator=rng).to(device)].unsqueeze(2).unbind(1)
    slots = (torch.randperm(9, generator=rng)[:count] + 1).to(device)
    spec = KVSpec(1, latent + turned, shared=True)
    found, expected = (KVPool([spec], 9, stored, device, [(0.5, 0.5)]) for _ in range(2))
    scale = found.scales[0][0]
    out = rope.write_latents(
        made, weight, 1e-6, cos, sin, slots, found.kv[0], scale, (query, query_weight) if beside else None
    )

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return (x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()).to(dtype)

    assert out.shape == query.shape
    torch.testing.assert_close(out, norm(query, query_weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    normed = norm(made[:, :latent], weight)
    keys = torch.cat((normed.unsqueeze(1), rotate(made[:, None, latent:], cos, sin)), 2)
    expected.write(0, slots, keys, keys)
    unit = 0.13 if stored == FP8 else TOLERANCE[dtype]  # a code more or less
    torch.testing.assert_close(found.kv[0].float(), expected.kv[0].float(), atol=unit, rtol=unit)


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_that_norms_its_heads(gated: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Qwen3's layers leave norm, rope and the pool to the kernel, and get what they would get without it; so do
    Qwen3.5's, with gates before their queries and heads of which a part is turned."""
    config = decoder_config(
        architecture="Qwen3ForCausalLM", hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
        ffn_size=64, vocab_size=16, max_positions=64, qk_norm=True,
    )  # fmt: skip
    mixer = replace(config.attention, gated=gated, rotary=8 * gated)
    layer = DecoderLayer(replace(config.layers[0], mixer=mixer), 0, torch.float32, device)
    rng = torch.Generator().manual_seed(3)
    for param in layer.parameters():
        param.data.copy_(torch.randn(param.shape, generator=rng) * 0.2 + (param.dim() == 1))
        param.requires_grad_(False)
    count = 6
    x = torch.randn(count, 64, generator=rng).to(device)
    pool = KVPool([KVSpec(2, 32)], 20, torch.float32, device)
    table = torch.arange(1, 21, device=device).view(1, 20)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    batch = Batch(rows, positions, positions, table[0, :count], table, rows, chunks=(ChunkSpan(0, 0, 0, count),))
    rope = RopeConfig(dims=8 * gated)
    cos, sin = rope_table(rope, 32, count, torch.float32, device).unsqueeze(2).unbind(1)
    calls, kernel = [], paged.rope_and_write
    monkeypatch.setattr(paged, "rope_and_write", lambda *args, **kw: (calls.append(args), kernel(*args, **kw))[1])
    results, written = [], []
    for fused in (True, False):
        attend = paged.PagedAttention(pool, exact=True).bind(batch, 0)
        results.append(layer(x, cos, sin, attend if fused else FunctionAttend(attend)))
        written.append(pool.kv[0].clone())
    assert len(calls) == 1
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(written[0], written[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [True, False])
def test_the_backend(chunks: bool, device: torch.device) -> None:
    """Both ways into it, for a layer behind others, against the brute force."""
    case = make_case([20, 33, 0], 4, device, (4, 2))
    pool = KVPool([KVSpec(1, 16), KVSpec(2, 32)], case.kv.shape[0] - 1, torch.float32, device)
    rng = torch.Generator().manual_seed(1)
    count = 12
    qkv = torch.randn(count, 8, 32, generator=rng).to(device)
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    cos, sin = rope_table(RopeConfig(), 32, count, torch.float32, device).unsqueeze(2).unbind(1)
    if chunks:
        slots = case.table[case.rows[0], 20:32]
        where = dict(chunks=(ChunkSpan(0, 0, 20, 5), ChunkSpan(0, 5, 25, 7)))
    else:
        slots = torch.cat([case.table[case.rows[b], case.prefix[b] : case.prefix[b] + 4] for b in range(3)])
        where = dict(path=case.path, path_len=case.path_len, window=4)
    batch = Batch(case.rows, nothing, positions, slots, case.table, case.prefix, **where)
    turned = rotate(qkv[:, :6], cos, sin)

    results = []
    for fused in (True, False):
        pool.kv[1].copy_(case.kv)
        attend = paged.PagedAttention(pool, exact=True).bind(batch, 1)
        if fused:
            results.append(attend.fused(0, qkv.clone(), cos, sin, None))
            written = pool.kv[1].clone()
            # Queries alone, of a layer that reads what another one wrote.
            again = attend.fused(0, qkv[:, :4].clone(), cos, sin, None, AttentionKind(reads=True))
            real = count if chunks else 8  # the dummy's slot is written several times, who comes last is not said
            assert torch.equal(again[:real], results[0][:real])
            torch.testing.assert_close(pool.kv[1], written, rtol=0, atol=0, equal_nan=True)
        else:
            results.append(attend(0, turned[:, :4], turned[:, 4:], qkv[:, 6:]))
    case.kv, case.q = pool.kv[1], turned[:, :4]
    if chunks:
        read = [case.table[case.rows[0], : 21 + i] for i in range(count)]
        expected = torch.stack([brute_force(case.q[i], *case.kv[read[i]].unbind(2)) for i in range(count)])
    else:
        expected = case.expected()
        results, expected = [r[:real] for r in results], expected[:real]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0].double(), expected, atol=2e-5, rtol=1e-4)


# -- a pool in float8_e4m3fn: what is written is torch's rounding, what is read is exactly that --

SCALES = (0.5, 0.03125)
CLOSE = 5e-3


def codes(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


def in_fp8(case: Case) -> tuple[Case, Tensor]:
    """The case with its pool in 8 bits, and what that holds: NaN where nobody may read."""
    by = torch.tensor(SCALES, device=case.kv.device)[: case.kv.shape[2], None]  # of values that are keys there is one
    stored = (case.kv.float() / by).clamp(-448, 448).to(FP8)
    return replace(case, kv=stored, scales=SCALES), stored.double() * by


def test_what_is_written_in_fp8(device: torch.device) -> None:
    """Every number of 16 bits is rounded as torch rounds it, by the kernel and by `KVPool.write`."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)][:: 1 if GPU else 5]  # the interpreter takes its time
    every = torch.cat([every, every.new_zeros(-len(every) % 128)])
    qkv = every.view(-1, 4, 32).to(device)  # 2 query heads, 1 key head, 1 value head
    qkv[0, 2, 0] = torch.nan
    count = len(qkv)
    slots = torch.arange(1, count + 1, device=device)
    cos, sin = torch.ones(count, 32, device=device).bfloat16(), torch.zeros(count, 32, device=device).bfloat16()
    by_kernel, by_torch = (KVPool([KVSpec(1, 32)], count, FP8, device, [SCALES]) for _ in range(2))
    rope.rope_and_write(qkv.clone(), cos, sin, slots, by_kernel.kv[0], scales=SCALES)
    by_torch.write(0, slots, qkv[:, 2:3], qkv[:, 3:])
    expected = (qkv[:, 2:].float().cpu() / torch.tensor(SCALES)[:, None]).clamp(-448, 448).to(FP8)
    assert torch.isnan(by_torch.kv[0][1, 0, 0, 0].float()) and torch.isnan(by_kernel.kv[0][1, 0, 0, 0].float())
    numbers = (~torch.isnan(expected.float())) & (codes(expected) & 0x7F > 0)  # to turn a zero may change its sign
    for pool in (by_kernel, by_torch):
        assert torch.equal(codes(pool.kv[0][1:, 0].cpu())[numbers], codes(expected)[numbers])


def test_turned_keys_in_fp8(device: torch.device) -> None:
    """The keys are those of a pool in 16 bits, rounded."""
    rng = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, 10, 64, generator=rng).to(device, torch.bfloat16)
    table = rope_table(RopeConfig(), 64, 7, torch.bfloat16, device)
    slots = (torch.randperm(9, generator=rng)[:7] + 1).to(device)
    wide, narrow = KVPool([KVSpec(2, 64)], 10, torch.bfloat16, device), KVPool([KVSpec(2, 64)], 10, FP8, device)
    turned = [qkv.clone(), qkv.clone()]
    for one, pool in zip(turned, (wide, narrow), strict=True):
        rope.rope_and_write(one, table[:, 0], table[:, 1], slots, pool.kv[0])
    assert torch.equal(*turned)
    assert torch.equal(codes(narrow.kv[0].cpu()), codes(wide.kv[0].cpu().float().to(FP8)))


@pytest.mark.further(nodes=1, values=32)
@pytest.mark.parametrize("values", [0, 32])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.covering
def test_trees_over_fp8(nodes: int, exact: bool, values: int, device: torch.device) -> None:
    dim = 48 if values else 32
    case, held = in_fp8(make_case([37, 130, 0], nodes, device, (4, 2), dim, torch.bfloat16, values=values))
    found = case.run(exact, common.pick_tiling(case.kv) if GPU else TINY)
    expected = replace(case, kv=held).expected()
    torch.testing.assert_close(found.double(), expected, atol=CLOSE, rtol=2e-2)


def test_bits_over_fp8_do_not_depend_on_tree_or_batch(device: torch.device) -> None:
    case, _ = in_fp8(make_case([39, 230, 0], 5, device, (4, 1), dim=16, dtype=torch.bfloat16))
    tiling = common.pick_tiling(case.kv) if GPU else TINY
    together = case.run(True, tiling).view(3, 5, -1)
    for b, node in [(0, 4), (1, 3)]:
        alone = case.alone(b, node)
        assert torch.equal(alone.run(True, tiling)[0], together[b, node])
        for length in (1, 21):
            assert torch.equal(alone.as_chunk(length, tiling), together[b, node])


def test_pools_in_fp8_are_cleared_and_scaled(device: torch.device) -> None:
    pool = KVPool([KVSpec(1, 16), KVSpec(1, 16)], 3, FP8, device, [SCALES])
    assert pool.scales == (SCALES, (1.0, 1.0))
    assert KVPool([KVSpec(1, 16)], 3, torch.bfloat16, device, [SCALES]).scales == ((1.0, 1.0),)
    key = torch.full((1, 1, 16), torch.nan, device=device)
    for layer in range(2):
        pool.write(layer, torch.tensor([2], device=device), key, key)
    assert all(torch.isnan(kv.float()).any() for kv in pool.kv)
    pool.clear(torch.tensor([2], device=device))
    assert not any(codes(kv).any() for kv in pool.kv)
