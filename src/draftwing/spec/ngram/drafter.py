"""Drafts copied from what was seen: the request's own prompt and output, and what other requests generated.

The end of a step looks for earlier occurrences of each row's newest tokens (`outlook`) and keeps what followed them;
the next step makes a tree of it (`propose`). Both work on device state alone, so the host may be a step behind.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import MAX_HINT, TreeShape
from draftwing.errors import ConfigError
from draftwing.ops.attention import Batch
from draftwing.sched.shapes import ExpectedGain, shape_menu
from draftwing.spec.drafter import Draft, Drafter
from draftwing.spec.ngram.memory import CANDIDATES, WAYS, NGramMemory, kernels_for
from draftwing.spec.ngram.tree import TreeBuilder

OWN: Final = 8  # matches kept from the row's own history
STEADY: Final = 3  # a match this long is what the row is copying from

# Matches are ranked by a key, the least first. Its level is 4 * (max_window - length), plus 0 for a match that goes on
# where the row was copying from, 1 for any other of its own, 2 for one of the shared memory.
_LEVEL: Final = 32
_LOW: Final = (1 << _LEVEL) - 1
_FAR: Final = (1 << _LEVEL + 8) - 1

_MAX_BATCH: Final = 4096  # rows of a step, padding included


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


class NGramDrafter(Drafter):
    """Tree drafts from token matches; a `Drafter` without weights and without KV.

    Memory: 147 MB for 10 million tokens of `capacity`, about 15 bytes a token, taken on the CPU when it is first used
    (`NGramMemory`), and 2.5 KB a row (8 * branch_length * 16 candidates).
    """

    first_hint = 0
    fixed_hint = False

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
        kept = OWN + CANDIDATES
        self.tree = TreeBuilder(kept, branch_length, max_window, min_breadth, max_breadth, device)
        # Row-indexed, written by `outlook` and read by `propose`: candidates in rank order.
        self.candidates = torch.full((rows, branch_length, kept), -1, dtype=torch.int64, device=device)
        self.match = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        # What the row is copying from lies this many tokens before its newest token's predecessor; a copy goes on at
        # the same gap. -1 = not copying.
        self.gap = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
        self._constants(device)

    def _constants(self, device: torch.device) -> None:
        window = self.max_window
        self.back = torch.arange(window - 1, -1, -1, device=device)
        self.until = torch.arange(-1, -1 - self.branch_length, -1, device=device)[:, None]
        self.missing = torch.arange(1, window + 1, dtype=torch.uint8, device=device)[:, None]
        self.steady = (4 * (window - min(STEADY, window)) + 2) << _LEVEL  # keys of long enough matches lie below
        self.shared = (2 << _LEVEL) + torch.arange(CANDIDATES, device=device)
        self.position = torch.empty(0, dtype=torch.int64, device=device)
        self.tickets = torch.zeros(_MAX_BATCH, dtype=torch.int32, device=device)  # of the kernel
        # By level: the length of the match, 0 if it is too short; and the outlook.
        match = window - torch.arange((_FAR >> _LEVEL) + 4 * (window + 1)) // 4
        match = torch.where(match >= self.min_window, match, 0)
        source = (torch.arange(match.numel()) % 4 == 0) & (match > 0)
        self.match_of = match.to(device)
        self.hint_of = (match + source * window).clamp_max(MAX_HINT).to(device)

    def policy(self, shape: TreeShape, adaptive: bool) -> ExpectedGain:
        """Always adaptive: outlooks tell steps apart."""
        return ExpectedGain(shape_menu(shape))

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
            self.memory.begin(rows, slots.salt.index_select(0, rows))
            self.match.index_fill_(0, rows, 0)
            self.candidates.index_fill_(0, rows, -1)
            self.gap.index_fill_(0, rows, -1)
            return
        self.memory.insert(slots.tokens, rows, batch.prefix_len, count, next_ids.numel() // rows.numel())

    def outlook(self, slots: NGramSlots, rows: Tensor, max_bound: int, out: Tensor | None = None) -> Tensor:
        """Finds and keeps the next candidates. max_bound: host bound of the rows' kv_len now.

        Returns [B] int64: the length m of the longest match, 1 to max_window, or max_window + m (at most `MAX_HINT`)
        if it goes on where the row has been copying from; 0 = nothing of at least min_window tokens. Written into `out`
        if that is given, of any stride. Kernels do not use the bound.
        """
        kernels = kernels_for(rows)
        if kernels is not None:
            out = torch.empty_like(rows) if out is None else out
            memory = self.memory
            kernels.outlook(
                slots.tokens, slots.kv_len, rows, memory.row, memory.log, memory.table, memory.factors, self.candidates,
                self.match, self.gap, self.tickets, memory.mask, WAYS, self.min_window, STEADY, MAX_HINT, out,
            )  # fmt: skip
            return out
        context = slots.tokens.shape[1]
        if self.position.numel() < context:  # once: the table's width is not known before
            self.position = torch.arange(1, context + 1, device=rows.device)
        length = min(max(max_bound + 1, OWN), context)
        history = slots.tokens[:, :length].index_select(0, rows)
        newest = slots.kv_len.index_select(0, rows)[:, None]  # [B, 1] index of the newest token
        suffix = history.gather(1, (newest - self.back).clamp_min_(0))  # [B, max_window]; before the start, its first

        source = self.gap.index_select(0, rows)
        own = self._search(history, newest, suffix, source)
        gap = torch.minimum(own & _LOW, newest)  # of those without a match: anything that can be read
        steady = own[:, :1] < self.steady
        self.gap.index_copy_(0, rows, torch.where(steady, gap[:, :1], source))
        # What follows a match runs into the newest token after gap + 1 tokens; it goes on by repeating itself.
        follow = newest[..., None] - self.until.remainder(gap[:, None] + 1)  # [B, branch_length, OWN]
        copied = history.gather(1, follow.flatten(1)).view_as(follow)

        missing, continued = self.memory.lookup(suffix, rows)
        key = torch.cat((own, torch.add(self.shared, missing, alpha=4 << _LEVEL)), 1)
        key, order = key.sort(dim=1)  # keys are distinct
        found = torch.cat((copied, continued), 2)
        level = key.bitwise_right_shift_(_LEVEL)
        self.match.index_copy_(0, rows, self.match_of.take(level))
        self.candidates.index_copy_(0, rows, found.gather(2, order[:, None].expand_as(found)))
        return torch.take(self.hint_of, level[:, 0], out=out)

    def _search(self, history: Tensor, newest: Tensor, suffix: Tensor, source: Tensor) -> Tensor:
        """Exact search of the rows' own history [B, length]: keys of the `OWN` best matches, best first [B, OWN].
        suffix [B, max_window]: the newest tokens; newest, source [B, 1]: index of the last of them, `gap` of the rows.

        Longest first; among equals first the one that goes on where the row was copying from (a match longer than
        max_window looks like any other of that length, and this one is), then the most recent. A key has the level in
        the bits from `_LEVEL` on and the gap below.
        """
        length = history.shape[1]
        # windows[:, i, e] is the token max_window - 1 - i before position e; -2 before the start matches nothing.
        windows = pad(history, (self.max_window - 1, 0), value=-2).unfold(1, length, 1)  # [B, max_window, length]
        differs = torch.empty(windows.shape, dtype=torch.bool, device=history.device)
        torch.ne(windows, suffix[..., None], out=differs)  # `out` keeps rows contiguous
        missing = differs.view(torch.uint8).mul_(self.missing).amax(1)
        gap = newest - self.position[:length]  # below 0 from the newest token on: the highest levels
        key = (gap & _FAR).add_(missing, alpha=4 << _LEVEL)
        key.add_(gap != source, alpha=1 << _LEVEL)
        return key.topk(OWN, dim=1, largest=False).values  # keys are distinct

    def propose(
        self, slots: NGramSlots, rows: Tensor, shape: TreeShape, max_bound: int, noisy: Tensor | None = None
    ) -> Draft:
        """A tree of the candidates that the last `outlook` kept; dead nodes where they are fewer than shape.nodes."""
        depth = min(shape.depth, self.branch_length)
        kernels = kernels_for(rows)
        if kernels is not None and shape.nodes > 1 and depth > 0:
            kept = self.candidates, self.match, slots.last, rows
            return Draft(*kernels.build(*kept, self.tree.weight, depth, shape.nodes))
        last = slots.last.index_select(0, rows)
        if shape.nodes == 1 or depth == 0:
            root = torch.zeros(rows.numel(), shape.nodes, dtype=torch.int64, device=rows.device)
            alive = (torch.arange(shape.nodes, device=rows.device) == 0).expand_as(root)
            return Draft(last[:, None].expand_as(root), root, alive)
        candidates = self.candidates[:, :depth].index_select(0, rows)
        return self.tree.build(candidates, self.match.index_select(0, rows), last, shape)
