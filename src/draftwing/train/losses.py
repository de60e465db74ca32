"""Computes what a head is to predict, and the losses of its logits, of which none are kept for a backward pass.

The logits of a batch are its largest tensor by far, seven times over, and what the backward pass needs of them is known
as soon as they are. So they are made once, a piece at a time, and each piece goes straight on into the gradients of the
hidden states and of the output head.

Of a row's logits z, q = softmax(z), the target's distribution p and the text's next token t there are
- the cross-entropy with the target's distribution, -sum p log q, whose gradient is that of KL(p, q);
- the cross-entropy with the text, -log q[t];
- the distance of both distributions, 1 - a with a = sum min(p, q): a is how often a token that is drawn from q is
  accepted (Leviathan et al. 2023, arXiv 2211.17192).
Their gradients of z are q sum p - p, q - [t] and, with m = [q < p], -q (m - sum q m). Heads that draft one token after
the other are trained for the first one, heads that draft a block for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftwing.models.heads.base import FeatureHead
from draftwing.train.heads import TargetHead
from draftwing.train.kernels import kernels_take


class Teacher(NamedTuple):
    """The target's predictions at each loss position."""

    probs: Tensor  # [n, Vd]: its probabilities, restricted to the draft vocabulary and normalised there
    best: Tensor  # [n] int64: its most likely token, -1 where the head cannot say it
    known: Tensor  # [n] bool: whether that is in the draft vocabulary
    share: Tensor  # [n]: of its probability, how much that vocabulary has; 1 where that was not asked for


@torch.no_grad()
def teach(
    head: FeatureHead, target_head: TargetHead, final: Tensor, temperature: float, shares: bool = False
) -> Teacher:
    """final [n, hidden] -> the predictions at n positions, at a temperature. shares: whether `Teacher.share` is
    needed."""
    kept = head.target_ids
    # Half precision holds a probability to 3 digits and saves half of what is this step's largest tensor.
    half = torch.is_autocast_enabled(final.device.type)
    dtype = torch.bfloat16 if half else next(head.parameters()).dtype
    probs = final.new_empty(final.shape[0], head.vocab, dtype=dtype)
    best = final.new_empty(final.shape[0], dtype=torch.int64)
    known = torch.ones_like(best, dtype=torch.bool)
    asked = temperature if shares else None
    share = torch.ones(final.shape[0], dtype=wide(final), device=final.device)
    for part in chunks(final.shape[0], head.config.vocab_size, final.device):
        with torch.autocast(final.device.type, enabled=False):
            if kept is None:
                logits = target_head(final[part])
            else:
                logits, known[part], share[part] = target_head.of(kept, final[part], asked)
        best[part] = logits.argmax(-1)
        if temperature != 1:
            logits = logits / temperature
        probs[part] = logits.softmax(-1).to(dtype)
    if kept is not None:
        best = torch.where(known, kept[best], -1)
    return Teacher(probs, best, known, share)


@torch.no_grad()
def lean_to_text(teacher: Teacher, head: FeatureHead, said: Tensor, share: float) -> Teacher:
    """Returns predictions of which `share` is the text's own token, `said` [n] ids of the target, and the rest the
    target's. Where the head cannot say that token, all of it is the target's."""
    at, rows = said, torch.arange(len(said), device=said.device)
    moved = teacher.probs.new_full((len(said),), share)
    draft_ids = head.draft_ids()
    if draft_ids is not None:
        at = draft_ids[said]
        moved *= at >= 0
    probs = teacher.probs.mul_((1 - moved).unsqueeze(1))  # in place: nothing of a step is larger
    probs[rows, at] += moved  # nothing where `at` is -1
    return teacher._replace(probs=probs)


def ratio(part: float, whole: float) -> float:
    """Returns their quotient, 0 of nothing."""
    return part / whole if whole else 0.0


def acceptance(chains: Sequence[float], hits: Sequence[float]) -> dict[str, float]:
    """Returns the acceptance length, and by place of a draft how often it is accepted: of chains that reach the place,
    `hits` are right up to it."""
    rates = [ratio(*pair) for pair in zip(hits, chains, strict=True)]
    return {"accept_length": 1 + sum(rates), **{f"accept_{k}": rate for k, rate in enumerate(rates, 1)}}


# Logits that exist at a time: what a CPU keeps in its caches, and what fills a GPU (256 MB in float32).
_CPU_ELEMENTS = 1 << 22
_GPU_ELEMENTS = 1 << 26


# Takes the logits of a slice of the rows, and whether the last result is asked for. Returns the loss of each row, other
# facts of each, and the gradient of the sum of the losses, which may be the logits, overwritten.
Terms = Callable[[Tensor, slice, bool], tuple[Tensor, ...]]


def linear_loss(parts: Sequence[tuple[Tensor, Tensor]], terms: Terms) -> tuple[Tensor, ...]:
    """Returns the sum of a loss over rows of logits, the loss of each row, and what else `terms` says of it; only the
    first has gradients.

    parts: (x [rows, .., width], weight [V, width]) of the products whose sum are the logits. Those that `terms` gets
    are [slice of rows * .., V]. Products are in the dtype of autocast where it is on, sums in float32 or wider.
    """
    device = parts[0][0].device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parts[0][0].dtype
    flat = [tensor.to(product) for part in parts for tensor in part]
    if not torch.is_grad_enabled():  # which the function's own forward pass does not know
        flat = [tensor.detach() for tensor in flat]
    found: tuple[Tensor, ...] = _LinearLoss.apply(terms, *flat)
    return found


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> tuple[Tensor, ...]:
        xs, weights, needed = parts[::2], parts[1::2], ctx.needs_input_grad[1:]
        rows, *inner, _ = xs[0].shape
        vocab, exact, found = weights[0].shape[0], wide(xs[0]), []
        to_x = [x.new_empty(x.shape) if need else None for x, need in zip(xs, needed[::2], strict=True)]
        to_weight = [
            torch.zeros_like(weight, dtype=exact) if need else None
            for weight, need in zip(weights, needed[1::2], strict=True)
        ]
        for part in chunks(rows, math.prod(inner) * vocab, xs[0].device):
            here = [x[part].flatten(0, -2) for x in xs]
            logits = here[0] @ weights[0].t()
            for x, weight in zip(here[1:], weights[1:], strict=True):
                logits = torch.addmm(logits, x, weight.t())
            *facts, slope = terms(logits, part, any(needed))
            found.append(facts)
            for i, (x, weight) in enumerate(zip(here, weights, strict=True)):
                if (grad := to_x[i]) is not None:
                    torch.mm(slope, weight, out=grad[part].flatten(0, -2))
                if (total := to_weight[i]) is not None:
                    total += slope.t() @ x
        kept = [None if total is None else total.to(weight.dtype)
                for total, weight in zip(to_weight, weights, strict=True)]  # fmt: skip
        ctx.save_for_backward(*to_x, *kept)
        facts = list(map(torch.cat, zip(*found, strict=True)))
        ctx.mark_non_differentiable(*facts)
        return facts[0].sum(), *facts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by, kept = grads[0], ctx.saved_tensors
        half = len(kept) // 2
        return None, *(
            None if one is None else one * by.to(one.dtype)
            for pair in zip(kept[:half], kept[half:], strict=True)
            for one in pair
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows that count of -sum p log softmax(hidden weight^T), and the index of the largest logit
    in each row.

    hidden [n, width], weight [V, width], probs [n, V] (p, without a gradient), counts [n] bool
    -> a scalar in float32 or wider, [n] int64. Products are in the dtype of autocast where it is on, sums in float32.
    """

    def terms(logits: Tensor, part: slice, sloped: bool) -> tuple[Tensor, ...]:
        kernels = _kernels(logits)
        take = _cross_entropy_in_torch if kernels is None else kernels.cross_entropy
        return take(logits, probs[part], counts[part], sloped)

    loss, _, best = linear_loss([(hidden, weight)], terms)
    return loss, best


def _kernels(logits: Tensor) -> ModuleType | None:
    """Returns the kernels where they take such logits; they may overwrite them."""
    if not kernels_take(logits):
        return None
    from draftwing.train.kernels import losses

    return losses


def _cross_entropy_in_torch(logits: Tensor, probs: Tensor, counts: Tensor, sloped: bool) -> tuple[Tensor, ...]:
    """`train.kernels.losses.cross_entropy` of any device and floating dtype."""
    exact, counted = wide(logits), counts.unsqueeze(1)
    z = logits.to(exact)
    row_max, best = z.max(-1)
    z.sub_(row_max.unsqueeze(1))
    likely = z.exp()
    norm, mass = likely.sum(-1, keepdim=True), probs.sum(-1, keepdim=True, dtype=exact)
    # -sum p log q = log(sum exp z) sum p - sum p z
    cross = norm.log().mul_(mass).sub_(z.mul_(probs).sum(-1, keepdim=True))
    if sloped:
        likely = likely.mul_(mass / norm).sub_(probs).mul_(counted)
    return (cross * counted).squeeze(1), best, likely.to(logits.dtype) if sloped else logits


def chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Cuts so many rows into pieces of about as many elements as the device likes; none into one that is empty."""
    size = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


Kind = Literal["text", "kl", "tv", "lk_hybrid", "d_pace"]  # as `train.settings.BLOCK_LOSSES`
_PACE = 0.5  # alpha of D-PACE


@dataclass(frozen=True)
class BlockLoss:
    """How a block is trained.

    kind: text: the cross-entropy with the text. kl: with the target's distribution. tv: DSpark's, 0.1 of the former and
    0.9 of the L1 distance to the target's distribution, which is twice 1 - a. lk_hybrid: of kl and 1 - a by
    exp(-3 a), so that a row which hardly ever is right learns as with kl, and one that is mostly right the share itself
    (arXiv 2602.23881). d_pace: text, where a position weighs what is to be won from it on, sum over m >= j of the
    product of (q[t] + 1) / 2 of the block's positions up to m, without a gradient.
    decay: weight of each position over the one before.  confidence: of the confidence head's cross-entropy with a.
    anchors: share of a text's tokens that open a block in each forward.  temperature: of the target's distribution.
    """

    kind: Kind = "kl"
    decay: float = math.exp(-1 / 4)
    confidence: float = 1.0
    anchors: float = 0.25
    temperature: float = 1.0

    def rate(self, hidden: int) -> float:
        """Returns the learning rate where none is asked for."""
        return 6e-4


class Rows(NamedTuple):
    """What N blocks of S positions are to predict."""

    place: Tensor  # [N, S] int64: which of the target's distributions
    token: Tensor  # [N, S] int64: the text's next token as the head counts, -1 where it cannot say it
    counts: Tensor  # [N, S] bool: whether there is anything to predict
    known: Tensor  # [N, S] bool: whether the target's distribution is among what counts


class Found(NamedTuple):
    """What came of them; only the first has gradients."""

    total: Tensor  # the loss, summed over all positions
    loss: Tensor  # [N, S]: that of each, as weighted
    best: Tensor  # [N, S] int64: the most likely token, as the head counts
    accepted: Tensor  # [N, S]: a, 0 where nothing is to be predicted


def block_loss(parts: Sequence[tuple[Tensor, Tensor]], probs: Tensor, rows: Rows, loss: BlockLoss) -> Found:
    """parts: (x [N, S, width], weight [V, width]) of the products whose sum are the logits; probs [n, V]: the target's
    distributions. Logits are made of whole blocks, as `linear_loss` does."""

    def of(logits: Tensor, part: slice, sloped: bool) -> tuple[Tensor, ...]:
        return terms(logits, probs, Rows(*(tensor[part] for tensor in rows)), loss, sloped)

    return Found(*linear_loss(parts, of))


# What the logits of R rows say with the target's distributions, [R] each, of rows that do not count, too: the most
# likely token, -sum p log q, -log q[t] (anything where there is no t), sum min(p, q); and last what the slopes are made
# of, as whoever made the facts likes it.
RowFacts = tuple[Tensor, ...]


def terms(
    logits: Tensor, probs: Tensor, rows: Rows, loss: BlockLoss, sloped: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [N * S, V], probs [n, V] -> `loss`, `best` and `accepted` of `Found`, and the gradient of the loss
    [N * S, V], which may be the logits, overwritten; the logits where it is not asked for."""
    shape, place, token = rows.place.shape, rows.place.flatten(), rows.token.flatten()
    kernels = _kernels(logits)
    facts_of = _facts_in_torch if kernels is None else kernels.row_facts
    *facts, kept = facts_of(logits, probs, place, token)
    best, cross, text, accepted = (fact.view(shape) for fact in facts)
    text = text * ((rows.token >= 0) & rows.counts)
    accepted = accepted * rows.counts
    by_text, by_kl, by_tv, weight = _shares(loss, text, accepted, rows)
    value = weight * (by_text * text + by_kl * cross + by_tv * (1 - accepted))
    if not sloped:
        return value, best, accepted, logits
    shares = tuple((weight * share).flatten() for share in (by_text, by_kl, by_tv))
    slopes_of = _slopes_in_torch if kernels is None else kernels.slopes
    return value, best, accepted, slopes_of(logits, probs, place, token, kept, shares)


def _facts_in_torch(logits: Tensor, probs: Tensor, place: Tensor, token: Tensor) -> RowFacts:
    """`train.kernels.losses.row_facts` of any device and floating dtype."""
    exact = wide(logits)
    log_q, p = logits.to(exact).log_softmax(-1), probs[place].to(exact)
    text = -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return logits.argmax(-1), -(p * log_q).sum(-1), text, torch.minimum(log_q.exp(), p).sum(-1), log_q


def _slopes_in_torch(
    logits: Tensor, probs: Tensor, place: Tensor, token: Tensor, log_q: Tensor, shares: tuple[Tensor, ...]
) -> Tensor:
    """`train.kernels.losses.slopes` of any device and floating dtype."""
    q, p = log_q.exp(), probs[place].to(log_q.dtype)
    a, b, c = (share.unsqueeze(-1) for share in shares)
    less = (q < p).to(q.dtype)
    inner = (q * less).sum(-1, keepdim=True)
    slope = q * (a + b * p.sum(-1, keepdim=True) - c * (less - inner)) - b * p
    return slope.scatter_add_(-1, token.clamp(min=0).unsqueeze(-1), -a).to(logits.dtype)


def _shares(loss: BlockLoss, text: Tensor, accepted: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the weights [N, S] of the three terms, and of the positions."""
    steps, soft = rows.counts.shape[1], (rows.counts & rows.known).to(text.dtype)
    hard = ((rows.token >= 0) & rows.counts).to(text.dtype)
    weight = (loss.decay ** torch.arange(steps, dtype=text.dtype, device=text.device)).expand_as(text)
    none = torch.zeros_like(text)
    if loss.kind == "kl":
        return none, soft, none, weight
    if loss.kind == "tv":
        return 0.1 * hard, none, 1.8 * soft, weight
    if loss.kind == "lk_hybrid":
        blend = torch.exp(-3 * accepted)
        return none, blend * soft, (1 - blend) * soft, weight
    if loss.kind == "d_pace":
        said = torch.where(rows.token >= 0, torch.exp(-text), 0.0)  # nothing that follows is reached without it
        sure = (1 - _PACE) * said + _PACE
        reached = (sure * rows.counts).cumprod(1)  # [N, S]: of each m, the product up to it
        return hard, none, none, reached.flip(1).cumsum(1).flip(1)
    return hard, none, none, weight
