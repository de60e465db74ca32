"""The drafter for heads that write a whole block in one forward (`models.heads.block`).

The head's keys and values of a token are made of the target's hidden states at that token, so they are complete as soon
as the target has run over it. A block is the newest token and masks: its rows write to page-table entries past kv_len,
scratch that nobody reads later. It costs one forward whatever the depth of the tree. The tree is then expanded level by
level as any other (`ops.expand`); what a level costs is the correction of its nodes' logits by the tokens above them,
where the head has one, and their top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.models.heads.block import BlockHead
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import Batch
from draftwing.ops.table import TorchOps
from draftwing.ops.types import BlockInputs, Continuations, Draft, LogitEditor, RowTensors
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import HeadDrafter, without


class BlockDrafter(HeadDrafter):
    """A `Drafter` around a `BlockHead`."""

    head: BlockHead

    def __init__(self, head: BlockHead, rows: int, topk: int, ops: TorchOps) -> None:
        """rows: those of the row table, its dummy included; topk: the largest of any shape that will be asked for."""
        # A root's feature is its state. Every `propose` writes `_first`.
        super().__init__(head, rows, topk, head.state_width, head.state_dtype, ops)
        # Kept, for what is recorded makes no such tensors again: states of roots' parents, rows of own tables, and how
        # far rows of a block see of it where they do without those after them.
        self._zeros = torch.zeros_like(self._first.feature)
        self._numbers = torch.arange(rows, device=ops.device)
        width = head.config_of_block.rows
        self._before = torch.arange(1, width + 1, device=ops.device).repeat(rows, 1)

    def span(self, shape: TreeShape) -> int:
        """Returns the most of: verified nodes, committed tokens, rows of a block."""
        return max(shape.nodes, shape.max_commit, self.head.config_of_block.rows if shape.depth else 0)

    # -- drafts -----------------------------------------------------------------------------------------------------

    def propose(self, step: DraftStep) -> Draft:
        table, rows, shape, max_kv_len, noisy, _ = step
        size, topk, depth, head, ops = rows.shape[0], shape.topk, shape.depth, self.head, self.ops
        config = head.config_of_block
        block = ops.block_inputs(table, rows, config.rows, config.mask)
        hidden = self._run(table, rows, block, max_kv_len)
        hidden = ops.of_levels(hidden, size, config.rows - config.steps, depth)  # [D * B, H]
        base = head.logits(hidden)  # [D * B, V]
        gates = hidden if head.selector is None else head.selector(hidden)  # [D * B, R]
        editor = self._editor(step)
        newest = ops.of_levels(block.ids.unsqueeze(1), size, 0, 1).flatten()
        found: list[Continuations] | list[None] = [None] * depth
        # Where logits depend on no token above, all candidates are found at once. What finds them may overwrite them.
        if head.selector is not None and head.markov is None and editor is None and self._constrained is None:
            found = ops.level_candidates(base, table, rows, 1, self._count, head.target_ids, noisy)
        self._keep_root(table, rows, base[:size], hidden[:size], gates[:size], newest, noisy, editor, found[0])
        expansion = ops.expand(table, rows, shape, self._first, 0, 0, head.target_ids)
        nothing = self._first.feature[:1].expand(size, topk, -1)  # what nodes hand down; mostly nothing
        for level in range(1, depth):
            above = self._next_level(expansion, editor).ids.flatten()  # [B * K]
            lanes = topk if head.markov is not None else 1  # else all nodes of a level have the same logits
            here = slice(level * size, (level + 1) * size)
            logits, states = base[here], hidden[here]
            if lanes > 1:
                logits = ops.repeat_rows(logits, lanes)
            if head.markov is not None and head.markov.reads_rows:
                states = ops.repeat_rows(states, lanes)
            handed = expansion.level_feature() if head.state_width else None
            logits, handed = head.given(logits, states, above, handed)
            if editor is not None:
                editor.apply(logits)
            following = self._best(table, rows, logits, gates[here], above, level + 1, topk, noisy, found[level])
            if lanes < topk and head.selector is None:
                following = Continuations(*(ops.repeat_rows(x, topk) for x in following))
            expansion.add(following, nothing if handed is None else handed.view(size, topk, -1))
        draft = expansion.draft()
        sure = head.confidence
        if sure is None or sure.weight is None:
            return draft
        return ops.confident(draft, hidden, sure.weight, sure.token_odds)

    def _run(self, table: RowTensors, rows: Tensor, block: BlockInputs, max_kv_len: int) -> Tensor:
        """-> [B * Q, H]"""
        width = self.head.config_of_block.rows
        everything = Batch(
            rows=rows,
            table=table.page_table,
            **block._asdict(),
            window=width,
            bound=min(max_kv_len + width, table.page_table.shape[1]),
        )
        return self.head.block(everything.ids, everything.positions, *self._attends(everything))

    def _attends(self, everything: Batch) -> list[Attend]:
        """Returns each layer's attention, as far as it sees. everything: the batch of a layer that sees all."""
        config, bound = self.head.config_of_block, {}
        kinds = list(zip(config.windows, config.causal, strict=True))
        for window, causal in dict.fromkeys(kinds):
            batch = everything if not window else self._windowed(everything, window)
            if causal:
                assert batch.path_len is not None
                batch = batch._replace(path_len=self._before[: len(batch.path_len)])
            bound[window, causal] = self._bind(batch)
        return [bound[kind] for kind in kinds]

    def _windowed(self, batch: Batch, window: int) -> Batch:
        """Returns the batch of blocks, which sees no more than the `window` - 1 positions before each block: with page
        tables of their own, that begin there."""
        if window >= batch.table.shape[1]:
            return batch
        width = self.head.config_of_block.rows
        prefix_len, table = self.ops.windowed(batch.table, batch.rows, batch.prefix_len, window, width)
        return batch._replace(rows=self._numbers[: len(batch.rows)], table=table, prefix_len=prefix_len, bound=0)

    def _keep_root(
        self, table: RowTensors, rows: Tensor, base: Tensor, hidden: Tensor, gates: Tensor, newest: Tensor,
        noisy: Tensor, editor: LogitEditor | None, found: Continuations | None,
    ) -> None:  # fmt: skip
        """base [B, V], hidden [B, H], gates [B, R]: of the rows that predict the first token, newest [B]: the token
        above it, found: the first tokens' candidates, where these are known -> what may follow the roots."""
        head, ops, topk = self.head, self.ops, self.topk
        constrained, self._constrained = self._constrained, None
        state = self._zeros[: len(rows)] if head.state_width else None
        logits, state = head.given(base, hidden, newest, state, newest=True)
        if editor is not None:
            editor.apply(logits)
        if state is not None:
            ops.put_rows(self._first.feature, rows, state)
        parts = [(rows, logits, gates, newest, noisy)]
        if constrained is not None:
            some, banned, noisy_some = constrained
            place = torch.zeros_like(table.kv_len).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
            # A copy, for what makes continuations may overwrite the logits.
            at = place.index_select(0, some)
            own = without(logits.index_select(0, at), banned, head.target_ids)
            parts.append((some, own, gates.index_select(0, at), newest.index_select(0, at), noisy_some))
        for which, scores, own_gates, above, sampled in parts:
            following = self._best(table, which, scores, own_gates, above, 1, topk, sampled, found)
            ops.keep_first(following, which, self._first, head.target_ids)

    def _best(
        self, table: RowTensors, rows: Tensor, logits: Tensor, gates: Tensor, above: Tensor, ahead: int, topk: int,
        noisy: Tensor, found: Continuations | None,
    ) -> Continuations:  # fmt: skip
        """Returns the best `topk` tokens at kv_len + ahead: of the nodes of logits [M, V], or with a selector, whose
        gates [B, R] are of the rows [B] of logits [B, V], those after each of the tokens above [M]; found: the
        candidates of these, None: not known yet."""
        head, ops, selector = self.head, self.ops, self.head.selector
        if selector is None:
            return ops.continuations(logits, table, rows, ahead, topk, head.target_ids, noisy)
        if found is None:
            (found,) = ops.level_candidates(logits, table, rows, ahead, self._count, head.target_ids, noisy)
        return ops.pair_continuations(found, above, gates, selector.before, selector.after, topk, head.target_ids)

    @property
    def _count(self) -> int:
        """Returns how many candidates the selector chooses among."""
        assert self.head.selector is not None
        return min(self.head.selector.count, self.head.vocab)

    def constrain(self, table: RowTensors, rows: Tensor, banned: Tensor, noisy: Tensor) -> None:
        self._constrained = rows, banned, noisy

    # -- committed text ---------------------------------------------------------------------------------------------

    def extend(self, seen: SeenTokens) -> None:
        if seen.count is None:
            seen = self.evened(self.ops, seen)
        assert seen.aux_hidden is not None
        self.head.write_text(self.head.features(seen.aux_hidden), seen.batch.positions, self._bind(seen.batch))
