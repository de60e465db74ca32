"""Gated delta nets over chunks and trees, by the plain recurrence. The reference is `ops.delta_net.spec`.

Three launches a layer: what goes into the recurrence, for all tokens at once (`_inputs_kernel`); the recurrence, walk
by walk (`ops.delta_net.triton_plan`), of each head in slices of value_dim that know nothing of each other; the
gated norm. With S [key_dim, value_dim] as the token before left it: d = beta (v - g S^T k); o = g S^T q + (q k) d;
S <- g S + k d^T. So S is read once a token for both sums, and o keeps no later token waiting. Of a state-space layer
d = dt v, and o gets D v besides. Where each channel of the key has its g, S is multiplied with that before its sums.

A token's bits are those of this recurrence over its ancestors: chunks and trees, of any number and size, and tokens
that are run again go through the same kernels, which know of nothing else than of a token's own inputs. How many
threads share a column of S depends on the batch, and the order of no sum does (`triton_walk`).

What was there before the plan, and the plan, is read ahead of the wait for the kernel in front: the first launch that
does so is an ordinary one. No walk reads a state that another one of the same forward writes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.kv.pool import LayerStates
from draftwing.ops.attention.batch import DeltaInputs, DeltaWeights
from draftwing.ops.delta_net.spec import L2_EPS
from draftwing.ops.delta_net.triton_norm import gated_norm, heads_of, sigmoid
from draftwing.ops.delta_net.triton_plan import QUERY, RECORD, Walks
from draftwing.ops.delta_net.triton_walk import LEAST_KEYS, Form, form_of, place_of, recurrence
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.triton.common import launch_options, let_next_come, ordinary_options, softplus, wait

_ANY = ["sources", "tokens", "steps", "walks", "segments"]  # parts of larger tensors


@triton.jit
def _known(
    conv, bias, windows, inputs, codes, channel, mask,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BY_TAP: tl.constexpr,
):  # fmt: skip
    """codes (WIDTH): where a token's inputs lie. -> of each tap its weights [HEADS, DIM], and its input where that is
    no query's, else zeros; the bias comes behind the weights."""
    weights, known = (), ()
    for tap in tl.static_range(WIDTH):
        kind, index = codes[tap] & 3, (codes[tap] >> 2).to(tl.int64)
        base = tl.where(kind == RECORD, inputs, windows) + index * CHANNELS
        known += (tl.load(base + channel, mask=mask & (kind != QUERY), other=0.0),)  # type: ignore[assignment]
        its = conv + tap * CHANNELS + channel if BY_TAP else conv + channel * WIDTH + tap
        weights += (tl.load(its, mask=mask, other=0.0),)  # type: ignore[assignment]
    if bias is not None:
        weights += (tl.load(bias + channel, mask=mask, other=0.0),)  # type: ignore[assignment]
    return weights, known


@triton.jit
def _taps(qkv, qkv_stride, known, codes, channel, mask, WIDTH: tl.constexpr):
    """Returns the inputs of all taps."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        is_query = (codes[tap] & 3) == QUERY
        row = qkv + (codes[tap] >> 2).to(tl.int64) * qkv_stride
        own = tl.load(row + channel, mask=mask & is_query, other=0.0)
        taps += (tl.where(is_query, own, known[tap]),)  # type: ignore[assignment]
    return taps


@triton.jit
def _convolved(
    taps, weights, windows, inputs, keep, save, record, channel, mask,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """channel [HEADS, DIM] -> the same of the convolution's result, float32. Leaves a token's input as its record, and
    windows, where state slots say so."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        total = tl.fma(taps[tap].to(tl.float32), weights[tap], total)
        if tap > 0:
            into = windows + (tap - 1) * CHANNELS + channel
            tl.store(into + keep.to(tl.int64) * ((WIDTH - 1) * CHANNELS), taps[tap], mask=mask & (keep >= 0))
            tl.store(into + save.to(tl.int64) * ((WIDTH - 1) * CHANNELS), taps[tap], mask=mask & (save >= 0))
    tl.store(inputs + record.to(tl.int64) * CHANNELS + channel, taps[WIDTH - 1], mask=mask & (record >= 0))
    if len(weights) > WIDTH:
        total += weights[WIDTH]
    return total * sigmoid(total)


@triton.jit
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _gates(a, b, rate, shift, head, has_decay, mask, CORRECTS: tl.constexpr):
    """Returns log decay, 0 where a head has none of its own, and beta or dt, of a query. rate, shift: what was loaded
    of decays and their biases."""
    x = tl.load(a + head, mask=has_decay, other=0.0).to(tl.float32)
    dt = softplus(x + shift)
    log_decay = rate * dt
    beta = CORRECTS * sigmoid(tl.load(b + head, mask=mask, other=0.0).to(tl.float32)) if CORRECTS else dt
    return log_decay, beta


@triton.jit(do_not_specialize=["queries", "a_stride", "b_stride"], do_not_specialize_on_alignment=[*_ANY, "a", "b"])
def _inputs_kernel(
    made, numbers, fades, qkv, b, a, conv, conv_bias, decay, dt_bias, windows, inputs, gates, sources, tokens,
    qkv_stride, b_stride, a_stride, queries,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr, TILED: tl.constexpr, CORRECTS: tl.constexpr, WIDTH: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, HEADS_PAD: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, BY_TAP: tl.constexpr, FLOOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens * (blocks of KEYS key heads + blocks of VALUES value heads + 1)). made [tokens, MADE]: queries and
    keys, of unit length where the net corrects, as `place_of` has their elements, and values; numbers [tokens,
    VALUE_HEADS, 4]: decay, beta, and the product of query and key; fades [tokens, VALUE_HEADS, KEY_PAD]: decays by
    channel, as elements of keys, in place of those, which are 1 then, or None; all float32. All loads come before the
    first use and the first store: each would cost a wait of its own."""
    let_next_come(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    MADE: tl.constexpr = CHANNELS + 2 * KEY_HEADS * (KEY_PAD - KEY_DIM)
    GATES: tl.constexpr = DECAYS + VALUE_HEADS
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + KEYS - 1) // KEYS
    BLOCKS: tl.constexpr = KEY_BLOCKS + (VALUE_HEADS + VALUES - 1) // VALUES + 1
    # Tokens that might be run again come first: most of them are not there, and those programs end at once.
    token, block = tl.num_programs(0) // BLOCKS - 1 - tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    tokens += token * 4
    live = tl.load(tokens) > 0
    keep, save, known = tl.load(tokens + 1), tl.load(tokens + 2), tl.load(tokens + 3)
    is_query = token < queries
    record = tl.where(is_query, known, -1)
    token64 = token.to(tl.int64)
    sources += token * WIDTH
    codes = ()
    for tap in tl.static_range(WIDTH):
        codes += (tl.load(sources + tap),)  # type: ignore[assignment]
    if live & (block < KEY_BLOCKS):
        head = block * KEYS + tl.arange(0, KEYS)
        dim = tl.arange(0, KEY_PAD)
        mask = (head < KEY_HEADS)[:, None] & (dim < KEY_DIM)[None, :]
        of_q = head[:, None] * KEY_DIM + dim[None, :]
        of_k = of_q + KEY_HEADS * KEY_DIM
        weights, before = _known(conv, conv_bias, windows, inputs, codes, of_q, mask, CHANNELS, WIDTH, BY_TAP)
        k_weights, k_before = _known(conv, conv_bias, windows, inputs, codes, of_k, mask, CHANNELS, WIDTH, BY_TAP)
        wait(PDL)
        taps = _taps(qkv, qkv_stride, before, codes, of_q, mask, WIDTH)
        k_taps = _taps(qkv, qkv_stride, k_before, codes, of_k, mask, WIDTH)
        q = _convolved(taps, weights, windows, inputs, keep, save, record, of_q, mask, CHANNELS, WIDTH)
        k = _convolved(k_taps, k_weights, windows, inputs, keep, save, record, of_k, mask, CHANNELS, WIDTH)
        if CORRECTS:
            q = _unit(q, EPS) * SCALE
            k = _unit(k, EPS)
        into = made + token64 * MADE + head[:, None] * KEY_PAD + place_of(dim, KEY_PAD)[None, :]
        tl.store(into, q, mask=(head < KEY_HEADS)[:, None])
        tl.store(into + KEY_HEADS * KEY_PAD, k, mask=(head < KEY_HEADS)[:, None])
        dot = tl.sum(q * k, 1)
        for each in tl.static_range(VALUE_HEADS // KEY_HEADS):
            theirs = head + each * KEY_HEADS if TILED else head * (VALUE_HEADS // KEY_HEADS) + each
            tl.store(numbers + (token64 * VALUE_HEADS + theirs) * 4 + 2, dot, mask=head < KEY_HEADS)
    elif live & (block < BLOCKS - 1):
        head = (block - KEY_BLOCKS) * VALUES + tl.arange(0, VALUES)
        dim = tl.arange(0, VALUE_PAD)
        mask = (head < VALUE_HEADS)[:, None] & (dim < VALUE_DIM)[None, :]
        channel = 2 * KEY_HEADS * KEY_DIM + head[:, None] * VALUE_DIM + dim[None, :]
        weights, before = _known(conv, conv_bias, windows, inputs, codes, channel, mask, CHANNELS, WIDTH, BY_TAP)
        if fades is not None:
            key = tl.arange(0, KEY_PAD)
            has_key = (head < VALUE_HEADS)[:, None] & (key < KEY_DIM)[None, :]
            of_key = head[:, None] * KEY_DIM + key[None, :]
            shift = tl.load(dt_bias + of_key, mask=has_key, other=0.0)
            rate = tl.load(decay + head, mask=head < VALUE_HEADS, other=0.0)[:, None]
        wait(PDL)
        taps = _taps(qkv, qkv_stride, before, codes, channel, mask, WIDTH)
        v = _convolved(taps, weights, windows, inputs, keep, save, record, channel, mask, CHANNELS, WIDTH)
        tl.store(made + token64 * MADE + (MADE - CHANNELS) + channel, v, mask=mask)
        if fades is not None:
            if is_query:
                x = tl.load(a + token64 * a_stride + of_key, mask=has_key, other=0.0).to(tl.float32) + shift
                log = rate * softplus(x) if FLOOR == 0 else FLOOR * sigmoid(-rate * x)
                tl.store(gates + record.to(tl.int64) * GATES + of_key, log, mask=has_key & (record >= 0))
            else:
                log = tl.load(gates + known.to(tl.int64) * GATES + of_key, mask=has_key, other=0.0)
            into = fades + (token64 * VALUE_HEADS + head[:, None]) * KEY_PAD + place_of(key, KEY_PAD)[None, :]
            tl.store(into, tl.where(has_key, tl.exp(log), 0.0), mask=(head < VALUE_HEADS)[:, None])
    elif live:
        head = tl.arange(0, HEADS_PAD)
        mask = head < VALUE_HEADS
        has_decay = mask & (fades is None)
        rate = tl.load(decay + head, mask=has_decay, other=0.0)
        shift = tl.load(dt_bias + head, mask=has_decay, other=0.0)
        wait(PDL)
        if is_query:
            own_a, own_b = a + token64 * a_stride, b + token64 * b_stride
            log_decay, beta = _gates(own_a, own_b, rate, shift, head, has_decay, mask, CORRECTS)
            its = gates + record.to(tl.int64) * GATES + head
            if fades is None:
                tl.store(its, log_decay, mask=mask & (record >= 0))
            tl.store(its + DECAYS, beta, mask=mask & (record >= 0))
        else:
            its = gates + known.to(tl.int64) * GATES + head
            log_decay = tl.load(its, mask=has_decay, other=0.0)
            beta = tl.load(its + DECAYS, mask=mask, other=0.0)
        into = numbers + (token64 * VALUE_HEADS + head) * 4
        tl.store(into, tl.exp(log_decay), mask=mask)
        tl.store(into + 1, beta, mask=mask)
    elif block == 0:
        wait(PDL)  # the kernel ends after those before it, even where no token is there


def delta_net(
    kept: LayerStates, plan: Walks, inputs: DeltaInputs, weights: DeltaWeights, is_first: bool = True,
    form: Form | None = None,
) -> Tensor | Fp8Rows:  # fmt: skip
    """Computes what `Attend.delta` returns. plan: of the batch. is_first: whether no layer has run by this plan before.
    form: of the recurrence, None: as is best; it changes no bits."""
    spec, device, count = kept.spec, inputs.qkv.device, plan.queries
    qkv, z, b, a = (part if part.stride(1) == 1 else part.contiguous() for part in inputs)
    assert all(part.dtype == kept.conv.dtype and part.shape[0] == count for part in (qkv, z, b, a))
    values = spec.value_heads * spec.value_dim
    assert [part.shape[1] for part in (qkv, z, b, a)] == [spec.channels, values, spec.value_heads, spec.decays]
    conv = weights.conv
    assert conv.shape == (spec.channels, spec.conv_width) and plan.sources.shape[1] == spec.conv_width
    assert conv.is_contiguous() or conv.t().is_contiguous()
    assert all(w.dtype == torch.float32 for w in weights[:4]) and all(w.is_contiguous() for w in weights[1:4])
    assert not spec.floor or spec.by_channel
    tokens = plan.tokens.shape[0]
    key_pad = max(triton.next_power_of_2(spec.key_dim), LEAST_KEYS)
    value_pad = max(triton.next_power_of_2(spec.value_dim), 2)
    made = torch.empty(tokens, 2 * spec.key_heads * key_pad + values, device=device)
    numbers = torch.empty(tokens, spec.value_heads, 4, device=device)
    fades = torch.empty(tokens, spec.value_heads, key_pad, device=device) if spec.by_channel else None
    keys, per_value = heads_of(key_pad), heads_of(value_pad)
    blocks = triton.cdiv(spec.key_heads, keys) + triton.cdiv(spec.value_heads, per_value) + 1
    options = ordinary_options(device) if is_first else launch_options(device)
    _inputs_kernel[(tokens * blocks,)](
        made, numbers, fades, qkv, b, a, conv, weights.conv_bias, weights.decay, weights.dt_bias, kept.conv,
        kept.inputs, kept.gates, plan.sources, plan.tokens, qkv.stride(0), b.stride(0), a.stride(0), count,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim,
        DECAYS=spec.decays, TILED=spec.tiled, CORRECTS=spec.corrects, WIDTH=spec.conv_width, KEY_PAD=key_pad,
        VALUE_PAD=value_pad, KEYS=keys, VALUES=per_value, HEADS_PAD=triton.next_power_of_2(spec.value_heads),
        SCALE=spec.key_dim**-0.5, EPS=L2_EPS, BY_TAP=conv.stride(0) == 1, FLOOR=spec.floor, num_warps=4, **options,
    )  # fmt: skip
    o = recurrence(kept, plan, made, numbers, fades, weights.skip, form or form_of(spec, plan))
    return gated_norm(spec, o, z, weights, plan.tokens)
