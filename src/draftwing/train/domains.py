"""Tells a client's kinds of text apart: by how its prompts begin, which is a system prompt, a template, or tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from draftwing.train.judge import SMALL

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
    end = _shared([(key, ids[: -BEGINNING - 1 : -1]) for key, ids in group], 0)
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
    start = _shared(group, start)
    branches: dict[int, list[tuple[str, Sequence[int]]]] = {}
    rest = [one for one in group if len(one[1]) <= start]
    for key, ids in group:
        if len(ids) > start:
            branches.setdefault(ids[start], []).append((key, ids))
    kinds: list[Prompts] = []
    for own in branches.values():
        parts = _split(own, least, start) if len(own) >= least else []
        if len(parts) > 1 or (parts and _shared(own, start) >= start + BEGINNING):
            kinds += parts
        else:
            rest += own
    return [*kinds, rest] if rest else kinds


def _shared(group: Prompts, length: int) -> int:
    """Returns the length of the beginning that nearly all of a group have in common, from `length` on."""
    left = [ids for _, ids in group]
    while True:
        left = [ids for ids in left if len(ids) > length]
        token, count = Counter(ids[length] for ids in left).most_common(1)[0] if left else (-1, 0)
        if count < (1 - SMALL) * len(group):
            return length
        left = [ids for ids in left if ids[length] == token]
        length += 1
