"""Sums over ranks, by one kernel that reads the other GPUs' memory: of few rows each rank adds all (one-shot
all-reduce), of more a share, and reads what the others added (two-shot). Of few rows with the norm behind them, or not
added, but side by side.

Each rank writes its part into memory of its own that the others map, signals that, waits until all have signalled, and
adds all parts itself, in float32 in the order of the ranks: the bits are those of `sum_parts`, on every rank and for
any number of rows.

Calls are counted by the device, so a captured kernel knows which one it is. There are two buffers, used in turn. A
rank that writes to one for call c has the signals of all others for call c - 1, before which they had ended call c - 2,
the last to read this buffer. So one meeting a call is enough. Blocks meet block by block; all of a call run at once.

A sum in shares has two meetings, counted like two calls: when all parts are there, and when all shares are added. It
writes parts where the others have read before the second meeting of the last such call, and its share after the first
meeting of this one, before which they had ended the last.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.fp8.triton import empty_rows, parts_of, store_rows_fp8
from draftwing.ops.norms.triton import normed, row_blocks
from draftwing.ops.peer_sums.memory import Exchange, PeerMemory
from draftwing.ops.triton.common import lanes, launch_options, start

BLOCKS = 128  # of a launch at most; they must find room on the GPU together
SLOT = 1 << 20  # bytes of one of the two buffers
# Bytes of a part that is added in shares: 2,048 rows of 8,192 in a half type. Of 64 MB NCCL takes less time.
SHARED = 32 << 20
_SIZES = (1024, 2048, 4096)  # elements of a block, 8 for each thread


class Peers(NamedTuple):
    """Memory of all ranks as this one sees it.

    buffers: addresses of each rank's two buffers, behind which are one for parts and one for sums of what is added in
    shares; inbox: address of this rank's signals [P, BLOCKS] int64, by who sent them; outbox [P] int64: where this
    rank's own signals are in the memory of each rank; calls [BLOCKS] int64: how many there were, the same everywhere.
    """

    rank: int
    buffers: tuple[int, ...]
    inbox: int
    outbox: Tensor
    calls: Tensor

    @staticmethod
    def bytes_of(ranks: int) -> tuple[int, int]:
        """Returns bytes of the signals, and of all that each rank has."""
        signals = ranks * BLOCKS * 8
        return signals, signals + 2 * (SLOT + SHARED)

    @classmethod
    def at(cls, addresses: Sequence[int], rank: int, device: torch.device) -> Peers:
        """addresses: of each rank's memory: signals, which are 0 at first, then the buffers."""
        signals, _ = cls.bytes_of(len(addresses))
        outbox = torch.tensor([address + rank * BLOCKS * 8 for address in addresses], device=device)
        calls = torch.zeros(BLOCKS, dtype=torch.int64, device=device)
        return cls(rank, tuple(address + signals for address in addresses), addresses[rank], outbox, calls)


@triton.jit
def _signals(outbox, inbox, block, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns [LANES], by rank: where this block's signals go, where theirs come, and whether it is another rank."""
    lane = tl.arange(0, LANES)
    others = (lane < RANKS) & (lane != RANK)
    theirs = tl.load(outbox + lane, mask=others, other=0).to(tl.pointer_type(tl.int64)) + block
    return theirs, inbox.to(tl.pointer_type(tl.int64)) + lane * BLOCKS + block, others


@triton.jit
def _meet(theirs, ours, others, call, LANES: tl.constexpr):
    """Says that this block has come to this call, and waits until those of the other ranks have."""
    tl.debug_barrier()  # all threads have stored before one of them says so
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int64) + call, mask=others, sem="release", scope="sys")
    nothing = tl.zeros([LANES], tl.int64)
    behind = 1
    while behind > 0:
        seen = tl.atomic_add(ours, nothing, mask=others, sem="acquire", scope="sys")
        behind = tl.sum(tl.where(others & (seen < call), 1, 0), 0)
    tl.debug_barrier()


@triton.jit
def _count(calls, block, call, BLOCKS: tl.constexpr):
    tl.store(calls + block, call)
    if block == 0:  # those of blocks that this call does without
        place = tl.arange(0, BLOCKS)
        tl.store(calls + place, tl.zeros([BLOCKS], tl.int64) + call, mask=place >= tl.num_programs(0))


@triton.jit(do_not_specialize=["eighths"])
def _peer_sum_kernel(
    out, partial, bias, residual, buffers, inbox, outbox, calls, eighths,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    SLOT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SIDE_BY_SIDE: parts are not summed, and out has RANKS * SIZE columns."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < eighths * 8  # so loads of 8 elements are whole
    theirs, ours, others = _signals(outbox, inbox, block, RANK, RANKS, LANES, BLOCKS)
    start(PDL)
    call = tl.load(calls + block) + 1
    dtype = out.dtype.element_ty
    slot = (call % 2) * SLOT
    part = tl.load(partial + at, mask=mask, other=0.0)
    tl.store(tl.multiple_of(buffers[RANK].to(tl.pointer_type(dtype)) + slot, 16) + at, part, mask=mask)

    rest = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        rest = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    _meet(theirs, ours, others, call, LANES)

    result = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        value = part
        if rank != RANK:
            there = tl.multiple_of(buffers[rank].to(tl.pointer_type(dtype)) + slot, 16)
            value = tl.load(there + at, mask=mask, other=0.0, cache_modifier=".cg")
        if SIDE_BY_SIDE:
            tl.store(out + at // SIZE * (RANKS * SIZE) + rank * SIZE + at % SIZE, value, mask=mask)
        else:
            result = value.to(tl.float32) if rank == 0 else result + value.to(tl.float32)
    if BIAS:
        result += tl.load(bias + at % SIZE, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += rest
    if not SIDE_BY_SIDE:
        tl.store(out + at, result.to(dtype), mask=mask)
    _count(calls, block, call, BLOCKS)


@triton.jit(do_not_specialize=["rows", "padded"])
def _peer_norm_kernel(
    total, out, codes, scales, padded, weight, rows, stride, partial, bias, residual, buffers, inbox, outbox, calls,
    SIZE: tl.constexpr, EPS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, SLOT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row of `_peer_sum_kernel`, and its norm. Tiles are those of `_rms_norm_kernel`, whose bits it has. stride: of
    the residual's rows."""
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < SIZE
    at = row * SIZE + col
    theirs, ours, others = _signals(outbox, inbox, row, RANK, RANKS, LANES, BLOCKS)
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)  # no kernel writes weights, nor biases
    start(PDL)
    call = tl.load(calls + row) + 1
    dtype = total.dtype.element_ty
    slot = (call % 2) * SLOT
    part = tl.load(partial + at, mask=mask, other=0.0)
    tl.store(tl.multiple_of(buffers[RANK].to(tl.pointer_type(dtype)) + slot, 16) + at, part, mask=mask)
    rest = tl.load(residual + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    _meet(theirs, ours, others, call, LANES)

    result = tl.zeros([1, BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        value = part
        if rank != RANK:
            there = tl.multiple_of(buffers[rank].to(tl.pointer_type(dtype)) + slot, 16)
            value = tl.load(there + at, mask=mask, other=0.0, cache_modifier=".cg")
        result = value.to(tl.float32) if rank == 0 else result + value.to(tl.float32)
    if BIAS:
        result += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    stream = (result + rest).to(dtype)
    tl.store(total + at, stream, mask=mask)
    under = normed(stream.to(tl.float32), w, SIZE, EPS).to(dtype)
    tl.store(out + at, under, mask=mask)
    if codes is not None:
        store_rows_fp8(codes, scales, under.to(tl.float32), row, rows, padded, SIZE, 1, BLOCK)
    _count(calls, row, call, BLOCKS)


@triton.jit(do_not_specialize=["eighths", "tiles"])
def _peer_share_kernel(
    out, partial, bias, residual, buffers, inbox, outbox, calls, eighths, tiles,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """tiles: of BLOCK elements in a rank's share. PARTS, SHARES: where the buffers for them begin, in elements."""
    block = tl.program_id(0)
    theirs, ours, others = _signals(outbox, inbox, block, RANK, RANKS, LANES, BLOCKS)
    start(PDL)
    call = tl.load(calls + block) + 1
    dtype = out.dtype.element_ty
    mine = tl.multiple_of(buffers[RANK].to(tl.pointer_type(dtype)), 16)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            for tile in range(block, tiles, tl.num_programs(0)):
                at = (rank * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
                mask = at < eighths * 8  # so loads of 8 elements are whole
                tl.store(mine + PARTS + at, tl.load(partial + at, mask=mask, other=0.0), mask=mask)
    _meet(theirs, ours, others, call, LANES)
    for tile in range(block, tiles, tl.num_programs(0)):
        at = (RANK * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        mask = at < eighths * 8
        result = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            there = partial if rank == RANK else tl.multiple_of(buffers[rank].to(tl.pointer_type(dtype)), 16) + PARTS
            value = tl.load(there + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            result = value if rank == 0 else result + value
        if BIAS:
            result += tl.load(bias + at % SIZE, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            result += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(mine + SHARES + at, result.to(dtype), mask=mask)
        tl.store(out + at, result.to(dtype), mask=mask)
    _meet(theirs, ours, others, call + 1, LANES)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.multiple_of(buffers[rank].to(tl.pointer_type(dtype)), 16) + SHARES
            for tile in range(block, tiles, tl.num_programs(0)):
                at = (rank * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
                mask = at < eighths * 8
                tl.store(out + at, tl.load(there + at, mask=mask, other=0.0, cache_modifier=".cg"), mask=mask)
    _count(calls, block, call + 1, BLOCKS)


def takes_few(partial: Tensor) -> bool:
    """Returns whether such parts pass in one meeting: of up to 64 rows of 8,192 in a half type."""
    return takes(partial) and partial.nbytes <= SLOT and partial.numel() <= BLOCKS * _SIZES[-1]


def takes(partial: Tensor) -> bool:
    """Returns whether there is room for such parts: up to 2,048 rows of 8,192 in a half type."""
    return 0 < partial.nbytes <= SHARED and partial.numel() % 8 == 0 and partial.is_contiguous()


def sum_rows(peers: Peers, partial: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """partial [M, n] of this rank, bias [n] and residual [M, n], the same on all -> the sum of all ranks' [M, n], then
    bias and residual, in this order in float32, rounded once. All ranks call it at the same place."""
    assert takes(partial) and (residual is None or residual.is_contiguous())
    out = torch.empty_like(partial)
    if takes_few(partial):
        _launch_few(peers, out, partial, bias, residual, False)
        return out
    total, itemsize, block = partial.numel(), partial.itemsize, _SIZES[-1]
    tensors, same = _arguments(peers, out, partial, bias, residual)
    tiles = triton.cdiv(total, block * len(peers.buffers))
    _peer_share_kernel[(min(tiles, BLOCKS),)](
        *tensors, total // 8, tiles, PARTS=2 * SLOT // itemsize, SHARES=(2 * SLOT + SHARED) // itemsize, BLOCK=block,
        num_warps=block // 256, **same,
    )  # fmt: skip
    return out


def takes_norm(partial: Tensor) -> bool:
    """Returns whether sums of such parts are made with the norm behind them: rows of which a program has one."""
    rows, size = partial.shape
    return takes_few(partial) and rows <= BLOCKS and size % 16 == 0 and row_blocks(size)[0] == 1


def sum_under(
    peers: Peers, partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, quantises: bool
) -> tuple[Tensor, Tensor | Fp8Rows]:
    """Returns `sum_rows` of such parts as `takes_norm` takes, and `rms_norm` of it, weight [n], or `rms_norm_fp8`: all
    of their bits."""
    assert takes_norm(partial) and residual.stride(1) == 1
    total, out = torch.empty_like(partial), torch.empty_like(partial)
    under = empty_rows(partial.shape, partial.device, out) if quantises else out
    rows, size = partial.shape
    _, block, warps = row_blocks(size)
    tensors, same = _arguments(peers, total, partial, bias, residual)
    _peer_norm_kernel[(rows,)](
        total, *parts_of(under), weight, rows, residual.stride(0), *tensors[1:], EPS=eps,
        SLOT=SLOT // partial.itemsize, BLOCK=block, num_warps=warps, **same,
    )  # fmt: skip
    return total, under


def side_by_side(peers: Peers, x: Tensor) -> Tensor:
    """x [M, n] of this rank, such that `takes_few` -> [M, ranks * n], in the order of the ranks. All ranks call it at
    the same place."""
    out = x.new_empty(x.shape[0], len(peers.buffers) * x.shape[1])
    _launch_few(peers, out, x, None, None, True)
    return out


def _launch_few(
    peers: Peers, out: Tensor, partial: Tensor, bias: Tensor | None, residual: Tensor | None, side_by_side: bool
) -> None:
    assert takes_few(partial)
    total = partial.numel()
    tensors, same = _arguments(peers, out, partial, bias, residual)
    block = next(size for size in _SIZES if triton.cdiv(total, size) <= BLOCKS)
    _peer_sum_kernel[(triton.cdiv(total, block),)](
        *tensors, total // 8, SLOT=SLOT // partial.itemsize, SIDE_BY_SIDE=side_by_side, BLOCK=block,
        num_warps=block // 256, **same,
    )  # fmt: skip


def _arguments(
    peers: Peers, out: Tensor, partial: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns those that both kernels have."""
    ranks = len(peers.buffers)
    return (out, partial, bias, residual, *peers[1:]), {
        "SIZE": partial.shape[-1], "RANK": peers.rank, "RANKS": ranks, "LANES": lanes(ranks), "BLOCKS": BLOCKS,
        "BIAS": bias is not None, "RESIDUAL": residual is not None, **launch_options(partial.device),
    }  # fmt: skip


class PeerSums:
    """`sum_rows`, `sum_under` and `side_by_side` with the memory that they need."""

    def __init__(self, rank: int, ranks: int, exchange: Exchange, device: torch.device) -> None:
        """All ranks make theirs together. Raises NoPeers as `PeerMemory` does."""
        self._signals, size = Peers.bytes_of(ranks)
        self._memory = PeerMemory(size, rank, ranks, exchange, device)
        self._peers = Peers.at(self._memory.addresses, rank, device)

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor | None:
        if not takes(partial) or not (residual is None or residual.is_contiguous()):
            return None
        return sum_rows(self._peers, partial, bias, residual)

    def under(
        self, partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, quantises: bool
    ) -> tuple[Tensor, Tensor | Fp8Rows] | None:
        if not takes_norm(partial) or residual.stride(1) != 1:
            return None
        return sum_under(self._peers, partial, bias, residual, weight, eps, quantises)

    def side_by_side(self, x: Tensor) -> Tensor | None:
        return side_by_side(self._peers, x) if takes_few(x) else None

    def release(self) -> None:
        self._memory.fill(self._signals)

    def close(self) -> None:
        self._memory.close()
