"""Token matches for drafts without a model: `NGramIndex`, what rows said and what requests of the same salt generated.

The end of a step looks for earlier occurrences of each row's newest tokens (`confidence`) and keeps what followed them;
the next step makes a tree of it (`propose`). Both work on device state alone, so the host may be a step behind.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import LOOKUP, MAX_CONFIDENCE, TreeShape
from draftwing.ops.drafts import LEVELS, roots_alone
from draftwing.ops.reference.ngram_memory import CANDIDATES, NGramMemory
from draftwing.ops.types import Draft, RowTensors

OWN: Final = 8  # matches kept from the row's own history
PART: Final = 30  # tokens of `NGramIndex.remember`; with two around them a power of two, as a kernel has them
STEADY: Final = 3  # a match this long is what the row is copying from

# Matches are ranked by a key, the least first. Its level is 4 * (max_window - length), plus 0 for a match that goes on
# where the row was copying from, 1 for any other of its own, 2 for one of the shared memory.
_LEVEL: Final = 32
_LOW: Final = (1 << _LEVEL) - 1
_FAR: Final = (1 << _LEVEL + 8) - 1
_TIE: Final = 1e-9  # far below the smallest difference of scores that matters, and below the smallest score


def grade_of(rank: Tensor, match: Tensor) -> Tensor:
    """rank, match: of the candidate that leads a node, int64 -> its grade: the best candidate is trusted by the length
    of its match, others are rarely right."""
    return LEVELS * LOOKUP + torch.where(rank == 0, (match + 3).clamp(max=LEVELS - 1), (match // 3).clamp(max=3))


class _Constants(NamedTuple):
    """What depends on the depth alone, for D levels of C candidates."""

    weight: Tensor  # [(W + 1) * (W + 1) * C, D] float64, by match of the best candidate, own match and rank
    tie: Tensor  # [D * C] float64: the earlier node wins
    leader: Tensor  # [D - 1, 1] int64: number of a level's first node


class TreeBuilder:
    """Builds trees from `ways` ranked candidates per row; holds the constants that depend on options only.

    Score of a node (a distinct prefix of candidates): the sum over its candidates of w(m, rank, depth) =
    m^2 * 0.8^rank * (1 - 1 / (m + 2))^depth, with m the length of the candidate's match. A long match is trusted more
    and for longer; candidates of one length vote nearly as equals. The draft is not sensitive to these numbers.

    Breadth: of the candidates only the first ones take part, max_breadth after a match of one token and linearly fewer
    down to min_breadth after max_window. No node has more children than candidates take part.
    """

    def __init__(
        self, ways: int, depth: int, max_window: int, min_breadth: int, max_breadth: int, device: torch.device
    ) -> None:
        self.ways, self.device = ways, device
        match = torch.arange(max_window + 1, dtype=torch.float64)
        self.stride = match.numel() * ways
        rank = torch.arange(ways)
        drop = (max_breadth - min_breadth) * (match.long() - 1).clamp_min(0) // max(max_window - 1, 1)
        taking_part = rank < (max_breadth - drop)[:, None]  # [W + 1, C] by match of the best
        decay = (1 - 1 / (match + 2))[:, None] ** torch.arange(depth)  # [W + 1, D]
        by_match = (match**2)[:, None] * 0.8**rank  # [W + 1, C]
        weight = taking_part[:, None, :, None] * by_match[..., None] * decay[:, None]  # [W + 1, W + 1, C, D]
        self.weight = weight.to(device)
        self.rank = torch.arange(ways, device=device)
        self._constants: dict[int, _Constants] = {}

    def _for(self, depth: int) -> _Constants:
        if depth not in self._constants:
            weight = self.weight[..., :depth].reshape(-1, depth)
            tie = torch.arange(depth * self.ways, dtype=torch.float64, device=self.device) * _TIE
            leader = 1 + torch.arange(depth - 1, device=self.device)[:, None] * self.ways
            self._constants[depth] = _Constants(weight, tie, leader)
        return self._constants[depth]

    def build(self, candidates: Tensor, match: Tensor, last: Tensor, nodes: int) -> Draft:
        """Returns the `nodes - 1` best nodes, as a tree under each row's last token.

        candidates [B, D, C]: token ids, C in rank order, -1 from where a candidate ends, D at least 1;
        match [B, C], 0 = no candidate; last [B]. Scores never grow with depth and a prefix's candidates are among its
        parent's, so the best nodes are closed under parents. Nodes are ordered by depth, then by rank.
        """
        depth = candidates.shape[1]
        weight, tie, leader = self._for(depth)
        index = torch.add(self.rank, match, alpha=self.ways).add_(match[:, :1], alpha=self.stride)
        votes = weight.index_select(0, index.flatten()).view(*match.shape, depth).transpose(1, 2)  # [B, D, C]
        # same[b, d, i, j]: candidates i and j agree up to and including depth d.
        same = (candidates[..., None] == candidates[:, :, None]).cumprod(1)
        owner = same.argmax(-1)  # [B, D, C] first candidate with this prefix, leads its node
        score = (same * votes[:, :, None]).sum(-1)
        score.mul_(owner == self.rank).mul_(candidates >= 0)
        # Numbers from here on: 0 the root, 1 + d * C + c a node, `dead` none.
        total = depth * self.ways
        dead = total + 1
        best = pad(score.flatten(1) - tie, (1, 0), value=math.inf).topk(min(nodes, dead), dim=1)
        chosen = best.indices.masked_fill_(best.values <= 0, dead).sort(dim=1).values  # parents first, dead nodes last
        if nodes > dead:
            chosen = pad(chosen, (0, nodes - dead), value=dead)

        root = last[:, None]
        tokens = torch.cat((root, candidates.flatten(1), root), 1).gather(1, chosen)
        # The parent of (d, c) is (d - 1, leader of c at d - 1); the root is its own and a dead node's.
        above = pad((owner[:, :-1] + leader).flatten(1), (1 + self.ways, 1)).gather(1, chosen)
        numbers = torch.arange(nodes, device=last.device).expand_as(chosen)
        rank = (chosen - 1).remainder(self.ways)  # of the candidate that leads the node
        grade = torch.where((chosen > 0) & (chosen < dead), grade_of(rank, match.gather(1, rank)), 0)
        place = chosen.new_zeros(chosen.shape[0], dead + 1).scatter_(1, chosen, numbers)
        return Draft(tokens, place.gather(1, above), chosen < dead, grade)


class NGramIndex:
    """Searches in torch. Row-indexed state of R + 1 rows, the last one a dummy, and a memory that rows share.

    Memory: 147 MB for 10 million tokens of `capacity`, about 15 bytes a token, taken on the CPU when it is first used
    (`NGramMemory`), and 2.5 KB a row (8 * branch_length * 16 candidates).
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        min_window: int = 1,
        max_window: int = 12,
        min_breadth: int = 1,
        max_breadth: int = 10,
        branch_length: int = 18,
        capacity: int = 10_000_000,
    ) -> None:
        """rows: R + 1, the rows of the row table with its dummy. A match has min_window to max_window tokens (longer
        ones count as max_window); a node has min_breadth to max_breadth children at most (`TreeBuilder`);
        branch_length: tokens of a continuation; capacity: tokens of the shared memory's log."""
        self.min_window, self.max_window = min_window, max_window
        self.branch_length = branch_length
        self.memory = NGramMemory(min_window, max_window, branch_length, capacity, rows, device)
        kept = OWN + CANDIDATES
        self.tree = TreeBuilder(kept, branch_length, max_window, min_breadth, max_breadth, device)
        # Written by `confidence` and read by `propose`: candidates in rank order.
        self.candidates = torch.full((rows, branch_length, kept), -1, dtype=torch.int64, device=device)
        self.match = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        # What the row is copying from lies this many tokens before its newest token's predecessor; a copy goes on at
        # the same gap. -1 = not copying.
        self.gap = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
        self._constants(device)

    def _constants(self, device: torch.device) -> None:
        window = self.max_window
        self.back = torch.arange(window - 1, -1, -1, device=device)
        self.until = torch.arange(-1, -1 - self.branch_length, -1, device=device)[:, None]
        self.missing = torch.arange(1, window + 1, dtype=torch.uint8, device=device)[:, None]
        self.steady = (4 * (window - min(STEADY, window)) + 2) << _LEVEL  # keys of long enough matches lie below
        self.shared = (2 << _LEVEL) + torch.arange(CANDIDATES, device=device)
        self.position = torch.empty(0, dtype=torch.int64, device=device)
        # By level: the length of the match, 0 if it is too short; and the confidence.
        match = window - torch.arange((_FAR >> _LEVEL) + 4 * (window + 1)) // 4
        match = torch.where(match >= self.min_window, match, 0)
        source = (torch.arange(match.numel()) % 4 == 0) & (match > 0)
        self.match_of = match.to(device)
        self.confidence_of = (match + source * window).clamp_max(MAX_CONFIDENCE).to(device)

    def flush(self) -> None:
        """Forgets the shared memory; candidates found in it before are dropped too."""
        self.memory.flush()
        self.match.zero_()
        self.candidates.fill_(-1)

    def begin(self, table: RowTensors, rows: Tensor) -> None:
        """rows [B]: what these rows hold from now on is another request's."""
        self.memory.begin(rows, table.salt.index_select(0, rows))
        self.match.index_fill_(0, rows, 0)
        self.candidates.index_fill_(0, rows, -1)
        self.gap.index_fill_(0, rows, -1)

    def insert(self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        """Takes the newest count [B] tokens into the memory, of rows that had prefix_len [B]; limit: host bound of
        count."""
        self.memory.insert(table.tokens, rows, prefix_len, count, limit)

    def remember(self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        """Does as `begin` and then `insert` for any limit: in parts, as steps have them, and of a row that has no more
        the newest token again."""
        self.begin(table, rows)
        for done in range(0, limit, PART):
            before = torch.clamp(count, max=done)
            self.insert(table, rows, prefix_len + before, torch.clamp(count - before, max=PART), PART)

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Finds and keeps the next candidates. max_kv_len: host bound of the rows' kv_len now.

        Returns [B] int64: the length m of the longest match, 1 to max_window, or max_window + m (at most
        `MAX_CONFIDENCE`) if it goes on where the row has been copying from; 0 = nothing of at least min_window tokens.
        Written into `out` if that is given, of any stride.
        """
        context = table.tokens.shape[1]
        if self.position.numel() < context:  # once: the table's width is not known before
            self.position = torch.arange(1, context + 1, device=rows.device)
        length = min(max(max_kv_len + 1, OWN), context)
        history = table.tokens[:, :length].index_select(0, rows).long()
        newest = table.kv_len.index_select(0, rows)[:, None]  # [B, 1] index of the newest token
        suffix = history.gather(1, (newest - self.back).clamp_min_(0))  # [B, max_window]; before the start, its first

        source = self.gap.index_select(0, rows)
        own = self._search(history, newest, suffix, source)
        gap = torch.minimum(own & _LOW, newest)  # of those without a match: anything that can be read
        steady = own[:, :1] < self.steady
        self.gap.index_copy_(0, rows, torch.where(steady, gap[:, :1], source))
        # What follows a match runs into the newest token after gap + 1 tokens; it goes on by repeating itself.
        follow = newest[..., None] - self.until.remainder(gap[:, None] + 1)  # [B, branch_length, OWN]
        copied = history.gather(1, follow.flatten(1)).view_as(follow)

        missing, continued = self.memory.lookup(suffix, rows)
        key = torch.cat((own, torch.add(self.shared, missing, alpha=4 << _LEVEL)), 1)
        key, order = key.sort(dim=1)  # keys are distinct
        found = torch.cat((copied, continued), 2)
        level = key.bitwise_right_shift_(_LEVEL)
        self.match.index_copy_(0, rows, self.match_of.take(level))
        self.candidates.index_copy_(0, rows, found.gather(2, order[:, None].expand_as(found)))
        return torch.take(self.confidence_of, level[:, 0], out=out)

    def _search(self, history: Tensor, newest: Tensor, suffix: Tensor, source: Tensor) -> Tensor:
        """Exact search of the rows' own history [B, length]: keys of the `OWN` best matches, best first [B, OWN].
        suffix [B, max_window]: the newest tokens; newest, source [B, 1]: index of the last of them, `gap` of the rows.

        Longest first; among equals first the one that goes on where the row was copying from (a match longer than
        max_window looks like any other of that length, and this one is), then the most recent. A key has the level in
        the bits from `_LEVEL` on and the gap below.
        """
        length = history.shape[1]
        # windows[:, i, e] is the token max_window - 1 - i before position e; -2 before the start matches nothing.
        windows = pad(history, (self.max_window - 1, 0), value=-2).unfold(1, length, 1)  # [B, max_window, length]
        differs = torch.empty(windows.shape, dtype=torch.bool, device=history.device)
        torch.ne(windows, suffix[..., None], out=differs)  # `out` keeps rows contiguous
        missing = differs.view(torch.uint8).mul_(self.missing).amax(1)
        gap = newest - self.position[:length]  # below 0 from the newest token on: the highest levels
        key = (gap & _FAR).add_(missing, alpha=4 << _LEVEL)
        key.add_(gap != source, alpha=1 << _LEVEL)
        return key.topk(OWN, dim=1, largest=False).values  # keys are distinct

    def propose(self, table: RowTensors, rows: Tensor, shape: TreeShape) -> Draft:
        """Returns a tree of the candidates that the last `confidence` kept; dead nodes where they are fewer than
        shape.nodes."""
        depth = min(shape.depth, self.branch_length)
        if shape.nodes > 1 and depth > 0:
            return self.build(table, rows, depth, shape.nodes)
        return roots_alone(table, rows, shape.nodes)

    def build(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        """Builds trees of 1 <= depth <= branch_length and nodes > 1."""
        candidates, match = self.candidates[:, :depth].index_select(0, rows), self.match.index_select(0, rows)
        return self.tree.build(candidates, match, table.last.index_select(0, rows), nodes)


class NGramOps:
    """The operations of the n-gram drafter: those of its index."""

    device: torch.device
    draws_by_row: bool
    can_record: bool
    ngram_index: type[NGramIndex] = NGramIndex
