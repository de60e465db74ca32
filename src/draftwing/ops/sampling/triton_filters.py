"""Top-k, top-p and min-p in Triton: `ops.sampling.spec.keep_mask` as one number a row, the largest gap that is kept.

Which rows filter is read on the device; the others cost an empty program. Four launches find the limits: the row's
maximum; a count of tokens by gap in coarse bins, with the row's whole mass; a list of the tokens up to the bin that
surely holds both limits; and the limits themselves, searched among those. All sums are of integers.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.types import RowTensors

BINS = tl.constexpr(128)  # each a quarter of the temperature wide; the last one takes all beyond, which has no mass
_BINS_PER_UNIT = tl.constexpr(4.0)
_MASS_ONE = tl.constexpr(2.0**40)  # fixed-point 1.0, as in ops.sampling.spec
_ALL = tl.constexpr(2**31 - 1)  # no limit: the pattern of every gap, NaN included, is at most this
_WAYS = tl.constexpr(8)  # a round of the search divides its interval by this
_ROUNDS = tl.constexpr(11)

_CHUNK = 2048  # logits of a program
_SEARCH_TILE = 1024
_LIST_WORDS = 1 << 24  # of all lists of tokens together
_MIN_LIST = 4096  # of each; a row with more tokens below its limits (flat logits, large batch) reads its logits


class Limits(NamedTuple):
    """Limits of each query; a token is kept if the bits of (top - logit), read as an integer, are at most `limit`."""

    top: Tensor  # [M] float32, the largest logit
    limit: Tensor  # [M] int32


@triton.jit
def load_logits(logits, place, ids, VOCAB: tl.constexpr):
    """Logits of the ids (int32, any shape) at the flat query `place`, float32; -inf past VOCAB."""
    return tl.load(logits + place.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def without_bans(x, ids, banned, row, ban_ids, BANS: tl.constexpr):
    """x, with -inf at the row's ban ids if it is `banned` from them."""
    if banned:
        for i in tl.static_range(BANS):
            x = tl.where(ids == tl.load(ban_ids + row * BANS + i).to(tl.int32), float("-inf"), x)
    return x


@triton.jit
def _allowed_logits(
    logits, place, row, ids, positions, ban_until, ban_ids, VOCAB: tl.constexpr, BANS: tl.constexpr
):  # fmt: skip
    x = load_logits(logits, place, ids, VOCAB)
    banned = tl.load(positions + place) + 1 < tl.load(ban_until + row)
    return without_bans(x, ids, banned, row, ban_ids, BANS)


@triton.jit
def _searches(row, floats, top_k, VOCAB: tl.constexpr):
    """Whether the row draws with top-k or top-p."""
    k = tl.load(top_k + row)
    noisy = tl.load(floats + row * 3) > 0.0
    return noisy & (((k > 0) & (k < VOCAB)) | (tl.load(floats + row * 3 + 1) < 1.0))


@triton.jit
def _mass(gap, temperature):
    """p / max(p) in fixed point, int64; none for NaN."""
    weight = tl.exp(-(gap / temperature))
    return (tl.where(weight > 0.0, weight, 0.0) * _MASS_ONE).to(tl.int64)


@triton.jit
def _bin_of(gap, temperature):
    """int32 below BINS; grows with the gap (a product rounds monotonically)."""
    scaled = gap * (1.0 / temperature * _BINS_PER_UNIT)
    return tl.where(scaled < BINS - 1.0, scaled, BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["nodes"])
def _maximum_kernel(
    maxima, histogram, mass, listed, logits, positions, rows, floats, ban_until, ban_ids, nodes,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Maximum of each chunk, and zeros for the sums of the kernels that follow."""
    start(PDL)
    chunk, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place // nodes)
    if tl.load(floats + row * 3) > 0.0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _allowed_logits(logits, place, row, ids, positions, ban_until, ban_ids, VOCAB, BANS)
        tl.store(maxima + place * tl.num_programs(0) + chunk, tl.max(x, 0))
        if chunk == 0:
            tl.store(histogram + place * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            tl.store(mass + place, tl.zeros([], tl.int64))
            tl.store(listed + place, tl.zeros([], tl.int32))


@triton.jit
def _row_top(maxima, place, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    lane = tl.arange(0, CHUNKS_BLOCK)
    return tl.max(tl.load(maxima + place * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf")), 0)


@triton.jit(do_not_specialize=["nodes"])
def _count_kernel(
    histogram, mass, maxima, logits, positions, rows, floats, top_k, ban_until, ban_ids, nodes,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    BANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    chunk, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place // nodes)
    if _searches(row, floats, top_k, VOCAB):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        temperature = tl.load(floats + row * 3)
        x = _allowed_logits(logits, place, row, ids, positions, ban_until, ban_ids, VOCAB, BANS)
        gap = _row_top(maxima, place, CHUNKS, CHUNKS_BLOCK) - x
        counts = tl.histogram(_bin_of(gap, temperature), BINS)
        tl.atomic_add(histogram + place * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(mass + place, tl.sum(_mass(gap, temperature), 0), sem="relaxed")


@triton.jit
def _mass_wanted(mass, top_p):
    """The mass that the kept tokens must reach, between 1 and `mass`."""
    exact = mass.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    wanted = whole + (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.minimum(tl.maximum(wanted, 1), mass)


@triton.jit
def _last_bin(histogram, place, mass, k, top_p, VOCAB: tl.constexpr):
    """A bin that lies at or past those of both limits: that of the k-th largest logit, which top-p cannot pass; or,
    without top-k, one past which there is less mass than top-p drops."""
    lane = tl.arange(0, BINS)
    counts = tl.load(histogram + place * BINS + lane)
    if (k > 0) & (k < VOCAB):
        last = tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32), 0)
    else:
        upper = tl.exp(-lane.to(tl.float32) / _BINS_PER_UNIT) * (1.001 * _MASS_ONE)  # of a token: the bin's lower edge
        upper = tl.where(lane < BINS - 1, upper, 0.0).to(tl.int64) * counts
        behind = tl.sum(upper, 0) - tl.cumsum(upper, 0)
        last = tl.sum((behind > mass - _mass_wanted(mass, top_p)).to(tl.int32), 0)
    return tl.minimum(last, BINS - 1)


@triton.jit(do_not_specialize=["nodes", "room"])
def _list_kernel(
    gaps, listed, histogram, mass, maxima, logits, positions, rows, floats, top_k, ban_until, ban_ids, nodes, room,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    BANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gaps of the tokens up to `_last_bin`, in any order: gaps [M, room], as many as fit; listed [M]."""
    start(PDL)
    chunk, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place // nodes)
    if _searches(row, floats, top_k, VOCAB):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        temperature, top_p = tl.load(floats + row * 3), tl.load(floats + row * 3 + 1)
        x = _allowed_logits(logits, place, row, ids, positions, ban_until, ban_ids, VOCAB, BANS)
        gap = _row_top(maxima, place, CHUNKS, CHUNKS_BLOCK) - x
        last = _last_bin(histogram, place, tl.load(mass + place), tl.load(top_k + row), top_p, VOCAB)
        chosen = (_bin_of(gap, temperature) <= last) & (ids < VOCAB)
        count = chosen.to(tl.int32)
        total = tl.sum(count, 0)
        if total > 0:
            at = tl.atomic_add(listed + place, total, sem="relaxed") + tl.cumsum(count, 0) - count
            tl.store(gaps + place.to(tl.int64) * room + at, gap, mask=chosen & (at < room))


@triton.jit
def _reached(
    gaps, count, top, temperature, limits, place, row, logits, positions, ban_until, ban_ids,
    BY_MASS: tl.constexpr, LISTED: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    """limits [W] int32 -> for each the tokens, or their mass, whose gap has a pattern up to it: [W] int64.

    LISTED: gaps points to `count` of them; else they are taken from the logits, count is VOCAB."""
    total = tl.zeros([limits.shape[0], TILE], tl.int64)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        if LISTED:
            gap = tl.load(gaps + at, mask=at < count, other=0.0)
        else:
            gap = top - _allowed_logits(logits, place, row, at, positions, ban_until, ban_ids, VOCAB, BANS)
        weight = _mass(gap, temperature) if BY_MASS else tl.full([TILE], 1, tl.int64)
        weight = tl.where(at < count, weight, 0)
        bits = gap.to(tl.int32, bitcast=True)
        total += tl.where(bits[None, :] <= limits[:, None], weight[None, :], 0)
    return tl.sum(total, 1)


@triton.jit
def _smallest_reaching(
    wanted, gaps, count, top, temperature, place, row, logits, positions, ban_until, ban_ids,
    BY_MASS: tl.constexpr, LISTED: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    """The smallest pattern of a gap up to which there are `wanted` tokens, or so much mass: int32."""
    lane = tl.arange(0, _WAYS)
    low = tl.full([], 0, tl.int32)  # the answer is in [low, low + 2^(shift + 3)), and 31 = 3 * 10 + 1
    for i in range(_ROUNDS):
        shift = tl.maximum(28 - 3 * i, 0)
        ends = low + (((lane + 1) << shift) - 1)  # wraps to 2^31 - 1 at the very end
        sums = _reached(
            gaps, count, top, temperature, ends, place, row, logits, positions, ban_until, ban_ids,
            BY_MASS, LISTED, VOCAB, TILE, BANS,
        )  # fmt: skip
        short = tl.sum((sums < wanted).to(tl.int32), 0)
        low += tl.minimum(short, _WAYS - 1) << shift
    return low


@triton.jit
def _search(
    gaps, count, top, temperature, k, top_p, mass, place, row, logits, positions, ban_until, ban_ids,
    LISTED: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    limit = tl.full([], _ALL, tl.int32)
    kept = mass
    if (k > 0) & (k < VOCAB):
        limit = _smallest_reaching(
            k, gaps, count, top, temperature, place, row, logits, positions, ban_until, ban_ids,
            False, LISTED, VOCAB, TILE, BANS,
        )  # fmt: skip
        kept = tl.sum(
            _reached(
                gaps, count, top, temperature, tl.full([1], 0, tl.int32) + limit, place, row, logits, positions,
                ban_until, ban_ids, True, LISTED, VOCAB, TILE, BANS,
            ),
            0,
        )  # fmt: skip
    if top_p < 1.0:
        crossing = _smallest_reaching(
            _mass_wanted(kept, top_p), gaps, count, top, temperature, place, row, logits, positions, ban_until,
            ban_ids, True, LISTED, VOCAB, TILE, BANS,
        )  # fmt: skip
        limit = tl.minimum(limit, crossing)
    return limit


@triton.jit(do_not_specialize=["nodes", "room"])
def _limit_kernel(
    tops, limits, gaps, listed, mass, maxima, logits, positions, rows, floats, top_k, ban_until, ban_ids, nodes, room,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, TILE: tl.constexpr,
    BANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    place = tl.program_id(0)
    row = tl.load(rows + place // nodes)
    temperature = tl.load(floats + row * 3)
    top_p, min_p = tl.load(floats + row * 3 + 1), tl.load(floats + row * 3 + 2)
    k = tl.load(top_k + row)
    limit = tl.full([], _ALL, tl.int32)
    top = tl.full([], 0.0, tl.float32)
    if temperature > 0.0:
        top = _row_top(maxima, place, CHUNKS, CHUNKS_BLOCK)
        if _searches(row, floats, top_k, VOCAB):
            count = tl.load(listed + place)
            total = tl.load(mass + place)
            if count <= room:
                limit = _search(
                    gaps + place.to(tl.int64) * room, count, top, temperature, k, top_p, total, place, row, logits,
                    positions, ban_until, ban_ids, True, VOCAB, TILE, BANS,
                )  # fmt: skip
            else:
                limit = _search(
                    gaps, VOCAB, top, temperature, k, top_p, total, place, row, logits,
                    positions, ban_until, ban_ids, False, VOCAB, TILE, BANS,
                )  # fmt: skip
        if min_p > 0.0:
            widest = -temperature * tl.log(min_p)  # p >= min_p * max(p)
            widest = tl.where(widest > 0.0, widest, 0.0)
            limit = tl.minimum(limit, widest.to(tl.int32, bitcast=True))
    tl.store(tops + place, top)
    tl.store(limits + place, limit)


def limits(logits: Tensor, positions: Tensor, rows: Tensor, params: RowTensors) -> Limits:
    """Returns the filters of each query.

    logits [B, N, V], any float type; positions [B, N] int64 of the queries; rows [B] int64, the rows of `params` of
    each, which may occur more than once. Bans count, as in `SamplingOps.sample`. Exactly the tokens of
    `keep_mask`, but for the last bits of exp and log. Rows at temperature 0 are not filtered.
    """
    batch, nodes, vocab = logits.shape
    device, count = logits.device, batch * nodes
    chunks = triton.cdiv(vocab, _CHUNK)
    room = min(vocab, max(_MIN_LIST, _LIST_WORDS // count))
    maxima = torch.empty(count, chunks, dtype=torch.float32, device=device)
    histogram = torch.empty(count, BINS.value, dtype=torch.int32, device=device)
    mass = torch.empty(count, dtype=torch.int64, device=device)
    listed = torch.empty(count, dtype=torch.int32, device=device)
    gaps = torch.empty(count, room, dtype=torch.float32, device=device)
    found = Limits(
        torch.empty(count, dtype=torch.float32, device=device), torch.empty(count, dtype=torch.int32, device=device)
    )
    bans = (params.ban_until, params.ban_ids)
    sizes = {"VOCAB": vocab, "BANS": params.ban_ids.shape[1], **launch_options(device)}
    chunk = {"CHUNKS": chunks, "CHUNKS_BLOCK": triton.next_power_of_2(chunks)}
    source = (logits, positions, rows, params.floats)
    grid = (chunks, count)
    _maximum_kernel[grid](maxima, histogram, mass, listed, *source, *bans, nodes, CHUNK=_CHUNK, **sizes)
    _count_kernel[grid](
        histogram, mass, maxima, *source, params.top_k, *bans, nodes, CHUNK=_CHUNK, **chunk, **sizes
    )  # fmt: skip
    _list_kernel[grid](
        gaps, listed, histogram, mass, maxima, *source, params.top_k, *bans, nodes, room, CHUNK=_CHUNK, **chunk,
        **sizes,
    )  # fmt: skip
    _limit_kernel[(count,)](
        *found, gaps, listed, mass, maxima, *source, params.top_k, *bans, nodes, room, TILE=_SEARCH_TILE, **chunk,
        **sizes, num_warps=8,
    )  # fmt: skip
    return found
