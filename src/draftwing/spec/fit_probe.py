"""Why drafts of a head are wrong: the head runs once along a text that the target runs along, as it is and with one
thing changed at a time. What makes it right more often is the likely cause.

Nothing here is of serving: keys and values are in pools of their own, and what is changed of the head is put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwing.kv.pool import KVPool
from draftwing.layers.attention import AttentionConfig
from draftwing.layers.rope import Rope
from draftwing.models.decoder import DecoderModel
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.block import BlockHead
from draftwing.models.heads.eagle import Eagle3Head
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.table import TorchOps

MOST = 192  # tokens of a text that is run along
LEAST = 24
BETTER = 0.12  # share of first drafts that a change must add, and
TIMES = 1.6  # by what it must multiply them, to be the cause
_THETAS = 10000.0, 100000.0, 500000.0, 1e6, 5e6, 1e7  # that models have
_CONSISTENT = 0.75  # of what another numbering of the same tokens gives


class Finding(NamedTuple):
    """rate: share of first drafts that are right as the head is.  cause: what is likely wrong, "" where no change
    helps.  better: the rate with that mended."""

    rate: float
    cause: str = ""
    better: float = 0.0


def can_probe(head: Any, target: DecoderModel) -> bool:
    """Returns whether both have layers with plain attention, on one device."""
    plain = isinstance(head, FeatureHead) and target.ranks.size == 1
    return plain and all(type(layer.mixer) is AttentionConfig for layer in target.config.layers)


@torch.inference_mode()
def probe(head: FeatureHead, target: DecoderModel, ops: TorchOps, text: Sequence[int]) -> Finding:
    """Runs both along the end of a text of at least `LEAST` tokens, and looks for what is wrong with the head."""
    device = target.norm.weight.device
    tokens = torch.tensor(list(text)[-MOST:], device=device)
    final, streams = _target_pass(target, ops, tokens)
    right = target.logits(final).argmax(-1)  # [T]: of the token after each
    run = _Run(head, ops, tokens, streams)
    rate, guesses = run.rate(right)
    found = [(*_rate(change, run, right), cause) for cause, change in _changes(head, target)]
    found += run.renamed(right, guesses)
    better, cause = max(found, default=(0.0, ""))
    if better >= max(rate + BETTER, rate * TIMES):
        return Finding(rate, cause, better)
    if _consistent(run.newest(), run.expected(right), guesses) >= max(_CONSISTENT * 0.5, 2 * rate + BETTER):
        mapped = "its map of draft tokens (d2t) is wrong, or " if head.vocab < target.config.vocab_size else ""
        return Finding(rate, f"it means the target's tokens by other ids: {mapped}it is for another tokenizer")
    return Finding(rate)


def _target_pass(target: DecoderModel, ops: TorchOps, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """-> final [T, hidden], and all streams, the last one that after the final norm"""
    count, layers = len(tokens), target.config.num_layers
    pool = KVPool(target.kv_layers, count, target.dtype, tokens.device)
    at = torch.arange(count, device=tokens.device)
    attend = ops.attention(pool).bind(_batch(ops, tokens, at), 0)
    names = (*range(layers + 1), target.final_aux_layer)
    final, aux_hidden = target(tokens, at, attend, names)
    assert aux_hidden is not None
    return final, list(aux_hidden.chunk(len(names), 1))


def _batch(ops: TorchOps, tokens: Tensor, at: Tensor) -> Batch:
    """A prompt in one chunk, in slots 1, 2, ..."""
    slots, zero = torch.arange(1, len(at) + 1, device=at.device), torch.zeros(1, dtype=torch.int64, device=at.device)
    span = ChunkSpan(0, 0, 0, len(at))
    table = slots.to(ops.table_dtype).unsqueeze(0)
    return Batch(zero, tokens, at, slots, table, zero, chunks=(span,), bound=len(at))


class _Run:
    """A head along a text: which token it drafts first from each position."""

    def __init__(self, head: FeatureHead, ops: TorchOps, tokens: Tensor, streams: Sequence[Tensor]) -> None:
        self.head, self.ops, self.tokens, self.streams = head, ops, tokens, streams
        self.layers = head.aux_layers
        self.shift = 0  # by how many tokens features are late

    def guesses(self) -> Tensor:
        """Returns them as the head counts, of the positions that `expected` has."""
        aux_hidden = torch.cat([self.streams[layer] for layer in self.layers], 1)
        if self.shift:
            aux_hidden = aux_hidden.roll(self.shift, 0)
        features = self.head.features(aux_hidden)
        along = self._blocks if isinstance(self.head, BlockHead) else self._chain
        return along(features)

    def rate(self, right: Tensor) -> tuple[float, Tensor]:
        guesses = self.guesses()
        named = guesses if self.head.target_ids is None else self.head.target_ids[guesses]
        return float((named == self.expected(right)).double().mean()), guesses

    def expected(self, right: Tensor) -> Tensor:
        """right [T]: the target's choice after each token -> what first drafts should be"""
        return right[self._anchors()] if isinstance(self.head, BlockHead) else right[1:]

    def newest(self) -> Tensor:
        """Returns the tokens before those, which a head reads last."""
        return self.tokens[self._anchors()] if isinstance(self.head, BlockHead) else self.tokens[1:]

    def renamed(self, right: Tensor, guesses: Tensor) -> list[tuple[float, str]]:
        """Returns how often drafts are right if ids are those of the target as they are."""
        if self.head.target_ids is None:
            return []
        rate = float((guesses == self.expected(right)).double().mean())
        return [(rate, "its map of draft tokens (d2t) is another head's: without one it fits")]

    def _chain(self, features: Tensor) -> Tensor:
        """The row at t is made of token t + 1 and the feature at t."""
        head, count = self.head, len(self.tokens) - 1
        pool = KVPool(head.kv_layers, count, head.target.dtype, self.tokens.device)
        at = torch.arange(count, device=self.tokens.device)
        batch = _batch(self.ops, self.tokens[1:], at)
        hidden = head.run(batch.ids, at, features[:count], 0, self.ops.attention(pool).bind(batch, 0))
        return head.logits(hidden.contiguous()).argmax(-1)

    def _anchors(self) -> Tensor:
        return torch.arange(4, len(self.tokens), device=self.tokens.device)

    def _blocks(self, features: Tensor) -> Tensor:
        """A block opens at some positions, after the text before it."""
        head, ops, device = self.head, self.ops, self.tokens.device
        assert isinstance(head, BlockHead)
        block, anchors, count = head.config_of_block, self._anchors(), len(self.tokens)
        rows, width = len(anchors), block.rows
        pool = KVPool(head.kv_layers, count + rows * width, head.target.dtype, device)
        attn, text = ops.attention(pool), torch.arange(count, device=device)
        head.write_text(features, text, attn.bind(_batch(ops, self.tokens, text), 0))
        own = count + 1 + torch.arange(rows * width, device=device).view(rows, width)
        at = anchors.unsqueeze(1) + torch.arange(width, device=device)  # [B, Q]
        table = torch.zeros(rows, count + width, dtype=torch.int64, device=device)
        table[:, :count] = text + 1
        table.scatter_(1, at, own)
        ids = torch.full_like(at, block.mask)
        ids[:, 0] = self.tokens[anchors]
        step = torch.arange(width, device=device)
        batch = Batch(
            torch.arange(rows, device=device), ids.flatten(), at.flatten(), own.flatten(), table.to(ops.table_dtype),
            anchors, step.expand(rows, width, width).contiguous(), torch.full_like(at, width), window=width,
            bound=count + width,
        )  # fmt: skip
        below = batch._replace(path_len=(step + 1).repeat(rows, 1))  # of layers whose rows see none after them
        attends = [attn.bind(below if causal else batch, 0) for causal in block.causal]
        hidden = head.block(batch.ids, batch.positions, *attends)
        first = hidden.view(rows, width, -1)[:, width - block.steps].contiguous()
        newest = self.tokens[anchors]
        state = first.new_zeros(rows, head.state_width) if head.state_width else None
        logits, _ = head.given(head.logits(first), first, newest, state, newest=True)
        if head.selector is None:
            return logits.argmax(-1)
        likely, places = logits.float().log_softmax(-1).topk(min(head.selector.count, head.vocab))
        named = places if head.target_ids is None else head.target_ids[places]
        gated = head.selector.before[newest].float() * head.selector(first).float()
        scores = likely + (head.selector.after[named].float() @ gated.unsqueeze(2)).squeeze(2)
        return places.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)


# ---- what may be wrong -----------------------------------------------------------------------------------------------

Change = Callable[[_Run], Any]


def _rate(change: Change, run: _Run, right: Tensor) -> tuple[float]:
    with change(run):
        return (run.rate(right)[0],)


def _changes(head: FeatureHead, target: DecoderModel) -> Iterator[tuple[str, Change]]:
    """Yields what would be the cause, and the change that mends it for a while."""
    layers = target.config.num_layers
    for other in _other_layers(head.aux_layers, layers, target.final_aux_layer):
        what = f"hidden states of layers {_shown(other)} of the target"
        yield f"it fits {what} and is given those of {_shown(head.aux_layers)}", _with(layers=other)
    for shift, which in ((1, "before"), (-1, "after")):
        yield f"it fits the hidden states of the token {which}", _with(shift=shift)
    for theta in _THETAS:
        if theta != head.config.ropes[0].theta:
            yield f"it fits a rope_theta of {theta:g}, its config has {head.config.ropes[0].theta:g}", _turned(theta)
    if isinstance(head, Eagle3Head):
        yield "its norm_before_residual is the other way round", _flipped(head)
    if isinstance(head, BlockHead):
        anchored = head.config_of_block.from_anchor
        yield f"it fits sample_from_anchor = {str(not anchored).lower()}", _anchored(head)


def _other_layers(own: Sequence[int], layers: int, final: int) -> list[tuple[int, ...]]:
    """Returns which streams a head may have been made for in place of its own."""
    if len(own) == 1:
        return [other for other in ((layers,), (final,)) if other != tuple(own)]
    count = len(own)
    usual = [2, layers // 2, layers - 3][:count] if count == 3 else []
    spread = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    guesses = [[one + by for one in base] for base in (own, usual, spread) for by in (-1, 0, 1) if base]
    guesses += [list(reversed(own)), [own[-1], *own[:-1]], [*own[1:], own[0]]]
    found = [tuple(one) for one in guesses if all(0 <= layer <= layers for layer in one) and tuple(one) != tuple(own)]
    return list(dict.fromkeys(found))


def _shown(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _with(**changes: Any) -> Change:
    return lambda run: _changed(run, **changes)


def _turned(theta: float) -> Change:
    def change(run: _Run) -> Any:
        head = run.head
        other = Rope(replace(head.config.ropes[0], theta=theta), head.rope.head_dim, head.rope.table.dtype)
        other.make(len(head.rope.table), head.rope.table.dtype, head.rope.table.device)
        return _changed(head, rope=other)

    return change


def _flipped(head: Eagle3Head) -> Change:
    return lambda run: _changed(head.fusion, from_normed=not head.fusion.from_normed)


def _anchored(head: BlockHead) -> Change:
    block = head.config_of_block
    return lambda run: _changed(head, config_of_block=replace(block, from_anchor=not block.from_anchor))


@contextmanager
def _changed(what: Any, **changes: Any) -> Iterator[None]:
    before = {name: getattr(what, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(what, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(what, name, value)


def _consistent(newest: Tensor, right: Tensor, guesses: Tensor) -> float:
    """Returns how often a guess stands for the token that it mostly stands for, among guesses after several tokens;
    less what the most frequent token alone would give. What repeats itself counts once."""
    once = set(zip(newest.tolist(), guesses.tolist(), right.tolist(), strict=True))
    by_guess: dict[int, Counter[int]] = {}
    for _, guess, token in once:
        by_guess.setdefault(guess, Counter())[token] += 1
    often = [tokens for tokens in by_guess.values() if tokens.total() > 1]
    total = sum(tokens.total() for tokens in often)
    if total < LEAST or len(often) < 4:
        return 0.0
    usual = max(Counter(token for _, _, token in once).values()) / len(once)
    return sum(max(tokens.values()) for tokens in often) / total - usual
