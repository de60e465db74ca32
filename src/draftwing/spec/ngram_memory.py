"""What all requests of one `cache_salt` have generated, as tensors: a log of tokens and a hash table into it.

The log is a ring of blocks. A block belongs to one request at a time and holds a contiguous piece of its output, so
tokens of different requests never mix; the first tokens of a block repeat the last ones of the block before, so that
a window of up to `max_window` tokens never crosses a border, and `LINK` leads a continuation over it. Log positions
grow forever (a cell is position modulo capacity), which makes "newer" a plain comparison, and a position is stale
when its block has another owner by now.

The table maps the hash of (salt, window) to a few recent positions of windows whose successor is known. What it
answers is checked against the log, so a collision costs a candidate and never gives a wrong one. Nothing here reads
the device on the host and every shape is known on the host.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Columns of the block table. OWNER: 1 + the block's number, counted forever; 0 = never used. FILL: tokens in it.
# BACK: of those, repeated from the block before. LINK: OWNER of the same request's next block, 0 = none yet.
# RUN: which uninterrupted stretch of decoding wrote it.
OWNER, FILL, BACK, LINK, SALT, RUN = range(6)
# Columns of the row table, what a row is writing. CURSOR: index of the newest token stored, -1 = nothing. START: index
# of the first token that may be stored. HELD: OWNER of the current block. BASE: log position minus token index.
CURSOR, START, HELD, BASE, ROW_BACK, ROW_RUN = range(6)

WINDOWS: Final = (2, 4, 8)  # hashed lengths besides `min_window`; longer matches are measured in the log
WAYS: Final = 4  # positions kept per bucket
BLOCK: Final = 128  # tokens of a block
CANDIDATES: Final = 8  # matches returned by a lookup

_WRAP: Final = 1 << 64
_LENGTH_BIT: Final = 1 << 48  # log positions stay below it


def _signed(value: int) -> int:
    """The int64 with the same bits as `value` modulo 2^64."""
    value %= _WRAP
    return value - _WRAP if value >= _WRAP >> 1 else value


class NGramMemory:
    """Shared token memory of the n-gram drafter; see the module's text. All public tensors are int64."""

    def __init__(
        self,
        min_window: int,
        max_window: int,
        branch_length: int,
        capacity: int,
        rows: int,
        device: torch.device,
        block: int = BLOCK,
    ) -> None:
        """capacity: tokens of log, raised to two blocks per row at least. rows: R + 1, the last one a dummy.

        The log takes 4 bytes a token and the hash table 16 to 32; on the CPU neither is touched before it is used.
        """
        self.min_window, self.max_window, self.branch_length = min_window, max_window, branch_length
        self.block = max(block, 2 * max_window + branch_length)
        self.blocks = max(capacity // self.block, 2 * rows)
        self.cells = self.blocks * self.block
        self.dummy = rows - 1
        self.lengths = sorted({min_window} | {w for w in WINDOWS if min_window < w <= max_window})
        entries = 1 << (2 * self.cells - 1).bit_length()
        self.entries, self.mask = entries, entries // WAYS - 1

        def long(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        # One cell, entry or block past the end takes the writes that must leave no trace.
        self.log = torch.zeros(self.cells + 1, dtype=torch.int32, device=device)
        self.table = long(entries + 1)  # 1 + log position, 0 = empty
        self.meta = long(self.blocks + 1, 6)
        self.row = long(rows, 6)
        self.row[:, CURSOR] = -1
        self.head = long(1)  # blocks handed out so far
        self.floor = long(1)  # table values up to this one were flushed
        widest = self.lengths[-1]
        # Multilinear hashing, one random-looking odd factor per length and place; a window of w tokens uses the last w.
        factors = [
            [_signed(0x9E3779B97F4A7C15 ** (i * widest + k + 1)) if k >= widest - w else 0 for k in range(widest)]
            for i, w in enumerate(self.lengths)
        ]
        self.factors = torch.tensor(factors, dtype=torch.int64, device=device)  # [W', widest]
        self.length_of = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        self.ways = torch.arange(WAYS, device=device)
        self.back_steps = torch.arange(max_window, device=device)
        self.ahead = torch.arange(1, branch_length + 1, device=device)
        found = len(self.lengths) * WAYS
        self.earlier = torch.ones(found, found, dtype=torch.bool, device=device).tril(-1)

    def close(self, rows: Tensor) -> None:
        """rows [B]: end what these rows were writing; what they write next is another request's."""
        self.row[:, CURSOR].index_fill_(0, rows, -1)
        self.row[:, ROW_RUN].index_fill_(0, rows, 0)

    def flush(self) -> None:
        """Forgets everything, in constant time: older positions are refused from now on."""
        self.floor.copy_(self.head * self.block)
        self.row[:, CURSOR].fill_(-1)
        self.row[:, ROW_RUN].fill_(0)

    def insert(self, tokens: Tensor, salt: Tensor, rows: Tensor, prefix_len: Tensor, count: Tensor, limit: int) -> None:
        """Appends tokens[row, prefix_len + 1 .. prefix_len + count] of each row (and, the first time, the one before).

        tokens [R + 1, L]; salt, rows, prefix_len, count [B]; limit: host bound of count. A row that continues where
        its last call ended goes on with its stretch, any other starts one. The dummy row is ignored.
        """
        count = count.masked_fill(rows == self.dummy, 0)
        piece = self.block - self.max_window - self.branch_length
        if limit <= piece:
            return self._insert(tokens, salt, rows, prefix_len, count, limit)
        for done in range(0, limit, piece):
            width = min(piece, limit - done)
            self._insert(tokens, salt, rows, prefix_len + done, (count - done).clamp(0, width), width)

    def _insert(self, tokens: Tensor, salt: Tensor, rows: Tensor, prefix: Tensor, count: Tensor, width: int) -> None:
        live = count > 0  # [B]
        old = self.row.index_select(0, rows)
        cursor, start, held, base, back, run = old.unbind(1)
        end = prefix + count  # index of the newest token
        fresh = cursor != prefix
        # This step may hand out one block per row; a block that this could recycle is given up beforehand, so that
        # no two rows ever write to the same cells.
        lost = held <= self.head + (rows.numel() - self.blocks)
        opening = live & (fresh | lost | (base + end >= held * self.block))
        new = self.head + opening.cumsum(0)
        start = torch.where(fresh, prefix, start)
        first = torch.maximum(start, prefix - (self.max_window - 1))
        now_held = torch.where(opening, new, held)
        base = torch.where(opening, (new - 1) * self.block - first, base)
        back = torch.where(opening, prefix + 1 - first, back)
        run = torch.where(fresh, new, run)
        self.head.add_(opening.sum())

        now = torch.stack((end, start, now_held, base, back, run), 1)
        self.row.index_copy_(0, rows, torch.where(live[:, None], now, old))
        slot = (now_held - 1).remainder(self.blocks).masked_fill(~live, self.blocks)
        fill = base + end + 1 - (now_held - 1) * self.block
        self.meta.index_copy_(0, slot, torch.stack((now_held, fill, back, torch.zeros_like(fill), salt, run), 1))
        before = (held - 1).remainder(self.blocks).masked_fill(~(opening & ~fresh & ~lost), self.blocks)
        self.meta[:, LINK].index_copy_(0, before, now_held)

        steps = torch.arange(1 - self.max_window, width + 1, device=rows.device)
        at = prefix[:, None] + steps  # [B, max_window + width] token indices
        context = tokens.shape[1]
        ids = tokens.take(rows[:, None] * context + at.clamp(0, context - 1))
        oldest = torch.where(opening, first, prefix + 1)
        keep = (at <= end[:, None]) & (at >= oldest[:, None])  # none where count is 0
        cell = torch.where(keep, (base[:, None] + at).remainder(self.cells), self.cells)
        self.log.scatter_(0, cell.flatten(), ids.flatten().int())
        self._index(ids, salt, start, base, at[:, self.max_window - 1 : -1], end)

    def _index(self, ids: Tensor, salt: Tensor, start: Tensor, base: Tensor, at: Tensor, end: Tensor) -> None:
        """Enters the windows that end at token indices `at` [B, Q], all of whose successors are in the log."""
        widest = self.lengths[-1]
        windows = ids[:, self.max_window - widest : -1].unfold(1, widest, 1)  # [B, Q, widest]
        bucket = self._bucket(windows, salt)  # [B, Q, W']
        # A window lies within its stretch, so prompts stay private and no window joins two requests.
        inside = (at[..., None] - self.length_of >= start[:, None, None] - 1) & (at < end[:, None])[..., None]
        position = (base[:, None] + at)[..., None]  # [B, Q, 1]
        entry = torch.where(inside, bucket * WAYS + position.remainder(WAYS), self.entries)
        # Several rows may meet in an entry: the newest position wins, whatever the order of the writes.
        value = (position + 1).expand_as(entry)
        self.table.scatter_reduce_(0, entry.flatten(), value.flatten(), "amax", include_self=True)

    def _bucket(self, windows: Tensor, salt: Tensor) -> Tensor:
        """windows [B, Q, widest], newest token last; salt [B] -> [B, Q, W'] bucket of each hashed length."""
        mixed = (windows[:, :, None] * self.factors).sum(-1) + (salt * _signed(0xA0761D6478BD642F))[:, None, None]
        return (mixed >> 24) & self.mask  # the low bits of a product depend on few bits of the tokens

    def lookup(self, suffix: Tensor, salt: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The best matches of each row's newest tokens in what others generated.

        suffix [B, max_window]: newest token first, -1 where there is none; salt, rows [B].
        Returns match [B, C], lengths of the matches, 0 = none, longest first and newest first among equals; and their
        continuations [B, C, branch_length], -1 past what is known. What the row's own stretch wrote is left out.
        """
        widest = self.lengths[-1]
        windows = suffix[:, :widest].flip(1)[:, None]  # [B, 1, widest]
        bucket = self._bucket(windows, salt)[:, 0]  # [B, W']
        value = self.table.take(bucket[..., None] * WAYS + self.ways).flatten(1)  # [B, K]
        position = value - 1
        number = position.div(self.block, rounding_mode="floor")
        meta = self._blocks(number)
        run = self.row[:, ROW_RUN].index_select(0, rows)[:, None]
        valid = (value > self.floor) & (meta[..., OWNER] == number + 1)
        valid &= (meta[..., SALT] == salt[:, None]) & (meta[..., RUN] != run)
        # A position is found once per hashed length: only its first finding counts.
        valid &= ~((value[:, :, None] == value[:, None]) & self.earlier).any(-1)
        offset = position - number * self.block
        cell = position.remainder(self.cells)[..., None] - self.back_steps  # [B, K, max_window]
        same = (self.log.take(cell.clamp_min(0)) == suffix[:, None]) & (offset[..., None] >= self.back_steps)
        match = same.cumprod(-1).sum(-1)
        valid &= match >= self.min_window
        key = torch.where(valid, match * _LENGTH_BIT + position, -1)
        key = key.topk(min(CANDIDATES, key.shape[1]), dim=1).values  # valid keys are distinct
        match = key.clamp_min(0) >> 48
        return match, self._continue(key.clamp_min(0) & (_LENGTH_BIT - 1), match > 0)

    def _blocks(self, number: Tensor) -> Tensor:
        """number [B, K] blocks -> [B, K, 6] what their places in the ring hold now."""
        return self.meta.index_select(0, number.remainder(self.blocks).flatten()).view(*number.shape, 6)

    def _continue(self, position: Tensor, valid: Tensor) -> Tensor:
        """position, valid [B, C] -> [B, C, branch_length] the tokens after each position, -1 where unknown."""
        number = position.div(self.block, rounding_mode="floor")
        here = self._blocks(number)
        fill, link = here[..., FILL], here[..., LINK]
        there = self._blocks(link - 1)
        ahead = (position - number * self.block)[..., None] + self.ahead  # offsets in this block
        over = ahead >= fill[..., None]
        # Past this block's last token the next block goes on after the tokens that it repeats.
        skip = (there[..., BACK] - fill)[..., None] + ahead
        linked = (link > 0) & (there[..., OWNER] == link)
        known = valid[..., None] & (~over | (linked[..., None] & (skip < there[..., FILL, None])))
        at = torch.where(over, ((link - 1) * self.block)[..., None] + skip, (number * self.block)[..., None] + ahead)
        return torch.where(known, self.log.take(at.remainder(self.cells)).long(), -1)
