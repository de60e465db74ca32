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

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import LEVELS, roots_alone
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
        image_token: int = -1,
    ) -> None:
        """rows: R + 1, the rows of the row table with its dummy. A match has min_window to max_window tokens (longer
        ones count as max_window); a node has min_breadth to max_breadth children at most (`TreeBuilder`);
        branch_length: tokens of a continuation; capacity: tokens of the shared memory's log; image_token: stands for
        images, -1 where none does. A match may hold it, a continuation ends before it."""
        self.image_token = image_token
        self.min_window, self.max_window = min_window, max_window
        self.branch_length = branch_length
        self.memory = NGramMemory(
            min_window, max_window, branch_length, capacity, rows, device, image_token=image_token
        )
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
        copied.masked_fill_((copied == self.image_token).cummax(1).values, -1)

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
        missing[:, :-1].masked_fill_(history[:, 1:] == self.image_token, self.max_window)
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


WINDOWS: Final = (1, 5)  # hashed lengths, clipped to the allowed matches; the match itself is measured in the log
WAYS: Final = 4  # places kept per bucket
CANDIDATES: Final = len(WINDOWS) * WAYS  # results of a lookup
MIN_CELLS: Final = 1024  # cells of a ring, at least

_ID_BITS: Final = 22
_SALT_BITS: Final = 63 - _ID_BITS
_CELL_BITS: Final = 32  # a table value is the number of the insert above, the cell below

# Columns of the row table. BASE: first cell of the ring; TAG: what is added to a token id to make a cell; QUOTA: most
# tokens that a step may append, 0 for the dummy row. CURSOR: index of the newest token stored, -1 = nothing. NEWEST:
# its place in the ring, counted on forever.
_BASE, _TAG, _QUOTA, _CURSOR, _NEWEST = range(5)


def _factors(lengths: tuple[int, ...], width: int) -> Tensor:
    """Multilinear hashing, [W', width] int64: a random-looking odd factor per length and place, 0 before a window."""
    rows = [
        [pow(0x9E3779B97F4A7C15, i * width + k + 1, 1 << 64) if k >= width - w else 0 for k in range(width)]
        for i, w in enumerate(lengths)
    ]
    signed = [[f - (1 << 64) if f >= 1 << 63 else f for f in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64)


class NGramMemory:
    """Shared token memory of the n-gram drafter; see the module's text. All public tensors are int64.

    Memory: 8 bytes a token for the log and 4 to 8 for the table, 147 MB for 10 million tokens; zeroed, so on the CPU a
    page is taken when it is first written. Two salts are told apart by their lowest 41 bits; token ids are below
    2^22 - 1.
    """

    def __init__(
        self,
        min_window: int,
        max_window: int,
        branch_length: int,
        capacity: int,
        rows: int,
        device: torch.device,
        min_cells: int = MIN_CELLS,
        image_token: int = -1,
    ) -> None:
        """capacity: tokens of log, shared out evenly among rows; a ring has at least `min_cells` cells. rows: R + 1,
        the last one a dummy, which stores nothing. image_token: an empty cell has its place."""
        self.max_window, self.image_token = max_window, image_token
        self.cells = max(capacity // rows, min_cells)
        total = rows * (self.cells + 1)  # an empty cell divides a ring from the next
        assert total < 1 << _CELL_BITS
        self.lengths = tuple(min(max(w, min_window), max_window) for w in WINDOWS)
        self.entries = max(1 << (total.bit_length() - 1), 1 << 12)
        self.mask = self.entries - WAYS

        # Empty cells around, so that a window or a continuation may be read anywhere.
        self.log = torch.zeros(max_window + total + branch_length, dtype=torch.int64, device=device)
        self.table = torch.zeros(self.entries, dtype=torch.int64, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)  # number of the newest insert, shifted
        row = torch.zeros(rows, 5, dtype=torch.int64)
        row[:, _BASE] = max_window + torch.arange(rows) * (self.cells + 1)
        row[:, _TAG], row[:-1, _QUOTA], row[:, _CURSOR], row[:, _NEWEST] = 1, self.cells, -1, -1
        self.row = row.to(device)
        self.tag, self.moving = self.row[:, _TAG : _TAG + 1], self.row[:, _CURSOR:]  # views

        self.factors = _factors(self.lengths, max_window).to(device)
        self.ways = torch.arange(WAYS, device=device)
        self.steps = torch.arange(1 - max_window, self.cells, device=device)
        self.ahead = self.steps[max_window - 1 :]  # from 0 on
        self.around = torch.arange(1 - max_window, branch_length + 1, device=device)[:, None]
        # A window that differs first at the k-th newest place, k = 0 .. max_window - 1, misses max_window - k tokens.
        self.missing = torch.arange(1, max_window + 1, dtype=torch.uint8, device=device)[:, None]

    def begin(self, rows: Tensor, salt: Tensor) -> None:
        """rows, salt [B]: what these rows generate from now on is another request's."""
        self.tag.index_copy_(0, rows, (((salt & ((1 << _SALT_BITS) - 1)) << _ID_BITS) + 1)[:, None])
        self.row[:, _CURSOR].index_fill_(0, rows, -1)

    def flush(self) -> None:
        """Forgets all tokens. Requests that are running go on as new stretches of the same salt."""
        self.log.zero_()
        self.row[:, _CURSOR].fill_(-1)

    def insert(self, tokens: Tensor, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        """Appends tokens[row, prefix_len + 1 .. prefix_len + count] of each row (and, the first time, the one before).

        tokens [R + 1, L]; rows, prefix_len, count [B]; limit: host bound of count, below `cells` - 1. A row that goes
        on where its last call ended continues its stretch, any other starts one.
        """
        assert 0 < limit < self.cells - 1
        window = self.max_window
        base, tag, quota, cursor, place = self.row.index_select(0, rows).split(1, dim=1)  # [B, 1] each
        prefix = prefix_len[:, None]
        count = torch.minimum(count[:, None], quota)
        place = torch.add(place, cursor != prefix, alpha=2)  # of token `prefix`; a new stretch leaves one cell empty
        self.moving.index_copy_(0, rows, torch.cat((prefix, place), 1) + count)

        # Cells of the tokens prefix - window + 1 .. prefix + limit + 1. What is read beyond the row's ends is stored
        # nowhere; at the start it takes part in the hash of windows that no stretch contains.
        at = torch.add(prefix, rows[:, None], alpha=tokens.shape[1]) + self.steps[: window + limit + 1]
        text = tokens.take(at.clamp_(0, tokens.numel() - 1))
        cells = text + tag
        ahead = self.ahead[: limit + 2]
        kept = ahead <= count  # [B, limit + 2]
        where = (place + ahead).remainder_(self.cells).add_(base)
        stored = kept & (text[:, window - 1 :] != self.image_token)
        self.log.put_(where, cells[:, window - 1 :] * stored)  # at least one empty cell follows the newest token

        # The windows that end at prefix .. prefix + limit - 1; those whose successor is not stored write a 0, which
        # changes nothing. Where several meet in an entry the newest wins, whatever the order of the writes.
        bucket = self._bucket(cells[:, :-2].unfold(1, window, 1)[:, :, None])  # [B, limit, W']
        where = where[:, :limit]
        entry = bucket.add_((where & (WAYS - 1))[..., None])
        value = (where + self.clock.add_(1 << _CELL_BITS)).mul_(kept[:, 1:-1])
        value = value[..., None].expand_as(entry)
        self.table.scatter_reduce_(0, entry.flatten(), value.flatten(), "amax")

    def _bucket(self, windows: Tensor) -> Tensor:
        """windows [..., 1, max_window] cells -> [..., W'] first entry of the bucket of each hashed length."""
        mixed = (windows * self.factors).sum(-1)
        return mixed.bitwise_right_shift_(24).bitwise_and_(self.mask)  # low bits of a product depend on few of a cell's

    def lookup(self, suffix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Finds where rows' newest tokens occur in what requests of the same salt generated, their own text included.

        suffix [B, max_window]: newest token last, -2 where there is none; rows [B].
        Returns missing [B, C] uint8: max_window minus the length of the match, so max_window = nothing found; and what
        follows [B, branch_length, C], -1 past what is known. In no order; a place may come twice.
        """
        cells = suffix + self.tag.index_select(0, rows)
        entry = self._bucket(cells[:, None])[..., None] + self.ways  # [B, W', WAYS]
        place = self.table.take(entry).flatten(1).bitwise_and_((1 << _CELL_BITS) - 1)
        found = self.log.take(place[:, None] + self.around)  # [B, max_window + branch_length, C]
        before, after = found.split((self.max_window, self.around.numel() - self.max_window), dim=1)
        differs = before != cells[..., None]
        missing = differs.view(torch.uint8).mul_(self.missing).amax(1)
        missing.masked_fill_(after[:, 0] == 0, self.max_window)  # overwritten by the end of another stretch
        after = after & ((1 << _ID_BITS) - 1)  # 1 + token id, 0 = empty
        # Beyond the empty cell that ends the stretch lies anybody's text.
        return missing, after.mul_(after.cummin(1).values > 0).sub_(1)
