"""What requests have generated, as tensors: a log of tokens and a hash table into it.

Every row of the row table owns a ring of the log and appends what its requests generate, one uninterrupted stretch of
decoding after the other. A cell holds 1 + token id below `_ID_BITS` and the stretch's salt above; an empty cell, 0,
precedes and follows each stretch. So one comparison of cells checks a token and the salt at once, no match crosses
from one request into another, and a continuation ends where its stretch does.

The table maps the hash of a window of cells to a few recent places of it whose successor is known. What it answers is
checked against the log as it is now: a collision, or a place that was overwritten since, costs a candidate and never
gives a wrong one. Nothing here reads the device on the host and every shape is known on the host.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

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
    ) -> None:
        """capacity: tokens of log, shared out evenly among rows; a ring has at least `min_cells` cells. rows: R + 1,
        the last one a dummy, which stores nothing."""
        self.max_window = max_window
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
        cells = tokens.take(at.clamp_(0, tokens.numel() - 1)) + tag
        ahead = self.ahead[: limit + 2]
        kept = ahead <= count  # [B, limit + 2]
        where = (place + ahead).remainder_(self.cells).add_(base)
        self.log.put_(where, cells[:, window - 1 :] * kept)  # at least one empty cell follows the newest token

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
