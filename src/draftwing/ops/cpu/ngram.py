"""The n-gram drafter in C (`ops/cpu/csrc/ngram.c`): the functions of `ops.triton.ngram` for the CPU, where the install
could build them; DRAFTWING_NATIVE=0 leaves them out.

The references are the torch code of `spec.ngram.drafter`, `ngram_memory` and `ngram_tree`: same state, hints and
trees. Two things differ, and nothing reads them: the dummy row is left alone, its hint is 0; candidates behind a row's
last match (`match` 0) are not written. Unlike there, lengths are read from the tensors: no bounds of the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import load_extension

OWN = 8  # these three as in ops/cpu/csrc/ngram.c
FOUND = 8
MOST_WINDOW = 31


def take(tensor: Tensor) -> bool:
    """Whether the functions below can run: there is the extension, and `tensor` is a real one on the CPU."""
    return tensor.is_cpu and type(tensor) is Tensor and load_extension() is not None


def insert(
    tokens: Tensor,
    rows: Tensor,
    prefix_len: Tensor,
    count: Tensor,
    limit: int,
    state: Tensor,
    log: Tensor,
    table: Tensor,
    clock: Tensor,
    ticket: Tensor,
    factors: Tensor,
    lengths: tuple[int, ...],
    cells: int,
    mask: int,
    ways: int,
) -> None:
    """`NGramMemory.insert`: tokens [R + 1, L]; rows, prefix_len, count [B] int64; the rest are the memory's own."""
    assert tokens.is_contiguous() and ways * len(lengths) == FOUND and factors.shape[1] <= MOST_WINDOW
    rows, prefix_len, count = rows.contiguous(), prefix_len.contiguous(), count.contiguous()
    raw = load_extension()
    assert raw is not None
    raw.ngram_insert(
        rows.data_ptr(), rows.shape[0], tokens.data_ptr(), tokens.shape[1], tokens.numel(),
        state.data_ptr(), log.data_ptr(), table.data_ptr(), factors.data_ptr(), mask, factors.shape[1],
        prefix_len.data_ptr(), count.data_ptr(), limit, cells, clock.data_ptr(),
    )  # fmt: skip


def outlook(
    tokens: Tensor,
    kv_len: Tensor,
    rows: Tensor,
    state: Tensor,
    log: Tensor,
    table: Tensor,
    factors: Tensor,
    candidates: Tensor,
    match: Tensor,
    gap: Tensor,
    tickets: Tensor,
    mask: int,
    ways: int,
    min_window: int,
    steady: int,
    max_hint: int,
    out: Tensor,
) -> None:
    """`NGramDrafter.outlook`: tokens [R + 1, L], kv_len [R + 1] of the slot table; rows [B]; candidates
    [R + 1, branch_length, C], match [R + 1, C] and gap [R + 1, 1] of the drafter; state, log, table and factors of its
    memory. out [B] int64, any stride: the hints."""
    branch, kept = candidates.shape[1:]
    window = factors.shape[1]
    assert tokens.is_contiguous() and ways * factors.shape[0] == FOUND and kept == OWN + FOUND
    assert window <= MOST_WINDOW
    rows, kv_len = rows.contiguous(), kv_len.contiguous()
    raw = load_extension()
    assert raw is not None
    raw.ngram_outlook(
        rows.data_ptr(), rows.shape[0], tokens.data_ptr(), tokens.shape[1], tokens.numel(),
        state.data_ptr(), log.data_ptr(), table.data_ptr(), factors.data_ptr(), mask, window,
        kv_len.data_ptr(), candidates.data_ptr(), match.data_ptr(), gap.data_ptr(),
        branch, min_window, min(steady, window), max_hint, out.data_ptr(), out.stride(0),
    )  # fmt: skip


def build(
    candidates: Tensor, match: Tensor, last: Tensor, rows: Tensor, weight: Tensor, depth: int, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`TreeBuilder.build` of the rows' candidates: tokens, parent [B, nodes] int64 and alive [B, nodes] bool.

    candidates [R + 1, branch_length, C] and match [R + 1, C], in rank order; last [R + 1]; rows [B]; weight
    [W + 1, W + 1, C, branch_length] float64; 1 <= depth <= branch_length, nodes > 1.
    """
    branch, kept = candidates.shape[1:]
    assert kept == OWN + FOUND and weight.shape[2:] == (kept, branch) and 1 <= depth <= branch and nodes > 1
    rows, last = rows.contiguous(), last.contiguous()
    batch = rows.shape[0]
    tokens = torch.empty(batch, nodes, dtype=torch.int64)
    parent = torch.empty(batch, nodes, dtype=torch.int64)
    alive = torch.empty(batch, nodes, dtype=torch.bool)
    raw = load_extension()
    assert raw is not None
    raw.ngram_build(
        rows.data_ptr(), batch, candidates.data_ptr(), match.data_ptr(), last.data_ptr(), weight.data_ptr(),
        weight.shape[0], branch, depth, nodes, tokens.data_ptr(), parent.data_ptr(), alive.data_ptr(),
    )  # fmt: skip
    return tokens, parent, alive
