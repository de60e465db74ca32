"""The training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840): a head is trained on what it will be run on.

From every position of a text a chain of drafts is unrolled, each step fed with the head's own output of the step before
and with the text's next token, as tree expansion does it in serving. The head is the serving module; only the
attention that is handed to it differs (`ChainAttention`). EAGLE and MTP heads are trained by the same unrolling: with
one step it is their ordinary recipe.

Indices. A row at index t of a sequence is made of the target's feature at t. In step k its token is ids[t + 1 + k], its
rotary position t + k, and it predicts the target's distribution at j = t + 1 + k, of which the token ids[j + 1] was
drawn. Where that token is to be learnt (`loss_mask[j + 1]`), j is one of the batch's *loss positions*.

Attention. The row at index t in step k stands for the k-th draft of the chain that starts after the text up to t. What
it may see is what the same row sees in serving: the committed rows 0 .. t, which are those of step 0, and the rows of
its own chain, which are those of steps 1 .. k at the same index t. The first part is ordinary causal attention, for
which there are fast kernels; the second is k scores a row. Both are joined by their log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.layers.linear import Linear
from draftwing.layers.rope import rotate
from draftwing.models.heads.eagle import Eagle3Head, EagleHead
from draftwing.models.heads.mtp import MTPHead
from draftwing.ops.attention.attend import Attend
from draftwing.ops.attention.batch import FULL, AttentionKind, HeadNorms
from draftwing.train.heads import TargetHead
from draftwing.train.kernels import kernels_take
from draftwing.train.losses import Teacher, acceptance, lean_to_text, linear_cross_entropy, ratio, teach, wide
from draftwing.train.store import Batch

KeyValue = tuple[Tensor, Tensor]  # [B, heads or kv_heads, T, head_dim] each


class ChainAttention(Attend):
    """Attention of all steps, one after the other, and of all layers of a head; keeps the keys and values of the steps
    so far.

    Queries come flat, M = B * T rows of B sequences of equal length T; a shorter sequence is padded at its end, where
    no row of it looks. After step 0 there may be fewer.
    """

    def __init__(self, sequences: int, length: int, kv_heads: int, rows: Tensor | None = None) -> None:
        """rows: of the B * T that steps 1, 2, .. have, int64; None: all."""
        self._shape, self._kv_heads, self._rows = (sequences, length), kv_heads, rows
        self._seen: dict[int, list[KeyValue]] = {}  # layer -> keys and values of steps 0, 1, ..

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = FULL) -> Tensor:
        """q [M, heads, head_dim], k, v [M, kv_heads, head_dim] of the layer's next step -> [M, heads * head_dim]"""
        assert kind._replace(window=0).is_full and not kind.reads, "draft heads see everything, by keys of their own"
        seen = self._seen.setdefault(layer, [])
        near = kind.window - len(seen) if kind.window else self._shape[1]  # of the keys of step 0
        assert near > 0, f"a window of {kind.window} is shorter than the chain"
        near = 0 if near >= self._shape[1] else near
        rows = self._rows if seen else None
        if rows is not None:  # the others' zeros are seen by nobody else
            q, k, v = (x.new_zeros(math.prod(self._shape), *x.shape[1:]).index_copy(0, rows, x) for x in (q, k, v))
        # Rotary tables are in float32 while a product under autocast is not: the kernels want one dtype.
        q, k, v = (
            x.to(v.dtype).unflatten(0, self._shape).transpose(1, 2) for x in (q, k, v)
        )  # [B, heads, T, head_dim]
        group = q.shape[1] // k.shape[1]
        if group > 1 and (kind.window or _own_kernels(v) is None):  # the GPU's kernels read a shared key where it is
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        seen.append((k, v))
        out = attend_chains(q, seen, near).transpose(1, 2).flatten(2).flatten(0, 1)
        return out if rows is None else out.index_select(0, rows)

    def fused(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kind: AttentionKind = FULL
    ) -> Tensor:
        kv, turned = self._kv_heads, qkv.shape[1] - self._kv_heads
        if kernels_take(qkv):
            from draftwing.train.kernels.layer_ops import turn

            q, k, v = turn(qkv, cos, sin, turned).split([turned - kv, kv, kv], 1)
        else:
            (q, k), v = rotate(qkv[:, :turned], cos, sin).split([turned - kv, kv], 1), qkv[:, turned:]
        return self(layer, q, k, v, kind)


def attend_chains(q: Tensor, seen: list[KeyValue], near: int = 0) -> Tensor:
    """q [B, heads, T, head_dim] of the newest step, keys and values of all steps -> [B, heads, T, head_dim]

    near: keys of step 0 that a query sees, the newest; 0: all up to its own. Of keys and values there may be fewer
    heads where `_own_kernels` has some and `near` is 0."""
    flat = [tensor for pair in seen for tensor in pair]
    out: Tensor = _ChainAttention.apply(q, near, *flat)
    return out


class _ChainAttention(torch.autograd.Function):
    """softmax over (scores of step 0's keys up to t, scores of the own row of steps 1 ..), written by hand.

    The causal part's kernel returns its output and log-sum-exp but takes no gradient of the latter. It needs none: its
    backward pass computes probabilities as exp(score - lse) and the softmax's inner term from (output, its gradient),
    so that given the joint output and the joint log-sum-exp it gives just its share of the joint gradient (the same
    step makes blockwise attention differentiable, Liu et al. 2023, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, near: int, *seen: Tensor) -> Tensor:
        k0, v0, *own = seen
        ctx.near = near
        out, lse, ctx.rest = _causal(q, k0, v0, near)
        if not own:
            ctx.save_for_backward(q, k0, v0, out, lse)
            return out
        kernels = None if near else _own_kernels(q)
        if kernels is not None:
            mixed, joint = kernels.join_own(out, lse, q, torch.stack(own[::2]), torch.stack(own[1::2]))
        else:
            mixed, joint = _join_own(out, lse, q, own[::2], own[1::2])
        ctx.save_for_backward(q, k0, v0, mixed, joint, *own)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        kernels, grad = None if ctx.near else _own_kernels(q), grads[0]
        if kernels is None or grad.stride(-1) != 1:
            grad = grad.contiguous()
        grad_q, grad_k0, grad_v0 = _causal_backward(grad, q, k0, v0, out, lse, ctx.rest, ctx.near)
        others: list[Tensor] = []
        if own and kernels is not None:
            keys, values = torch.stack(own[::2]), torch.stack(own[1::2])
            to_own = kernels.own_gradients(grad_q, grad, out, lse, q, keys, values)
            others = [x for pair in zip(*to_own, strict=True) for x in pair]
        elif own:
            grad_q, others = _own_gradients(grad_q, grad, out, lse, q, own[::2], own[1::2])
        return grad_q, None, grad_k0, grad_v0, *others


# ---- the own rows ----------------------------------------------------------------------------------------------------


def _own_kernels(q: Tensor) -> ModuleType | None:
    """Returns kernels that do what follows in a pass or two, where a kernel does the causal part that takes shared keys
    too."""
    if _kernel(q) != "flash" or not kernels_take(q):
        return None
    from draftwing.train.kernels import attention

    return attention


def _join_own(
    out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`train.kernels.attention.join_own`; keys and values one tensor a step"""
    scores = torch.stack([_own_scores(q, k) for k in keys])  # [k, B, heads, T]
    joint = torch.logsumexp(torch.cat((lse.unsqueeze(0), scores)), 0)
    mixed = out * (lse - joint).exp().unsqueeze(-1)  # in lse's dtype
    for score, v in zip(scores, values, strict=True):
        mixed = torch.addcmul(mixed, (score - joint).exp().unsqueeze(-1), v.to(mixed.dtype))
    return mixed.to(q.dtype), joint


def _own_gradients(
    grad_q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """grad_q of the causal part -> that of q, and those of each step's keys and values in turn"""
    exact, scale = lse.dtype, FULL.scale(q.shape[-1])
    inner = (grad.to(exact) * out.to(exact)).sum(-1)  # [B, heads, T]
    total, others = grad_q.to(exact), []
    for k, v in zip(keys, values, strict=True):
        prob = (_own_scores(q, k) - lse).exp()  # probability of the own row
        slope = (prob * ((grad.to(exact) * v.to(exact)).sum(-1) - inner) * scale).unsqueeze(-1)
        total = torch.addcmul(total, slope, k.to(exact))
        others += [(slope * q).to(k.dtype), (prob.unsqueeze(-1) * grad).to(v.dtype)]
    return total.to(q.dtype), others


def _own_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns scores [B, heads, T], float32 or wider."""
    return (q.to(wide(q)) * k.to(wide(q))).sum(-1) * FULL.scale(q.shape[-1])


# ---- causal attention that returns its log-sum-exp -------------------------------------------------------------------
# torch's public attention keeps it to itself, so its kernels are called by their own names.


def _kernel(q: Tensor) -> Literal["cpu", "flash", "dense"]:
    """dense: what the flash kernels do not take, float32 on a GPU and windows among it; memory grows with T squared."""
    if q.device.type == "cpu":
        return "cpu"
    half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return "flash" if q.is_cuda and half and size % 8 == 0 and size <= 256 else "dense"


def _causal(q: Tensor, k: Tensor, v: Tensor, near: int = 0) -> tuple[Tensor, Tensor, Sequence[Any]]:
    """Returns the output [B, heads, T, head_dim], the log-sum-exp of the scores [B, heads, T], and what else the
    kernel's backward pass takes: lengths, dropout and its random state."""
    rest: Sequence[Any] = ()
    ops, kernel = torch.ops.aten, "dense" if near else _kernel(q)
    if kernel == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    elif kernel == "flash":
        out, lse, *rest = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    else:
        scores = _dense_scores(q, k, near)
        lse = scores.logsumexp(-1)
        out = ((scores - lse.unsqueeze(-1)).exp().to(v.dtype)) @ v
    return out, lse, rest


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Any], near: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    ops, kernel = torch.ops.aten, "dense" if near else _kernel(q)
    if kernel == "cpu":
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    elif kernel == "flash":
        ends_q, ends_k, max_q, max_k, seed, offset = rest[:6]
        grads = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, 0.0, True, seed, offset
        )
    else:
        probs = (_dense_scores(q, k, near) - lse.unsqueeze(-1)).exp()  # [B, heads, T, T]
        exact = probs.dtype
        inner = (grad.to(exact) * out.to(exact)).sum(-1, keepdim=True)
        slopes = (probs * ((grad @ v.transpose(-1, -2)).to(exact) - inner) * FULL.scale(q.shape[-1])).to(q.dtype)
        grads = slopes @ k, slopes.transpose(-1, -2) @ q, probs.to(grad.dtype).transpose(-1, -2) @ grad
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, grad_v


def _dense_scores(q: Tensor, k: Tensor, near: int) -> Tensor:
    """Returns scores [B, heads, T, T], float32 or wider; minus infinity where a key comes after the query, or is not
    among the `near` newest up to it (0: all are)."""
    with torch.autocast(q.device.type, enabled=False):  # rounded to 16 bits they would be off by several percent
        scores = q.to(wide(q)) @ k.to(wide(q)).transpose(-1, -2) * FULL.scale(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    far = torch.ones_like(future).tril(-near) if near else torch.zeros_like(future)
    return scores.masked_fill(future | far, float("-inf"))


ChainHead = EagleHead | Eagle3Head | MTPHead


@dataclass(frozen=True)
class Loss:
    """Weights of steps and terms.

    steps: drafts per chain.  decay: weight of each step over the one before.  tokens: of the cross-entropy with the
    target's distribution.  features: of the smooth L1 distance between the head's output and the target's next
    feature.  noise: width of the uniform noise on the features it is fed, for a text of 512 tokens; it falls with the
    length of the text.  temperature: of the target's distribution that is learnt; the lower, the more its most likely
    token counts, which is all that matters in greedy text.  text: share of what is learnt that is the text's own token,
    not the target's distribution, which knows nothing of a request's temperature, penalties and grammar.
    """

    steps: int = 7
    decay: float = 0.8
    tokens: float = 1.0
    features: float = 0.0
    noise: float = 0.0
    temperature: float = 1.0
    text: float = 0.0

    def rate(self, hidden: int) -> float:
        """Returns the learning rate where none is asked for."""
        return 0.4 / hidden


# Columns of what `Objective` counts, per step.
STATS = ("rows", "token_loss", "feature_loss", "hits", "chains", "chain_hits")


class Objective(nn.Module):
    """The loss of a head on a batch. A module, so that torch's data parallelism can wrap it."""

    columns = len(STATS)

    def __init__(self, head: ChainHead, target_head: TargetHead, loss: Loss, max_length: int = 0) -> None:
        """max_length: of a text; 0: the head's rotary table is there. Raises ConfigError for longer chains than the
        head's window."""
        super().__init__()
        for layer in head.config.layers:
            if 0 < (window := getattr(layer.mixer, "window", 0)) < loss.steps:
                raise ConfigError(f"--ttt-steps: expected at most {window}, the head's window; found {loss.steps}")
        self.head, self.loss = head, loss
        self._target_head = target_head
        self.steps, self.random = loss.steps, bool(loss.noise)
        if max_length:
            head.set_max_positions(max_length + loss.steps)

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over steps and positions, a scalar, and the counts, [steps, len(STATS)] float64.

        generator: of the noise; without one there is none.

        rows: loss positions that the step predicts.  hits: of these, where the head's most likely token is the
        target's.  chains: rows whose earlier steps predicted positions too; chain_hits: of these, where all steps up to
        this one hit, so that chain_hits / chains is how often a draft of this depth is accepted, as far as the text is
        greedy.
        """
        loss, head = self.loss, self.head
        teacher = teach(head, self._target_head, batch.final, loss.temperature)
        if loss.text:
            teacher = lean_to_text(teacher, head, batch.ids.flatten()[batch.position + 1], loss.text)
        features = head.features(batch.aux_hidden.flatten(0, 1))  # [B * T, width]
        if loss.noise and generator is not None:
            features = features + _noise(features, batch, loss.noise, generator)
        total = features.new_zeros((), dtype=torch.float32)
        stats = []
        chains, opened = _Chains(batch), None if batch.ids.is_cuda else chain_rows(batch, loss.steps)
        for k, hidden in enumerate(unroll(head, batch.ids, features, loss.steps, opened)):
            rows, counts = chains.rows(k)
            at = rows if opened is None or not k else torch.searchsorted(opened, rows)
            hidden = hidden.index_select(0, at.clamp(max=len(hidden) - 1))
            tokens, guess = self._token_loss(hidden, counts, teacher)
            near = self._feature_loss(hidden, counts, batch.final) if loss.features else tokens.new_zeros(())
            total = total + loss.decay**k * (loss.tokens * tokens + loss.features * near)
            hit = (guess == teacher.best) & counts
            chain, chain_hit = chains.add(rows, counts, hit)
            sums = (counts.sum(), tokens.detach(), near.detach(), hit.sum(), chain.sum(), chain_hit.sum())
            stats.append(torch.stack([value.double() for value in sums]))
        return total, torch.stack(stats)

    def metrics(self, stats: Tensor) -> dict[str, float]:
        """Returns a row of metrics from the counts."""
        rows, token_loss, feature_loss, hits, chains, chain_hits = stats.t().tolist()
        loss = self.loss
        means = [loss.tokens * ratio(t, n) + loss.features * ratio(f, n)
                 for t, f, n in zip(token_loss, feature_loss, rows, strict=True)]  # fmt: skip
        return {
            "loss": sum(loss.decay**k * mean for k, mean in enumerate(means)),
            "token_loss": ratio(token_loss[0], rows[0]),
            "hit_rate": ratio(hits[0], rows[0]),
            **acceptance(chains, chain_hits),
        }

    # -- terms ------------------------------------------------------------------------------------------------------

    def _token_loss(self, hidden: Tensor, counts: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Returns the sum of cross-entropies and the head's best tokens [n]; hidden [n, width], counts [n].

        Positions whose most likely token the head cannot say do not count: it would learn to prefer the second best.
        """
        state, weight = self.head.readout(hidden)
        loss, best = linear_cross_entropy(state, weight, teacher.probs, counts & teacher.known)
        return loss, best if self.head.target_ids is None else self.head.target_ids[best]

    def _feature_loss(self, hidden: Tensor, counts: Tensor, final: Tensor) -> Tensor:
        distance = F.smooth_l1_loss(hidden.to(wide(hidden)), final.to(wide(hidden)), reduction="none").mean(-1)
        return (distance * counts).sum()


def unroll(head: ChainHead, ids: Tensor, features: Tensor, steps: int, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Gives the hidden states of step 0, [B * T, width], and of steps 1, 2, ..: of `rows` [r] int64 alone, [r, width];
    None: of all. ids [B, T], features [B * T, width].

    Rows without a token of their own, at the end, are made of token 0: they are not looked at.
    """
    sequences, length = ids.shape
    padded = F.pad(ids, (0, steps))  # [B, T + steps]
    positions = torch.arange(length, device=ids.device).repeat(sequences)
    attention = ChainAttention(sequences, length, head.config.attention.kv_heads, rows)
    for k in range(steps):
        tokens = padded[:, k + 1 : k + 1 + length].flatten()
        if k == 1 and rows is not None:
            features, positions = features[rows], positions[rows]
        if k and rows is not None:
            tokens = tokens[rows]
        features = head.run(tokens, positions + k, features, k, attention)
        yield features


@torch.no_grad()
def chains(head: ChainHead, batch: Batch, depth: int) -> Iterator[Sequence[tuple[Tensor, Linear]]]:
    """Gives what the logits of drafts 1, 2, .., `depth` are made of, of chains that begin at the batch's loss
    positions: `Along.drafts`."""
    norm, lm_head = head.output_layer()
    places, features = batch.position, head.features(batch.aux_hidden.flatten(0, 1))
    for k, hidden in enumerate(unroll(head, batch.ids, features, depth, places)):
        here = hidden if k else hidden[places]
        yield ((here if norm is None else norm(here), lm_head),)


def chain_rows(batch: Batch, steps: int) -> Tensor:
    """Returns the rows [r] int64, ascending, whose chains of `steps` drafts are to be learnt beyond the first draft:
    those shortly before a loss position. Of a long prompt with a short answer they are few. A GPU would wait for their
    number."""
    wanted = torch.zeros(batch.ids.numel(), dtype=torch.bool, device=batch.ids.device)
    wanted[0] = True  # where there are none
    for back in range(2, steps + 1):
        wanted[(batch.position - back)[batch.depth >= back]] = True
    return wanted.nonzero().flatten()


class _Chains:
    """Knows which row of a step predicts each loss position, and which chains have been right so far."""

    def __init__(self, batch: Batch) -> None:
        self._position, self._depth = batch.position, batch.depth
        cells = batch.ids.numel() + 1  # the last one is for rows before the text
        self._whole = torch.ones(cells, dtype=torch.bool, device=batch.ids.device)
        self._right = self._whole

    def rows(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns for each loss position the row [n] that predicts it in step k, and whether there is one [n]; if not,
        a row of the same sequence that is not to be counted."""
        back = 1 + k
        counts = self._depth >= back
        return self._position - self._depth.clamp(max=back), counts

    def add(self, rows: Tensor, counts: Tensor, hit: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether the row's chain predicted a position in every step, [n], and each rightly, [n]; hit [n]."""
        whole = self._whole[rows] & counts
        right = self._right[rows] & hit
        at = torch.where(counts, rows, self._whole.shape[0] - 1)
        # New tensors: chains that end here, at the end of a turn, take no further part.
        self._whole = torch.zeros_like(self._whole).index_copy_(0, at, whole)
        self._right = torch.zeros_like(self._right).index_copy_(0, at, right)
        return whole, right


def _noise(features: Tensor, batch: Batch, width: float, generator: torch.Generator) -> Tensor:
    """Returns noise [B * T, width], uniform as in EAGLE's recipe: a text of T tokens gets 512 / T of it."""
    noise = torch.rand(features.shape, generator=generator, device=features.device, dtype=torch.float32) - 0.5
    scale = width * 512.0 / batch.lengths.float()  # [B]
    return (noise * scale.repeat_interleave(batch.ids.shape[1]).unsqueeze(1)).to(features.dtype)
