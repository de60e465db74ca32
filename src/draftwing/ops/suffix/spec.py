"""Suffix decoding: `SuffixIndex`, a trie of what followed the last 1, 2, 3, ... tokens, in a hash table.

The trie has no pointers. A *context* is a few tokens that follow each other, of one of the lengths `LENGTHS`. What
followed it is in one bucket of the table, with how often it did. The bucket is found by a hash of the context and of
its *owner*: a row, for the text of the request that it holds, or a salt, for what requests generated. So a row forgets
by taking another owner, and what nobody asks for leaves its bucket in time. The hash is linear, and contexts are what
clients choose: owners are secrets, or a context could be computed that meets another owner's in the hash.

A draft grows node by node, the most probable first. What follows a node is found by the contexts that end with it: by
the longest that is known, and by shorter ones for as much of the probability as the longer ones leave. The end of a
step grows the tree (`confidence`), the next one emits as much of it as its shape takes (`propose`). All work on device
state alone.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from draftwing.config.trees import LOOKUP, MAX_CONFIDENCE, TreeShape
from draftwing.ops.assign.spec import LEVELS, MIDDLE, SLOPE, roots_alone
from draftwing.ops.types import Draft, RowTensors

LENGTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # of contexts, up to the longest that is asked for
# For each token that followed a context, so many occurrences are taken to be of tokens that have not been seen there:
# as often as text of chats and code went on in another way. What others said says less.
ESCAPE: Final = (2.3, 1.0, 0.6, 0.35, 0.28, 0.22, 0.18, 0.1, 0.06, 0.05, 0.03)
OTHERS: Final = 2.0  # times that many, where the tokens are of other requests
WAYS: Final = 8  # tokens of a bucket, the newest first
BACK: Final = 3  # contexts that a node's children come from

# A way is 0 or count << 53 | check << 22 | token: how often the token followed, halved whenever another one did, and
# what tells contexts apart that share a bucket. Token and check together are its name.
_TOKEN_BITS: Final = 22
_CHECK_BITS: Final = 31
_NAME_BITS: Final = _TOKEN_BITS + _CHECK_BITS
MAX_COUNT: Final = (1 << 63 - _NAME_BITS) - 1  # a count stops here
_TOKEN, _CHECK, _NAME = (1 << _TOKEN_BITS) - 1, (1 << _CHECK_BITS) - 1, (1 << _NAME_BITS) - 1

_WORD: Final = 1 << 64


def signed(x: int) -> int:
    """Returns the 64 bits of x as torch counts them."""
    return (x + (_WORD >> 1)) % _WORD - (_WORD >> 1)


BASE, FIRST, SECOND, OWNER, SALT = (
    signed(x)
    for x in (
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1342543DE82EF95, 0xA0761D6478BD642F,
    )
)  # fmt: skip


def owners(count: int, secret: int) -> Tensor:
    """Returns [count] int64: 64 bits each, of which none says anything of another one or of their difference."""
    key = secret.to_bytes(8, "little")
    hashes = (blake2b(i.to_bytes(8, "little"), digest_size=8, key=key).digest() for i in range(count))
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in hashes])


SCORE_BITS: Final = 12  # of a probability's fraction, where they are summed


def level_starts() -> Tensor:
    """Returns [LEVELS - 1] float32: the least probability of level 1, 2, ... of `ops.assign.spec.level_of`."""
    return torch.sigmoid((torch.arange(1, LEVELS, dtype=torch.float64) - 0.5 - MIDDLE) / SLOPE).float()


class SuffixIndex:
    """The trie in torch. Row-indexed state of R + 1 rows, the last one a dummy, and one table for all.

    Memory: 8 bytes for each context length and token of `capacity`, rounded up to a power of two: 92 MB for a million
    tokens and contexts of up to 32, taken on the CPU when it is first used; and 32 bytes a node of the tree for each
    row. Token ids are below 2^22.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        depth: int = 16,
        nodes: int = 17,
        max_context: int = 24,
        min_prob: float = 0.005,
        capacity: int = 1_000_000,
        secret: int | None = None,
        image_token: int = -1,
    ) -> None:
        """rows: R + 1, the rows of the row table with its dummy. depth, nodes: of the largest tree, its root included.
        max_context: tokens of the longest context; min_prob: of a node's path, or it is not proposed; capacity: tokens
        that the table remembers, of prompts and answers together; secret: 63 bits, from which owners begin; None draws
        them; image_token: stands for images, -1 where none does. Contexts have it, and it follows none."""
        self.image_token = image_token
        self.rows, self.depth, self.nodes, self.min_prob = rows - 1, depth, max(nodes, 2), min_prob
        self.lengths = tuple(length for length in LENGTHS if length <= max_context)
        self.width = self.lengths[-1]  # tokens of the longest context
        self.buckets = max(1 << (max(capacity, 1) - 1).bit_length(), 1 << 10) // WAYS  # of each length
        # The last bucket is nobody's: what must not be written goes there.
        self.table = torch.zeros(len(self.lengths) * self.buckets + 1, WAYS, dtype=torch.int64, device=device)
        self.owner = torch.zeros(rows, 2, dtype=torch.int64, device=device)  # of a row's own text; of its salt
        begin = owners(rows + 1, secrets.randbits(63) if secret is None else secret).to(device)
        self.owner[:, 0], self.epoch = begin[:rows], begin[rows:].clone()  # the epoch moves with each flush
        # Written by `confidence` and read by `propose`, node 0 the root: token, parent, depth (0: no node), grade.
        self.grown = torch.zeros(4, rows, self.nodes, dtype=torch.int64, device=device)
        self._constants(device)

    def _constants(self, device: torch.device) -> None:
        count, width = len(self.lengths), self.width
        # factors[w, k]: of the k-th token of a context of `width`, the newest last; 0 before one of lengths[w].
        factors = [
            [signed(pow(BASE % _WORD, width - 1 - k, _WORD)) if k >= width - length else 0 for k in range(width)]
            for length in self.lengths
        ]
        self.factors = torch.tensor(factors, dtype=torch.int64, device=device)
        self.length = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        self.region = torch.arange(count, device=device) * self.buckets  # first bucket of each length
        self.nowhere = count * self.buckets
        # escape[w, s, n]: after n tokens, of a row's own (s = 0) or of its salt.
        escape = torch.tensor(ESCAPE[:count])[:, None, None] * torch.tensor([1, OTHERS])[:, None]
        self.escape = (escape * torch.arange(WAYS + 1)).to(device)
        self.starts = level_starts().to(device)
        self.least = torch.tensor([self.min_prob], dtype=torch.float32, device=device)
        self.back = torch.arange(width - 1, -1, -1, device=device)
        self.way = torch.arange(WAYS, device=device)
        self.by_length = torch.arange(count, device=device)
        self.node = torch.arange(self.nodes, device=device)
        # Of what is known of a node's context the longest counts, and of two of one length the row's own.
        self.preferred = 2 * self.by_length[:, None] + torch.tensor([2, 1], device=device)  # [W, 2]
        self.earlier = torch.arange(self.nodes * BACK * WAYS - 1, -1, -1, device=device)

    # -- what it learns ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forgets what requests generated; the text of those that run stays."""
        self.epoch.add_(SECOND)
        self.owner[:, 1].add_(SECOND)
        self.grown.zero_()

    def begin(self, table: RowTensors, rows: Tensor, longest: int) -> None:
        """rows [B] hold the text of another request from now on, all of it but the newest token in the KV: the trie
        learns it. longest: host bound of their kv_len."""
        owner = self.owner.index_select(0, rows)
        salt = table.salt.index_select(0, rows) * SALT + self.epoch
        self.owner.index_copy_(0, rows, torch.stack((owner[:, 0] * OWNER + 1, salt), 1))
        self.grown.index_fill_(1, rows, 0)
        zero = torch.zeros_like(rows)
        self.insert(table, rows, zero, table.kv_len.index_select(0, rows), longest, shared=False)

    def insert(
        self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int, shared: bool = True
    ) -> None:
        """Teaches the trie tokens prefix_len + 1 .. prefix_len + count of each row: what followed the contexts that end
        before them. rows, prefix_len, count [B]; limit: host bound of count; shared: whether requests of the same salt
        learn them, too."""
        real = torch.where(rows < self.rows, count, 0)
        for b in range(rows.shape[0]):  # in turn: what two rows write may be one bucket's
            row, first = rows[b : b + 1], prefix_len[b : b + 1] + 1
            for ahead in range(limit):
                at = first + ahead  # [1]
                # Past the count, and past the end of the table, is nothing.
                known = (ahead < real[b : b + 1]) & (self.length <= at)  # [W]
                place = (at - 1 - self.back).clamp_(0, table.tokens.shape[1] - 1)
                context = table.tokens[row, place].long() + 1  # [width]
                token = table.tokens[row, at.clamp(max=table.tokens.shape[1] - 1)].long()
                known = known & (token != self.image_token)
                for owner in range(1 + shared):
                    self._learn(context, self.owner[row, owner], token, known)

    def remember(self, table: RowTensors, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        """Does as `insert` for requests of the rows' salts alone: the rows do not learn it."""
        own, salt = self.owner.index_select(0, rows), table.salt.index_select(0, rows) * SALT + self.epoch
        self.owner.index_copy_(0, rows, torch.stack((salt, salt), 1))
        self.insert(table, rows, prefix_len, count, limit, shared=False)
        self.owner.index_copy_(0, rows, own)

    def _learn(self, context: Tensor, owner: Tensor, token: Tensor, known: Tensor) -> None:
        """token [1] followed the last tokens of context [width] (ids + 1), where known [W] allows it."""
        bucket, check = self._bucket((self.factors * context).sum(-1) + owner)
        bucket = torch.where(known, bucket + self.region, self.nowhere)
        ways = self.table.index_select(0, bucket)  # [W, WAYS]
        name = check << _TOKEN_BITS | token  # [W]
        same = (ways & _NAME) == name[:, None]
        at = torch.where(same, self.way, WAYS - 1).amin(1, keepdim=True)  # the place that it leaves, or the oldest's
        count = torch.where(same.any(1), (ways.gather(1, at).squeeze(1) >> _NAME_BITS) + 1, 1).clamp_(max=MAX_COUNT)
        moved = torch.where(self.way <= at, ways.roll(1, 1), ways)
        others = (moved >> _TOKEN_BITS & _CHECK) == check[:, None]  # what followed instead counts half
        halved = ((moved >> _NAME_BITS) + 1 >> 1) << _NAME_BITS | (moved & _NAME)
        moved = torch.where(others, halved, moved)
        moved[:, 0] = count << _NAME_BITS | name
        self.table.index_copy_(0, bucket, moved)

    def _bucket(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """key: any shape; returns the bucket among those of one length, and the check of its ways."""
        key = key * FIRST
        key = (key ^ (key >> 32 & 0xFFFFFFFF)) * SECOND
        key = key ^ (key >> 29 & ((1 << 35) - 1))
        return key >> _CHECK_BITS & self.buckets - 1, key & _CHECK

    # -- what it proposes -------------------------------------------------------------------------------------------

    def confidence(self, table: RowTensors, rows: Tensor, max_kv_len: int, out: Tensor | None = None) -> Tensor:
        """Grows the next trees and keeps them. max_kv_len: host bound of the rows' kv_len now.

        Returns [B] int64: how many drafts are expected to be accepted, the sum of the probabilities of the nodes,
        rounded, in [1, `MAX_CONFIDENCE`]; 0 where nothing is known. Written into `out` if that is given, of any stride.
        """
        newest = table.kv_len.index_select(0, rows)[:, None]  # [B, 1]
        place = (newest - self.back).clamp_(min=0)
        context = table.tokens[rows[:, None], place].long() + 1  # [B, width] ids + 1
        real = rows < self.rows
        # Of the tokens before the start of the text no context is made.
        behind = torch.where(real[:, None], newest + 1, 0)
        paths, grown = self._grow(context, self.owner.index_select(0, rows), behind)
        self.grown.index_copy_(1, rows, grown)
        total = (paths * (1 << SCORE_BITS)).long().sum(1)
        score = (total + (1 << SCORE_BITS - 1)) >> SCORE_BITS
        score = torch.maximum(score, (paths[:, 1] > 0).long()).clamp_(max=MAX_CONFIDENCE)
        return score if out is None else out.copy_(score)

    def _grow(self, context: Tensor, owner: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
        """context [B, width], owner [B, 2]; behind [B, 1]: tokens of the text. Returns the probability of each node's
        path [B, nodes] float32, 0 for the root and where no node is; and `grown` of these rows [4, B, nodes]."""
        batch, nodes, size = context.shape[0], self.nodes, BACK * WAYS
        grown = context.new_zeros(4, batch, nodes)
        paths = torch.zeros(batch, nodes, dtype=torch.float32, device=context.device)
        contexts = context.new_zeros(batch, nodes, self.width)
        reach = context.new_zeros(batch, nodes)  # lengths of contexts that may be tried for what follows its children
        # Children of node n stand from n * size on: their paths' probabilities, tokens and grades.
        path = torch.zeros(batch, nodes * size, dtype=torch.float32, device=context.device)
        token, grade = context.new_zeros(2, batch, nodes * size)
        depth, mine, end = torch.zeros_like(behind), torch.ones_like(path[:, :1]), behind * 0 + len(self.lengths)
        for n in range(nodes):
            if n:
                # The best by the bits of its probability, of equals the first.
                best = (path.view(torch.int32).long() << 32 | self.earlier).argmax(1, keepdim=True)  # [B, 1]
                parent, mine = best // size, path.gather(1, best)
                path.scatter_(1, best, 0.0)
                alive = mine > 0
                depth = (grown[2].gather(1, parent) + 1) * alive
                found = torch.cat((token.gather(1, best), parent, depth, grade.gather(1, best)), 1) * alive
                grown[:, :, n], paths[:, n] = found.t(), mine.squeeze(1)
                context = contexts.gather(1, parent[..., None].expand(-1, 1, self.width)).squeeze(1)
                context = torch.cat((context[:, 1:], found[:, :1] + 1), 1)
                end = reach.gather(1, parent)
            contexts[:, n] = context
            tokens, single, reach[:, n] = self._following(context, owner, behind + depth, end)
            onwards = mine * single  # [B, size]
            where = slice(n * size, (n + 1) * size)
            path[:, where] = torch.where((onwards >= self.least) & (depth < self.depth), onwards, 0.0)
            token[:, where] = tokens
            grade[:, where] = LOOKUP * LEVELS + (single[..., None] >= self.starts).sum(-1)
        return paths, grown

    def _following(self, context: Tensor, owner: Tensor, behind: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what follows context [B, width] by the `BACK` longest contexts that are known, of two of one length
        the row's own first; among the first `end` [B, 1] lengths and not longer than behind [B, 1]. Returns tokens and
        their probabilities [B, BACK * WAYS], 0 where there is none, and how many lengths may be tried for what follows
        them [B]."""
        key = (self.factors * context[:, None]).sum(-1)  # [B, W]
        bucket, check = self._bucket(key[..., None] + owner[:, None])  # [B, W, 2]
        ways = self.table[bucket + self.region[:, None]].flatten(1, 2)  # [B, 2 * W, WAYS]
        fits = ((self.by_length < end) & (self.length <= behind))[..., None].expand_as(check).flatten(1)
        counts = (ways > 0) & ((ways >> _TOKEN_BITS & _CHECK) == check.flatten(1)[..., None]) & fits[..., None]
        rank = self.preferred.flatten() * counts.any(-1)  # [B, 2 * W]
        reach = (rank.argmax(1) // 2 + 2).clamp_(max=len(self.lengths))
        tokens, singles = ways.new_full((ways.shape[0], 0), -1), self.escape.new_zeros(ways.shape[0], 0)
        left = self.escape.new_ones(ways.shape[0], 1)
        for _ in range(BACK):
            best = rank.argmax(1, keepdim=True)  # [B, 1]
            there = rank.gather(1, best) > 0
            rank = rank.scatter(1, best, 0)
            where = best[..., None].expand(-1, 1, WAYS)
            found, fresh = ways.gather(1, where).squeeze(1), counts.gather(1, where).squeeze(1) & there
            token = found & _TOKEN
            fresh &= (token[..., None] != tokens[:, None]).all(-1)
            count = torch.where(fresh, found >> _NAME_BITS, 0).float()
            escape = self.escape.flatten(0, 1)[best.squeeze(1)].gather(1, fresh.sum(1, keepdim=True))
            total = count.sum(1, keepdim=True) + escape
            some = total > 0
            total = torch.where(some, total, 1.0)
            singles = torch.cat((singles, left * (count / total)), 1)
            tokens = torch.cat((tokens, torch.where(fresh, token, -1)), 1)
            left = torch.where(some, left * (escape / total), left)
        return tokens, singles, reach

    def propose(self, table: RowTensors, rows: Tensor, shape: TreeShape) -> Draft:
        """Proposes as much of the trees that the last `confidence` kept as the shape takes, the most probable nodes
        first; dead nodes where there are fewer."""
        if shape.nodes > 1 and shape.depth > 0:
            return self.emit(table, rows, shape.depth, shape.nodes)
        return roots_alone(table, rows, shape.nodes)

    def emit(self, table: RowTensors, rows: Tensor, depth: int, nodes: int) -> Draft:
        """Emits trees with depth above 0 and nodes above 1."""
        token, parent, level, grade = self.grown.index_select(1, rows).unbind(0)  # [B, n] each
        fits = (level > 0) & (level <= depth)
        place = fits.cumsum(1)
        fits &= place < nodes
        place = torch.where(fits, place, 0)
        # Nodes that are left out meet at a place past the end.
        where = torch.where(fits, place, nodes)
        last = table.last.index_select(0, rows)[:, None]
        tokens = last.expand(-1, nodes + 1).scatter(1, where, token)
        parents = torch.zeros_like(tokens).scatter(1, where, place.gather(1, parent))
        alive = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, where, fits)
        alive[:, 0].fill_(True)  # `= True` would wait: it copies from the host
        grades = torch.zeros_like(tokens).scatter(1, where, grade)
        return Draft(tokens[:, :nodes], parents[:, :nodes], alive[:, :nodes], grades[:, :nodes])
