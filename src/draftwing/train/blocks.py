"""Trains heads that draft a block (DFlash, DFlash2, DSpark): in each text some positions are anchors, and each of them
opens a block as the engine would draft it there.

Indices. A block at anchor a stands at positions a, a + 1, ...: the text's token at a and masks. Its draft s = 0, 1, ...
is for the position a + 1 + s; the target's distribution of it is that of its state at j = a + s, and the token above it
is the text's at a + s. Where the token at j + 1 is to be learnt, j is one of the batch's loss positions
(`train.store.Batch`). Anchors are tokens that the target wrote itself, for in serving the newest token always is; a
block counts up to the first position that is not to be learnt.

Attention. What a row of a block sees is what it sees in serving: the text before its anchor, of which the anchor's own
position is no part, for the target has not run over it yet; and its own block. So the keys of a sequence are those of
its text and after them those of all of its blocks, under a mask. On a GPU kernels go over as much of the text as each
row sees and over its own block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.linear import Linear
from draftwing.models.heads.block import BlockHead, MarkovHead
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, AttentionKind, HeadNorms
from draftwing.train.heads import TargetHead
from draftwing.train.kernels import kernels_take
from draftwing.train.losses import BlockLoss, Rows, Teacher, acceptance, block_loss, ratio, teach
from draftwing.train.pairs import as_layer, pair_loss, paired
from draftwing.train.store import Batch


class BlockAttention(Attend):
    """Takes the keys and values of the texts, all T positions of each, and lets blocks attend to them, for all layers
    of a head.

    Rows of blocks come flat, B * A * rows of them: A blocks of each of B texts of T tokens.
    """

    norms_heads = True

    def __init__(self, anchors: Tensor, rows: int, length: int) -> None:
        """anchors [B, A] int64, ascending: the position of each block's first row; rows: of a block; length: T."""
        self._anchors, self._rows, self._length = anchors, rows, length
        self._text: dict[int, Tensor] = {}  # layer -> keys, then values [B, T, 2 * kv_heads, head_dim]
        self._masks: dict[tuple[int, bool], Tensor] = {}
        self._reach: Any = None  # once it is asked for

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._keep(layer, torch.cat((k.to(v.dtype), v), 1))

    def fused_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> bool:
        if not kernels_take(qkv):
            return False
        from draftwing.train.kernels.layer_ops import turn

        assert qkv.shape[1] % 2 == 0, "keys and values alone"
        self._keep(layer, turn(qkv, cos, sin, qkv.shape[1] // 2, 0, norms))
        return True

    def blocks(self, window: int, causal: bool, kv_heads: int) -> Attend:
        """Returns the attention of blocks with so many heads of keys; window, causal: as in `BlockConfig`."""
        return _Blocks(self, window, causal, kv_heads)

    def _keep(self, layer: int, kv: Tensor) -> None:
        """kv [B * T, 2 * kv_heads, head_dim]: keys, rotated, and values"""
        self._text[layer] = kv.unflatten(0, (len(self._anchors), self._length))

    def attend(self, kind: tuple[int, bool], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * A * rows, heads, head_dim], k, v with kv_heads -> [B * A * rows, heads * head_dim]"""
        # Rotary tables are in float32 while a product under autocast is not: the kernels want one dtype.
        q, k, v = (x.to(v.dtype).unflatten(0, (self._anchors.shape[0], -1)).transpose(1, 2) for x in (q, k, v))
        text_k, text_v = self._text.pop(layer).to(v.dtype).transpose(1, 2).chunk(2, 1)
        k, v = torch.cat((text_k, k), 2), torch.cat((text_v, v), 2)
        group = q.shape[1] // k.shape[1]
        if group > 1:  # the kernels that take a mask want a key for each head
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(kind, q.dtype))
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def attend_by_kernels(self, layer: int, qkv: Tensor) -> Tensor:
        """Attends with q, k and v concatenated, for what `takes_blocks`; all text is seen before the anchor."""
        from draftwing.train.kernels.attention import reach

        if self._reach is None:
            limits = self._anchors.repeat_interleave(self._rows, 1).to(torch.int32)  # [B, A * rows]
            self._reach = reach(limits, self._length, self._rows)
        qkv = qkv.unflatten(0, (len(self._anchors), -1))
        out: Tensor = ToTextAndBlocks.apply(qkv, self._text.pop(layer).to(qkv.dtype), self._reach)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, kind: tuple[int, bool], dtype: torch.dtype) -> Tensor:
        """[B, 1, A * rows, T + A * rows]: what is added to scores, 0 where a row sees a key."""
        if kind not in self._masks:
            seen = self._seen(*kind)
            self._masks[kind] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return self._masks[kind]

    def _seen(self, window: int, causal: bool) -> Tensor:
        (count, blocks), rows = self._anchors.shape, self._rows
        anchor = self._anchors.repeat_interleave(rows, 1).unsqueeze(2)  # [B, A * rows, 1]
        position = torch.arange(self._length, device=anchor.device)
        text = position < anchor
        if window:
            text &= position > anchor - window
        place = torch.arange(blocks * rows, device=anchor.device)
        own = (place // rows).unsqueeze(1) == place // rows
        if causal:
            own &= place <= place.unsqueeze(1)
        return torch.cat((text, own.expand(count, -1, -1)), 2).unsqueeze(1)


def takes_blocks(q: Tensor, window: int, causal: bool) -> bool:
    """Returns whether `ToTextAndBlocks` does what such queries see: kernels for half types, a whole text and a whole
    block."""
    return kernels_take(q) and q.dtype != torch.float32 and not window and not causal


class ToTextAndBlocks(torch.autograd.Function):
    """Attention to the text up to each query's limit and to the query's own block, by `train.kernels.attention`.
    What comes concatenated has its gradients concatenated."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, text: Tensor, far: Any) -> Tensor:
        """qkv [B, A * rows, heads + 2 * kv_heads, head_dim], text [B, T, 2 * kv_heads, head_dim], far: a `Reach` ->
        [B, heads, A * rows, head_dim]"""
        from draftwing.train.kernels.attention import block_attention

        out, lse = block_attention(_views(qkv, text), far)
        ctx.save_for_backward(qkv, text, out, lse)
        ctx.far = far
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from draftwing.train.kernels.attention import block_gradients

        qkv, text, out, lse = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        to_qkv, to_text = torch.empty_like(qkv), torch.empty_like(text)
        block_gradients(grad, out, lse, _views(qkv, text), ctx.far, _views(to_qkv, to_text))
        return to_qkv, to_text, None


def _views(qkv: Tensor, text: Tensor) -> Any:
    from draftwing.train.kernels.attention import Inputs

    kv_heads = text.shape[2] // 2
    q, k, v = qkv.transpose(1, 2).split([qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 1)
    text_k, text_v = text.transpose(1, 2).split(kv_heads, 1)
    return Inputs(q, text_k, text_v, k, v)


class _Blocks(Attend):
    norms_heads = True

    def __init__(self, owner: BlockAttention, window: int, causal: bool, kv_heads: int) -> None:
        self._owner, self._kind, self._kv_heads = owner, (window, causal), kv_heads

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        assert kind.is_full, "draft heads say themselves how far they see"
        return self._owner.attend(self._kind, layer, q, k, v)

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor | None:
        if not kernels_take(qkv):
            return None
        from draftwing.train.kernels.layer_ops import turn

        kv = self._kv_heads
        queries = qkv.shape[1] - 2 * kv
        qkv = turn(qkv, cos, sin, queries + kv, queries, norms)
        if takes_blocks(qkv, *self._kind):
            return self._owner.attend_by_kernels(layer, qkv)
        q, k, v = qkv.split([queries, kv, kv], 1)
        return self(layer, q, k, v, kind)


# Columns of what `BlockObjective` counts, per draft.
STATS = ("rows", "loss", "accepted", "second_loss", "hits", "chains", "chain_hits")
_AT_ONCE = 64  # blocks of a text that are drafted along it at once: their rows attend to each other under a mask
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie evenly


class Blocks(NamedTuple):
    """A blocks of each of B texts, with S drafts each."""

    anchors: Tensor  # [B, A] int64
    scale: Tensor  # as many blocks as there could be, for each that there is
    above: Tensor  # [B * A, S] int64: the token above each draft
    rows: Rows  # of N = B * A blocks


class BlockObjective(nn.Module):
    """The loss of a `BlockHead` on a batch. A module, so that torch's data parallelism can wrap it."""

    random = True  # whether `forward` draws anything
    columns = len(STATS)

    def __init__(self, head: BlockHead, target_head: TargetHead, loss: BlockLoss, max_length: int) -> None:
        """max_length: of a text."""
        super().__init__()
        self.head, self.loss = head, loss
        self._target_head = target_head
        self.steps = head.config_of_block.steps
        head.set_max_positions(max_length + head.config_of_block.rows)
        self._ids = head.draft_ids()

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns the loss, a scalar, and the counts, [steps, len(STATS)] float64. The loss is summed over drafts and
        scaled to as many blocks as there could be, so that it does not depend on the share that is looked at.

        generator: of the anchors; without one they lie evenly, and are the same each time.

        rows: positions that the draft predicts.  accepted: of these, sum min(p, q).  second_loss: of the confidence
        head or the selector.  hits: where the head's most likely token, or the one that it selects, is the target's.
        chains, chain_hits: of rows that are predicted at all, those up to which all drafts of their block hit.
        """
        head, shares = self.head, self.head.confidence is not None
        teacher = teach(head, self._target_head, batch.final, self.loss.temperature, shares)
        blocks = self._blocks(batch, teacher, generator)
        hidden = unroll(head, batch.ids, head.features(batch.aux_hidden.flatten(0, 1)), blocks.anchors)
        state, weight = head.readout(hidden)
        parts = [(state, weight)]
        if head.markov is not None:
            parts.append((mixed(head, hidden, blocks.above), head.markov.out.weight))
        found = block_loss(parts, teacher.probs, blocks.rows, self.loss)
        counts = blocks.rows.counts
        # No token outside of the draft vocabulary is ever accepted; as where the head is the target within it.
        accepted = found.accepted.minimum(teacher.share[blocks.rows.place].to(found.accepted.dtype))
        unsure, best = self._confidence_loss(hidden, blocks, accepted), found.best  # [N, S]
        total, second = found.total + self.loss.confidence * unsure.sum(), unsure.detach()
        if head.selector is not None:
            value, best = pair_loss(
                head, hidden, parts[0], blocks.above.flatten(), teacher.probs, blocks.rows, self.loss
            )
            total, second = total + value.sum(), second + value.detach()
        guess = best if head.target_ids is None else head.target_ids[best]
        hit = (guess == teacher.best[blocks.rows.place]) & counts
        columns = (counts, found.loss, found.accepted, second, hit, counts, hit.long().cumprod(1))
        stats = torch.stack([column.sum(0, dtype=torch.float64) for column in columns], 1)
        return total * blocks.scale, stats

    def metrics(self, stats: Tensor) -> dict[str, float]:
        """Returns a row of metrics from the counts."""
        rows, loss, accepted, unsure, hits, chains, chain_hits = stats.t().tolist()
        second = "pair_loss" if self.head.selector is not None else "confidence_loss" if self.head.confidence else ""
        more = {second: ratio(sum(unsure), sum(rows))} if second else {}
        return {
            "loss": sum(ratio(*pair) for pair in zip(loss, rows, strict=True)),
            "token_loss": ratio(loss[0], rows[0]),
            "overlap": ratio(sum(accepted), sum(rows)),
            **more,
            "hit_rate": ratio(hits[0], rows[0]),
            **acceptance(chains, chain_hits),
        }

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _blocks(self, batch: Batch, teacher: Teacher, generator: torch.Generator | None) -> Blocks:
        ids, steps = batch.ids, self.steps
        count, length = ids.shape
        place = torch.full((count * length,), -1, dtype=torch.int64, device=ids.device)
        place = place.index_copy_(0, batch.position, torch.arange(len(batch.position), device=ids.device))
        # A loss position's number, -1 elsewhere and past the end.
        place = F.pad(place.view(count, length), (0, steps), value=-1)  # [B, T + S]
        learnt = place[:, :length] >= 0
        able = learnt & F.pad(learnt, (1, 0))[:, :length]  # a token that is to be learnt, after one that was
        anchors, open_ = self._anchors(able, batch.max_positions, generator)
        scale = able.sum() / open_.sum().clamp(min=1)
        at = anchors.unsqueeze(2) + torch.arange(steps, device=ids.device)  # [B, A, S]
        where = place.gather(1, at.flatten(1)).view(-1, steps)  # [N, S]
        counts = ((where >= 0).long().cumprod(1) * open_.view(-1, 1)).bool()
        where = where.clamp(min=0)
        padded = F.pad(ids, (0, steps + 1))
        above, token = (padded.gather(1, (at + by).flatten(1)).view(-1, steps) for by in (0, 1))
        said = token if self._ids is None else self._ids[token]
        return Blocks(anchors, scale, above, Rows(where, said, counts, teacher.known[where]))

    def _anchors(self, able: Tensor, max_positions: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """able [B, T] bool: what may be one, at most so many of a text -> anchors [B, A], ascending, and which of them
        are blocks [B, A]: a text may have fewer."""
        count, length = able.shape
        size = max(1, min(max_positions, round(self.loss.anchors * length)))
        if generator is None:
            order = (torch.arange(length, device=able.device) * _GOLDEN).frac().expand(count, -1)
        else:
            order = torch.rand(count, length, generator=generator, device=able.device)
        value, at = torch.where(able, order, -1.0).topk(size, 1)
        at, by = torch.where(value >= 0, at, 0).sort(1)
        return at, (value >= 0).gather(1, by)

    # -- terms ------------------------------------------------------------------------------------------------------

    def _confidence_loss(self, hidden: Tensor, blocks: Blocks, accepted: Tensor) -> Tensor:
        """[N, S]: the cross-entropy of the confidence head with how often a draft would be accepted; hidden
        [N, S, H]."""
        head, counts = self.head, blocks.rows.counts
        if head.confidence is None:
            return torch.zeros_like(accepted)
        odds = head.confidence(hidden.flatten(0, 1), head.markov, blocks.above.flatten()).view_as(accepted)
        unsure = F.binary_cross_entropy_with_logits(odds.to(accepted.dtype), accepted.clamp(0, 1), reduction="none")
        steps = self.loss.decay ** torch.arange(self.steps, dtype=accepted.dtype, device=accepted.device)
        return unsure * counts * steps


def unroll(head: BlockHead, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Returns the states [B * A, S, H] of the rows that predict; ids [B, T], features [B * T, H], anchors [B, A]."""
    config, (count, length) = head.config_of_block, ids.shape
    attention = BlockAttention(anchors, config.rows, length)
    head.write_text(features, torch.arange(length, device=ids.device).repeat(count), attention)
    tokens = torch.full((*anchors.shape, config.rows), config.mask, dtype=torch.int64, device=ids.device)
    tokens[..., 0] = ids.gather(1, anchors)
    positions = anchors.unsqueeze(2) + torch.arange(config.rows, device=ids.device)
    kv_heads = head.config.attention.kv_heads
    kinds = {kind: attention.blocks(*kind, kv_heads) for kind in zip(config.windows, config.causal, strict=True)}
    attends = [kinds[kind] for kind in zip(config.windows, config.causal, strict=True)]
    hidden = head.block(tokens.flatten(), positions.flatten(), *attends)
    return hidden.view(anchors.numel(), config.rows, -1)[:, config.rows - config.steps :]


@torch.no_grad()
def chains(
    head: BlockHead, batch: Batch, depth: int
) -> tuple[Iterator[Sequence[tuple[Tensor, Linear]]], Sequence[tuple[Tensor, Linear]]]:
    """Returns `Along.drafts` and `Along.uncalled` of blocks that are opened by the tokens after the batch's loss
    positions, of which each draft follows the text's own tokens."""
    features, lm_head, markov = head.features(batch.aux_hidden.flatten(0, 1)), head.output_layer()[1], head.markov
    texts, length = batch.ids.shape
    counts = torch.bincount(batch.position // length, minlength=texts).unsqueeze(1)  # [B, 1]
    first = counts.cumsum(0) - counts
    states = features.new_empty(len(batch.position), depth, head.config.hidden_size)
    for start in range(0, batch.max_positions, _AT_ONCE):
        turn = torch.arange(start, min(start + _AT_ONCE, batch.max_positions), device=batch.ids.device)
        there = turn < counts  # [B, A]: texts with fewer have their end in its place
        number = (first + turn).clamp(max=len(states) - 1)
        anchors = torch.where(there, batch.depth[number] + 1, length - 1)
        hidden = unroll(head, batch.ids, features, anchors)
        states[number[there]] = hidden[there.flatten(), :depth]
    padded = F.pad(batch.ids, (0, depth))
    at = batch.depth.unsqueeze(1) + torch.arange(1, depth + 1, device=batch.ids.device)
    above = padded[(batch.position // length).unsqueeze(1), at]  # [n, depth]
    mix, out = None, None
    if markov is not None:
        mix, out = mixed(head, states, above), markov.out
    elif head.selector is not None:
        mix, out = paired(head, states, above.flatten()), as_layer(head)
    uncalled = [(features, layer.qkv) for layer in head.attentions()]
    if isinstance(markov, MarkovHead):
        uncalled.append((above.flatten(), markov.above.table))

    def drafts() -> Iterator[Sequence[tuple[Tensor, Linear]]]:
        for k in range(depth):
            corrected = () if mix is None or out is None else ((mix[:, k], out),)
            yield ((states[:, k] * head.config_of_block.logit_scale, lm_head), *corrected)

    return drafts(), uncalled


def mixed(head: BlockHead, hidden: Tensor, above: Tensor) -> Tensor:
    """Returns what the Markov head multiplies, [N, S, rank]: hidden [N, S, H], above [N, S] the text's own tokens."""
    markov = head.markov
    assert markov is not None
    if not markov.width:
        return markov.mix(hidden.flatten(0, 1), above.flatten(), None)[0].view(*above.shape, -1)
    state: Tensor | None = hidden.new_zeros(len(hidden), markov.width)
    out = []
    for step in range(above.shape[1]):
        x, state = markov.mix(hidden[:, step], above[:, step], state, newest=step == 0)
        out.append(x)
    return torch.stack(out, 1)
