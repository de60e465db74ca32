"""Short convolutions between gates, in one launch. The reference is `Attend.short_conv`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import Batch
from draftwing.ops.delta_net.triton_plan import tree_of
from draftwing.ops.row_states.spec import ancestor_slots
from draftwing.ops.triton.common import lanes, launch_options, let_next_come, ordinary_options, start, wait

_BLOCK = 512  # channels of a program


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _short_conv_kernel(
    out, made, taps, kept, slots, sources, made_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, blocks of BLOCK channels). What was there before the plan, and the plan, is read ahead of the wait for
    the kernel in front: the first launch that does so is an ordinary one. All loads come before the first use and the
    store: each would cost a wait of its own."""
    let_next_come(PDL)
    query = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    made += channel
    row = made + query * made_stride
    slot = tl.load(slots + query)
    weights, at, known = (), (), ()
    for back in tl.static_range(WIDTH):
        weights += (tl.load(taps + channel * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0),)  # type: ignore[assignment]
        if back > 0:
            source = tl.load(sources + query * (WIDTH - 1) + back - 1)
            at += (source,)  # type: ignore[assignment]
            known += (tl.load(kept + source * CHANNELS + channel, mask=mask & (source > 0), other=0.0),)  # type: ignore[assignment]
    wait(PDL)
    c, own, others = tl.load(row + CHANNELS, mask=mask, other=0.0), _own(row, mask, CHANNELS), ()
    for back in tl.static_range(1, WIDTH):
        source = at[back - 1]
        others += (_own(made + (-1 - source) * made_stride, mask & (source < 0), CHANNELS),)  # type: ignore[assignment]
    total = own.to(tl.float32) * weights[0]  # type: ignore[misc]
    for back in tl.static_range(1, WIDTH):  # of this batch, or of one before
        before = tl.where(at[back - 1] < 0, others[back - 1].to(kept.dtype.element_ty), known[back - 1])
        total = tl.fma(before.to(own.dtype).to(tl.float32), weights[back], total)
    tl.store(kept + slot * CHANNELS + channel, own.to(kept.dtype.element_ty), mask=mask)
    dtype = out.dtype.element_ty
    result = c.to(tl.float32) * total.to(dtype).to(tl.float32)
    tl.store(out + query * CHANNELS + channel, result.to(dtype), mask=mask)


@triton.jit
def _own(row, mask, CHANNELS: tl.constexpr):
    """b * u of a row of `made`, rounded."""
    b = tl.load(row, mask=mask, other=0.0)
    u = tl.load(row + 2 * CHANNELS, mask=mask, other=0.0)
    return (b.to(tl.float32) * u.to(tl.float32)).to(b.dtype)


@triton.jit(
    do_not_specialize=["trees", "each", "depth"],
    do_not_specialize_on_alignment=["rows", "prefix_len", "path", "path_len", "starts", "slots"],
)
def _sources_kernel(
    sources, rows, prefix_len, path, path_len, starts, table, slots, table_stride, trees, each, depth,
    COUNT: tl.constexpr, RAGGED: tl.constexpr, CAP_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M), of trees: a token before a query is one of the row's text or a query of the same tree. each: queries of
    a tree that is not ragged."""
    start(PDL)
    query = tl.program_id(0)
    _, first, end, batch_row = tree_of(starts, trees, query, each, RAGGED)
    row, prefix, size = tl.load(rows + batch_row), tl.load(prefix_len + batch_row), tl.load(path_len + query)
    other = first + tl.arange(0, CAP_PAD)
    written = tl.load(slots + other, mask=other < end, other=-1)
    for back in tl.static_range(1, COUNT + 1):
        at = size - 1 - back  # below 0: before the tree
        entry = tl.load(path + query.to(tl.int64) * depth + at, mask=at >= 0, other=0)
        place = prefix + tl.where(at >= 0, entry, at)
        slot = tl.load(table + row * table_stride + place, mask=place >= 0, other=0).to(tl.int64)
        theirs = tl.max(tl.where((written == slot) & (slot > 0), other, -1), 0)
        tl.store(sources + query * COUNT + back - 1, tl.where(theirs < 0, slot, -1 - theirs.to(tl.int64)))


def sources_of(batch: Batch, count: int, owners: Tensor) -> Tensor:
    """Returns where the entries of the `count` tokens before each query lie, the nearest first, [M, count] int64: a
    slot of the pool; -1 - q, where query q of the same batch will write it; 0: there is no such token.

    owners [slots + 1] int32, kept from chunks to chunks: it names a query by slot; what other batches left there is
    found out by the query's own slot.
    """
    queries = len(batch.write_slots)
    if batch.path is not None and batch.path_len is not None:
        return _of_trees(batch, batch.path.contiguous(), batch.path_len.contiguous(), count)
    slots = ancestor_slots(batch, count)
    owners.index_copy_(0, batch.write_slots, torch.arange(queries, dtype=torch.int32, device=owners.device))
    query = owners[slots].long().clamp(max=queries - 1)
    return torch.where((slots > 0) & (batch.write_slots[query] == slots), -1 - query, slots).contiguous()


def _of_trees(batch: Batch, path: Tensor, path_len: Tensor, count: int) -> Tensor:
    trees, each, depth = path.shape
    ragged, starts, cap = batch.ragged, batch.rows, each
    if ragged is not None:
        assert each == 1
        trees, starts, cap = ragged.rows.shape[0], ragged.starts, ragged.cap
    found = torch.empty(len(batch.write_slots), count, dtype=torch.int64, device=path.device)
    _sources_kernel[(len(found),)](
        found, batch.rows, batch.prefix_len, path, path_len, starts, batch.table, batch.write_slots,
        batch.table.stride(0), trees, each, depth, COUNT=count, RAGGED=ragged is not None, CAP_PAD=lanes(cap),
        num_warps=1, **launch_options(path.device),
    )  # fmt: skip
    return found


def short_conv(
    made: Tensor, taps: Tensor, kept: Tensor, slots: Tensor, sources: Tensor, is_first: bool = True
) -> Tensor:
    """Computes what `Attend.short_conv` returns. kept [slots + 1, channels]; slots [M]: the batch's; sources
    [M, width - 1]: `sources_of` it. is_first: whether no layer has run by these sources before."""
    (queries, size), (channels, width) = made.shape, taps.shape
    assert size == 3 * channels and kept.shape[1:] == (channels,) and sources.shape == (queries, width - 1)
    assert made.stride(1) == 1 and taps.is_contiguous() and kept.is_contiguous() and taps.dtype == torch.float32
    out, device = made.new_empty(queries, channels), made.device
    _short_conv_kernel[(queries, triton.cdiv(channels, _BLOCK))](
        out, made, taps, kept, slots, sources, made.stride(0), CHANNELS=channels, WIDTH=width, BLOCK=_BLOCK,
        num_warps=4, **(ordinary_options if is_first else launch_options)(device),
    )  # fmt: skip
    return out
