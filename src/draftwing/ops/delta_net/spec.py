"""Gated delta nets over chunks and trees, in plain torch: readable, and slow. Devices have kernels in its place.

Of each value head, with q and k of unit length and q scaled, S [key_dim, value_dim] float32 and log decay g:
S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q.
Beta is a sigmoid, or twice that (Grazzi et al. 2025, arXiv 2411.12537), by which values may be turned round.

Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) is the same without the correction (`DeltaSpec.corrects`), so it is no
operation of its own: states, records, walks over trees and chunks, convolution and decay are shared. With C, B and x
of its papers as q, k and v, a group of heads as a key head, and dt = softplus(a + dt_bias):
S <- exp(A dt) S + B (dt x)^T;  y = S^T C + D x.
C and B are as the convolution, which has a bias, leaves them. The norm is over all heads of a group, behind the gates
or before them, or there is none.

Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692) is the same with a g for each channel of the key
(`DeltaSpec.by_channel`), [key_dim] in place of one number: S <- diag(exp(g)) S. So decays, their biases and their
records are [value_heads, key_dim] where they are else [value_heads]; A is of a head in both. All else is shared, but
for the gates of what the net gives, which are sigmoids. With a floor g = floor sigmoid(exp(A_log) (a + dt_bias)), in
place of -exp(A_log) softplus(a + dt_bias).

Mamba-1 (Gu and Dao 2023, arXiv 2312.00752) is Mamba-2 with an A for each element of a head's state
(`DeltaSpec.by_state`), [value_heads, key_dim]; a head has one value. dt stands where log decays else do, as records
of these would be large. No kernel has it.

Every token's bits are those of this recurrence over its ancestors, one after the other (see `kv.pool`). Between
what is kept in float32 it is computed in float64: torch's functions, and the order of its sums, depend in the last bits
on where in a tensor a value stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, LayerStates, RowStates

if TYPE_CHECKING:  # it calls what is here
    from draftwing.ops.attention.batch import Batch, DeltaInputs, DeltaWeights

L2_EPS = 1e-6  # of the squared length of queries and keys


class _State(NamedTuple):
    """States of B rows or nodes: the matrices, and the convolution's inputs of the newest tokens."""

    s: Tensor  # [B, value_heads, key_dim, value_dim]
    window: Tensor  # [B, conv_width - 1, channels]


def gates(spec: DeltaSpec, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
    """Returns log decays, and beta or dt, [M, decays + value_heads] float32."""
    x = inputs.a.double() + weights.dt_bias
    if spec.by_state:
        return F.softplus(x).repeat(1, 2).float()
    decay, dt = weights.decay.repeat_interleave(spec.decays // spec.value_heads), F.softplus(x)
    log = spec.floor * (-decay * x).sigmoid() if spec.floor else decay * dt
    return torch.cat((log, spec.corrects * inputs.b.double().sigmoid() if spec.corrects else dt), 1).float()


def delta_net(states: RowStates, layer: int, batch: Batch, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
    """Computes what `Attend.delta` returns; layer: of the pool."""
    kept = states.layers[layer]
    gate, run = gates(kept.spec, inputs, weights), _chunks if batch.chunks else _tree
    return gated_norm(kept.spec, run(states, kept, batch, inputs.qkv, gate, weights), inputs.z, weights)


def over_sequences(inputs: DeltaInputs, weights: DeltaWeights, sequences: int) -> Tensor:
    """Computes a gated delta net over so many whole sequences of one length, without a pool."""
    assert weights.spec is not None
    spec = weights.spec
    gate = gates(spec, inputs, weights).unflatten(0, (sequences, -1))
    qkv = inputs.qkv.unflatten(0, (sequences, -1))
    s = torch.zeros(sequences, spec.value_heads, spec.key_dim, spec.value_dim, device=qkv.device)
    state, out = _State(s, qkv.new_zeros(sequences, spec.conv_width - 1, spec.channels)), []
    for token in range(qkv.shape[1]):
        state, o = _step(spec, state, qkv[:, token], gate[:, token], weights)
        out.append(o)
    return gated_norm(spec, torch.stack(out, 1).flatten(0, 1), inputs.z, weights)


def _chunks(
    states: RowStates, kept: LayerStates, batch: Batch, qkv: Tensor, gate: Tensor, weights: DeltaWeights
) -> Tensor:
    """-> [M, value_heads, value_dim] float32"""
    out = []
    for span in batch.chunks:
        row = batch.rows[span.row : span.row + 1]
        at = states.read[row]
        state = _State(kept.state[at], kept.conv[at])
        saves = dict(span.saves)
        for done, token in enumerate(range(span.offset, span.offset + span.length), 1):
            here = slice(token, token + 1)
            state, o = _step(kept.spec, state, qkv[here], gate[here], weights)
            out.append(o)
            if done in saves:
                _write(kept, at.new_full((1,), saves[done]), state)
        _write(kept, states.write[row], state)
    return torch.cat(out)


def _tree(
    states: RowStates, kept: LayerStates, batch: Batch, qkv: Tensor, gate: Tensor, weights: DeltaWeights
) -> Tensor:
    """-> [M, value_heads, value_dim] float32"""
    assert batch.path is not None and batch.path_len is not None
    # [M] of each query: its row, what it reads and writes, and its node, which is the last of its path.
    rows = batch.rows.repeat_interleave(batch.path.shape[1])
    prefix_len = batch.prefix_len.repeat_interleave(batch.path.shape[1])
    page, length, path = states.page[rows], batch.path_len.flatten(), batch.path.flatten(0, 1)
    node = path.gather(1, length[:, None] - 1).squeeze(1)
    state = _State(kept.state[states.read[rows]], kept.conv[states.read[rows]])

    def go_on(state: _State, goes: Tensor, qkv: Tensor, gate: Tensor) -> tuple[_State, Tensor]:
        after, o = _step(kept.spec, state, qkv, gate, weights)
        s = torch.where(goes[:, None, None, None], after.s, state.s)
        return _State(s, torch.where(goes[:, None, None], after.window, state.window)), o

    for step in range(states.nodes):  # tokens that were accepted since
        place = states.length[rows] + step
        slot = batch.table[rows, place]
        record = rows, 1 - page, (states.node_slots[rows, 1 - page] == slot[:, None]).int().argmax(1)
        state, _ = go_on(state, place < prefix_len, kept.inputs[record], kept.gates[record])
    query = torch.zeros(len(states.read), batch.window, dtype=torch.int64, device=rows.device)  # of each node
    query[rows, node] = torch.arange(len(rows), device=rows.device)
    out = torch.zeros(len(rows), *kept.state.shape[1::2], device=rows.device)
    for level in range(path.shape[1]):  # of each query's path
        goes = level < length
        at = query[rows, torch.where(goes, path[:, level], 0)]
        state, o = go_on(state, goes, qkv[at], gate[at])
        out = torch.where(goes[:, None, None], o, out)
        if not level:  # the root
            written = (node == 0) & ~states.left(rows, batch.window)
            _write(kept, torch.where(written, states.write[rows], states.dummy), state)
    kept.inputs[rows, page, node], kept.gates[rows, page, node] = qkv, gate
    states.node_slots[rows, page, node] = batch.write_slots
    return out


def _step(spec: DeltaSpec, state: _State, qkv: Tensor, gate: Tensor, weights: DeltaWeights) -> tuple[_State, Tensor]:
    """One token of each of B states: qkv [B, channels], gate [B, decays + value_heads] -> what it is then, and o
    [B, value_heads, value_dim]"""
    window = torch.cat((state.window, qkv[:, None]), 1)  # [B, conv_width, channels]
    made = qkv.double()
    if spec.conv_width > 1:
        made = (window.double() * weights.conv.T).sum(1)
        made = F.silu(made if weights.conv_bias is None else made + weights.conv_bias)
    wide = spec.key_heads * spec.key_dim
    q, k, v = made.split((wide, wide, spec.value_heads * spec.value_dim), 1)
    q, k = (part.unflatten(1, (spec.key_heads, spec.key_dim)) for part in (q, k))
    if spec.corrects:
        q, k = _unit(q) * spec.key_dim**-0.5, _unit(k)
    head = torch.arange(spec.value_heads, device=qkv.device)
    theirs = head % spec.key_heads if spec.tiled else head // (spec.value_heads // spec.key_heads)
    q, k = q[:, theirs], k[:, theirs]  # [B, value_heads, key_dim]
    v, (decay, beta) = v.unflatten(1, (spec.value_heads, spec.value_dim)), gate.double().tensor_split((spec.decays,), 1)
    log = decay.unflatten(1, (spec.value_heads, -1))
    s = state.s * (log * weights.decay if spec.by_state else log)[..., None].exp()
    d = beta[:, :, None] * (v - (s * k[..., None]).sum(2) if spec.corrects else v)
    s = s + k[..., None] * d[:, :, None]
    o = (s * q[..., None]).sum(2)
    o = o if weights.skip is None else o + weights.skip[:, None] * v
    return _State(s.float(), window[:, 1:]), o.float()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _write(kept: LayerStates, slots: Tensor, state: _State) -> None:
    kept.state.index_copy_(0, slots, state.s)
    kept.conv.index_copy_(0, slots, state.window)


def gated_norm(spec: DeltaSpec, o: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """o [M, value_heads, value_dim] float32, z [M, value_heads * value_dim] -> as z"""
    o, gate = o.double(), z.double().sigmoid() if spec.by_channel else F.silu(z.double())
    if not spec.corrects:
        o = o.flatten(1)
        if not weights.norm.numel():
            return (o * gate).to(z.dtype)
        if weights.gates_first:
            o, gate = o * gate, torch.ones_like(gate)
        o = o.unflatten(1, (spec.key_heads, -1))  # the heads of a group
    normed = o * (o.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm.view(-1, o.shape[2])
    return (normed.flatten(1) * gate).to(z.dtype)
