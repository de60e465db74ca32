"""Edits logits as requests ask, before sampling: penalties, biases, bans, and the end of reasoning whose budget is
spent. Exact at every node of a draft tree.

A node is edited as the plain sequence that ends with it would be: it sees the committed tokens, its ancestors' drafts
and itself. Nothing is counted ahead: counts are made of the token history in every step, so a preempted request, a
cached prefix or a rejected draft leaves nothing to correct.

The order is that of Hugging Face and vLLM: repetition penalty (prompt and answer), then frequency and presence
penalties and that of repetitions (answer only) and biases as one sum, then bans.

The penalty of repetitions is DRY ("don't repeat yourself"): where the last n tokens of an answer have been in it
before, what followed them there loses dry_multiplier * dry_base ** (n - dry_allowed_length), for the longest n, from
dry_allowed_length to `MAX_REPEAT`.

A row that is edited by its masks alone needs an `EditTable.write` too: it resets what an earlier request left in the
row. Stop ids below min_new_tokens are the sampler's.

Reasoning is ended by the model's own end marker (`BudgetTable`). Tokens are counted from after the marker that begins a
block, or from the answer's beginning, to the marker that ends it, which counts, too. Where the count has reached the
budget, the next token is the one by which the end marker goes on, whatever was drawn. What the path has of the marker
already is not said again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwing.core import IntArray
from draftwing.ops.types import Edits
from draftwing.requests.request import MAX_MARKER, ThinkingBudget
from draftwing.requests.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_REPEAT,
    SamplingParams,
)

_BEFORE: Final = -2  # the token before the beginning of an answer: equal to none, and to no padding


class Features(NamedTuple):
    """What the rows of a sub-batch use, so what has to be computed. The host knows it."""

    counts: bool = False  # frequency or presence penalty
    seen: bool = False  # repetition penalty
    repeats: bool = False  # penalty of repetitions
    biases: int = 0  # the most of a row
    allowed: bool = False
    bad_words: int = 0  # the most of a row
    bad_tokens: int = 0  # of the longest bad word
    masks: bool = False  # of grammars and the like: a mask for each node


class Nodes(NamedTuple):
    """The nodes of a sub-batch, and the text before them; int64.

    In a tree step `newest` is kv_len before the step. For a prefill's last query, N = 1 and D = 0 with zeros for drafts
    and path and ones for path_len, it is kv_len after the step minus 1.
    """

    rows: Tensor  # [b] of the table
    history: Tensor  # [R + 1, L] the tokens of all rows
    newest: Tensor  # [b] the position of the root, up to which they count
    bound: int  # of `newest`, known to the host
    drafts: Tensor  # [b, N] token 0 the root's
    path: Tensor  # [b, N, D + 1] as in `ops.types.Tree`
    path_len: Tensor  # [b, N]


class _Rows(NamedTuple):
    """What edits at chosen ids are computed from, of the rows of a sub-batch. None where no row uses it."""

    penalties: Tensor  # [b, 3] float32: frequency, presence, repetition
    counts: Tensor | None  # [b, V] float32: how often the committed answer has the token
    seen: Tensor | None  # [b, V] float32: 1 where committed tokens have it, else 0
    bias: Tensor | None  # [b, V] float32
    repeats: Tensor | None  # [b, N, V] float32: what repetitions cost a token
    bits: Tensor | None  # [b, 1 or N, W] int32: the tokens that may come
    below: Tensor | None  # [b, N, D] int64: drafts from the root's child to the node itself, -1 past it
    bad_last: Tensor | None  # [b, S] int64: what a bad word ends with, -1 for none
    bad_active: Tensor | None  # [b, N, S] bool: the path ends with the rest of the bad word


class EditTable:
    """Row-indexed device state of the requests' edits, [R + 1] rows as in `RowTable`."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, upload: Callable[[IntArray], Tensor] = torch.from_numpy
    ) -> None:
        """rows: R + 1, the rows of the row table with its dummy; vocab: V, the width of the logits; upload: how [n]
        int64 get from the host to the device, `Device.upload` where the host must not wait for the copy."""
        self.vocab, self.device, self._upload = vocab, device, upload

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.penalties = full(3, dtype=torch.float32)  # frequency, presence, repetition
        self.costs = full(MAX_REPEAT + 1, dtype=torch.float32)  # of repetitions of so many tokens
        self.penalties[:, 2] = 1
        self.prompt_len = full()
        self.bias_ids = full(MAX_BIASES)  # padded with (0, 0.0), which adds nothing
        self.bias_values = full(MAX_BIASES, dtype=torch.float32)
        # bad_before[r, s, j]: the token j + 1 before the word's last; -1 = any, past the word's beginning.
        self.bad_before = full(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1, value=-1)
        self.bad_last = full(MAX_BAD_WORDS, value=-1)
        self.allowed: Tensor | None = None  # [R + 1, W] int32 bits, made when it is first asked for
        self._features = [Features()] * rows
        # Of every byte of a mask its 8 tokens' bans, a byte each: one look-up unpacks 8 tokens.
        banned = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._unpacked = torch.from_numpy(banned.view(np.int64).ravel()).to(device)

    @torch.inference_mode()
    def write(self, row: int, params: SamplingParams, prompt_len: int, bad_word_ids: Sequence[Sequence[int]]) -> None:
        """Sets all columns of the row, for a request with edits.

        prompt_len: of the request, not counting output carried over a preemption. bad_word_ids: token sequences of
        its bad words, none empty. Sizes and ids were checked at admission.
        """
        biases, words = params.logit_bias, bad_word_ids
        assert len(biases) <= MAX_BIASES and len(words) <= MAX_BAD_WORDS
        assert all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words)
        penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        ids, floats = np.zeros(MAX_BIASES, np.int64), np.zeros(4 + MAX_BIASES + MAX_REPEAT, np.float32)
        floats[:3] = penalties
        ids[: len(biases)] = [id_ for id_, _ in biases]
        floats[4 : 4 + len(biases)] = [value for _, value in biases]
        further = np.arange(MAX_REPEAT - params.dry_allowed_length + 1)
        floats[3 + MAX_BIASES + params.dry_allowed_length :][: len(further)] = (
            params.dry_multiplier * params.dry_base**further
        )
        before = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1), -1, np.int64)
        last = np.full(MAX_BAD_WORDS, -1, np.int64)
        for s, word in enumerate(words):
            before[s, : len(word) - 1] = word[-2::-1]
            last[s] = word[-1]
        self.prompt_len[row].fill_(prompt_len)
        parts = (floats.view(np.int64), ids, before.ravel(), last)  # one copy for all: each costs a launch
        packed = self._upload(np.concatenate(parts)).split([len(part) for part in parts])
        sent = packed[0].view(torch.float32)
        self.penalties[row].copy_(sent[:3])
        self.bias_values[row].copy_(sent[4 : 4 + MAX_BIASES])
        self.costs[row, 1:].copy_(sent[4 + MAX_BIASES :])
        self.bias_ids[row].copy_(packed[1])
        self.bad_before[row].copy_(packed[2].view(before.shape))
        self.bad_last[row].copy_(packed[3])
        self._write_allowed(row, params.allowed_token_ids)
        self._features[row] = Features(
            counts=bool(params.frequency_penalty or params.presence_penalty),
            seen=params.repetition_penalty != 1.0,
            repeats=params.dry_multiplier > 0,
            biases=len(biases),
            allowed=bool(params.allowed_token_ids),
            bad_words=len(words),
            bad_tokens=max(map(len, words), default=0),
        )

    def _write_allowed(self, row: int, ids: Sequence[int]) -> None:
        words = -(-self.vocab // 32)
        if self.allowed is None:
            if not ids:
                return
            self.allowed = self.prompt_len.new_full((len(self.prompt_len), words), -1, dtype=torch.int32)
        may = np.zeros((words + words % 2) * 32, bool)  # whole int64 words
        may[list(ids) or slice(None)] = True
        packed = np.packbits(may, bitorder="little").view(np.int64)
        self.allowed[row].copy_(self._upload(packed).view(torch.int32)[:words])

    def of_rows(self, at: Tensor | None = None) -> Edits:
        """Returns what samplers and drafters apply themselves. at: batch indices of the rows that may have some."""
        return Edits(self.prompt_len, self.penalties, self.bias_ids, self.bias_values, self.costs, at)

    def is_edited(self, row: int) -> bool:
        """Returns whether the row has edits other than masks."""
        return self._features[row] != Features()

    def features(self, rows: Iterable[int], guided: bool = False) -> Features:
        """Returns what rows of the table use, together; guided: `apply` will be given masks."""
        every = [Features(masks=guided), *(self._features[row] for row in rows)]
        return Features(*map(max, zip(*every, strict=True)))

    def apply(self, logits: Tensor, features: Features, nodes: Nodes, masks: Tensor | None = None) -> Edited:
        """Edits the logits of every node. What a dead node gets is not defined.

        logits [b, N, V] float32, not changed; masks [b, N, W] int32 with features.masks: bit i of word w is set where
        token 32 * w + i may come, W = ceil(V / 32); all ones for rows of the sub-batch without a mask.
        """
        assert (masks is not None) == features.masks
        here, drafts, path = self._gather(features, nodes, masks), nodes.drafts, nodes.path
        x = _edited(logits, here, here.counts, here.seen, here.bias, here.repeats)
        if x is logits:
            x = logits.clone()
        if features.counts or features.seen:  # what is on the path below the root counts for that node alone
            tokens = drafts.gather(1, path.flatten(1)).view_as(path)  # [b, N, D + 1]
            if path.shape[-1] > 1:
                own = _edited_at(logits.gather(-1, tokens), tokens, here._replace(bits=None, bad_active=None))
                x.scatter_(-1, tokens, own)  # a token's duplicates are edited alike
        if here.bits is not None:
            x.masked_fill_(self.banned(here.bits), -torch.inf)
        if here.bad_active is not None and here.bad_last is not None:
            limit = torch.where(here.bad_active, -torch.inf, torch.inf)  # [b, N, S]; a minimum serves any order
            x.scatter_reduce_(-1, here.bad_last.clamp(min=0)[:, None].expand_as(limit), limit, "amin")
        return Edited(x, here)

    def _gather(self, features: Features, nodes: Nodes, masks: Tensor | None) -> _Rows:
        count, seen, bias, below, repeats, bad_last, active = None, None, None, None, None, None, None
        rows, drafts, path = nodes.rows, nodes.drafts, nodes.path
        prompt_len = self.prompt_len.index_select(0, rows)[:, None]
        if features.counts or features.seen:
            known = nodes.history[:, : nodes.bound + 1].index_select(0, rows).long()  # [b, L]
            position = torch.arange(known.shape[1], device=rows.device)
            past = position <= nodes.newest[:, None]
            zeros = torch.zeros(rows.shape[0], self.vocab, dtype=torch.float32, device=rows.device)
            if features.counts:
                count = zeros.scatter_add(1, known, ((position >= prompt_len) & past).float())
            if features.seen:
                seen = zeros.scatter_add(1, known, past.float()).clamp_(max=1)
            level = torch.arange(1, path.shape[-1], device=rows.device)
            below = drafts.gather(1, path[..., 1:].flatten(1)).view(*drafts.shape, -1)  # [b, N, D]
            below = below.masked_fill(level >= nodes.path_len[..., None], -1)
        if features.biases:
            ids, values = (x[:, : features.biases].index_select(0, rows) for x in (self.bias_ids, self.bias_values))
            bias = torch.zeros(rows.shape[0], self.vocab, dtype=torch.float32, device=rows.device)
            bias.scatter_add_(1, ids, values)
        if features.repeats:
            repeats = _repeats(nodes, prompt_len, self.costs.index_select(0, rows), self.vocab)
        if features.bad_words:
            bad_last = self.bad_last[:, : features.bad_words].index_select(0, rows)  # [b, S]
            active = (bad_last >= 0)[:, None].expand(-1, drafts.shape[1], -1)  # [b, N, S]
            if features.bad_tokens > 1:
                recent = _recent(features.bad_tokens - 1, nodes, prompt_len)  # [b, N, J]
                before = self.bad_before[:, : features.bad_words, : features.bad_tokens - 1].index_select(0, rows)
                before = before[:, None]  # [b, 1, S, J]
                active = active & ((before == recent[:, :, None]) | (before < 0)).all(-1)
        bits = masks
        if features.allowed and self.allowed is not None:
            allowed = self.allowed.index_select(0, rows)[:, None]  # [b, 1, W]
            bits = allowed if masks is None else masks & allowed
        return _Rows(self.penalties.index_select(0, rows), count, seen, bias, repeats, bits, below, bad_last, active)

    def banned(self, bits: Tensor) -> Tensor:
        """Returns what may not come, [b, n, V] bool; bits [b, n, W] int32."""
        octets = bits.contiguous().view(torch.uint8)  # [b, n, 4 * W], little-endian as every device is
        banned = self._unpacked.index_select(0, octets.flatten().to(torch.int32)).view(torch.bool)
        return banned.view(*bits.shape[:2], -1)[..., : self.vocab]


class Edited:
    """The edited logits of a sub-batch, and the same edits for single ids."""

    def __init__(self, logits: Tensor, rows: _Rows) -> None:
        self.logits = logits  # [b, N, V] float32, -inf where banned
        self._rows = rows

    def at(self, values: Tensor, ids: Tensor, only: Tensor | None = None) -> Tensor:
        """Edits the logits of chosen ids, bit for bit as `logits` where values are equal.

        values [b', N, K] float32, logits of ids [b', N, K] int64; only [b'] int64: which rows of the sub-batch these
        are, None for all. Returns [b', N, K] float32.
        """
        rows = self._rows
        if only is not None:
            fields = (None if field is None else field.index_select(0, only) for field in rows[1:])
            rows = _Rows(rows.penalties.index_select(0, only), *fields)
        return _edited_at(values, ids, rows)


def _edited(
    x: Tensor, rows: _Rows, count: Tensor | None, seen: Tensor | None, bias: Tensor | None, repeats: Tensor | None
) -> Tensor:
    """Applies penalties and biases. x [b, N, K] float32; the others [b, N, K], or [b, K] for all nodes alike."""
    penalties = rows.penalties[:, None, :, None]  # [b, 1, 3, 1]

    def wide(y: Tensor) -> Tensor:
        return y if y.dim() == 3 else y[:, None]

    if seen is not None:
        # Exact arithmetic on zeros and ones instead of `where`, whose CPU kernel takes several times as long.
        seen = wide(seen)
        factor = (1 - seen).add_(seen * penalties[:, :, 2])  # the penalty, or 1
        x = x.clamp(min=0).div_(factor).add_(x.clamp(max=0).mul_(factor))
    delta = None if bias is None else wide(bias)
    if count is not None:
        count = wide(count)
        # Products and sums one by one: a fused kernel's rounding may depend on the tensor's shape.
        penalty = count.clamp(max=1).mul_(penalties[:, :, 1]).add_(count * penalties[:, :, 0])
        delta = penalty.neg_() if delta is None else penalty.neg_().add_(delta)
    if repeats is not None:
        delta = -repeats if delta is None else delta - repeats
    return x if delta is None else x + delta


def _edited_at(values: Tensor, ids: Tensor, rows: _Rows) -> Tensor:
    """Applies all edits to the nodes' own ids: values, ids [b, N, K] -> [b, N, K]."""
    flat = ids.flatten(1)

    def pick(dense: Tensor | None) -> Tensor | None:
        return None if dense is None else dense.gather(1, flat).view_as(ids)

    count, seen = pick(rows.counts), pick(rows.seen)
    if rows.below is not None:
        on_path = (ids[..., None] == rows.below[:, :, None]).sum(-1)  # [b, N, K]
        count = None if count is None else count + on_path
        seen = None if seen is None else (seen + on_path).clamp_(max=1)
    repeats = None if rows.repeats is None else rows.repeats.gather(-1, ids)
    x = _edited(values, rows, count, seen, pick(rows.bias), repeats)
    if rows.bits is not None:
        words = rows.bits.expand(-1, ids.shape[1], -1).gather(-1, ids >> 5)
        x = x.masked_fill((words >> (ids & 31)) & 1 == 0, -torch.inf)
    if rows.bad_active is not None and rows.bad_last is not None:
        hit = (ids[..., None] == rows.bad_last[:, None, None]) & rows.bad_active[:, :, None]
        x = x.masked_fill(hit.any(-1), -torch.inf)
    return x


def _recent(length: int, nodes: Nodes, prompt_len: Tensor) -> Tensor:
    """Returns the newest `length` answer tokens of every node's path, its own first, [b, N, length]; `_BEFORE` before
    the answer's beginning. prompt_len [b, 1]."""
    rows, history, newest, _, drafts, path, path_len = nodes
    back = torch.arange(length, device=rows.device)
    level = (path_len - 1)[..., None] - back  # [b, N, J]: below the root where positive
    position = level + newest[:, None, None]
    committed = history[rows[:, None, None], torch.minimum(position, newest[:, None, None]).clamp_(min=0)]
    at = path.gather(-1, level.clamp(0, path.shape[-1] - 1))
    drafted = drafts.gather(1, at.flatten(1)).view_as(at)
    return torch.where(level > 0, drafted, committed).masked_fill_(position < prompt_len[..., None], _BEFORE)


def _repeats(nodes: Nodes, prompt_len: Tensor, costs: Tensor, vocab: int) -> Tensor:
    """Returns what each token costs at every node since the answer would go on repeating itself, [b, N, vocab] float32.
    prompt_len [b, 1]; costs [b, MAX_REPEAT + 1]."""
    longest = nodes.bound + nodes.path.shape[-1]
    recent = _recent(longest, nodes, prompt_len)  # [b, N, L]
    known = torch.nn.functional.pad(recent, (0, MAX_REPEAT), value=_BEFORE)
    same = recent[..., 1:] >= 0  # whether what ends so many tokens before is that of the node, up to here
    length = torch.zeros_like(same, dtype=torch.int64)  # [b, N, L - 1]
    for back in range(min(MAX_REPEAT, longest)):
        same = same & (known[..., 1 + back : longest + back] == recent[..., back, None])
        same = same & (recent[..., back, None] >= 0)
        length += same
    costs = costs[:, None].expand(-1, length.shape[1], -1).gather(-1, length)  # [b, N, L - 1]
    zeros = torch.zeros(*length.shape[:2], vocab, dtype=torch.float32, device=costs.device)
    return zeros.scatter_reduce_(-1, recent[..., :-1].clamp(min=0), costs, "amax")


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
