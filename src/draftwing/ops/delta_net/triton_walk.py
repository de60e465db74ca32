"""The recurrence of gated delta nets, walk by walk: see `ops.delta_net.triton`."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, LayerStates
from draftwing.ops.delta_net.triton_plan import Walks
from draftwing.ops.triton.common import launch_options, let_next_come, ordinary_options, wait

LEAST_KEYS = 16  # elements of a key, with zeros behind it


class Form(NamedTuple):
    """How S is laid out over threads; it changes no bits. lanes: of a warp that share a column's keys, 4 or 8.  warps:
    of a block, each with columns of its own.  per: columns of a thread.  turn: tokens of a turn of the loop, 1 or 4;
    they lie one behind another.  stages: turns whose inputs are on their way, and one."""

    lanes: int
    warps: int
    per: int
    turn: int
    stages: int

    @property
    def columns(self) -> int:
        return 32 // self.lanes * self.warps * self.per


# Swept on an H200, see docs/dev/gpu_kernels.md. A chunk's few programs are spread over the multiprocessors by an
# ordinary launch: those that came up early would crowd where the kernel in front leaves room.
TREE = Form(lanes=4, warps=2, per=4, turn=1, stages=3)
CHUNK = Form(lanes=8, warps=2, per=2, turn=4, stages=3)
CHUNKS = Form(lanes=8, warps=4, per=4, turn=4, stages=3)  # two or more at once


def form_of(spec: DeltaSpec, plan: Walks) -> Form:
    """Returns the form for the walks of a batch."""
    form = TREE
    if plan.of_chunks:
        form = CHUNKS if plan.walks.shape[0] > 1 else CHUNK
    # Threads have neighbours only where rows begin at a multiple of four.
    return form if spec.value_dim % 4 == 0 else form._replace(per=1)


@triton.jit
def place_of(key, KEY_PAD: tl.constexpr):
    """Returns where an element of a key or query lies in memory: elements of a thread are neighbours."""
    return key % 8 * (KEY_PAD // 8) + key // 8 % 2 * (KEY_PAD // 16) + key // 16


@triton.jit
def _over_keys(x):
    """x [COLUMN_LANES, LEFT, 4, WARPS, HIGH, 2, OUTER, PER] -> sums [COLUMN_LANES, WARPS, PER], in an order that does
    not depend on the form: LEFT and HIGH are one bit of a key, of threads or of registers."""
    return tl.sum(tl.sum(tl.sum(tl.sum(tl.sum(x, 6), 5), 4), 1), 1)


@triton.jit
def _four(x):
    """x [2, 2, ...] -> four of [...], in order."""
    if len(x.shape) == 4:
        x = tl.permute(x, (2, 3, 0, 1))
    elif len(x.shape) == 5:
        x = tl.permute(x, (2, 3, 4, 0, 1))
    else:
        x = tl.permute(x, (2, 3, 4, 5, 6, 0, 1))
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _turn(
    s, token, out, made, numbers, fades, through, queries, head, key_head, place, column, is_column, is_first_lane,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CORRECTS: tl.constexpr,
    KEY_PAD: tl.constexpr, EVEN: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Returns S behind one or four tokens, from `token` on, and stores their results."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_PAD + VALUE_HEADS * VALUE_DIM
    two = tl.arange(0, 2)
    token64 = token.to(tl.int64)
    number = two[:, None] * 2 + two[None, :]
    if TURN == 1:
        tokens, of_numbers, of_column = token64, token64, token64
    else:
        four = token64 + two[:, None] * 2 + two[None, :]
        tokens, of_numbers, of_column = (
            four[:, :, None, None, None, None, None], four[:, :, None, None], four[:, :, None, None, None],
        )  # fmt: skip
    q = tl.load(made + tokens * CHANNELS + key_head * KEY_PAD + place)
    k = tl.load(made + tokens * CHANNELS + (KEY_HEADS + key_head) * KEY_PAD + place)
    of_v = made + of_column * CHANNELS + 2 * KEY_HEADS * KEY_PAD + head * VALUE_DIM + column
    v = tl.load(of_v) if EVEN else tl.load(of_v, mask=is_column, other=0.0)
    number = tl.load(numbers + (of_numbers * VALUE_HEADS + head) * 4 + number)
    fade = tl.load(fades + (tokens * VALUE_HEADS + head) * KEY_PAD + place) if fades is not None else q
    if TURN == 1:
        qs, ks, vs, ns, fs = (q,), (k,), (v,), (number,), (fade,)
    else:
        qs, ks, vs, ns, fs = _four(q), _four(k), _four(v), _four(number), _four(fade)
    results = ()
    for each in tl.static_range(TURN):
        even, odd = tl.split(ns[each])
        decay, dot = tl.split(even)
        beta, _ = tl.split(odd)
        q = qs[each][None, :, :, None, :, :, :, None]
        k = ks[each][None, :, :, None, :, :, :, None]
        if fades is not None:
            s *= fs[each][None, :, :, None, :, :, :, None]
        by_query = _over_keys(s * q)
        # Fused by hand: what a compiler fuses depends on the rest of the kernel.
        d = beta * (tl.fma(-decay, _over_keys(s * k), vs[each]) if CORRECTS else vs[each])
        left = s if fades is not None else s * decay  # the decay is 1 where channels have their own
        s = tl.fma(k, d[:, None, None, :, None, None, None, :], left)
        o = tl.fma(dot, d, decay * by_query)
        if through is not None:
            o = tl.fma(through, vs[each], o)
        results += (o,)  # type: ignore[assignment]
    into = out + (of_column * VALUE_HEADS + head) * VALUE_DIM
    if TURN == 1:
        # From the threads that have it: of one lane alone it would go through shared memory.
        is_there = is_column[:, None, None, :, :] & is_first_lane & (token < queries)
        tl.store(into + column[:, None, None, :, :] + 0 * is_first_lane, results[0][:, None, None, :, :], mask=is_there)  # type: ignore[misc]
    else:
        first, second, third, fourth = results  # type: ignore[misc]
        o = tl.permute(tl.join(tl.join(first, third), tl.join(second, fourth)), (3, 4, 0, 1, 2))
        tl.store(into + column, o, mask=is_column & (of_column < queries))
    return s


@triton.jit(do_not_specialize=["queries"], do_not_specialize_on_alignment=["steps", "walks", "segments"])
def _walk_kernel(
    out, made, numbers, fades, state, skip, steps, walks, segments, queries,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr, CORRECTS: tl.constexpr, KEY_PAD: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    PER: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (value heads * slices, walks). Tokens from `queries` on have no results."""
    let_next_come(PDL)
    COLUMN_LANES: tl.constexpr = 32 // LANES
    COLUMNS: tl.constexpr = COLUMN_LANES * WARPS * PER
    SLICES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    walks += tl.program_id(1) * 4
    start = tl.load(walks)
    steps += start
    read, first, end = tl.load(walks + 1), tl.load(walks + 2), tl.load(walks + 3)
    head = tl.program_id(0) // SLICES
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    # [LEFT, 4, HIGH, 2, OUTER]
    left, high, low = tl.arange(0, LANES // 4), tl.arange(0, 8 // LANES), tl.arange(0, 4)
    inner = left[:, None, None, None, None] * 4 + high[None, None, :, None, None] * 4 + low[None, :, None, None, None]
    outer, middle = tl.arange(0, KEY_PAD // 16)[None, None, None, None, :], tl.arange(0, 2)[None, None, None, :, None]
    key = (outer * 2 + middle) * 8 + inner
    place = inner * (KEY_PAD // 8) + middle * (KEY_PAD // 16) + outer  # as `place_of`
    lane, warp, per = tl.arange(0, COLUMN_LANES), tl.arange(0, WARPS), tl.arange(0, PER)
    if PER == 1:  # neighbours would be one thread's
        lane = lane % (COLUMN_LANES // 2) * 2 + lane // (COLUMN_LANES // 2)
    column = (warp[None, :, None] * COLUMN_LANES + lane[:, None, None]) * PER + per[None, None, :]
    column += tl.program_id(0) % SLICES * COLUMNS
    is_column = column < VALUE_DIM
    mask = (key < KEY_DIM)[None, :, :, None, :, :, :, None] & is_column[:, None, None, :, None, None, None, :]
    within = state + head * (KEY_DIM * VALUE_DIM)
    within += key[None, :, :, None, :, :, :, None] * VALUE_DIM + column[:, None, None, :, None, None, None, :]
    size: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    EVEN: tl.constexpr = VALUE_DIM % COLUMNS == 0
    is_there = first < end
    s = tl.load(within + read.to(tl.int64) * size, mask=mask & is_there, other=0.0)
    # The first token and segment are asked for, too: then they lie in the L1 cache.
    is_column &= (tl.load(steps, mask=is_there) >= 0) | (tl.load(segments + first * 2, mask=is_there) >= 0)
    is_first_lane = (left[None, :, None, None, None] == 0) & (low[None, None, :, None, None] == 0)
    through = None
    if skip is not None:
        through = tl.load(skip + head)
    wait(PDL)
    for segment in range(first, end):
        # Read, not carried on from segment to segment: Triton 3.6 drops such a bound when it pipelines the inner loop.
        done = tl.load(segments + segment * 2 - 2, mask=segment > first, other=0)
        until, slot = tl.load(segments + segment * 2), tl.load(segments + segment * 2 + 1)
        whole = done
        if TURN > 1:
            whole += (until - done) // TURN * TURN
            for step in tl.range(done, whole, TURN, num_stages=STAGES):
                s = _turn(
                    s, start + step, out, made, numbers, fades, through, queries, head, key_head, place, column,
                    is_column, is_first_lane, KEY_HEADS, VALUE_HEADS, VALUE_DIM, CORRECTS, KEY_PAD, EVEN, TURN,
                )  # fmt: skip
        for step in tl.range(whole, until, num_stages=STAGES if TURN == 1 else 2):
            s = _turn(
                s, tl.load(steps + step), out, made, numbers, fades, through, queries, head, key_head, place, column,
                is_column, is_first_lane, KEY_HEADS, VALUE_HEADS, VALUE_DIM, CORRECTS, KEY_PAD, EVEN, 1,
            )  # fmt: skip
        if slot >= 0:
            tl.store(within + slot.to(tl.int64) * size, s, mask=mask)


def recurrence(
    kept: LayerStates, plan: Walks, made: Tensor, numbers: Tensor, fades: Tensor | None, skip: Tensor | None, form: Form
) -> Tensor:
    """Returns what S gives of queries [queries, value_heads * value_dim], float32, and writes states where the plan
    says so. made, numbers, fades: as `_inputs_kernel` of `ops.delta_net.triton` leaves them. skip [value_heads] or
    None: what of a value goes past the state."""
    spec, device = kept.spec, made.device
    out = torch.empty(plan.queries, spec.value_heads * spec.value_dim, device=device)
    key_pad = (made.shape[1] - out.shape[1]) // (2 * spec.key_heads)
    launched = ordinary_options(device) if plan.of_chunks else launch_options(device)
    assert form.turn == 1 or plan.of_chunks
    _walk_kernel[(spec.value_heads * triton.cdiv(spec.value_dim, form.columns), plan.walks.shape[0])](
        out, made, numbers, fades, kept.state, skip, plan.steps, plan.walks, plan.segments, plan.queries,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim,
        TILED=spec.tiled, CORRECTS=spec.corrects, KEY_PAD=key_pad, LANES=form.lanes, WARPS=form.warps, PER=form.per,
        TURN=form.turn, STAGES=form.stages, num_warps=form.warps, **launched,
    )  # fmt: skip
    return out
