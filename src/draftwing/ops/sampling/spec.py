"""One token per node: the largest of logits + temperature * noise, after bans and filters.

The same call serves a prefill's last position, plain decoding and every node of a tree. Which rows need which work is
known on the host and comes as index tensors, whose sizes decide what runs; their values are never read there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.core import NOT_FINITE
from draftwing.ops.noise.spec import gumbel, gumbel_at
from draftwing.ops.types import Edits, Rescoring, RowTensors, SampleInputs, SamplingGroups, SamplingRows


def first_argmax(x: Tensor) -> Tensor:
    """Index of the largest value along the last dimension, the first one on a tie: [..., V] -> [...] int64.

    Equals `x.argmax(-1)`, whose CPU kernel drags an index along with every value and takes 4 to 7 times as long for a
    vocabulary: find the block that holds the maximum by values alone, then look inside it.
    """
    block = math.gcd(x.shape[-1], 256)
    if block < 64:
        return x.max(-1).indices
    blocks = x.unflatten(-1, (-1, block))  # [..., V / block, block]
    which = blocks.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    chosen = blocks.gather(-2, which[..., None].expand(*which.shape, block))  # [..., 1, block]
    return torch.add(chosen.argmax(-1), which, alpha=block).squeeze(-1)


def top_candidates(x: Tensor, count: int) -> Tensor:
    """Returns ids of the `count` largest values along the last dimension, in ascending order of id: [..., V] -> [...,
    count].

    Of values equal to the smallest one kept, any may be. As in `first_argmax` the blocks with the largest maxima are
    found first: they hold all candidates.
    """
    block = math.gcd(x.shape[-1], 256)
    if block < 64 or x.shape[-1] // block < 2 * count:
        return x.topk(count).indices.sort(-1).values
    blocks = x.unflatten(-1, (-1, block))  # [..., V / block, block]
    which = blocks.amax(-1).topk(count).indices  # [..., count]
    inside = blocks.gather(-2, which[..., None].expand(*which.shape, block)).flatten(-2)  # [..., count * block]
    place = inside.topk(count).indices
    ids = which.gather(-1, place.div(block, rounding_mode="floor")).mul_(block).add_(place.remainder(block))
    return ids.sort(-1).values


_ROUNDS = ((20, 2048), (10, 1024), (0, 1024))  # (bits below the bin, bins): 11 + 10 + 10 bits of a 31-bit pattern
_CPU_BLOCK = 1 << 16  # logits
_MASS_ONE = 2.0**40  # fixed-point 1.0, the mass of the most probable token; sums stay below 2^63 for vocab < 2^23


def keep_mask(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Finds which tokens a row may sample from.

    logits [M, V] float32; temperature [M] float32 > 0; top_k [M] int64 (<= 0: off); top_p [M] float32 (>= 1: off);
    min_p [M] float32 (0: off). Returns [M, V] bool. With p = softmax(logits / temperature), a token is kept if

    - top-k: its logit is at least the k-th largest;
    - top-p, over p renormalised after top-k: it belongs to the smallest set of most probable tokens whose mass reaches
      top_p. The token that crosses the limit is kept, so the most probable one always is;
    - min-p: p >= min_p * max(p).

    Tokens tied with the last one kept are kept too (equal gaps are ties, see above), so a mask may hold more than k.
    """
    # On the CPU, blocks of rows small enough for the cache and for the allocator to keep at hand.
    rows = logits.shape[0] if logits.is_cuda else max(1, _CPU_BLOCK // logits.shape[-1])
    blocks = zip(*(x.split(rows) for x in (logits, temperature, top_k, top_p, min_p)), strict=True)
    return torch.cat([_keep_block(*block) for block in blocks])


def _keep_block(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    gap = logits.amax(-1, keepdim=True) - logits
    rank = gap.view(torch.int32)
    weight = torch.div(gap, -temperature[:, None]).exp_()  # p / max(p)

    wanted = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    last = _smallest_reaching(rank, torch.ones_like(rank, dtype=torch.int64), wanted[:, None])

    mass = (weight * _MASS_ONE).to(torch.int64)
    kept_mass = mass.mul(rank <= last).sum(-1, keepdim=True)
    wanted = (kept_mass * top_p[:, None].double()).ceil().to(torch.int64)
    crossing = _smallest_reaching(rank, mass, torch.minimum(wanted.clamp(min=1), kept_mass))
    # Tokens too improbable to have any mass would be lost to a top-p that is off.
    last = torch.where(top_p[:, None] < 1, torch.minimum(last, crossing), last)
    return (rank <= last).logical_and_(weight >= min_p[:, None])


def _smallest_reaching(rank: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """Returns the smallest rank r for which the weights of all entries with rank <= r sum to `wanted` or more.

    rank [M, V] int32, >= 0; weight [M, V] int64, >= 0; wanted [M, 1] int64, between 1 and the row's sum.
    Returns [M, 1] int32.
    """
    low = torch.zeros_like(wanted, dtype=torch.int32)  # the answer is in [low, low + 2^(bits still open))
    for shift, bins in _ROUNDS:
        # One more bin on either side gathers what lies outside the interval. The lower one makes the running sum that
        # of the whole row; together they also keep the pattern of a NaN, of either sign, inside the histogram.
        bin_of = (rank - (low - (1 << shift))).bitwise_right_shift_(shift).clamp_(0, bins + 1).to(torch.int64)
        histogram = torch.zeros(rank.shape[0], bins + 2, dtype=torch.int64, device=rank.device)
        reached = histogram.scatter_add_(-1, bin_of, weight).cumsum(-1)
        crossing = (reached < wanted).sum(-1, keepdim=True, dtype=torch.int32).sub_(1).clamp_(0, bins - 1)
        low = low + crossing.bitwise_left_shift_(shift)
    return low


CANDIDATES = 8  # best tokens of a node, among which `exact` logits choose
# (ids [B, N, K], batch indices of those B rows or None for all) -> their logits [B, N, K] float32
Exact = Callable[[Tensor, Tensor | None], Tensor]


class SamplingOps:
    """The operations of the sampler, and the noise that it draws with."""

    draws_by_row = False  # whether `draw` looks up on the device what each row asks for, so that graphs serve all rows
    edits_by_row = False  # whether it applies penalties and biases, too

    gumbel = staticmethod(gumbel)
    gumbel_at = staticmethod(gumbel_at)

    def draw(
        self,
        drawn: SampleInputs,
        table: RowTensors,
        drawing: SamplingGroups,
        filtered: bool,
        rescoring: Rescoring | None,
        edits: Edits | None = None,
    ) -> Tensor:
        """Does as `sample`, with what the rows [B] of the table ask for: the next token of every node, [B, N].

        drawing: read where `draws_by_row` is False; filtered: whether any row has top-k, top-p or min-p, read where it
        is True. rescoring: of logits that are rounded to a half type. edits: what is done to the logits before, where
        `edits_by_row` is True.
        """
        assert edits is None
        asked = drawing.noisy.shape[0] + drawing.banning.shape[0]
        params = table.sampling(drawn.rows) if asked else None  # greedy rows need none
        exact = None if rescoring is None else rescoring.exact
        return self.sample(drawn.logits, drawn.positions, drawn.depth, drawn.depth_max, params, *drawing, exact)

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        depth: Tensor,
        depth_max: int,
        params: SamplingRows | None,
        noisy: Tensor,
        filtered: Tensor,
        banning: Tensor,
        exact: Exact | None = None,
    ) -> Tensor:
        """Returns the next token of every node; the lowest id wins a tie.

        logits [B, N, V] of any float type, not changed; positions [B, N] int64, the absolute position of each node,
        whose sampled token will stand one further; depth [B, N] int64, at most `depth_max`, 0 for node 0.
        noisy [Bn] int64: batch indices of the rows with temperature > 0; filtered [Bf]: those of them with top-k, top-p
        or min-p; banning [Bb]: rows that may still be below `ban_until`; params may be None where there are no such
        rows. No index occurs twice in one of these tensors.
        exact: gives logits of chosen ids in float32, where `logits` are rounded to a half type; the last choice, among
        the `CANDIDATES` best, is made with it.
        Returns [B, N] int64, with `core.NOT_FINITE` where the best is not a finite number. Nodes of a row at the same
        depth share their noise, as the same position must.
        """
        assert params is not None or (not noisy.shape[0] and not banning.shape[0])
        if params is not None and banning.shape[0]:
            logits = without_banned(logits, positions, params, banning)
        if params is None or not noisy.shape[0]:
            return _choose(logits, logits, exact)
        if noisy.shape[0] == logits.shape[0]:  # every row, so batch order serves and nothing needs selecting
            return _choose(_noised(logits, positions, depth, depth_max, params, filtered), logits, exact)
        place = torch.zeros_like(params.seed).index_copy_(0, noisy, torch.arange(noisy.shape[0], device=noisy.device))
        drawn = logits.index_select(0, noisy)
        z = _noised(
            drawn,
            positions.index_select(0, noisy),
            depth.index_select(0, noisy),
            depth_max,
            SamplingRows(*(field.index_select(0, noisy) for field in params)),
            place.index_select(0, filtered),
        )
        return _choose(logits, logits, exact).index_copy_(0, noisy, _choose(z, drawn, exact, noisy))


def _choose(z: Tensor, logits: Tensor, exact: Exact | None, rows: Tensor | None = None) -> Tensor:
    """Argmax of z [B, N, V], which is `logits` with noise added and tokens removed; rows: which rows of the batch these
    are, None for all. With `exact` the best few are weighed again by their true logits."""
    if exact is None:
        ids = first_argmax(z)
        return _marked(ids, z.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    ids = top_candidates(z, min(CANDIDATES, z.shape[-1]))  # [B, N, K], ascending
    at = z.gather(-1, ids).float()
    value = at - logits.gather(-1, ids).float() + exact(ids, rows)  # noise + true logit
    value = torch.where(at == -math.inf, at, value)  # what was removed stays so
    best = value.max(-1)
    return _marked(ids.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1), best.values)


def _marked(tokens: Tensor, values: Tensor) -> Tensor:
    """Returns tokens with the values by which they were chosen, of the same shape."""
    return tokens.add_(values.isfinite().logical_not_(), alpha=NOT_FINITE)


def _noised(
    logits: Tensor, positions: Tensor, depth: Tensor, depth_max: int, params: SamplingRows, filtered: Tensor
) -> Tensor:
    """Returns logits plus noise [B, N, V] float32, -inf where a filter removes; all rows have a temperature above 0."""
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
    return z


def _removed(x: Tensor, params: SamplingRows) -> Tensor:
    """Complement of `keep_mask` for x [B, N, V] and parameters [B]."""
    nodes, vocab = x.shape[1:]
    rows = (field.repeat_interleave(nodes) for field in (params.temperature, params.top_k, params.top_p, params.min_p))
    return keep_mask(x.reshape(-1, vocab), *rows).logical_not_().view_as(x)


def without_banned(logits: Tensor, positions: Tensor, params: SamplingRows, banning: Tensor) -> Tensor:
    """Returns a copy of the logits in which the ban ids of rows below `ban_until` are -inf."""
    ids = params.ban_ids.index_select(0, banning)[:, None, :]  # [Bb, 1, S]
    active = positions.index_select(0, banning) + 1 < params.ban_until.index_select(0, banning)[:, None]  # [Bb, N]
    # Padding aims at token 0, which may also be a ban id: a minimum with +inf changes nothing in either order.
    limit = torch.where(active[:, :, None] & (ids >= 0), -math.inf, math.inf).to(logits.dtype)  # [Bb, N, S]
    rows = logits.index_select(0, banning)
    rows.scatter_reduce_(-1, ids.clamp(min=0).expand_as(limit), limit, "amin")
    return logits.index_copy(0, banning, rows)
