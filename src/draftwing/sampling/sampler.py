"""One token per node: the largest of logits + temperature * noise, after bans and filters.

The same call serves a prefill's last position, plain decoding and every node of a tree. Which rows need which work is
known on the host and comes as index tensors, whose sizes decide what runs; their values are never read there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.sampling.argmax import first_argmax
from draftwing.sampling.filters import keep_mask
from draftwing.sampling.noise import gumbel


class SamplingRows(NamedTuple):
    """What the sampler needs to know of each row of a batch."""

    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int64, <= 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off
    ban_until: Tensor  # [B] int64: tokens at positions below it may not be in ban_ids
    ban_ids: Tensor  # [B, S] int64, padded with -1


def sample(
    logits: Tensor,
    positions: Tensor,
    depth: Tensor,
    depth_max: int,
    params: SamplingRows,
    noisy: Tensor,
    filtered: Tensor,
    banning: Tensor,
) -> Tensor:
    """The next token of every node; the lowest id wins a tie.

    logits [B, N, V] of any float type, not changed; positions [B, N] int64, the absolute position of each node, whose
    sampled token will stand one further; depth [B, N] int64, at most `depth_max`, 0 for node 0.
    noisy [Bn] int64: batch indices of the rows with temperature > 0; filtered [Bf]: those of them with top-k, top-p or
    min-p; banning [Bb]: rows that may still be below `ban_until`. No index occurs twice in one of these tensors.
    Returns [B, N] int64. Nodes of a row at the same depth share their noise, as the same position must.
    """
    if banning.shape[0]:
        logits = _ban(logits, positions, params, banning)
    if not noisy.shape[0]:
        return first_argmax(logits)
    if noisy.shape[0] == logits.shape[0]:  # every row, so batch order serves and nothing needs selecting
        return _sample_noisy(logits, positions, depth, depth_max, params, filtered)
    place = torch.zeros_like(params.seed).index_copy_(0, noisy, torch.arange(noisy.shape[0], device=noisy.device))
    picked = _sample_noisy(
        logits.index_select(0, noisy),
        positions.index_select(0, noisy),
        depth.index_select(0, noisy),
        depth_max,
        SamplingRows(*(field.index_select(0, noisy) for field in params)),
        place.index_select(0, filtered),
    )
    return first_argmax(logits).index_copy_(0, noisy, picked)


def _sample_noisy(
    logits: Tensor, positions: Tensor, depth: Tensor, depth_max: int, params: SamplingRows, filtered: Tensor
) -> Tensor:
    """`sample` for rows that all have a temperature above 0."""
    batch, nodes, vocab = logits.shape
    assert depth_max or nodes == 1, f"depth 0 has 1 node, found {nodes}"
    x = logits.float()
    levels = torch.arange(1, depth_max + 2, device=logits.device)
    noise = gumbel(params.seed, positions[:, :1] + levels, vocab).mul_(params.temperature[:, None, None])
    if depth_max:  # [B, D + 1, V] -> [B, N, V]
        first = torch.arange(0, batch * (depth_max + 1), depth_max + 1, device=logits.device)
        noise = noise.view(-1, vocab).index_select(0, (depth + first[:, None]).view(-1)).view_as(x)
    z = noise.add_(x)
    if filtered.shape[0] == batch:
        z.masked_fill_(_removed(x, params), -math.inf)
    elif filtered.shape[0]:
        chosen = SamplingRows(*(field.index_select(0, filtered) for field in params))
        removed = _removed(x.index_select(0, filtered), chosen)
        z.index_copy_(0, filtered, z.index_select(0, filtered).masked_fill_(removed, -math.inf))
    return first_argmax(z)


def _removed(x: Tensor, params: SamplingRows) -> Tensor:
    """Complement of `keep_mask` for x [B, N, V] and parameters [B]."""
    nodes, vocab = x.shape[1:]
    rows = (field.repeat_interleave(nodes) for field in (params.temperature, params.top_k, params.top_p, params.min_p))
    return keep_mask(x.reshape(-1, vocab), *rows).logical_not_().view_as(x)


def _ban(logits: Tensor, positions: Tensor, params: SamplingRows, banning: Tensor) -> Tensor:
    """A copy of the logits in which the ban ids of rows below `ban_until` are -inf."""
    ids = params.ban_ids.index_select(0, banning)[:, None, :]  # [Bb, 1, S]
    active = positions.index_select(0, banning) + 1 < params.ban_until.index_select(0, banning)[:, None]  # [Bb, N]
    # Padding aims at token 0, which may also be a ban id: a minimum with +inf changes nothing in either order.
    limit = torch.where(active[:, :, None] & (ids >= 0), -math.inf, math.inf).to(logits.dtype)  # [Bb, N, S]
    rows = logits.index_select(0, banning)
    rows.scatter_reduce_(-1, ids.clamp(min=0).expand_as(limit), limit, "amin")
    return logits.index_copy(0, banning, rows)
