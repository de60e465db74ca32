"""Sums by memory that ranks share, one rank after the other: those whose turn has not come have left theirs by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.norms.triton import rms_norm, rms_norm_fp8
from draftwing.ops.peer_sums import triton as peer_sums
from draftwing.ops.peer_sums.triton import BLOCKS, SHARED, SLOT, Peers
from draftwing.ops.table import PLAIN

pytestmark = pytest.mark.usefixtures("mended_interpreter")


class World:
    """The memory of all ranks, on this one device."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        _, size = Peers.bytes_of(ranks)
        self.memory = [torch.zeros(size // 8, dtype=torch.int64, device=device) for _ in range(ranks)]
        addresses = [one.data_ptr() for one in self.memory]
        self.peers = [Peers.at(addresses, rank, device) for rank in range(ranks)]
        self.calls = 0

    def signals(self, rank: int) -> Tensor:
        """[P, BLOCKS]: how many calls each rank has signalled to this one."""
        return self.memory[rank][: len(self.memory) * BLOCKS].view(-1, BLOCKS)

    def slot(self, rank: int, call: int, like: Tensor) -> Tensor:
        return self.buffer(rank, call % 2 * SLOT, like)

    def buffer(self, rank: int, offset: int, like: Tensor) -> Tensor:
        return self.memory[rank][len(self.memory) * BLOCKS + offset // 8 :].view(like.dtype)[: like.numel()]

    def sums(self, parts: list[Tensor], bias: Tensor | None, residual: Tensor | None) -> list[Tensor]:
        return self.on_each(parts, lambda peers, part: peer_sums.sum_rows(peers, part, bias, residual))

    def on_each(self, parts: list[Tensor], call: Callable[[Peers, Tensor], Any], blocks: int = 0) -> list[Any]:
        """A call on each rank, in turn."""
        self.calls += 1
        blocks = blocks or -(-parts[0].numel() // 1024)
        for rank in range(1, len(parts)):
            self.slot(rank, self.calls, parts[rank]).copy_(parts[rank].view(-1))
        found = []
        for rank, peers in enumerate(self.peers):
            for later in range(rank + 1, len(parts)):
                self.signals(rank)[later, :blocks] = self.calls
            self.slot(rank, self.calls, parts[rank]).zero_()  # its own call writes it
            found.append(call(peers, parts[rank]))
            assert torch.equal(self.slot(rank, self.calls, parts[rank]), parts[rank].view(-1))
            received = [self.signals(other)[rank, :blocks] for other in range(len(parts)) if other != rank]
            assert all(bool((one == self.calls).all()) for one in received)
        assert all(bool((peers.calls == self.calls).all()) for peers in self.peers)
        return found

    def sums_in_shares(self, parts: list[Tensor], bias: Tensor | None, residual: Tensor | None) -> list[Tensor]:
        """The same of parts that are too large for a slot. expected: what each rank adds of its share."""
        ranks, self.calls, found = len(parts), self.calls + 2, []
        expected = PLAIN.sum_parts(torch.stack(parts), bias, residual).view(-1)
        tiles = -(-parts[0].numel() // (4096 * ranks))
        shares = torch.arange(len(expected), device=expected.device) // (tiles * 4096)
        for rank, peers in enumerate(self.peers):
            for other in range(ranks):
                self.signals(rank)[other] = self.calls * (other != rank)
                is_own = shares == other
                ours, added = (self.buffer(other, 2 * SLOT + at, parts[0]) for at in (0, SHARED))
                ours.copy_(torch.where(is_own, torch.nan, parts[other].view(-1)))
                added.copy_(torch.where(is_own, expected, torch.nan))
            ours, added = (self.buffer(rank, 2 * SLOT + at, parts[0]) for at in (0, SHARED))
            ours.zero_(), added.zero_()
            found.append(peer_sums.sum_rows(peers, parts[rank], bias, residual))
            assert torch.equal(ours, torch.where(shares == rank, 0, parts[rank].view(-1)))
            assert torch.equal(added, torch.where(shares == rank, expected, 0))
            received = [self.signals(other)[rank, : min(tiles, BLOCKS)] for other in range(ranks) if other != rank]
            assert all(bool((one == self.calls).all()) for one in received)
        assert all(bool((peers.calls == self.calls).all()) for peers in self.peers)
        return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_get_the_bits_of_sum_parts(ranks: int, device: torch.device) -> None:
    world, generator = World(ranks, device), torch.Generator(device).manual_seed(ranks)
    for call, (rows, size) in enumerate([(1, 576), (5, 1024), (1, 64), (3, 576), (9, 576)]):  # 1 to 6 blocks
        parts = torch.randn(ranks, rows, size, generator=generator, device=device)
        bias = torch.randn(size, generator=generator, device=device) if call % 2 else None
        residual = torch.randn(rows, size, generator=generator, device=device) if call % 3 else None
        expected = PLAIN.sum_parts(parts, bias, residual)
        assert all(torch.equal(found, expected) for found in world.sums([*parts], bias, residual))


@pytest.mark.parametrize(
    "ranks, rows",
    [
        (4, 66),
        pytest.param(2, 67, marks=pytest.mark.exhaustive),
        pytest.param(3, 300, marks=pytest.mark.exhaustive),
        pytest.param(4, 257, marks=pytest.mark.exhaustive),  # blocks have several tiles
    ],
)
def test_more_rows_are_added_in_shares(ranks: int, rows: int, device: torch.device) -> None:
    """Between sums of few rows, with which they share signals."""
    world, generator = World(ranks, device), torch.Generator(device).manual_seed(ranks)
    for call, count in enumerate((2, rows, 1, rows)):
        parts = torch.randn(ranks, count, 8192, generator=generator, device=device).half()
        bias = torch.randn(8192, generator=generator, device=device).half() if call % 2 else None
        residual = torch.randn(count, 8192, generator=generator, device=device).half() if call % 3 else None
        sums = world.sums if count < 60 else world.sums_in_shares
        expected = PLAIN.sum_parts(parts, bias, residual)
        assert all(torch.equal(found, expected) for found in sums([*parts], bias, residual)), call


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive), 4])
def test_all_ranks_get_what_each_has_side_by_side(ranks: int, device: torch.device) -> None:
    """Between sums, with which they share buffers and signals."""
    world, generator = World(ranks, device), torch.Generator(device).manual_seed(ranks)
    for rows, size in [(1, 576), (5, 200), (9, 576), (2, 12)]:  # 1 to 6 blocks
        parts = [*torch.randn(ranks, rows, size, generator=generator, device=device).half()]
        assert all(torch.equal(one, torch.cat(parts, 1)) for one in world.on_each(parts, peer_sums.side_by_side))
        expected = PLAIN.sum_parts(torch.stack(parts), None, None)
        assert all(torch.equal(found, expected) for found in world.sums(parts, None, None))


@pytest.mark.further(ranks=[2, 3])
@pytest.mark.further(wide=True)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_under_a_norm_have_the_bits_of_both(ranks: int, wide: bool, device: torch.device) -> None:
    """Between sums, with which they share buffers and signals."""
    world, generator = World(ranks, device), torch.Generator(device).manual_seed(ranks)
    for call, (rows, size) in enumerate([(1, 1024), (3, 640), (9, 768), (2, 1536)]):
        parts = torch.randn(ranks, rows, size, generator=generator, device=device).bfloat16()
        bias = torch.randn(size, generator=generator, device=device).bfloat16() if call % 2 else None
        apart = torch.randn(rows, 2 * size, generator=generator, device=device).bfloat16()
        residual = apart[:, size:] if call > 1 else apart[:, :size].contiguous()
        weight = torch.randn(size, generator=generator, device=device).to(torch.float32 if wide else torch.bfloat16)
        expected = world.sums([*parts], bias, residual.contiguous())[0]
        for norm, quantises in ((rms_norm, False), (rms_norm_fp8, True)):
            known = parts_of(norm(expected, weight, 1e-5))
            for total, made in world.on_each(
                [*parts],
                partial(summed, bias, residual, weight, quantises),
                rows,
            ):
                assert torch.equal(total, expected) and all(map(torch.equal, parts_of(made), known)), call


def summed(
    bias: Tensor | None, residual: Tensor, weight: Tensor, quantises: bool, peers: Peers, part: Tensor
) -> tuple[Tensor, Tensor | Fp8Rows]:
    return peer_sums.sum_under(peers, part, bias, residual, weight, 1e-5, quantises)


def parts_of(normed: Tensor | Fp8Rows) -> list[Tensor]:
    if isinstance(normed, Tensor):
        return [normed]
    assert normed.x is not None
    codes, scales = normed.plain()
    return [normed.x, codes.float(), scales]


def test_half_types_are_rounded_once(device: torch.device) -> None:
    world, generator = World(2, device), torch.Generator(device).manual_seed(1)
    parts, residual = torch.randn(2, 4, 256, generator=generator, device=device).half(), torch.ones(4, 256).half()
    residual = residual.to(device)
    expected = (parts[0].float() + parts[1].float() + residual.float()).half()
    assert all(torch.equal(found, expected) for found in world.sums([*parts], None, residual))


def test_what_is_too_large_or_not_whole_is_left_to_others() -> None:
    half = torch.bfloat16
    shapes = {
        (64, 8192): True,
        (2048, 8192): True,
        (2049, 8192): False,
        (3, 100): False,
        (2, 100): True,
        (0, 64): False,
    }
    for shape, expected in shapes.items():
        assert peer_sums.takes(torch.empty(shape, dtype=half, device="meta")) is expected, shape
    assert not peer_sums.takes(torch.empty(8, 16, dtype=half).t())
