"""Gated delta nets in C: ops/cpu/csrc/delta_net.c, which says in what order it sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, RowStates
from draftwing.ops.attention.batch import ChunkSpan, DeltaInputs, DeltaWeights
from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.workers import Workers

_VECTOR = 16  # sizes of heads are multiples of it
_MOST_TAPS = 8
_PLENTY = 7  # units of work for a thread

Who = tuple[Any, ...]  # rows, table, its stride, prefix_len, path, path_len, spans, starts, count, nodes, depth


def can_run(spec: DeltaSpec, inputs: DeltaInputs) -> bool:
    """Returns whether the kernel takes heads of these sizes."""
    sizes = spec.key_dim % _VECTOR == 0 and spec.value_dim % _VECTOR == 0 and 2 <= spec.conv_width <= _MOST_TAPS
    return sizes and inputs.qkv.dtype in DTYPES


def saves_of(chunks: Sequence[ChunkSpan]) -> Tensor:
    """Returns `ChunkSpan.saves` as the kernel takes them: where each chunk's begin, where the last ones end, and
    all of them."""
    starts, pairs = [len(chunks) + 1], []
    for chunk in chunks:
        pairs += [number for save in chunk.saves for number in save]
        starts.append(len(chunks) + 1 + len(pairs))
    return torch.tensor(starts + pairs)


def _group(spec: DeltaSpec, items: int, threads: int) -> int:
    """Value heads of a unit of work: all that share a key head, whose queries and keys are then made once, or where
    these units are few for the threads, one."""
    return spec.value_heads // spec.key_heads if items * spec.key_heads >= _PLENTY * threads else 1


def delta_net(
    raw: Any,
    scratch: Callable[[int, int], Tensor],
    states: RowStates,
    layer: int,
    who: Who,
    slots: Tensor,
    saves: Tensor | None,
    workers: Workers,
    inputs: DeltaInputs,
    weights: DeltaWeights,
) -> Tensor:
    """Computes what `Attend.delta` returns. scratch(size, rows): so many bytes; layer: of the pool; slots [M]: the
    batch's write slots; saves: `saves_of` the chunks."""
    kept = states.layers[layer]
    spec, rows = kept.spec, inputs.qkv.shape[0]
    values = spec.value_heads * spec.value_dim
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in inputs]
    assert all(part.dtype == kept.conv.dtype for part in parts)
    assert kept.state.data_ptr() % (4 * _VECTOR) == 0, "states are stored as whole vectors past the caches"
    assert [part.shape[1] for part in parts] == [spec.channels, values, spec.value_heads, spec.decays]
    conv = weights.conv.T.contiguous()  # as it is already of a model that was packed
    assert conv.shape == (spec.conv_width, spec.channels)
    assert all(w.dtype == torch.float32 and w.is_contiguous() for w in (conv, *weights[1:4]))
    assert not spec.floor or spec.by_channel
    out = inputs.z.new_empty(rows, values)
    made = out if spec.corrects else inputs.z.new_empty(rows, values, dtype=torch.float32)
    count, half = who[8], kept.conv.dtype == torch.bfloat16
    sizes = (
        *spec[:5],
        spec.tiled,
        spec.corrects,
        spec.by_channel,
        states.nodes,
        _group(spec, count, workers.most),
        half,
        workers.address,
    )
    size = raw.delta_scratch(*sizes, *who)
    raw.delta_net(
        *sizes, *who, slots, saves, made, *parts, *(part.stride(0) for part in parts), conv, *weights[1:4],
        weights.conv_bias, weights.skip, *kept[1:], states.read, states.write, states.page, states.length,
        states.node_slots, scratch(size * workers.most, rows), size, rows, spec.floor, weights.eps,
    )  # fmt: skip
    if not spec.corrects:
        norm = weights.norm if weights.norm.numel() else None
        raw.ssm_norm(
            out, made, parts[1], parts[1].stride(0), norm, rows, spec.key_heads, values // spec.key_heads,
            weights.gates_first, half, workers.address, weights.eps,
        )  # fmt: skip
    return out
