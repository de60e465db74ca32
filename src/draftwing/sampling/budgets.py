"""Ends reasoning whose budget is spent, by the model's own end marker. Exact at every node of a draft tree.

At each node the answer is looked at as plain decoding would find it there: committed tokens, the drafts of the node's
ancestors, and its own. Nothing is counted ahead, as with edits of logits (`sampling.edits`).

Tokens are counted from after the marker that begins a block, or from the answer's beginning, to the marker that ends
it, which counts, too. Where the count has reached the budget, the next token is the one by which the end marker goes
on, whatever was drawn. What the path has of the marker already is not said again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import IntArray
from draftwing.requests.request import MAX_MARKER, ThinkingBudget
from draftwing.sampling.edits import Nodes

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
        # What the host knows of it: the tokens of the longer marker, and prompt_len.
        self._longest, self._prompt_len = [1] * rows, [1] * rows

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
        self._longest[row], self._prompt_len[row] = max(len(begin), len(end)), prompt_len

    def forced(self, known_rows: Sequence[int], nodes: Nodes) -> Tensor:
        """Returns what must follow each node: a token of the end marker, [b, N] int64; -1 where the model decides. What
        a dead node gets is not defined. known_rows: the rows, on the host."""
        rows, history, newest, bound, drafts, path, path_len = nodes
        longest = max(self._longest[row] for row in known_rows)
        first = min(self._prompt_len[row] for row in known_rows) - 1  # a prompt may be long, and says nothing here
        state = self._state.index_select(0, rows)[:, None, None]  # [b, 1, 1, S]
        numbers, begins, ends, begun = state.split((_NUMBERS, *[MAX_MARKER] * 3), -1)
        tokens, prompt_len, begin_len, end_len, lead, opened = numbers.unbind(-1)  # [b, 1, 1] each
        markers = _Markers(begins[..., -longest:], ends[..., -longest:], begin_len, end_len, lead)

        # Committed tokens. `order` counts those of the answer, up to and including one.
        known = history[:, first : bound + 1].index_select(0, rows)[:, None]  # [b, 1, L]
        position, root = torch.arange(first, first + known.shape[-1], device=rows.device), newest[:, None, None]
        order = position + 1 - prompt_len
        known = known.masked_fill((order < 1) | (position > root), _NOTHING)
        windows = pad(known, (longest - 1, 0), value=_NOTHING).unfold(-1, longest, 1)  # [b, 1, L, K]: each ends at one
        begun_at, ended_at = markers.newest(windows, order, torch.zeros_like(opened), -opened)
        before = (order >= 0) & (position < root)
        used = ((begun_at > ended_at) & before).sum(-1)  # [b, 1]

        # Paths. Level 0 is the root, whose window is committed.
        level, here = torch.arange(path.shape[-1], device=rows.device), (path_len - 1)[..., None]
        own = drafts.gather(1, path[..., 1:].flatten(1)).view(*drafts.shape, -1)  # [b, N, D]
        own = own.masked_fill(level[1:] > here, _NOTHING)
        window = windows.gather(2, (root - first)[..., None].expand(-1, -1, -1, longest)).squeeze(2)  # [b, 1, K]
        windows = torch.cat((window.expand(-1, own.shape[1], -1), own), -1).unfold(-1, longest, 1)  # [b, N, D + 1, K]
        order = root + 1 - prompt_len + level  # [b, 1, D + 1]
        begun_at, ended_at = markers.newest(windows, order, begun_at[..., -1:], ended_at[..., -1:])
        inside = begun_at > ended_at  # [b, N, D + 1]
        used = used + (inside & (level < here)).sum(-1)  # [b, N]

        # What the end of each node's path has of the end marker, within its block.
        window = windows.gather(2, here[..., None].expand(-1, -1, -1, longest)).squeeze(2)  # [b, N, K]
        since, said = (order - begun_at).gather(-1, here), torch.zeros_like(here)
        begun = begun.squeeze(1)  # [b, 1, MAX_MARKER]
        for count in range(1, longest):
            same = (window[..., longest - count :] == begun[..., :count]).all(-1, keepdim=True)
            said = torch.where(same & (since >= count), count, said)
        following = begun.expand(-1, drafts.shape[1], -1).gather(-1, said).squeeze(-1)
        return torch.where(inside.gather(-1, here).squeeze(-1) & (used >= tokens.squeeze(-1)), following, -1)


class _Markers(NamedTuple):
    """The markers of b rows."""

    begins: Tensor  # [b, 1, 1, K], padded on the left
    ends: Tensor
    begin_len: Tensor  # [b, 1, 1]
    end_len: Tensor
    lead: Tensor  # the most answer tokens before a block

    def newest(self, windows: Tensor, order: Tensor, begun: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the orders of the newest markers up to each token, [b, N, T]; the answer's beginning is one of order
        0.

        windows [b, N, T, K], which end at tokens of the orders [b, 1, T]; begun, ended [b, N or 1, 1]: those before."""
        found = _equal(windows, self.begins) & (order - self.begin_len <= self.lead)
        begun_at = torch.where(found, order, begun).cummax(-1).values
        found = _equal(windows, self.ends) & (order - begun_at >= self.end_len)  # all of it is inside of the block
        return begun_at, torch.where(found, order, ended).cummax(-1).values


def _equal(windows: Tensor, marker: Tensor) -> Tensor:
    """Returns whether windows [..., K] end with the marker [..., K]."""
    return ((windows == marker) | (marker == _ANY)).all(-1)
