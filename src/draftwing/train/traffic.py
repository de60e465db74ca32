"""Chooses what of a server's traffic a head is trained on, and what it is judged by: later traffic by client and
domain, and general prompts.

Answers alone are learnt, which the target wrote, so what a client sends as a prompt counts little. A client's domains
are told apart by how its prompts begin, which is a system prompt, a template, or tools. General prompts are of many
kinds, and never trained on: what the model writes itself does not say whether a head has forgotten general chat, for
a head that is trained on some of that drafts the rest of it as well as before, while other chat is drafted worse
(docs/dev/learning.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from draftwing.learn.traffic import Exchange
from draftwing.train.data import Prompt, Skipped, read_prompts
from draftwing.train.heads import TargetHead
from draftwing.train.judge import FEW, SMALL
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
    learnt, sums = _within_share([one for one in every if one.key not in kept], clients, skipped)
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


def _within_share(
    every: Sequence[Tokens], clients: dict[str, str], skipped: Counter[str]
) -> tuple[list[Tokens], dict[str, int]]:
    """Leaves out the oldest of whoever has more than `CLIENT_SHARE` -> the rest, and tokens by client."""
    sums: Counter[str] = Counter()
    for tokens in every:
        sums[clients[tokens.key]] += int(tokens.loss_mask.sum())
    (largest, most), *others = sums.most_common() or [("", 0)]
    limit = round((sums.total() - most) * CLIENT_SHARE / (1 - CLIENT_SHARE)) if others else 0
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


BEGINNING = 4  # tokens in which prompts of a kind agree at least: questions mostly do not, whose first words are alike
LEAST = 2  # conversations of a kind: the turns of a single one begin alike, too

Prompts = Sequence[tuple[str, Sequence[int]]]  # keys and token ids


def domains(prompts: Mapping[str, Sequence[int]], clients: Mapping[str, str]) -> dict[str, str]:
    """Returns the domain of each prompt: the client's name and a number, 1 of its largest. prompts: token ids by key.
    clients: by key."""
    of_client: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for key, ids in prompts.items():
        of_client.setdefault(clients[key], []).append((key, ids))
    found = dict[str, str]()
    for client, own in of_client.items():
        turns = _conversations(own)
        kinds = _split([(key, prompts[key]) for key in turns], max(LEAST, SMALL * len(turns)))
        groups = [[key for first, _ in kind for key in turns[first]] for kind in kinds]
        for number, group in enumerate(sorted(groups, key=len, reverse=True), 1):
            found |= dict.fromkeys(group, f"{client}, domain {number}")
    return found


def _conversations(group: Prompts) -> dict[str, list[str]]:
    """Returns the keys of all prompts by that of the first one of the same conversation, which they go on from. Some
    templates end a prompt with what a later one does not have there, such as an empty thought."""
    end = _shared_beginning([(key, ids[: -BEGINNING - 1 : -1]) for key, ids in group], 0)
    # Bytes that sort as the token ids do, so that what goes on from a prompt follows it.
    begun = [(np.asarray(ids[: max(len(ids) - end, 0)], dtype=">u4").tobytes(), key) for key, ids in group]
    found: dict[str, list[str]] = {}
    last, shortest = b"", 4 * BEGINNING
    for text, key in sorted(begun):
        if len(last) <= shortest or text == last or not text.startswith(last):
            last, first = text, key
        found.setdefault(first, []).append(key)
    return found


def _split(group: Prompts, least: float, start: int = 0) -> list[Prompts]:
    """Returns those that go on alike behind what nearly all have in common, and all others together. least: prompts of
    a part.  start: tokens that all have in common."""
    start = _shared_beginning(group, start)
    branches: dict[int, list[tuple[str, Sequence[int]]]] = {}
    rest = [one for one in group if len(one[1]) <= start]
    for key, ids in group:
        if len(ids) > start:
            branches.setdefault(ids[start], []).append((key, ids))
    kinds: list[Prompts] = []
    for own in branches.values():
        parts = _split(own, least, start) if len(own) >= least else []
        if len(parts) > 1 or (parts and _shared_beginning(own, start) >= start + BEGINNING):
            kinds += parts
        else:
            rest += own
    return [*kinds, rest] if rest else kinds


def _shared_beginning(group: Prompts, length: int) -> int:
    """Returns the length of the beginning that nearly all of a group have in common, from `length` on."""
    left = [ids for _, ids in group]
    while True:
        left = [ids for ids in left if len(ids) > length]
        token, count = Counter(ids[length] for ids in left).most_common(1)[0] if left else (-1, 0)
        if count < (1 - SMALL) * len(group):
            return length
        left = [ids for ids in left if ids[length] == token]
        length += 1


GENERAL_PROMPTS = Path(__file__).with_name("general_prompts.jsonl")


def general_prompts() -> list[Prompt]:
    """Returns the prompts whose answers say whether a head has forgotten general chat, in their order."""
    return read_prompts([GENERAL_PROMPTS], Skipped())
