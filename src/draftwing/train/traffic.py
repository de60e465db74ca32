"""What of a server's traffic a head is trained on, and what it is judged by.

Answers alone are learnt, which the target wrote, so what a client sends as a prompt counts little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from draftwing.learn.traffic import Exchange
from draftwing.train.domains import domains
from draftwing.train.heads import TargetHead
from draftwing.train.judge import FEW
from draftwing.train.store import FeatureSource, Part, Tokens

LATER = 0.2  # share of the exchanges, the newest ones, that heads are judged by
MANY = round(FEW / LATER)  # exchanges of a client whose own newest are kept, and judged: others' flood hides nobody's
CLIENT_SHARE = 0.5  # of the tokens that are learnt: most of one client, where there are others
# A text that repeats itself is a lookup's matter, and a head that learnt it would expect repetition everywhere.
LEAST_NEW, LOOP = 0.3, 4  # share of an answer's runs of so many tokens that are different ones
MIN_LOOP = 32  # tokens of an answer of which that is asked
ASKED = 32  # tokens of an answer whose likelihood is looked at
# Answers whose likelihoods are computed at once: each product reads the target's whole lm_head, 113 MB of SmolLM2 in
# float32, and makes logits of some 64 tokens an answer at most.
TOGETHER = 8
# Nats: mean log probability of an answer's tokens. 359 answers of SmolLM2 at temperatures of 0 to 1 had -0.9 in the
# middle and -3.7 at least (docs/dev/learning.md); tokens at random have -10 and less.
LEAST_LIKELY = -4.0


@dataclass(frozen=True)
class Traffic:
    """Sequences to learn, and later ones to judge heads by, both in order of time.

    clients, temperatures, domains: of each sequence, by its key.  tokens: of answers that are learnt, by client.
    skipped: exchanges that are left out, by reason.
    """

    learnt: list[Tokens]
    later: list[Tokens]
    clients: dict[str, str]
    temperatures: dict[str, float]
    domains: dict[str, str]
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


def choose_traffic(exchanges: Iterable[Exchange], max_length: int, later: float = LATER) -> Traffic:
    """Chooses from exchanges in order of time. max_length: tokens of a sequence; longer ones are left out.  later:
    share of what is left that is not learnt: the newest of each client with `MANY`, and of all others together."""
    skipped: Counter[str] = Counter()
    found: dict[str, tuple[Tokens, Exchange]] = {}
    for exchange in exchanges:
        reason = _unfit(exchange, max_length)
        if reason:
            skipped[reason] += 1
            continue
        tokens = _tokens(exchange)
        found.pop(tokens.key, None)  # of the same under another salt the newest counts
        found[tokens.key] = tokens, exchange
    clients = {key: exchange.client for key, (_, exchange) in found.items()}
    temperatures = {key: exchange.temperature for key, (_, exchange) in found.items()}
    kinds = domains({key: exchange.prompt for key, (_, exchange) in found.items()}, clients)
    every = [tokens for tokens, _ in found.values()]
    kept = _newest(every, clients, later)
    learnt, sums = _shared([one for one in every if one.key not in kept], clients, skipped)
    return Traffic(learnt, [one for one in every if one.key in kept], clients, temperatures, kinds, sums, skipped)


def _newest(every: Sequence[Tokens], clients: dict[str, str], share: float) -> set[str]:
    """Keys of the newest share of each client with `MANY`, and of all others together."""
    counts = Counter(clients.values())
    groups: dict[str | None, list[str]] = {}
    for tokens in every:
        client = clients[tokens.key]
        groups.setdefault(client if counts[client] >= MANY else None, []).append(tokens.key)
    return {key for keys in groups.values() for key in keys[len(keys) - round(share * len(keys)) :]}


def _unfit(exchange: Exchange, max_length: int) -> str:
    """Why it is of no use; empty where it is."""
    if len(exchange.prompt) + len(exchange.answer) > max_length:
        return f"longer than {max_length} tokens"
    runs = len(exchange.answer) - LOOP + 1
    if len(exchange.answer) >= MIN_LOOP:
        different = len({tuple(exchange.answer[i : i + LOOP]) for i in range(runs)})
        if different < LEAST_NEW * runs:
            return "repeats itself"
    return ""


def _tokens(exchange: Exchange) -> Tokens:
    ids = np.array([*exchange.prompt, *exchange.answer], np.int32)
    mask = np.zeros(len(ids), np.bool_)
    mask[len(exchange.prompt) :] = True
    key = blake2b(ids.tobytes() + mask.tobytes() + exchange.client.encode(), digest_size=10).hexdigest()
    return Tokens(ids, mask, key)


def _shared(
    every: Sequence[Tokens], clients: dict[str, str], skipped: Counter[str]
) -> tuple[list[Tokens], dict[str, int]]:
    """Leaves out the oldest of whoever has more than `CLIENT_SHARE` -> the rest, and tokens by client."""
    sums: Counter[str] = Counter()
    for tokens in every:
        sums[clients[tokens.key]] += int(tokens.loss_mask.sum())
    if len(sums) > 1:
        (largest, most), *_ = sums.most_common(1)
        limit = round((sums.total() - most) * CLIENT_SHARE / (1 - CLIENT_SHARE))
    else:
        largest, limit = "", 0
    left = []
    for tokens in every:  # the oldest first
        client = clients[tokens.key]
        if client == largest and limit and sums[client] > limit:
            sums[client] -= int(tokens.loss_mask.sum())
            skipped["beyond a client's share"] += 1
        else:
            left.append(tokens)
    return left, dict(sums)


@torch.no_grad()
def log_probabilities(source: FeatureSource, target: TargetHead) -> Iterator[tuple[str, float]]:
    """Gives the key of each sample and the mean log probability of tokens in its loss, in nats: of about `ASKED`,
    evenly chosen, for each takes a product with the whole vocabulary."""
    whole, numbers = (source.source, source.numbers) if isinstance(source, Part) else (source, range(len(source)))
    for start in range(0, len(numbers), TOGETHER):
        keys, states, tokens = [], [], []
        for sample in whole.read_many(list(numbers[start : start + TOGETHER])):
            at = sample.loss_mask[1:].nonzero().flatten()
            at = at[:: max(len(at) // ASKED, 1)]
            if len(at):
                keys.append(sample.key)
                states.append(sample.final[at])
                tokens.append(sample.ids[at + 1].long())
        if keys:
            logits = target(torch.cat(states).to(target.device)).float()  # [rows, V]
            chosen = logits.gather(1, torch.cat(tokens).to(logits.device).unsqueeze(1)).squeeze(1)
            found = (chosen - logits.logsumexp(1)).split([len(own) for own in tokens])
            yield from zip(keys, [float(own.mean()) for own in found], strict=True)
