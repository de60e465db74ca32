"""Rows of tables: taken, put, put beside each other."""

from __future__ import annotations

import torch
from torch import Tensor


class RowOps:
    """Takes, puts and joins rows."""

    def concat_columns(self, *parts: Tensor) -> Tensor:
        """parts [M, n_i] of one dtype, rows may be apart -> [M, sum of n_i]"""
        return torch.cat(parts, 1)

    def take_rows(self, source: Tensor, index: Tensor) -> Tensor:
        """source [R, ...], index [M] int64 -> source[index], [M, ...]"""
        return source.index_select(0, index)

    def put_rows(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target [R, T], index [M] int64, source [M, T]: target[index] = source"""
        target.index_copy_(0, index, source)

    def row_numbers(self, table: Tensor, rows: Tensor, each: int, added: Tensor | None = None) -> Tensor:
        """table [R], rows [B], both int64 -> the number of each row's queries, so many a row, [B * each], plus those of
        `added` [B * each]."""
        if added is None:
            return table.index_select(0, rows.repeat_interleave(each))  # one row's, expanded, would be one number
        return (table.index_select(0, rows).unsqueeze(1) + added.view(-1, each)).flatten()

    def share_rows(self, source: Tensor, index: Tensor, begin: int) -> Tensor:
        """source [R, size], the rows [begin, begin + R) of a whole, index [M] int64 into the whole -> [M, size], 0
        where the row is not in `source`."""
        own = index - begin
        mine = (own >= 0) & (own < len(source))
        return torch.where(mine.unsqueeze(-1), self.take_rows(source, own.clamp(0, len(source) - 1)), 0)
