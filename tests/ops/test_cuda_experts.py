"""How the GEMMs of experts cut their work. What they compute is tested in test_cuda_experts_host.py and
test_experts.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftwing.ops.contracts import Routed
from draftwing.ops.cuda import gemm_experts
from draftwing.ops.cuda.gemm_experts import DENSE, MAX_PAIRS, Cut, Layout, Stream, cuts_for, layout_of, read_source
from draftwing.ops.expert_rows import FP8, INT4, MX

FORMATS = [Layout(), Layout(MX, 4), Layout(FP8, 0), Layout(FP8, 1), Layout(INT4, 1), Layout(INT4, 4, True)]
MAX_SHARED = 232_448  # bytes that a block can have on an H100 or H200: CUDA's cudaDevAttrMaxSharedMemoryPerBlockOptin


def dense(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("layout", FORMATS)
def test_streams_fit(layout: Layout) -> None:
    for chunks in range(1, 65):
        stream = layout._replace(chunks=chunks)
        if Stream.of(stream, 1, MAX_PAIRS).stages < 2:
            assert layout.kind == DENSE and chunks > 45
            continue
        cuts = cuts_for(stream)
        assert {(kind, tile) for kind, tile in cuts if tile > 1} == set(
            itertools.product(gemm_experts.KINDS, (8, MAX_PAIRS))
        )
        for (_, tile), cut in cuts.items():
            assert cut.shared_bytes(tile) <= MAX_SHARED
            assert isinstance(cut, Cut) or cut.stages > 1


def test_which_weights_are_a_stream() -> None:
    assert layout_of(dense(64, 2048)) == Layout(chunks=32)
    assert layout_of(dense(64, 2880)) == Layout(chunks=45)
    assert layout_of(dense(64, 4096)) == Layout(), "two stages of it have no room"
    assert layout_of(dense(64, 8192)) == Layout(), "so much of x has no room in registers"
    assert layout_of(dense(66, 2048), width=33) == Layout(), "scales of four features are copied at a time"


@pytest.mark.parametrize(
    ("kind", "tiles", "width", "row_tiles"),
    [("silu", 8, 768, 3), ("silu", 5, 1536, 4), ("silu", 8, 1408, 6), ("silu", 9, 512, 3), ("plain", 8, 2048, 4),
     ("plain", 5, 2048, 3), ("plain", 9, 2048, 5)],
)  # fmt: skip
def test_a_token_takes_the_cut_of_fewest_rounds(kind: str, tiles: int, width: int, row_tiles: int) -> None:
    """Of Qwen3-30B-A3B, GLM-4.7-Flash, DeepSeek-V2-Lite and Qwen3.5-35B-A3B on 132 multiprocessors."""
    cuts = cuts_for(Layout(FP8, 1, chunks=32))
    tried = [cuts[kind + name, 1] for name in ("", *gemm_experts.OTHERS)]
    assert tried[gemm_experts.best_of(tried, kind, tiles, width, 132)].row_tiles == row_tiles


def test_routes_of_heads_are_waited_for() -> None:
    """Nothing behind the kernel that makes them has waited for it when attention lets the next kernel come."""

    def routed(choices: int, count: int, partial: bool = False) -> Routed:
        return Routed(torch.zeros(1, choices, dtype=torch.int64), torch.ones(1, choices), count, None, partial)

    known = gemm_experts.routes_known
    assert not known(routed(4, 4), 1)
    assert known(routed(4, 8), 1) and known(routed(4, 4, partial=True), 1)
    assert not known(routed(4, 8), 4) and not known(routed(1, 8), 1)


def test_devices_without_bulk_copies() -> None:
    layout = Layout(FP8, 1, chunks=32)
    assert layout.on((9, 0)) == layout
    older = layout.on((8, 9))
    assert "cp.async.bulk" in read_source(layout, cuts_for(layout))
    assert "cp.async.bulk" not in read_source(older, cuts_for(older))
