"""One token per node in Triton: the rule of `SamplingOps.sample`, with every row's parameters read on the
device.

Two launches, whatever mix of greedy, noisy and banned rows a batch is, so one captured graph serves them all; filters
take four more. The first finds the largest value of each group of neighbouring tokens. The groups with the largest of
these hold all candidates, and the second looks at no other.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.core import NOT_FINITE
from draftwing.ops.expansion.triton_continuations import LAST, key_place, key_value, sort_key
from draftwing.ops.noise.triton import gumbel, position_words
from draftwing.ops.sampling.spec import CANDIDATES, SamplingOps
from draftwing.ops.sampling.triton_filters import Limits, limits, load_logits, without_bans
from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.types import Edits, Rescoring, RowTensors, SampleInputs, SamplingGroups

_GROUP = 128  # tokens; 8 groups of it are about as many values as a vocabulary has groups
_FEW_QUERIES = 8  # queries up to which the vocabulary is cut finer, to occupy the GPU
_FAN = 16  # groups of a block of groups, and tokens of a block of tokens
_DOT_STEP = 1024
_PICK_WARPS = 8
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _state(place, positions, depth, rows, seed, floats, ban_until, nodes):
    """What a program needs to know of its query, in two rounds of loads."""
    index = place // nodes
    position = tl.load(positions + place) + 1
    drawn = tl.load(positions + index * nodes) + tl.load(depth + place) + 1
    row = tl.load(rows + index)
    temperature = tl.load(floats + row * 3)
    banned = position < tl.load(ban_until + row)
    word0, word1 = position_words(tl.load(seed + row), drawn)
    return row, temperature, banned, word0, word1


@triton.jit
def _scores(
    x, ids, place, row, temperature, banned, word0, word1, ban_ids, tops, limit,
    BANS: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Logits x of the ids, plus noise; -inf for what is removed and for NaN."""
    x = without_bans(x, ids, banned, row, ban_ids, BANS)
    z = x
    if temperature > 0.0:
        z = tl.fma(gumbel(word0, word1, ids), temperature, x)  # not left to the compiler: both kernels must agree
        if FILTERED:
            gap = tl.load(tops + place) - x
            z = tl.where(gap.to(tl.int32, bitcast=True) <= tl.load(limit + place), z, float("-inf"))
    return tl.where(z > float("-inf"), z, float("-inf"))


@triton.jit(do_not_specialize=["nodes"])
def _peaks_kernel(
    peaks, logits, positions, depth, rows, seed, floats, ban_until, ban_ids, tops, limit, nodes,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BANS: tl.constexpr,
    FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest score of each group: peaks [M, GROUPS]; a program takes TILE groups."""
    start(PDL)
    place = tl.program_id(1)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits, place, ids, VOCAB)  # on its way before anything that must be waited for
    row, temperature, banned, word0, word1 = _state(place, positions, depth, rows, seed, floats, ban_until, nodes)
    z = _scores(x, ids, place, row, temperature, banned, word0, word1, ban_ids, tops, limit, BANS, FILTERED)
    tl.store(peaks + place * GROUPS + group, tl.max(z, 1), mask=group < GROUPS)


@triton.jit
def _largest(keys, COUNT: tl.constexpr):
    """The COUNT largest of distinct keys [n], descending: [COUNT] int64. Each key's rank is a count over all pairs: for
    a hundred keys that takes as long as two of the rounds that would find one after the other."""
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    lane = tl.arange(0, COUNT)
    return tl.max(tl.where(rank[:, None] == lane[None, :], keys[:, None], LAST), 0)


@triton.jit
def _largest_in_rounds(keys, COUNT: tl.constexpr):
    """Like `_largest`, one after the other. Before `_dots`, whose layout the compiler would spread the pairs over."""
    lane = tl.arange(0, COUNT)
    found = tl.full([COUNT], LAST, tl.int64)
    for i in tl.static_range(COUNT):
        best = tl.max(keys)
        found = tl.where(lane == i, best, found)
        keys = tl.where(keys == best, LAST, keys)
    return found


@triton.jit
def best_groups(peaks, GROUPS: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT groups with the largest peaks [GROUPS], those in the best COUNT of blocks of FAN: [COUNT] int32."""
    block = tl.arange(0, BLOCK)
    inside = tl.arange(0, FAN)[None, :]
    group = block[:, None] * FAN + inside
    peak = tl.max(tl.load(peaks + group, mask=group < GROUPS, other=float("-inf")), 1)
    group = key_place(_largest(sort_key(peak, block), COUNT))[:, None] * FAN + inside
    peak = tl.load(peaks + group, mask=group < GROUPS, other=float("-inf"))
    return key_place(_largest(tl.reshape(sort_key(peak, group), [COUNT * FAN]), COUNT))


@triton.jit
def _dots(hidden, weight, place, ids, HIDDEN: tl.constexpr, STEP: tl.constexpr):
    """ids [K] int32 -> their logits from hidden [M, HIDDEN] and weight [V, HIDDEN], [K] float32; the order of summation
    follows from HIDDEN alone."""
    total = tl.zeros([ids.shape[0], STEP], tl.float32)
    for first in tl.static_range(0, HIDDEN, STEP):
        column = first + tl.arange(0, STEP)
        x = tl.load(hidden + place.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        w = tl.load(
            weight + ids.to(tl.int64)[:, None] * HIDDEN + column[None, :], mask=(column < HIDDEN)[None, :], other=0.0
        )  # fmt: skip
        total = tl.fma(w.to(tl.float32), x.to(tl.float32)[None, :], total)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["nodes"])
def _pick_kernel(
    tokens, peaks, hidden, weight, logits, positions, depth, rows, seed, floats, ban_until, ban_ids, tops, limit,
    nodes,
    VOCAB: tl.constexpr, HIDDEN: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    FAN: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, RESCORED: tl.constexpr, APART: tl.constexpr,
    BANS: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best token of the COUNT best groups; RESCORED: of the COUNT best tokens, by exact logits. APART: these are
    weighed by whoever has the weight, so tokens [M, COUNT] are the candidates, and `hidden` [M, COUNT] float32 takes
    what noise adds to their logits, -inf for what cannot be chosen."""
    start(PDL)
    place = tl.program_id(0)
    row, temperature, banned, word0, word1 = _state(place, positions, depth, rows, seed, floats, ban_until, nodes)
    group = best_groups(peaks + place * GROUPS, GROUPS, BLOCK, FAN, COUNT)  # a padding group is past VOCAB
    # Inside the groups as outside: blocks of FAN tokens, then the tokens of the best of these.
    inside = tl.arange(0, FAN)[None, :]
    first = group[:, None] * GROUP + tl.arange(0, GROUP // FAN)[None, :] * FAN
    first = tl.reshape(first, [COUNT * (GROUP // FAN)])
    ids = first[:, None] + inside
    x = load_logits(logits, place, ids, VOCAB)
    z = _scores(x, ids, place, row, temperature, banned, word0, word1, ban_ids, tops, limit, BANS, FILTERED)
    ids = key_place(_largest(sort_key(tl.max(z, 1), first), COUNT))[:, None] + inside
    x = load_logits(logits, place, ids, VOCAB)
    z = _scores(x, ids, place, row, temperature, banned, word0, word1, ban_ids, tops, limit, BANS, FILTERED)
    keys = tl.reshape(sort_key(z, ids), [COUNT * FAN])
    if RESCORED:
        best = _largest_in_rounds(keys, COUNT)
        chosen, score = key_place(best), key_value(best)
        inside = tl.minimum(chosen, VOCAB - 1)
        rounded = tl.load(logits + place.to(tl.int64) * VOCAB + inside).to(tl.float32)
        if APART:
            out = place * COUNT + tl.arange(0, COUNT)
            tl.store(tokens + out, inside.to(tl.int64))
            tl.store(hidden + out, tl.where(score > float("-inf"), score - rounded, float("-inf")))
        else:
            value = score - rounded + _dots(hidden, weight, place, inside, HIDDEN, STEP)  # noise + true logit
            value = tl.where((score > float("-inf")) & (value > float("-inf")), value, float("-inf"))
            _store_token(tokens, place, tl.max(sort_key(value, chosen)))
    else:
        _store_token(tokens, place, tl.max(keys))


@triton.jit
def _store_token(tokens, place, best):
    finite = tl.abs(key_value(best)) < float("inf")
    tl.store(tokens + place, key_place(best).to(tl.int64) | tl.where(finite, 0, _NOT_FINITE).to(tl.int64))


def _weighed(ids: Tensor, noise: Tensor, logits: Tensor) -> Tensor:
    """ids [B, N, K], noise and logits [B, N, K] float32 -> [B, N]: ids of the largest sum, of equals the lowest."""
    value = noise + logits
    value = value.masked_fill_(~((noise > -math.inf) & (value > -math.inf)), -math.inf)
    best = value.amax(-1, keepdim=True)
    token = torch.where(value == best, ids, NOT_FINITE).amin(-1)
    return token.add_(best.squeeze(-1).isfinite().logical_not_(), alpha=NOT_FINITE)


class TritonSamplingOps(SamplingOps):
    """Overrides `draw`. What the host edits and masks is drawn by torch."""

    draws_by_row = True

    def draw(
        self,
        drawn: SampleInputs,
        table: RowTensors,
        drawing: SamplingGroups,
        filtered: bool,
        rescoring: Rescoring | None,
        edits: Edits | None = None,
    ) -> Tensor:
        """Every choice but `filtered` is made on the device, by value: a row is greedy at temperature 0, and banned
        from ids below its `ban_until`. A row may occur more than once."""
        assert edits is None
        rows, logits, positions, depth = drawn.rows, drawn.logits, drawn.positions, drawn.depth
        batch, nodes, vocab = logits.shape
        device, count = logits.device, batch * nodes
        for tensor in (logits, positions, depth, rows, table.floats, table.ban_ids):
            assert tensor.is_contiguous()
        found = limits(logits, positions, rows, table) if filtered else Limits(table.floats, table.floats)  # none read
        product, size = (logits, logits), 1  # not read
        tokens = torch.empty(batch, nodes, dtype=torch.int64, device=device)
        apart = rescoring is not None and rescoring.weight is None
        if rescoring is not None and rescoring.weight is not None:
            hidden, weight, size = rescoring.hidden, rescoring.weight, rescoring.hidden.shape[-1]
            assert hidden.is_contiguous() and weight.is_contiguous() and weight.shape == (vocab, size)
            product = (hidden, weight)
        elif apart:
            tokens = tokens.new_empty(batch, nodes, CANDIDATES)
            product = (torch.empty(tokens.shape, dtype=torch.float32, device=device), logits)
        groups = triton.cdiv(vocab, _GROUP)
        tile, warps = (8, 4) if count <= _FEW_QUERIES else (32, 8)
        peaks = torch.empty(count, groups, dtype=torch.float32, device=device)
        state = (
            logits, positions, depth, rows, table.seed, table.floats, table.ban_until, table.ban_ids, *found, nodes,
        )  # fmt: skip
        sizes = {
            "VOCAB": vocab, "GROUPS": groups, "GROUP": _GROUP, "BANS": table.ban_ids.shape[1], "FILTERED": filtered,
            **launch_options(device),
        }  # fmt: skip
        _peaks_kernel[(triton.cdiv(groups, tile), count)](peaks, *state, TILE=tile, **sizes, num_warps=warps)
        blocks = max(CANDIDATES, triton.next_power_of_2(triton.cdiv(groups, _FAN)))
        _pick_kernel[(count,)](
            tokens, peaks, *product, *state, HIDDEN=size, BLOCK=blocks, FAN=_FAN, COUNT=CANDIDATES, STEP=_DOT_STEP,
            RESCORED=rescoring is not None, APART=apart, **sizes, num_warps=_PICK_WARPS,
        )  # fmt: skip
        if rescoring is not None and apart:
            return _weighed(tokens, product[0], rescoring.exact(tokens, None))
        return tokens
