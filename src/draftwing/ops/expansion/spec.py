"""Tree expansion of EAGLE-2 (Li et al. 2024, arXiv 2406.16858): a tree from any drafter that scores continuations.

Level by level the best `topk` nodes are expanded by `topk` children each; a node's score is the sum of the log
probabilities along its path. At the end the best nodes of all levels are kept. Scores never grow along a path and ties
go to the earlier candidate, parents being earlier than their children, so what is kept is closed under parents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.config.trees import MODEL, TreeShape
from draftwing.ops.assign.spec import LEVELS, level_of, level_of_odds
from draftwing.ops.sampling.spec import SamplingOps, first_argmax
from draftwing.ops.types import (
    BlockInputs,
    Chain,
    Continuations,
    Draft,
    Edits,
    Expansion,
    First,
    Level,
    LevelRows,
    LogitEditor,
    NoiseKey,
    RowTensors,
    Unseen,
)

_NONE = -2  # a token that is equal to none that there is


class ExpansionOps:
    """The operations of a drafter with a model: its pass over committed text, and the expansion of a tree."""

    def __init__(self, sampling: SamplingOps) -> None:
        self._sampling = sampling

    # Whether the root's continuations are to be read when a tree is wanted, rather than with every pass: a step without
    # drafts then does without them.
    reads_root_late = True

    def chain(self, table: RowTensors, rows: Tensor, prefix: Tensor, width: int) -> Chain:
        """Returns tokens at the positions prefix[b] .. prefix[b] + width - 1 of rows [B], from the token history."""
        step = torch.arange(width, device=rows.device)
        column, positions = rows.unsqueeze(1), prefix.unsqueeze(1) + step  # [B, Q]
        return Chain(
            ids=table.tokens_at(column, positions).flatten(),
            positions=positions.flatten(),
            write_slots=table.slots_at(column, positions).flatten(),
            path=step.expand(rows.shape[0], width, width),
            path_len=(step + 1).expand(rows.shape[0], width),
        )

    def keep_unseen(
        self, unseen: Unseen, rows: Tensor, prefix_len: Tensor, count: Tensor, hidden: Tensor | None,
        nodes: Tensor | None,
    ) -> None:  # fmt: skip
        """Notes in `unseen` what a step has committed: count [B] positions of rows [B], from prefix_len [B] on. hidden
        [M, T]: of the step's queries, None where T = 0; nodes [B * Q]: the query of each of Q positions, of which those
        past the count are garbage; None where Q = 1 and M = B."""
        unseen.behind.index_add_(0, rows, count)
        if hidden is None:
            return
        if nodes is not None:
            hidden = hidden.index_select(0, nodes)
        places = unseen.hidden.shape[1]
        step = torch.arange(hidden.shape[0] // rows.shape[0], device=rows.device)
        at = rows.unsqueeze(1) * places + (prefix_len.unsqueeze(1) + step) % places  # [B, Q]
        unseen.hidden.view(-1, hidden.shape[1]).index_copy_(0, at.flatten(), hidden)

    def newest_rows(self, hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, kept: Tensor | None) -> Tensor:
        """hidden [B * Q, H], Q rows of each batch row -> its row count[b] - lookahead, [B, H]; also written into
        kept [R + 1, H], at rows [B]."""
        hidden = hidden.unflatten(0, (rows.shape[0], -1))
        last = (count - lookahead).view(-1, 1, 1)
        newest = hidden.gather(1, last.expand(-1, 1, hidden.shape[2])).squeeze(1)
        if kept is not None:
            kept.index_copy_(0, rows, newest)
        return newest

    def block_inputs(self, table: RowTensors, rows: Tensor, width: int, mask: int) -> BlockInputs:
        """Returns a block of `width` rows for each of rows [B]: its newest token, and tokens `mask` after it."""
        step = torch.arange(width, device=rows.device)
        prefix_len = table.kv_len.index_select(0, rows)
        at = prefix_len.unsqueeze(1) + step  # [B, Q]
        ids = torch.full_like(at, mask)
        ids[:, 0].copy_(table.last.index_select(0, rows))
        return BlockInputs(
            ids=ids.flatten(),
            positions=at.flatten(),
            write_slots=table.slots_at(rows.unsqueeze(1), at).flatten(),
            prefix_len=prefix_len,
            path=step.expand(len(rows), width, width).contiguous(),
            path_len=torch.full_like(at, width),
        )

    def windowed(
        self, table: Tensor, rows: Tensor, prefix_len: Tensor, window: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """table [R, L]: the entries of rows [B] from window - 1 before prefix_len [B] on, as many as a window and
        `width` have -> how many of them are before, [B], and a table of its own, [B, window - 1 + width]."""
        before = prefix_len.clamp(max=window - 1)
        entry = torch.arange(window - 1 + width, device=prefix_len.device)
        at = ((prefix_len - before).unsqueeze(1) + entry).clamp(max=table.shape[1] - 1)
        return before, table[rows.unsqueeze(1), at]

    def of_levels(self, x: Tensor, batch: int, first: int, levels: int) -> Tensor:
        """x [B * Q, ...] -> rows first, first + 1, ... of each of B, [levels * B, ...]: those of a level side by
        side."""
        x = x.unflatten(0, (batch, -1))[:, first : first + levels]
        return x.transpose(0, 1).flatten(0, 1).contiguous()

    def repeat_rows(self, x: Tensor, times: int) -> Tensor:
        """x [B, ...] -> [B * times, ...]: each row so often."""
        return x.repeat_interleave(times, 0)

    def confident(self, draft: Draft, hidden: Tensor, weight: Tensor, token_odds: Tensor) -> Draft:
        """Returns the draft with grades that a confidence head has moved: those of siblings by a third of how far it
        differs from the grade of the best of them, in levels, rounded. Log odds that a node is accepted are hidden [D *
        B, H] of its level, times weight [H] float32, plus what the token above it adds, token_odds [V] float32."""
        assert draft.grade is not None
        grade, depth = draft.grade, torch.zeros_like(draft.parent)
        child = torch.arange(grade.shape[1], device=grade.device) > 0
        batch = len(grade)
        for _ in range(len(hidden) // batch):
            depth = torch.where(child, depth.gather(1, draft.parent) + 1, 0)
        odds = (hidden.float() @ weight).view(-1, batch).t().gather(1, (depth - 1).clamp(min=0))  # [B, N]
        odds = odds + token_odds[draft.tokens.gather(1, draft.parent)]
        own = grade % LEVELS
        best = torch.zeros_like(own).scatter_reduce(1, draft.parent, torch.where(child, own, 0), "amax")
        moved = own + (2 * (level_of_odds(odds) - best.gather(1, draft.parent)) + 3) // 6
        return draft._replace(grade=torch.where(child, grade - own + moved.clamp(0, LEVELS - 1), 0))

    def continuations(
        self, logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, topk: int, target_ids: Tensor | None,
        noisy: Tensor,
    ) -> Continuations:  # fmt: skip
        """Returns the best `topk` next tokens at kv_len + ahead of logits [M, V], any float type, which may be
        overwritten; M a multiple of the rows [B]: M / B nodes of each.

        target_ids [V] int64: the target's id of each of the logits' tokens, None where they are the same. noisy: batch
        indices of the rows with a temperature. These get the noise that the target will draw with at that position, so
        that both pick the same token more often (arXiv 2408.07978); renormalised, so that scores still fall along a
        path. Of rows with min-p, what it would leave out lies lower by as much again as it lies below its limit: a
        head's logits are near the target's, not equal.
        """
        z = logits.float()
        if noisy.shape[0]:
            drawn, vocab = rows[noisy], z.shape[1]
            key = (table.seed[drawn], table.kv_len[drawn].unsqueeze(1) + ahead)
            noise = (
                self._sampling.gumbel(*key, vocab) if target_ids is None else self._sampling.gumbel_at(*key, target_ids)
            )  # [Bn, 1, V]
            noise = noise * table.floats[drawn, :1].unsqueeze(2)
            z = z.view(rows.shape[0], -1, vocab)
            noise = noise - unlikely(z.index_select(0, noisy), table.floats[drawn, 0], table.floats[drawn, 2])
            z = z.index_add(0, noisy, noise).flatten(0, 1)
        ids, logp = top_tokens(z, topk)
        return Continuations(ids if target_ids is None else target_ids[ids], logp)

    def level_candidates(
        self, logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, count: int, target_ids: Tensor | None,
        noisy: Tensor,
    ) -> list[Continuations]:  # fmt: skip
        """Returns the `continuations` of each of L levels, of logits [L * B, V], level by level (`of_levels`): at
        kv_len + ahead and on. As `pair_continuations` takes them."""
        return [
            self.continuations(own, table, rows, ahead + level, count, target_ids, noisy)
            for level, own in enumerate(logits.split(len(rows)))
        ]

    def pair_continuations(
        self, candidates: Continuations, above: Tensor, gate: Tensor, before: Tensor, after: Tensor, topk: int,
        target_ids: Tensor | None,
    ) -> Continuations:  # fmt: skip
        """Returns the best `topk` of the candidates (`continuations`, C of each of B rows) of M nodes, M / B of each
        row, which follow the tokens above [M] int64: by log p[c] + sum over r of before[above, r] * gate[b, r] *
        after[c, r]. gate [B, R] of the rows, before, after [V, R] by the target's ids.

        They share what all candidates of the row had together. Of equals it is any.
        """
        exact = torch.promote_types(gate.dtype, torch.float32)
        ids, logp = candidates.ids, candidates.logp.to(exact)  # [B, C]
        each = len(above) // len(ids)
        gated = before[above].to(exact) * gate.to(exact).repeat_interleave(each, 0)  # [M, R]
        ids, logp = ids.repeat_interleave(each, 0), logp.repeat_interleave(each, 0)
        scores = logp + (after[ids].to(exact) @ gated.unsqueeze(2)).squeeze(2)
        scores = scores - scores.logsumexp(1, keepdim=True) + logp.logsumexp(1, keepdim=True)
        best, places = _best_first(scores, topk)
        return Continuations(ids.gather(1, places), best.float())

    def logit_editor(
        self, table: RowTensors, rows: Tensor, edits: Edits, bound: int, vocab: int, draft_ids: Tensor | None
    ) -> LogitEditor:
        """Returns what edits a head's logits of rows [B]. bound: of their kv_len; vocab: the head's; draft_ids: of
        `DraftHead`."""
        return TextEditor(table, rows, edits, bound, vocab, draft_ids)

    def noise_key(self, table: RowTensors, rows: Tensor, ahead: int) -> NoiseKey:
        """Returns what makes the noise that the target draws with at kv_len + ahead of rows [B]."""
        return NoiseKey(table.seed[rows], table.kv_len[rows] + ahead, table.floats[rows].t().contiguous())

    def keep_first(self, following: Continuations, rows: Tensor, first: First, target_ids: Tensor | None) -> None:
        """Writes the continuations of one node for each of rows [B] into `first`; target_ids: as they were made
        with."""
        first.ids.index_copy_(0, rows, following.ids)
        first.logp.index_copy_(0, rows, following.logp)

    def expand(
        self, table: RowTensors, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int,
        target_ids: Tensor | None,
    ) -> Expansion:  # fmt: skip
        """Returns the expansion of a tree for each of rows [B], with the rows that a head of one layer per level runs
        for each node. tail: 1 where the root has a row of its own, at page-table entry kv_len, else 0; lookahead: the
        head's; target_ids: as continuations are made with."""
        return TreeExpansion(table, rows, shape, first, tail, lookahead)


class TextEditor:
    """A `LogitEditor`, in torch: of every token factor and summand, once for all levels of a tree."""

    def __init__(
        self, table: RowTensors, rows: Tensor, edits: Edits, bound: int, vocab: int, draft_ids: Tensor | None
    ) -> None:
        """See `ExpansionOps.logit_editor`."""
        self._at, self._batch = edits.at, rows.shape[0]
        rows = rows if edits.at is None else rows.index_select(0, edits.at)
        text = table.tokens[:, : bound + 1].index_select(0, rows).long()  # [Be, L]
        position = torch.arange(text.shape[1], device=rows.device)
        known = position <= table.kv_len.index_select(0, rows).unsqueeze(1)
        answer = known & (position >= edits.prompt_len.index_select(0, rows).unsqueeze(1))

        def summed(ids: Tensor, values: Tensor) -> Tensor:
            """ids, values [Be, n] -> [Be, V] float32"""
            own = ids if draft_ids is None else draft_ids[ids]
            own = torch.where((own < 0) | (own >= vocab), vocab, own)  # a column that is dropped
            sums = torch.zeros(len(ids), vocab + 1, dtype=torch.float32, device=ids.device)
            return sums.scatter_add_(1, own, values.float())[:, :vocab]

        frequency, presence, repetition = edits.penalties.index_select(0, rows).unsqueeze(2).unbind(1)  # [Be, 1]
        count = summed(text, answer)
        bias = summed(edits.bias_ids.index_select(0, rows), edits.bias_values.index_select(0, rows))
        self._factor = torch.where(summed(text, known) > 0, repetition, 1).unsqueeze(1)  # [Be, 1, V]
        self._summand = (bias - (count.clamp(max=1) * presence + count * frequency)).unsqueeze(1)
        # Of what repetitions cost: the answer's tokens, the newest one last, and before them what is equal to none.
        back = table.kv_len.index_select(0, rows).unsqueeze(1) - position.flip(0)
        self._answer = text.masked_fill(~answer, _NONE).gather(1, back.clamp(min=0)).masked_fill(back < 0, _NONE)
        self._costs, self._places, self._vocab = edits.costs.index_select(0, rows), draft_ids, vocab
        self._below = text.new_empty(self._batch, 1, 0)  # [B, K, D] tokens from below the root down to each node

    def follow(self, level: Level) -> None:
        self._below = torch.cat((of_parent(self._below, level.parent), level.ids.unsqueeze(2)), 2)

    def apply(self, logits: Tensor) -> None:
        nodes = logits.unflatten(0, (self._batch, -1))  # [B, K, V]
        x = (nodes if self._at is None else nodes.index_select(0, self._at)).float()
        x = torch.where(x > 0, x / self._factor, x * self._factor) + self._summand
        if self._below.shape[1] in (1, nodes.shape[1]):  # else one of all nodes of a level
            x = x.to(nodes.dtype).float() - self._repeats()
        if self._at is None:
            nodes.copy_(x)
        else:
            nodes.index_copy_(0, self._at, x.to(nodes.dtype))

    def _repeats(self) -> Tensor:
        """Returns what tokens cost with which the nodes would go on repeating the answer, [Be, K, V] float32."""
        below = self._below if self._at is None else self._below.index_select(0, self._at)
        count = below.shape[1]
        said = torch.cat((self._answer.unsqueeze(1).expand(-1, count, -1), below), 2)  # [Be, K, L]
        longest, size = self._costs.shape[1] - 1, said.shape[2]
        earlier = torch.nn.functional.pad(said, (longest, 0), value=_NONE)
        length = torch.zeros_like(said[..., :-1])  # of what ends at each token as the node does
        same = length == 0
        for back in range(min(longest, size)):
            own = said[..., size - 1 - back : size - back]
            same = same & (own >= 0) & (earlier[..., longest - back : longest - back + size - 1] == own)
            length += same
        costs = self._costs.unsqueeze(1).expand(-1, count, -1).gather(2, length)
        ids = said[..., 1:].clamp(min=0)
        own = ids if self._places is None else self._places[ids]
        own = torch.where((own < 0) | (own >= self._vocab), self._vocab, own)  # a column that is dropped
        zeros = costs.new_zeros(*costs.shape[:2], self._vocab + 1)
        return zeros.scatter_reduce_(2, own, costs, "amax")[..., : self._vocab]


def capacity(depth: int, topk: int) -> int:
    """Candidates that an expansion produces, the root not counted."""
    return topk + (depth - 1) * topk * topk


class TreeExpansion:
    """An `Expansion`, in torch."""

    def __init__(
        self, table: RowTensors, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int
    ) -> None:
        """See `ExpansionOps.expand`."""
        assert shape.nodes - 1 <= capacity(shape.depth, shape.topk), "more nodes than expansion has candidates"
        size, topk = rows.shape[0], shape.topk
        self._table, self._rows, self._shape, self._tail, self._lookahead = table, rows, shape, tail, lookahead
        self.root_at = table.kv_len[rows]  # [B]
        self._number = 0  # of the level that was chosen last
        first_ids, first_logp = first.ids[rows, :topk], first.logp[rows, :topk]
        self._level = Level(first_ids, torch.zeros_like(first_ids))
        self._score = first_logp  # [B, K] of the level's nodes
        self._flat = torch.arange(topk, device=rows.device).expand_as(first_ids)  # their candidate numbers
        self._ids, self._scores = [first_ids], [first_logp]  # of all candidates
        self._parents = [torch.full_like(first_ids, -1)]  # candidate numbers, -1 the root
        self._hidden = first.feature[rows].unsqueeze(1)  # [B, 1 or K, width] of the nodes above
        self._has_features = first.feature.shape[1] > 0
        # Page-table entries past kv_len that each node's path has: the root's, where it has one, then scratch entries.
        self._path = torch.zeros(size, topk, tail, dtype=torch.int64, device=rows.device)
        self._lane = torch.arange(topk, device=rows.device)

    def level(self) -> Level:
        self._number += 1
        if self._number > 1:
            topk = self._shape.topk
            self._score, best = _best_first(self._scores[-1], topk)
            ids = self._ids[-1].gather(1, best)
            self._level = Level(ids, best.div(topk, rounding_mode="floor"))
            self._flat = topk + (self._number - 2) * topk * topk + best
        return self._level

    def level_rows(self) -> LevelRows:
        level, parent, size, topk = self._number, self._level.parent, self._rows.shape[0], self._shape.topk
        own = (self._tail + (level - 1) * topk + self._lane).expand(size, topk)
        above = of_parent(self._path, parent)  # the parent's, not the lane's
        self._path = torch.cat((above, own.unsqueeze(2)), 2)  # [B, K, tail + level]
        entries = self.root_at.unsqueeze(1) + own
        return LevelRows(
            # A row that is made of the token after its position stands one earlier than that token.
            positions=(self.root_at + level - self._lookahead).unsqueeze(1).expand(size, topk),
            write_slots=self._table.slots_at(self._rows.unsqueeze(1), entries),
            path=self._path,
            path_len=torch.full_like(own, self._path.shape[2]),
            feature=self.level_feature() if self._has_features else None,
        )

    def level_feature(self) -> Tensor:
        return of_parent(self._hidden, self._level.parent).flatten(0, 1)

    def add(self, following: Continuations, hidden: Tensor) -> None:
        size, topk = self._score.shape
        self._ids.append(following.ids.view(size, topk * topk))
        self._scores.append((self._score.unsqueeze(2) + following.logp.view(size, topk, topk)).flatten(1))
        self._parents.append(self._flat.repeat_interleave(topk, 1))
        self._hidden = hidden

    def draft(self) -> Draft:
        nodes, column = self._shape.nodes, self._table.last[self._rows].unsqueeze(1)
        scores = torch.cat(self._scores, 1)
        _, chosen = _best_first(scores, nodes - 1)
        chosen = chosen.sort(1).values  # parents before children
        above = torch.cat(self._parents, 1).gather(1, chosen)  # [B, N - 1]
        logp = scores.gather(1, chosen) - torch.where(above < 0, 0.0, scores.gather(1, above.clamp(min=0)))
        place = torch.searchsorted(chosen, above) + 1
        return Draft(
            tokens=torch.cat((column, torch.cat(self._ids, 1).gather(1, chosen)), 1),
            parent=torch.cat((torch.zeros_like(column), torch.where(above < 0, 0, place)), 1),
            alive=torch.ones(column.shape[0], nodes, dtype=torch.bool, device=column.device),
            grade=torch.cat((torch.zeros_like(column), LEVELS * MODEL + level_of(logp)), 1),
        )


def of_parent(x: Tensor, parent: Tensor) -> Tensor:
    """x [B, K', ...] of the nodes above, parent [B, K] -> [B, K, ...]"""
    return x.gather(1, parent.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the best `count` of scores [B, M] and their places, best first; of equals the lower place. For small
    M."""
    ordered, places = scores.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def unlikely(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Returns how far logits [B, K, V] lie below what min-p lets the target draw, 0 where they do not; temperature,
    min_p [B], 0: no limit."""
    reach = (-temperature * min_p.log()).clamp(0, 1e30)[:, None, None]
    return (logits.amax(-1, keepdim=True) - logits - reach).clamp_(min=0)


def top_tokens(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """logits [M, V] float32, overwritten -> (ids, log probabilities) [M, topk], best first, of equals the lower id.

    `torch.topk` breaks ties as it likes, and in bfloat16 ties are common; a few masked argmax passes do not.
    """
    total = logits.logsumexp(-1, keepdim=True)
    ids, values = [], []
    for _ in range(topk):
        best = first_argmax(logits).unsqueeze(1)
        ids.append(best)
        values.append(logits.gather(1, best))
        logits.scatter_(1, best, -torch.inf)
    return torch.cat(ids, 1), torch.cat(values, 1) - total
