"""Ends reasoning whose budget is spent, by the model's own end marker. Exact at every node of a draft tree.

At each node the answer is looked at as plain decoding would find it there: committed tokens, the drafts of the node's
ancestors, and its own. Nothing is counted ahead, as with edits of logits (`sampling.edits`).

Tokens are counted from after the marker that begins a block, or from the answer's beginning, to the marker that ends
it, which counts, too. Where the count has reached the budget, the next token is the one by which the end marker goes
on, whatever was drawn. What the path has of the marker already is not said again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import IntArray
from draftwing.requests.request import MAX_MARKER, ThinkingBudget

_ANY: Final = -1  # before the beginning of a marker: equal to every token
_NOTHING: Final = -2  # where a text has no token
_NEVER: Final = -3  # equal to no token, and not to `_NOTHING`
_LEAD: Final = 1  # tokens of whitespace that may come before a block at the beginning of an answer
_NUMBERS: Final = 6  # of a row, before its markers


class BudgetTable:
    """Row-indexed device state of the requests' thinking budgets, [R + 1] rows as in `RowTable`."""

    def __init__(
        self, rows: int, device: torch.device, upload: Callable[[IntArray], Tensor] = torch.from_numpy
    ) -> None:
        """rows, upload: as of `EditTable`."""
        self._upload = upload
        # Tokens of the budget, prompt_len, lengths of both markers, the most answer tokens before a block, and whether
        # the answer begins inside of one; then the markers: that of the beginning and that of the end, each ending with
        # the last column of its part, and that of the end from its first column on.
        self._state = torch.zeros((rows, _NUMBERS + 3 * MAX_MARKER), dtype=torch.int64, device=device)
        self._longest = [1] * rows  # tokens of the longer marker

    @torch.inference_mode()
    def write(self, row: int, budget: ThinkingBudget, prompt_len: int) -> None:
        """Sets a row. prompt_len: of the request, not counting output carried over a preemption. Markers were checked
        at admission."""
        begin, end = budget.begin or (_NEVER,), budget.end
        host = np.full(_NUMBERS + 3 * MAX_MARKER, _ANY, np.int64)
        lead = np.iinfo(np.int32).max if budget.again else _LEAD
        host[:_NUMBERS] = budget.tokens, prompt_len, len(begin), len(end), lead, budget.open
        begins, ends, begun = host[_NUMBERS:].reshape(3, MAX_MARKER)
        begins[-len(begin) :], ends[-len(end) :] = begin, end
        begun[:] = _NEVER
        begun[: len(end)] = end
        self._state[row].copy_(self._upload(host))
        self._longest[row] = max(len(begin), len(end))

    def longest(self, rows: Iterable[int]) -> int:
        """Tokens of the longest marker of these rows, which the host knows."""
        return max(self._longest[row] for row in rows)

    def forced(
        self,
        longest: int,
        rows: Tensor,
        history: Tensor,
        newest: Tensor,
        bound: int,
        drafts: Tensor,
        path: Tensor,
        path_len: Tensor,
    ) -> Tensor:
        """What must follow each node: a token of the end marker, [b, N] int64; -1 where the model decides.

        longest: as of the method; all else as of `EditTable.apply`. What a dead node gets is not defined.
        """
        state = self._state.index_select(0, rows)
        tokens, prompt_len, begin_len, end_len, lead, opened = state[:, :_NUMBERS, None].unbind(1)  # [b, 1] each
        begins, ends, begun = state[:, _NUMBERS:].view(-1, 3, MAX_MARKER).unbind(1)
        begins, ends, begun = begins[:, -longest:], ends[:, -longest:], begun[:, :longest]

        # Committed tokens. `order` counts those of the answer, up to and including one.
        known = history[:, : bound + 1].index_select(0, rows)  # [b, L]
        position = torch.arange(known.shape[1], device=rows.device)
        order, past = position + 1 - prompt_len, position <= newest[:, None]
        known = known.masked_fill((order < 1) | ~past, _NOTHING)
        windows = pad(known, (longest - 1, 0), value=_NOTHING).unfold(-1, longest, 1)  # [b, L, K]: each ends at a token
        found = _equal(windows, begins[:, None]) & (order - begin_len <= lead)
        begun_at = torch.where(found, order, 0).cummax(-1).values  # the answer's beginning counts as a marker, too
        found = _equal(windows, ends[:, None]) & (order - begun_at >= end_len)
        ended_at = torch.where(found, order, -opened).cummax(-1).values
        counted = (order >= 0) & (position < newest[:, None])
        used = ((begun_at > ended_at) & counted).sum(-1)[:, None, None]  # [b, 1, 1], without the root's own block

        # Paths: level 0 is the root, whose window is committed.
        level = torch.arange(path.shape[-1], device=rows.device)  # [D + 1]
        root = newest[:, None, None].expand(-1, 1, longest)
        own = drafts.gather(1, path[..., 1:].flatten(1)).view(*drafts.shape, -1)  # [b, N, D]
        own = own.masked_fill(level[1:] >= path_len[..., None], _NOTHING)
        text = torch.cat((windows.gather(1, root).expand(-1, own.shape[1], -1), own), -1)
        windows = text.unfold(-1, longest, 1)  # [b, N, D + 1, K]
        order = (newest[:, None] + 1 - prompt_len)[..., None] + level  # [b, 1, D + 1]
        below = level > 0
        found = _equal(windows, begins[:, None, None]) & (order - begin_len[..., None] <= lead[..., None]) & below
        begun_at = torch.where(found, order, begun_at[:, None, -1:]).cummax(-1).values
        found = _equal(windows, ends[:, None, None]) & (order - begun_at >= end_len[..., None]) & below
        ended_at = torch.where(found, order, ended_at[:, None, -1:]).cummax(-1).values
        inside = begun_at > ended_at  # [b, N, D + 1]

        here = (path_len - 1)[..., None]  # the node's own level
        used = used.squeeze(-1) + (inside & (level < here)).sum(-1)  # [b, N]
        since = (order - begun_at).gather(-1, here)
        window = windows.gather(2, here[..., None].expand(-1, -1, -1, longest)).squeeze(2)  # [b, N, K]
        said = torch.zeros_like(here)  # of the end marker
        for count in range(1, longest):
            begins_so = (window[..., longest - count :] == begun[:, None, :count]).all(-1, keepdim=True)
            said = torch.where(begins_so & (since >= count), count, said)
        following = begun[:, None].expand(-1, drafts.shape[1], -1).gather(-1, said).squeeze(-1)
        return torch.where(inside.gather(-1, here).squeeze(-1) & (used >= tokens), following, -1)


def _equal(windows: Tensor, marker: Tensor) -> Tensor:
    """Whether windows [..., K] end with the marker [..., K]."""
    return ((windows == marker) | (marker == _ANY)).all(-1)
