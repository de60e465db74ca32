"""Drafts copied from what was seen: the request's own prompt and output, and what other requests generated.

The end of a step looks for earlier occurrences of each row's newest tokens (`outlook`) and keeps what followed them;
the next step makes a tree of it (`propose`). Both work on device state alone, so the host may be a step behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from draftwing.attn.base import AttnBackend, Batch
from draftwing.core import MAX_HINT, TreeShape
from draftwing.errors import ConfigError
from draftwing.kv.pool import LayerSpec
from draftwing.spec.drafter import Draft
from draftwing.spec.ngram_memory import CANDIDATES, NGramMemory
from draftwing.spec.ngram_tree import TreeBuilder

OWN: Final = 8  # matches kept from the row's own history
STEADY: Final = 3  # a match this long is what the row is copying from


class NGramSlots(Protocol):
    """What the drafter reads of the slot table; the last row is a dummy."""

    @property
    def tokens(self) -> Tensor: ...  # [R + 1, L] int64, valid at 0 .. kv_len
    @property
    def kv_len(self) -> Tensor: ...  # [R + 1] int64, index of the newest token
    @property
    def last(self) -> Tensor: ...  # [R + 1] int64, tokens[r, kv_len[r]]
    @property
    def salt(self) -> Tensor: ...  # [R + 1] int64, 0 = none


class NGramDrafter:
    """Tree drafts from token matches; a `Drafter` without weights and without KV."""

    taps: tuple[int, ...] = ()
    lookahead = 0
    kv_layers: Sequence[LayerSpec] = ()
    tail = 0
    first_hint = 0

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
    ) -> None:
        """rows: R + 1, the rows of the slot table with its dummy. A match has min_window to max_window tokens (longer
        ones count as max_window); a node has min_breadth to max_breadth children at most (`TreeBuilder`);
        branch_length: tokens of a continuation; capacity: tokens of the shared memory's log."""
        if not 1 <= min_window <= max_window <= MAX_HINT:
            found = f"{min_window} and {max_window}"
            raise ConfigError(f"n-gram match windows: expected 1 <= min <= max <= {MAX_HINT}, found {found}")
        if not 1 <= min_breadth <= max_breadth:
            raise ConfigError(f"n-gram breadths: expected 1 <= min <= max, found {min_breadth} and {max_breadth}")
        if branch_length < 1 or capacity < 1:
            raise ConfigError(f"n-gram branch length and capacity: expected >= 1, found {branch_length}, {capacity}")
        self.min_window, self.max_window = min_window, max_window
        self.branch_length = branch_length
        self.memory = NGramMemory(min_window, max_window, branch_length, capacity, rows, device)
        kept = OWN + min(CANDIDATES, self.memory.earlier.shape[0])
        self.tree = TreeBuilder(kept, branch_length, max_window, min_breadth, max_breadth, device)
        # Row-indexed, written by `outlook` and read by `propose`: candidates in rank order.
        self.candidates = torch.full((rows, branch_length, kept), -1, dtype=torch.int64, device=device)
        self.match = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        # How far back the row's source lies; a copy goes on at the same distance. 0 = not copying.
        self.distance = torch.zeros(rows, dtype=torch.int64, device=device)
        self.back_steps = torch.arange(max_window, device=device)
        self.ahead = torch.arange(branch_length, device=device)
        self.tie = torch.arange(kept - 1, -1, -1, device=device) + (torch.arange(kept, device=device) < OWN) * kept

    def attach(self, attn: AttnBackend, first_layer: int, positions: int) -> None:
        """Nothing to reach: no layers."""

    def span(self, shape: TreeShape) -> int:
        return shape.nodes

    def flush(self) -> None:
        """Forgets the shared memory; candidates found in it before are dropped too."""
        self.memory.flush()
        self.match.zero_()
        self.candidates.fill_(-1)

    def observe(
        self,
        slots: NGramSlots,
        batch: Batch,
        taps: Tensor | None,
        next_ids: Tensor,
        count: Tensor | None,
        noisy: Tensor | None = None,
    ) -> None:
        """Called after the table has advanced. Decoding: the count[b] newest tokens of each row enter the memory.
        Prefill: the row begins anew; prompts stay out of the memory."""
        rows = batch.rows
        if count is None:
            self.memory.close(rows)
            self.match.index_fill_(0, rows, 0)
            self.candidates.index_fill_(0, rows, -1)
            self.distance.index_fill_(0, rows, 0)
            return
        limit = next_ids.numel() // rows.numel()
        salt = slots.salt.index_select(0, rows)
        self.memory.insert(slots.tokens, salt, rows, batch.prefix_len, count, limit)

    def outlook(self, slots: NGramSlots, rows: Tensor, max_bound: int) -> Tensor:
        """Finds and keeps the next candidates. max_bound: host bound of the rows' kv_len now.

        Returns [B] int64: the longest match, at most max_window; 0 = nothing of at least min_window tokens.
        """
        newest = slots.kv_len.index_select(0, rows)  # [B] index of the newest token
        context = slots.tokens.shape[1]
        at = newest[:, None] - self.back_steps
        start = (rows * context)[:, None]
        suffix = slots.tokens.take(start + at.clamp_min(0)).masked_fill_(at < 0, -1)  # newest first
        own, where = self._search(slots.tokens, rows, newest, suffix, min(max_bound + 1, context))
        # What follows a match runs into the newest token after `period` tokens; it goes on by repeating itself.
        period = (newest[:, None] - where).clamp_min(1)
        follow = where[..., None] + 1 + self.ahead.remainder(period[..., None])
        copied = slots.tokens.take(start[..., None] + follow.clamp_max(context - 1))
        copied = torch.where((own > 0)[..., None], copied, -1)

        shared, continued = self.memory.lookup(suffix, slots.salt.index_select(0, rows), rows)
        match = torch.cat((own, shared), 1)
        # Longer first, then own before shared, then the order within each.
        order = (match * (2 * match.shape[1]) + self.tie).topk(match.shape[1], dim=1).indices  # keys are distinct
        match = match.gather(1, order)
        found = torch.cat((copied, continued), 1).flatten(0, 1)
        picked = order + torch.arange(0, found.shape[0], order.shape[1], device=rows.device)[:, None]
        found = found.index_select(0, picked.flatten()).view(*order.shape, self.branch_length)
        self.match.index_copy_(0, rows, match)
        self.candidates.index_copy_(0, rows, found.transpose(1, 2))
        return match[:, 0]

    def _search(
        self, tokens: Tensor, rows: Tensor, newest: Tensor, suffix: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Exact search of the rows' own history: match [B, OWN] and the index of each match's last token [B, OWN].

        Longest first; among equals first the one that goes on where the row was copying from (a match longer than
        max_window looks like any other of that length, and this one is), then the most recent.
        """
        history = tokens[:, :length].index_select(0, rows).int()  # [B, length]
        # windows[i, :, e] is the token max_window - 1 - i before position e; -2 before the start matches nothing.
        windows = torch.nn.functional.pad(history, (self.max_window - 1, 0), value=-2).unfold(
            1, length, 1
        )  # [B, max_window, length]
        equal = torch.empty(self.max_window, rows.numel(), length, dtype=torch.bool, device=tokens.device)
        torch.eq(windows.transpose(0, 1), suffix.int().flip(1).t()[..., None], out=equal)  # `out` keeps rows contiguous
        steps = equal.view(torch.uint8).unbind(0)
        run, match = steps[-1], steps[-1].clone()
        for step in steps[-2::-1]:
            run.bitwise_and_(step)
            match.add_(run)
        position = torch.arange(length, device=tokens.device, dtype=torch.int32)
        match.mul_(position < newest[:, None]).mul_(match >= self.min_window)
        key = match.int().mul_(2)
        distance = self.distance.index_select(0, rows)
        source = (newest - distance).clamp(0, length - 1)[:, None]
        key.scatter_add_(1, source, torch.ones_like(source, dtype=torch.int32))
        key.mul_(length).add_(position)
        best = key.topk(min(OWN, length), dim=1).values.long()  # keys are distinct
        if length < OWN:
            best = torch.cat((best, best.new_zeros(best.shape[0], OWN - length)), 1)
        where, found = best.remainder(length), best.div(2 * length, rounding_mode="floor")
        steady = found[:, 0] >= min(STEADY, self.max_window)
        self.distance.index_copy_(0, rows, torch.where(steady, newest - where[:, 0], distance))
        return found, where

    def propose(
        self, slots: NGramSlots, rows: Tensor, shape: TreeShape, max_bound: int, noisy: Tensor | None = None
    ) -> Draft:
        """A tree of the candidates that the last `outlook` kept; dead nodes where they are fewer than shape.nodes."""
        last = slots.last.index_select(0, rows)
        depth = min(shape.depth, self.branch_length)
        if shape.nodes == 1 or depth == 0:
            root = torch.zeros(rows.numel(), shape.nodes, dtype=torch.int64, device=rows.device)
            alive = (torch.arange(shape.nodes, device=rows.device) == 0).expand_as(root)
            return Draft(last[:, None].expand_as(root), root, alive)
        match = self.match.index_select(0, rows)
        candidates = self.candidates[:, :depth].index_select(0, rows)
        return self.tree.build(candidates, match, last, shape)
