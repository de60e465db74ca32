"""Short convolutions between gates, in one launch. The reference is `Attend.short_conv`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import Batch
from draftwing.ops.row_states.spec import ancestor_slots
from draftwing.ops.triton.common import launch_options, start

_BLOCK = 512  # channels of a program


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _short_conv_kernel(
    out, made, taps, kept, slots, sources, made_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, blocks of BLOCK channels)."""
    start(PDL)
    query = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    made += channel
    row = made + query * made_stride
    c, own = tl.load(row + CHANNELS, mask=mask, other=0.0), _own(row, mask, CHANNELS)
    tl.store(kept + tl.load(slots + query) * CHANNELS + channel, own.to(kept.dtype.element_ty), mask=mask)
    total = own.to(tl.float32) * tl.load(taps + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0)
    for back in tl.static_range(1, WIDTH):
        source = tl.load(sources + query * (WIDTH - 1) + back - 1)
        if source < 0:  # of this batch
            before = _own(made + (-1 - source) * made_stride, mask, CHANNELS).to(kept.dtype.element_ty)
        else:
            before = tl.load(kept + source * CHANNELS + channel, mask=mask & (source > 0), other=0.0)
        weight = tl.load(taps + channel * WIDTH + WIDTH - 1 - back, mask=mask, other=0.0)
        total = tl.fma(before.to(own.dtype).to(tl.float32), weight, total)
    dtype = out.dtype.element_ty
    result = c.to(tl.float32) * total.to(dtype).to(tl.float32)
    tl.store(out + query * CHANNELS + channel, result.to(dtype), mask=mask)


@triton.jit
def _own(row, mask, CHANNELS: tl.constexpr):
    """b * u of a row of `made`, rounded."""
    b = tl.load(row, mask=mask, other=0.0)
    u = tl.load(row + 2 * CHANNELS, mask=mask, other=0.0)
    return (b.to(tl.float32) * u.to(tl.float32)).to(b.dtype)


def sources_of(batch: Batch, count: int, owners: Tensor) -> Tensor:
    """Returns where the entries of the `count` tokens before each query lie, the nearest first, [M, count] int64: a
    slot of the pool; -1 - q, where query q of the same batch will write it; 0: there is no such token.

    owners [slots + 1] int32, kept from batch to batch: it names a query by slot; what other batches left there is found
    out by the query's own slot.
    """
    slots, queries = ancestor_slots(batch, count), len(batch.write_slots)
    owners.index_copy_(0, batch.write_slots, torch.arange(queries, dtype=torch.int32, device=owners.device))
    query = owners[slots].long().clamp(max=queries - 1)
    return torch.where((slots > 0) & (batch.write_slots[query] == slots), -1 - query, slots).contiguous()


def short_conv(made: Tensor, taps: Tensor, kept: Tensor, slots: Tensor, sources: Tensor) -> Tensor:
    """Computes what `Attend.short_conv` returns. kept [slots + 1, channels]; slots [M]: the batch's; sources
    [M, width - 1]: `sources_of` it."""
    (queries, size), (channels, width) = made.shape, taps.shape
    assert size == 3 * channels and kept.shape[1:] == (channels,) and sources.shape == (queries, width - 1)
    assert made.stride(1) == 1 and taps.is_contiguous() and kept.is_contiguous() and taps.dtype == torch.float32
    out = made.new_empty(queries, channels)
    _short_conv_kernel[(queries, triton.cdiv(channels, _BLOCK))](
        out, made, taps, kept, slots, sources, made.stride(0), CHANNELS=channels, WIDTH=width, BLOCK=_BLOCK,
        num_warps=4, **launch_options(made.device),
    )  # fmt: skip
    return out
