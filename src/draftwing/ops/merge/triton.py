"""Two drafters' trees become one in Triton: one program per row, one lane per node of either tree."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.config.trees import MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import DEPTHS, LEVELS, SURE, graded
from draftwing.ops.merge.spec import MergeOps
from draftwing.ops.triton.common import lanes, launch_options, start
from draftwing.ops.types import Calibration, Draft

_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_DEPTHS: tl.constexpr = tl.constexpr(DEPTHS)
_SURE: tl.constexpr = tl.constexpr(SURE)
_MAX_NODES = 64  # nodes of either tree


@triton.jit
def _paths(tokens_ptr, parent_ptr, alive_ptr, NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Returns of a tree's nodes: whether they are alive and no deeper than DEPTH, their depth, and a hash of their
    path. Paths that differ have the same hash once in 2^60 or so, and then a draft is lost."""
    lane = tl.arange(0, LANES)
    real = lane < NODES
    alive = tl.load(alive_ptr + lane, mask=real, other=0) != 0
    depth = tl.zeros([LANES], tl.int32)
    up = tl.where(alive, lane, 0)
    for _ in range(DEPTH + 1):
        depth += (up != 0).to(tl.int32)
        up = tl.load(parent_ptr + up, mask=real, other=0).to(tl.int32)
    path = tl.zeros([LANES], tl.int64)
    up = tl.where(alive, lane, 0)
    for k in range(DEPTH):
        token = tl.load(tokens_ptr + up, mask=real, other=0)
        word = (token + ((depth - k).to(tl.int64) << 40)) * 0x1E3779B97F4A7C15
        word = (word ^ (word >> 29)) * 0x3F58476D1CE4E5B9
        path += tl.where(up != 0, word ^ (word >> 32), 0)
        up = tl.load(parent_ptr + up, mask=real, other=0).to(tl.int32)
    return alive & (depth <= DEPTH), depth, path


@triton.jit
def _merge_kernel(
    tokens1_ptr, parent1_ptr, alive1_ptr, grade1_ptr, tokens2_ptr, parent2_ptr, alive2_ptr, grade2_ptr,
    seen_ptr, accepted_ptr, scratch_ptr, tokens_ptr, parent_ptr, alive_ptr, grade_ptr,
    ONE: tl.constexpr, TWO: tl.constexpr, NODES: tl.constexpr, DEPTH: tl.constexpr,
    LANES1: tl.constexpr, LANES2: tl.constexpr, LANES: tl.constexpr, LANES_OUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first, second, out = b * ONE, b * TWO, b * NODES
    COUNT: tl.constexpr = ONE + TWO
    # Of all nodes: place, parent, grade (-1: none), depth.
    places = scratch_ptr + b * 4 * COUNT
    parents, grades, depths = places + COUNT, places + 2 * COUNT, places + 3 * COUNT

    lane1, lane2 = tl.arange(0, LANES1), tl.arange(0, LANES2)
    real1, real2 = lane1 < ONE, lane2 < TWO
    live1, depth1, path1 = _paths(tokens1_ptr + first, parent1_ptr + first, alive1_ptr + first, ONE, LANES1, DEPTH)
    live2, depth2, path2 = _paths(tokens2_ptr + second, parent2_ptr + second, alive2_ptr + second, TWO, LANES2, DEPTH)
    same = live1[:, None] & live2[None, :] & (path1[:, None] == path2[None, :]) & (depth1[:, None] == depth2[None, :])
    twin = tl.max(tl.where(same, lane1[:, None], -1), 0)  # of the second's nodes
    grade1 = tl.load(grade1_ptr + first + lane1, mask=real1, other=0).to(tl.int32)
    grade2 = tl.load(grade2_ptr + second + lane2, mask=real2, other=0).to(tl.int32)
    other = tl.max(tl.where(same, grade2[None, :], 0), 1)
    level = tl.maximum(grade1 % _LEVELS, other % _LEVELS)
    grade1 = ((grade1 // _LEVELS) | (other // _LEVELS)) * _LEVELS + level

    tl.store(places + lane2, tl.where(twin >= 0, twin, ONE + lane2).to(tl.int64), mask=real2)
    parent1 = tl.load(parent1_ptr + first + lane1, mask=real1, other=0)
    tl.store(parents + lane1, parent1, mask=real1)
    tl.store(grades + lane1, tl.where(live1, grade1, -1).to(tl.int64), mask=real1)
    tl.store(depths + lane1, depth1.to(tl.int64), mask=real1)
    tl.debug_barrier()
    above = tl.load(places + tl.load(parent2_ptr + second + lane2, mask=real2, other=0), mask=real2, other=0)
    tl.store(parents + ONE + lane2, above, mask=real2)
    tl.store(grades + ONE + lane2, tl.where(live2 & (twin < 0), grade2, -1).to(tl.int64), mask=real2)
    tl.store(depths + ONE + lane2, depth2.to(tl.int64), mask=real2)
    tl.debug_barrier()

    lane = tl.arange(0, LANES)
    real = lane < COUNT
    grade = tl.load(grades + lane, mask=real, other=-1).to(tl.int32)
    depth = tl.load(depths + lane, mask=real, other=0).to(tl.int32)
    live = grade >= 0
    survival = tl.full([LANES], 1.0, tl.float32)
    up = tl.where(live, lane, 0)
    for k in range(DEPTH):
        here = tl.load(grades + up, mask=real, other=0).to(tl.int32)
        cell = tl.maximum(here, 0) * _DEPTHS + tl.maximum(tl.minimum(depth - k, _DEPTHS - 1), 0)
        share = tl.div_rn(tl.load(accepted_ptr + cell), tl.load(seen_ptr + cell))
        survival *= tl.where(up != 0, tl.minimum(share, _SURE), 1.0)
        up = tl.load(parents + up, mask=real, other=0).to(tl.int32)
    survival = tl.where(live, survival, -1.0)

    better = survival[None, :] > survival[:, None]
    better |= (survival[None, :] == survival[:, None]) & (lane[None, :] < lane[:, None])
    chosen = live & (tl.sum(better.to(tl.int32), 1) < NODES)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    total = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # the places were read
    tl.store(places + lane, tl.where(chosen, place, 0).to(tl.int64), mask=real)
    tl.debug_barrier()
    parent = tl.load(places + tl.load(parents + lane, mask=chosen, other=0), mask=chosen, other=0)
    token = tl.load(tokens1_ptr + first + lane, mask=lane < ONE, other=0)
    token += tl.load(tokens2_ptr + second + lane - ONE, mask=(lane >= ONE) & real, other=0)
    to = out + tl.where(chosen, place, 0)
    tl.store(tokens_ptr + to, token, mask=chosen)
    tl.store(parent_ptr + to, parent, mask=chosen)
    tl.store(alive_ptr + to, chosen.to(tl.uint8), mask=chosen)
    tl.store(grade_ptr + to, grade.to(tl.int64), mask=chosen)

    node = tl.arange(0, LANES_OUT)
    missing = (node >= total) & (node < NODES)
    root = tl.load(tokens1_ptr + first)
    zero = tl.zeros([LANES_OUT], tl.int64)
    tl.store(tokens_ptr + out + node, zero + root, mask=missing)
    tl.store(parent_ptr + out + node, zero, mask=missing)
    tl.store(alive_ptr + out + node, zero.to(tl.uint8), mask=missing)
    tl.store(grade_ptr + out + node, zero + tl.load(grade1_ptr + first), mask=missing)


@triton.jit(do_not_specialize=["stride", "batch"])
def _raise_kernel(confidence_ptr, stride, batch, MAX: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):
    start(PDL)
    b = tl.program_id(0) * LANES + tl.arange(0, LANES)
    value = tl.load(confidence_ptr + b * stride, mask=b < batch, other=0)
    tl.store(confidence_ptr + b * stride, tl.minimum(value + 1, MAX), mask=b < batch)


class TritonMergeOps(MergeOps):
    """Overrides all of `MergeOps`."""

    def merge(self, first: Draft, second: Draft, shape: TreeShape, calibration: Calibration) -> Draft:
        (batch, one), two, nodes = first.tokens.shape, second.tokens.shape[1], shape.nodes
        if max(one, two) > _MAX_NODES:
            return super().merge(first, second, shape, calibration)
        assert calibration.seen.is_contiguous() and calibration.accepted.is_contiguous()
        new = first.tokens.new_empty
        draft = Draft(new(batch, nodes), new(batch, nodes), new(batch, nodes, dtype=torch.bool), new(batch, nodes))
        parts = [part for tree in (graded(first), graded(second)) for part in _parts(tree)]
        wide = lanes(one + two)
        _merge_kernel[(batch,)](
            *parts, *calibration, new(batch, 4, one + two), *_parts(draft),
            ONE=one, TWO=two, NODES=nodes, DEPTH=shape.depth, LANES1=lanes(one), LANES2=lanes(two), LANES=wide,
            LANES_OUT=lanes(nodes), num_warps=max(1, min(8, wide // 16)), **launch_options(first.tokens.device),
        )  # fmt: skip
        return draft

    def raise_confidence(self, confidence: Tensor) -> Tensor:
        batch = confidence.shape[0]
        _raise_kernel[(triton.cdiv(batch, 128),)](
            confidence, confidence.stride(0), batch, MAX=MAX_CONFIDENCE, LANES=128, num_warps=1,
            **launch_options(confidence.device),
        )  # fmt: skip
        return confidence


def _parts(draft: Draft) -> list[Tensor]:
    """Contiguous, with `alive` as bytes."""
    assert draft.grade is not None
    return [part.contiguous() for part in (draft.tokens, draft.parent, draft.alive.view(torch.uint8), draft.grade)]
