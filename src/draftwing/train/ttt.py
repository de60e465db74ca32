"""The training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840): a head is trained on what it will be run on.

From every position of a text a chain of drafts is unrolled, each step fed with the head's own output of the step before
and with the text's next token, as tree expansion does it in serving. The head is the serving module; only the
attention that is handed to it differs (`ChainAttention`). EAGLE and MTP heads are trained by the same unrolling: with
one step it is their ordinary recipe.

Indices. A row at index t of a sequence is made of the target's feature at t. In step k its token is ids[t + 1 + k], its
rotary position t + k, and it predicts the target's distribution at j = t + 1 + k, of which the token ids[j + 1] was
drawn. Where that token is to be learnt (`loss_mask[j + 1]`), j is one of the batch's *loss positions*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.linear import Linear
from draftwing.models.heads.eagle import EagleHead
from draftwing.models.heads.eagle3 import Eagle3Head
from draftwing.models.heads.mtp import MTPHead
from draftwing.train.chain_attention import ChainAttention, wide
from draftwing.train.cross_entropy import linear_cross_entropy
from draftwing.train.heads import TargetHead
from draftwing.train.teacher import Batch, Teacher, acceptance, lean_to_text, ratio, teach

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
        """max_length: of a text; 0: the head's rotary table is there."""
        super().__init__()
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
