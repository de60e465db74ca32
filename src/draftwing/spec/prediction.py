"""What a request asks of its own drafts: that they are copied from a text which it expects its answer to resemble
(OpenAI's `prediction`), and limits of their trees.

`PredictedOutput.write` takes a prediction when its request is admitted. In a step, `merge` puts the copied chain into
the tree that the drafter proposed, or under bare roots where there is no drafter; then `limit` has nodes die that are
beyond the limits, before the target's batch is made. At the end of a step, `confidence` says how promising the next
copy is, so that the policy chooses a shape with room for it. Draft extend still runs for every row, so the drafter's KV
stays complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.config.trees import OTHER, TreeShape
from draftwing.core import IntArray
from draftwing.ops.assign.spec import LEVELS, graded
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Calibration, Draft, RowTensors

WINDOW: Final = 8  # newest tokens that are looked for; a longer match counts as this long
LEVEL: Final = 12  # of a predicted token's grade, until it is known how often answers follow predictions


class _Match(NamedTuple):
    """Where the newest tokens of rows stand in their predictions."""

    end: Tensor  # [b] int64: index of the newest token, -1 before the beginning
    length: Tensor  # [b] int64 in [0, WINDOW]: tokens that agree
    expected: Tensor  # [b] bool: where the answer would be had it gone on as predicted
    found: Tensor  # [b] bool: it is there, and something follows it


class PredictedOutput:
    """Row-indexed predictions and how far into them the answers are; int64 tensors of [R + 1] rows.

    Memory: the longest prediction so far, rounded up to a power of two, for every row.
    """

    def __init__(
        self, rows: int, length: int, device: torch.device, upload: Callable[[IntArray], Tensor] = torch.from_numpy,
        image_token: int = -1,
    ) -> None:  # fmt: skip
        """rows: R + 1, the rows of the row table with its dummy; length: most tokens of a prediction that are kept;
        upload: how [n] int64 get from the host to the device, `Device.upload` where nobody may wait for the copy;
        image_token: stands for images, -1 where none does. Predictions are kept without it."""
        self.limit, self._upload, self._image_token = length, upload, image_token

        def column(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=device)

        self.tokens = column(0).new_empty(rows, 0)  # padded with -1
        self.count = column(0)  # tokens of the prediction
        self.prompt_len = column(0)
        # The newest match: the token at position `seen` was the prediction's token `at`.
        self.at, self.seen = column(-1), column(-1)
        self._lengths = [0] * rows

    @torch.inference_mode()
    def write(self, row: int, ids: Sequence[int], prompt_len: int) -> None:
        """Gives the row to a request with a prediction. ids: token ids of the prediction; prompt_len: of the request,
        not counting output carried over a preemption."""
        kept = np.asarray(ids, np.int64)
        kept = kept[kept != self._image_token][: self.limit]
        columns = self.tokens.shape[1]
        if len(kept) > columns:
            more = min(1 << (len(kept) - 1).bit_length(), self.limit) - columns
            self.tokens = pad(self.tokens, (0, more), value=-1)
        self.tokens[row].fill_(-1)
        self.tokens[row, : len(kept)].copy_(self._upload(kept))
        for column, value in (
            (self.count, len(kept)),
            (self.prompt_len, prompt_len),
            (self.at, -1),
            (self.seen, prompt_len - 1),
        ):
            column[row].fill_(value)  # `column[row] = value` would wait: it copies from the host
        self._lengths[row] = len(kept)

    def longest(self, rows: Iterable[int]) -> int:
        """Returns the tokens of the longest prediction among rows of the table, on the host."""
        return max((self._lengths[row] for row in rows), default=0)

    def confidence(self, table: RowTensors, rows: Tensor, bound: int) -> Tensor:
        """Returns how promising the next `overlay` is for rows [b] of the table: [b] int64, 0 = it will find nothing,
        else the length m of the match, or WINDOW + m if it goes on where the answer was following the prediction (at
        most 16; m = 0 before the answer's first token).
        """
        if bound == 0:
            return torch.zeros_like(rows)
        match = self._match(table, rows, bound)
        return torch.where(match.expected, match.length + WINDOW, match.length).mul_(match.found)

    def merge(
        self, draft: Draft, table: RowTensors, rows: Tensor, which: Tensor, shape: TreeShape, bound: int, ops: TorchOps,
        calibration: Calibration,
    ) -> Draft:  # fmt: skip
        """Returns the draft [B, N = shape.nodes] with a chain of what follows in their predictions, at most shape.depth
        tokens, for the rows `which` that are found there. The chain comes first; of the other nodes those stay for
        which there is room, see `TorchOps.merge`.

        rows [B] int64, of the table; which [b] int64, batch indices of rows with a prediction, none twice; bound:
        `longest` of them, or more. The longest suffix of the row's tokens (up to `WINDOW`) that the prediction has
        decides; of equally long ones the place where the answer should be if it went on as it did in the last step,
        then the first place after the last match, then the first of all. Before the answer's first token the
        prediction's own beginning follows. Once a step: it moves the row's place in the prediction.
        """
        assert draft.tokens.shape[1] == shape.nodes
        depth = min(shape.depth, shape.nodes - 1)
        if depth == 0 or bound == 0 or which.shape[0] == 0:
            return draft
        table_rows = rows.index_select(0, which)
        match = self._match(table, table_rows, bound)
        moved = torch.where(match.found, match.end, self.at.index_select(0, table_rows))
        seen = torch.where(match.found, table.kv_len.index_select(0, table_rows), self.seen.index_select(0, table_rows))
        self.at.index_copy_(0, table_rows, moved)
        self.seen.index_copy_(0, table_rows, seen)

        node = torch.arange(shape.nodes, device=rows.device)
        place = match.end[:, None] + node  # [b, N]; the root's own at node 0
        on = (node <= depth) & (place < self.count.index_select(0, table_rows)[:, None])
        predicted = self.tokens[:, :bound].index_select(0, table_rows).gather(1, place.clamp(0, bound - 1))
        draft = graded(draft)
        inner = Draft(*(x.index_select(0, which) for x in draft if x is not None))
        chain = Draft(
            tokens=torch.where(on & (node > 0), predicted, inner.tokens[:, :1]),
            parent=((node - 1).clamp_(min=0) * (node <= depth)).expand_as(place),
            alive=(on & match.found[:, None]) | (node == 0),
            grade=((node > 0) * (LEVELS * OTHER + LEVEL)).expand_as(place),
        )
        merged = ops.merge(chain, inner, shape, calibration)
        return Draft(*(x.index_copy(0, which, y) for x, y in zip(draft, merged, strict=True) if x is not None))  # type: ignore[arg-type]

    def _match(self, table: RowTensors, rows: Tensor, bound: int) -> _Match:
        assert 0 < bound <= self.tokens.shape[1]
        newest = table.kv_len.index_select(0, rows)  # [b]
        back = torch.arange(WINDOW - 1, -1, -1, device=rows.device)
        position = newest[:, None] - back  # [b, WINDOW]
        suffix = table.tokens[rows[:, None], position.clamp(min=0)].masked_fill_(position < 0, -3)
        # windows[:, i, e] is the token WINDOW - 1 - i before index e; -2 before the start, -1 past the end: no token.
        predicted = pad(self.tokens[:, :bound].index_select(0, rows), (WINDOW - 1, 0), value=-2)
        windows = predicted.unfold(1, predicted.shape[1] - WINDOW + 1, 1)
        missing = ((windows != suffix[..., None]) * (WINDOW - back)[:, None]).amax(1)  # [b, P]
        columns = missing.shape[1]
        end = torch.arange(columns, device=rows.device)
        at = self.at.index_select(0, rows)
        expected = at + newest - self.seen.index_select(0, rows)  # [b]
        later = (end - at[:, None] - 1).remainder_(columns).add_(1)  # 1 .. P: what comes after the last match first
        later = later.masked_fill_(end == expected[:, None], 0)
        best = (missing * (columns + 1) + later).min(1)
        length = WINDOW - best.values.div(columns + 1, rounding_mode="floor")
        begins = newest < self.prompt_len.index_select(0, rows)
        where = torch.where(begins, -1, best.indices)
        length.mul_(begins.logical_not())
        found = ((length > 0) | begins) & (where + 1 < self.count.index_select(0, rows))
        return _Match(where, length, begins | (where == expected), found)


def limit(draft: Draft, depth_max: int, max_depth: Tensor, max_topk: Tensor, max_nodes: Tensor) -> Draft:
    """Returns the draft with fewer live nodes; tokens and parents stay.

    depth_max: of the shape, no node is deeper; max_depth, max_topk, max_nodes [B] int64, at least 0, 1, 1. A node is
    dead if it is deeper than max_depth, if max_topk or more live siblings come before it, if an ancestor is dead, or if
    max_nodes survivors of these rules, the root counted, come before it. Its parent is one of them, so what is left is
    a tree.
    """
    parent, alive = draft.parent, draft.alive
    nodes = parent.shape[1]
    if nodes == 1:
        return draft
    node = torch.arange(nodes, device=parent.device)
    earlier = (node < node[:, None]) & (node > 0)  # [N, N]: column before row; the root is nobody's sibling
    siblings = (parent[:, :, None] == parent[:, None]) & alive[:, None] & earlier
    keeps = alive & (siblings.sum(-1) < max_topk[:, None])
    keeps[:, 0].fill_(True)
    # Depths and the worst of all ancestors, over twice the distance in every round; the root is its own parent.
    depth = (node > 0).to(torch.int64).expand_as(parent)  # [B, N]
    jump, reach = parent, 1
    while reach < depth_max:
        keeps, depth = keeps & keeps.gather(1, jump), depth + depth.gather(1, jump)
        jump, reach = jump.gather(1, jump), 2 * reach
    keeps = keeps & (depth <= max_depth[:, None])
    return draft._replace(alive=keeps & (keeps.cumsum(1) <= max_nodes[:, None]))
