"""Compares two heads on texts that neither was trained on: what each would have drafted along them, and how fast.

A text decides what of a draft is accepted, so both heads are asked the same, and their difference is known better than
either figure. Chains alone are looked at, whatever tree is served: who drafts better chains drafts better trees.

What is drafted along a text is what is drafted in serving (`along`; `train.merge` goes by the inputs that matrices get
there). An engine adds Gumbel noise times the temperature to the target's logits and takes the largest sum, and a
drafter adds the same noise to its own (`ops.noise.spec`). So what it drafts along a text that is given depends on noise
of which the token that was drawn tells a part: the largest sum is a Gumbel variable around log sum exp of the logits,
whichever token has it, and all others are below (Maddison et al. 2014, arXiv 1411.0030). Where a request had penalties
or filters this is as if it had had none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from statistics import NormalDist
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.models.heads.block import BlockHead
from draftwing.ops.noise.spec import gumbel_at
from draftwing.ops.table import PLAIN
from draftwing.train import blocks, ttt
from draftwing.train.heads import AnyHead, TargetHead
from draftwing.train.losses import chunks
from draftwing.train.store import Batch, Part, in_order, load_batches, to_device, usable_lengths

BATCH_TOKENS = 4096  # of a forward, padding included


class Along(NamedTuple):
    """A batch of texts. numbers: of the texts in their part.  drafts: of each draft 1, 2, .. of the chains that begin
    at the batch's n loss positions, the products whose sum are its logits: (x [n, width], layer) of each.  uncalled:
    what layers got on the way that were not called: (x [m, width], layer), of a table (ids [m], table)."""

    numbers: list[int]
    batch: Batch
    drafts: Iterator[Sequence[tuple[Tensor, Linear]]]
    uncalled: Sequence[tuple[Tensor, Linear]]


@torch.no_grad()
def along(head: AnyHead, part: Part, depth: int, max_length: int) -> Iterator[Along]:
    """Gives batches of the texts, drafted along in chains of `depth`."""
    lengths, param = usable_lengths(part, max_length), next(head.parameters())
    ahead = head.config_of_block.rows if isinstance(head, BlockHead) else depth
    head.set_max_positions(max_length + ahead)
    order = in_order(lengths, BATCH_TOKENS)
    for numbers, loaded in zip(order, load_batches(part, order, max_length), strict=True):
        batch = to_device(loaded, param.device, param.dtype)
        if isinstance(head, BlockHead):
            yield Along(numbers, batch, *blocks.chains(head, batch, depth))
        else:
            yield Along(numbers, batch, ttt.chains(head, batch, depth), ())


def most_drafts(head: AnyHead) -> int | None:
    """Returns how long a chain of the head can be, None: of any length."""
    return head.config_of_block.steps if isinstance(head, BlockHead) else None


class Temperatures(NamedTuple):
    """At which texts were drawn, by their keys, and the target that drew them; others are greedy."""

    of: Mapping[str, float]
    target: TargetHead

    def rows(self, keys: Sequence[str]) -> tuple[list[float], list[int]]:
        """Returns the temperatures of texts, and seeds for their noise."""
        return [self.of.get(key, 0.0) for key in keys], [crc32(key.encode()) for key in keys]

    def noise(
        self, final: Tensor, said: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, ids: Tensor | None
    ) -> Tensor:
        """Draws the noise of n positions, times the temperature. final [n, hidden]: of the target after its final norm;
        ids [Vd] int64: tokens whose noise is asked for, None: all; the others as of `noise_of_text` -> [n, Vd]."""
        heat = temperature.unsqueeze(1)
        if ids is None:
            scaled = self.target(final) / heat
            ids, total = torch.arange(scaled.shape[1], device=final.device), scaled.logsumexp(1)
        else:
            logits, _, share = self.target.of(ids, final, heat)
            scaled = logits / heat
            total = scaled.logsumexp(1) - share.log()
        return noise_of_text(scaled, total, said, seed, position, ids) * heat


def noise_of_text(scaled: Tensor, total: Tensor, said: Tensor, seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Draws the noise that has made a target say what it said, at n positions of texts.

    scaled [n, Vd] float32 or wider: the target's logits of the tokens ids [Vd] int64, through the temperature; total
    [n]: log sum exp of those of all tokens; said [n] int64: the token that was drawn; seed, position [n] int64: what is
    drawn follows from them alone -> [n, Vd].
    """
    key = seed, position.unsqueeze(1)
    none = torch.tensor([-1], device=ids.device)  # no token's: the noise of the largest sum
    top = total.unsqueeze(1) + gumbel_at(*key, none).squeeze(1)  # [n, 1]
    below = -torch.logaddexp(-top, -(scaled + gumbel_at(*key, ids).squeeze(1)))
    return torch.where(ids == said.unsqueeze(1), top, below) - scaled


ERRORS = 2.0  # standard errors by which a candidate must be better: chance alone does it once in 40 times
LEAST_GAIN = 1.01  # less is not worth that draft KV is of another head for a while
# Of tokens per second of general text, and of each client. The mean has to keep it, nearly: with few texts, a bound
# that two errors must be beyond would let through who loses a tenth (docs/dev/learning.md).
LEAST_KEPT = 0.97
CHANCE = 0.2  # with which any of the clients may refuse a head that changes nothing for all of them, by noise alone
FEW = 8  # exchanges of a client, below which nothing is said of it by itself
# Of the later answers' tokens: a client that has less is not judged by itself either, or one of many would keep a head
# from all others. The largest client counts no more than all others together, so that a flood makes nobody small.
SMALL = 0.1
OTHERS = "small clients"  # stands for all of these together
REST = "other domains"  # stands for a client's that are small


class Drafted(NamedTuple):
    """A head along one text. tokens: of the answer, but for its first, which nobody drafts.  steps [depth]: that these
    take with chains of 1, 2, .. drafts."""

    tokens: int
    steps: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Comparison:
    """A candidate beside its parent. lengths: acceptance lengths, each at the depth that is fastest for it.  gain: of
    tokens per second.  error: its standard error over the texts; 0 of a single one."""

    texts: int
    length_before: float
    length_after: float
    gain: float
    error: float

    @property
    def better(self) -> bool:
        return self.gain >= LEAST_GAIN and self.gain - ERRORS * self.error > 1

    def worse(self, chance: float) -> bool:
        """Whether less is left than must be kept. chance: with which noise alone may make any loss look like this
        one."""
        return self.gain < LEAST_KEPT and self.gain - NormalDist().inv_cdf(chance) * self.error <= 1


@dataclass(frozen=True)
class Judgement:
    """traffic: on all later exchanges.  clients: by client, of those that have enough, and of `OTHERS`.  general: on
    general text, None where there is none.  domains: by domain, of the clients that have several with enough.
    kept_before: share of tokens per second of general text that the parent has left of the first head's: heads are
    trained one from another, and what each may lose would add up."""

    traffic: Comparison
    clients: Mapping[str, Comparison]
    general: Comparison | None
    domains: Mapping[str, Comparison] = field(default_factory=dict)
    kept_before: float = 1.0

    @property
    def kept(self) -> float:
        """Returns `kept_before` of the candidate."""
        return self.kept_before if self.general is None else self.kept_before * self.general.gain

    def forgets(self, least: float) -> bool:
        """Whether less of general text is left than `least`, and less than the parent has."""
        return self.general is not None and self.kept < least and self.general.gain < 1

    @property
    def taken(self) -> bool:
        """Whether the candidate is to be served."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it is not; empty where it is."""
        if not self.traffic.better:
            return "not better by more than noise"
        if self.harmed:
            return f"worse for {', '.join(self.harmed)}"
        if self.forgets(LEAST_KEPT):
            return "worse on general text"
        return ""

    @property
    def harmed(self) -> list[str]:
        """Clients and domains that would lose more than they may."""
        groups = self.clients, self.domains
        return [name for group in groups for name, found in group.items() if found.worse(CHANCE / len(group))]

    def report(self) -> dict[str, Any]:
        """Returns it for a file of JSON."""
        return {**asdict(self), "kept": self.kept, "taken": self.taken, "reason": self.reason}


@torch.no_grad()
def draft_along(
    head: AnyHead, part: Part, depth: int, max_length: int, temperatures: Temperatures | None = None
) -> dict[str, Drafted]:
    """Drafts chains of up to `depth` along each text of `part`, the head's own output fed back as in serving. Along a
    text that was drawn at a temperature drafts have its noise, as an engine's have. None: all are greedy."""
    found = dict[str, Drafted]()
    for numbers, batch, drafts, _ in along(head, part, depth, max_length):
        rows, longest = batch.ids.shape
        answers = torch.zeros(rows * longest, dtype=torch.bool, device=batch.ids.device)
        answers[batch.position] = True  # before each token of an answer
        keys = [_key(part, number) for number in numbers]
        hits = _hits(head, batch, list(drafts), keys, temperatures)
        # A chain at index t drafts the tokens at t + 2, .. : those before which the target stands at t + 1, ..
        right, learnt = hits.view(rows, longest, depth).cpu().numpy(), answers.view(rows, longest).cpu().numpy()
        for row, key in enumerate(keys):
            found[key] = _walk(right[row], learnt[row])
    return found


def _hits(
    head: AnyHead, batch: Batch, drafts: Sequence[Sequence[tuple[Tensor, Linear]]], keys: Sequence[str],
    temperatures: Temperatures | None,
) -> Tensor:  # fmt: skip
    """Returns for each index of the batch, and each draft of a chain that begins there, whether it is the text's token:
    [B * T, depth] bool. drafts: as of `Along`."""
    places, longest = batch.position, batch.ids.shape[1]
    device, text = places.device, places // longest
    hits = torch.zeros(batch.ids.numel(), len(drafts), dtype=torch.bool, device=device)
    said = torch.nn.functional.pad(batch.ids, (0, 1)).flatten()[places + text + 1]  # after each place
    weights = {layer: layer.dense_weight() for _, layer in drafts[0]}
    for part in chunks(len(places), head.config.vocab_size, device):
        here = torch.arange(len(places), device=device)[part]
        warm, noise = None, None
        if temperatures is not None:
            heats, seeds = (torch.tensor(each, device=device)[text[part]] for each in temperatures.rows(keys))
            warm = (heats > 0).nonzero().flatten()
            if len(warm):
                at = here[warm]
                noise = temperatures.noise(
                    batch.final[at], said[at], heats[warm], seeds[warm], batch.depth[at], head.target_ids
                )
        for k, products in enumerate(drafts):
            begin = (here - k - 1).clamp(min=0)  # the chains that have come here
            logits, *more = (PLAIN.wide_gemm(x[begin], weights[layer]) for x, layer in products)
            if noise is not None:
                logits[warm] += noise.to(logits.dtype)
            if isinstance(head, BlockHead) and head.selector is not None:  # which chooses among a few
                least = logits.topk(min(head.selector.count, head.vocab)).values[:, -1:]
                logits.masked_fill_(logits < least, -torch.inf)
            logits = reduce(Tensor.add_, more, logits)
            best = logits.argmax(-1)
            guess = best if head.target_ids is None else head.target_ids[best]
            theirs = places[begin] + k + 1 == places[here]  # else a text or an answer begins between
            hits[places[begin[theirs]], k] = (guess == said[here])[theirs]
    return hits


def _key(part: Part, number: int) -> str:
    return part.source.order[part.numbers[number]]


def _walk(right: npt.NDArray[np.bool_], answers: npt.NDArray[np.bool_]) -> Drafted:
    """Goes along a text as an engine does: each step commits the drafts that are right, and one token more.

    right [T, depth]: whether the chain at index t has the token at t + 2 + k.  answers [T]: whether the token at t + 1
    is of an answer. Runs of these are answers; the first token of each comes with the prompt."""
    depth = right.shape[1]
    leading = right.cumprod(1).cumsum(1)  # [T, depth]: accepted drafts of chains of 1, 2, ..
    bounds = np.flatnonzero(np.diff(np.r_[0, answers.astype(np.int8), 0]))
    tokens, steps = 0, np.zeros(depth, np.int64)
    for start, end in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True):
        tokens += end - start - 1
        for d in range(depth):
            accepted, at = leading[:, d].tolist(), start
            while at < end - 1:  # the chain at index `at` drafts from the token at at + 1
                at += 1 + accepted[at]
                steps[d] += 1
    return Drafted(tokens, steps)


def compare(before: Mapping[str, Drafted], after: Mapping[str, Drafted], seconds: Sequence[float]) -> Comparison:
    """Compares what two heads drafted along the same texts. seconds: of a step with 1, 2, .. drafts, in any unit."""
    keys = [key for key in before if before[key].tokens]
    cost = np.array(seconds)
    old, new = (np.stack([drafted[key].steps for key in keys]) * cost for drafted in (before, after))  # [texts, depth]
    best = [int(times.sum(0).argmin()) for times in (old, new)]
    times = [each[:, depth] for each, depth in zip((old, new), best, strict=True)]
    tokens = sum(before[key].tokens for key in keys)
    first, other = (float(tokens * cost[depth] / each.sum()) for each, depth in zip(times, best, strict=True))
    gain = float(times[0].sum() / times[1].sum())
    error = 0.0
    if len(keys) > 1:  # of a ratio of sums, from how texts differ
        squares = float(((times[0] - gain * times[1]) ** 2).sum())
        error = math.sqrt(squares * len(keys) / (len(keys) - 1)) / float(times[1].sum())
    return Comparison(len(keys), first, other, gain, error)


def judge(
    before: Mapping[str, Drafted],
    after: Mapping[str, Drafted],
    clients: Mapping[str, str],
    seconds: Sequence[float],
    domains: Mapping[str, str] | None = None,
    kept_before: float = 1.0,
) -> Judgement:
    """Judges a candidate. before, after: by key of a text, of the parent and of the candidate.  clients: by key of an
    exchange; other texts are general ones.  seconds: as of `compare`.  domains: by key of an exchange
    (`train.traffic`), None: each client has one.  kept_before: as `Judgement` has it."""

    def compared(keys: Sequence[str]) -> Comparison:
        return compare({key: before[key] for key in keys}, after, seconds)

    drafted = [key for key, one in before.items() if one.tokens]
    traffic = [key for key in drafted if key in clients]
    general = [key for key in drafted if key not in clients]
    alone, parts = _judged_alone(traffic, before, clients), dict[str, list[str]]()
    for client, keys in alone.items():
        own = {} if domains is None or client == OTHERS else _judged_alone(keys, before, domains)
        if len(own) > 1:  # else the client's sum says it
            parts |= {f"{client}, {REST}" if name == OTHERS else name: some for name, some in own.items()}
    return Judgement(
        compared(traffic),
        {client: compared(keys) for client, keys in alone.items()},
        compared(general) if general else None,
        {name: compared(keys) for name, keys in parts.items()},
        kept_before,
    )


def _judged_alone(
    traffic: Sequence[str], drafted: Mapping[str, Drafted], clients: Mapping[str, str]
) -> dict[str, list[str]]:
    """Returns the keys of each client that is judged by itself, and of all others together, if these are enough; of
    domains in place of clients likewise."""
    keys: dict[str, list[str]] = {}
    tokens: Counter[str] = Counter()
    for key in traffic:
        keys.setdefault(clients[key], []).append(key)
        tokens[clients[key]] += drafted[key].tokens
    total, most = tokens.total(), max(tokens.values(), default=0)
    least = SMALL * min(total, 2 * (total - most))
    alone = {client: own for client, own in sorted(keys.items()) if len(own) >= FEW and tokens[client] >= least}
    others = [key for key in traffic if clients[key] not in alone]
    return alone | ({OTHERS: others} if len(others) >= FEW else {})
