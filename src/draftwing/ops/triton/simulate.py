"""`spec.simulate` in one launch, so that a simulated step costs what a real one does."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start
from draftwing.ops.triton.noise import position_words


@triton.jit
def _simulate_kernel(
    out_ptr, tokens_ptr, parent_ptr, alive_ptr, depth_ptr, target_ptr, rows_ptr, kv_len_ptr,
    DRAFTS: tl.constexpr, THRESHOLD: tl.constexpr, MASK: tl.constexpr, VOCAB: tl.constexpr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first = b * NODES
    lane = tl.arange(0, LANES)
    real = lane < NODES
    token = tl.load(tokens_ptr + first + lane, mask=real, other=0)
    parent = tl.load(parent_ptr + first + lane, mask=real, other=0).to(tl.int32)
    alive = tl.load(alive_ptr + first + lane, mask=real, other=0) != 0
    depth = tl.load(depth_ptr + first + lane, mask=real, other=0).to(tl.int32)
    result = tl.load(target_ptr + first + lane, mask=real, other=0)

    word, _ = position_words(tl.load(rows_ptr + b), tl.load(kv_len_ptr + b))
    wanted = DRAFTS + ((word & MASK).to(tl.int32) < THRESHOLD).to(tl.int32)
    best = tl.max(tl.where(alive & (depth <= wanted), depth * NODES + (NODES - 1 - lane), -1), 0)
    leaf = NODES - 1 - best % NODES

    child = alive & (parent == leaf) & (lane > 0)
    last = tl.sum(tl.where(lane == leaf, result, 0), 0)
    hit = tl.max((child & (token == last)).to(tl.int32), 0)
    above = tl.max(tl.where(child, token, -1), 0) + 1
    below = tl.min(tl.where(child, token, VOCAB), 0) - 1
    beside = tl.where(above < VOCAB, above, tl.where(below >= 0, below, last))
    result = tl.where((lane == leaf) & (hit != 0), beside, result)

    node = leaf
    for _ in range(DEPTH):  # up to the root, where nothing matches any more
        here = (lane == node) & (node > 0)
        up = tl.sum(tl.where(here, parent, 0), 0)
        draft = tl.sum(tl.where(here, token, 0), 0)
        result = tl.where((lane == up) & (node > 0), draft, result)
        node = up
    tl.store(out_ptr + first + lane, result, mask=real)


def simulate(
    tokens: Tensor, parent: Tensor, alive: Tensor, depth: Tensor, target: Tensor, rows: Tensor, kv_len: Tensor,
    *, depth_max: int, drafts: int, threshold: int, mask: int, vocab: int,
) -> Tensor:  # fmt: skip
    """`Simulation.__call__`: tokens, parent, alive of the draft, depth of the tree, all [B, N].

    A step accepts `drafts`, or one more where the hash of (row, kv_len) & mask is below the threshold."""
    batch, nodes = target.shape
    tokens, parent, alive, target = (part.contiguous() for part in (tokens, parent, alive, target))
    out = torch.empty(batch, nodes, dtype=torch.int64, device=target.device)
    lanes = triton.next_power_of_2(nodes)
    _simulate_kernel[(batch,)](
        out, tokens, parent, alive, depth, target, rows, kv_len,
        DRAFTS=drafts, THRESHOLD=threshold, MASK=mask, VOCAB=vocab, NODES=nodes, LANES=lanes, DEPTH=depth_max,
        num_warps=max(1, min(4, lanes // 32)), **launch_options(target.device),
    )  # fmt: skip
    return out
