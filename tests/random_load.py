"""Random requests at a random engine: conversations with beginnings in common that go on, prompts of all lengths beside
trees of all shapes, grammars, log probabilities, priorities, aborts, pools that are too small, pictures. The text of
each request is that of the request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine_rig import InTurn
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.kv.pool import delta_specs
from draftwing.requests.request import LogprobParams, SpecLimits
from draftwing.sched.state_slots import StateSizes

DRAFTERS = "oracle", "suffix", "ngram"
ROUNDS = 2  # the second finds what the first has left
ROOM = 40  # slots that a tree may need behind a text


class Shown(NamedTuple):
    """numbers: below 0, of pictures; they may stand among a prompt's tokens.  placed: makes a prompt and its images."""

    numbers: Sequence[int] = ()
    placed: Callable[[list[int]], tuple[list[int], Any]] = lambda items: (items, ())


NO_PICTURES = Shown()


class Asked(NamedTuple):
    """items: tokens and pictures, of which the prompt was made."""

    prompt: list[int]
    params: Any
    grammar: int | None
    logprobs: LogprobParams | None
    items: list[int]
    images: Any = ()

    def answers(self, rng: random.Random, n: int) -> list[Asked]:
        """Returns the request n times, each with a seed of its own, as an engine has one that asks for n answers."""
        return [self._replace(params=each) for each in self.params.replace(n=n).answers(rng)]

    def submit(self, rig: Any, uid: str, **more: Any) -> None:
        grammar = None if self.grammar is None else ToyGrammar(self.grammar, rig.sched.config.vocab)
        asked = {"grammar": grammar, "logprobs": self.logprobs, "images": self.images}
        rig.submit(uid, self.prompt, self.params, **asked, **more)


class AtRandom(InTurn):
    """Any shape of the menu. plain: how often plain steps stand there."""

    adapts = True

    def __init__(self, rng: random.Random, *menu: TreeShape, plain: int = 1) -> None:
        super().__init__(*menu, PLAIN)
        self._rng, self._weights = rng, [*[1] * len(menu), plain]

    def choose(self, load: Any) -> TreeShape:
        return self._rng.choices(self.menu, self._weights)[0]


def shape(rng: random.Random) -> TreeShape:
    topk, depth = rng.choice((1, 2, 3, 4)), rng.randint(1, 8)
    nodes = depth + 1 if topk == 1 else rng.randint(depth + 1, 1 + topk + (depth - 1) * topk)
    return TreeShape(depth, topk, nodes, rng.choice((0, 0, rng.randint(2, nodes))))


def asked(harness: Any, rng: random.Random, number: int, items: list[int], shown: Shown) -> Asked:
    tokens, vocab = rng.choice((1, 3, 24, 24)), harness.VOCAB
    edits: dict[str, Any] = {"stop_token_ids": tuple(rng.sample(range(vocab), rng.choice((0, 0, 2))))}
    if rng.random() < 0.2:
        edits |= {"frequency_penalty": rng.uniform(-1, 2), "repetition_penalty": rng.uniform(0.7, 1.6)}
    if rng.random() < 0.2:
        edits |= {"dry_multiplier": rng.uniform(0.1, 3), "dry_allowed_length": rng.randint(1, 3)}
    params = harness.greedy(tokens, **edits) if rng.random() < 0.5 else harness.seeded(tokens, seed=number, **edits)
    wanted = LogprobParams(rng.choice((0, 2)), (), rng.choice((-1, 0))) if rng.random() < 0.2 else None
    prompt, images = shown.placed(items)
    return Asked(prompt, params, rng.randrange(99) if rng.random() < 0.25 else None, wanted, items, images)


def text(rng: random.Random, vocab: int, size: int, shown: Shown) -> list[int]:
    """Tokens, often with a picture among them, and now and then with two that follow each other."""
    found = rng.choices(range(vocab), k=size)
    if shown.numbers and rng.random() < 0.6:
        found[rng.randrange(size)] = rng.choice(shown.numbers)
        if rng.random() < 0.2:
            found[rng.randrange(size)] = rng.choice(shown.numbers)
    return found


def alone(harness: Any, model: Any, requests: list[Asked]) -> Any:
    """Without drafts and prefix cache, from the last to the first."""
    (whole,) = getattr(model, "whole", (model,))
    rig = (harness.Rig if whole is model else harness.one_rank)(whole, rows=4, radix=False)
    for i, one in reversed([*enumerate(requests)]):
        one.submit(rig, str(i))
    return rig.run()


def requests_of(harness: Any, model: Any, rng: random.Random, shown: Shown, n: int) -> tuple[list[Asked], Any]:
    """First turns, and second ones of some of them with more or less of the answer; and all answers. n: answers that
    half of the first turns ask for."""
    vocab, longest = harness.VOCAB, harness.CONTEXT - 60
    stems = [text(rng, vocab, size, shown) for size in (16, 40)]
    found = []
    for i in range(rng.randint(4, 9)):
        stem = rng.choice(stems)[: rng.choice((0, 5, 16, 40))]
        found.append(asked(harness, rng, i, [*stem, *text(rng, vocab, rng.choice((1, 2, 9, 25)), shown)], shown))
    if n > 1:
        found = [each for one in found for each in one.answers(rng, rng.choice((1, n)))]
    answers = alone(harness, model, found).tokens
    for i, first in enumerate([*found]):
        if rng.random() < 0.5:
            kept = rng.choice((0, 5, 24))
            said = answers.get(str(i), [])[:kept]
            items = [*first.items, *said, *text(rng, vocab, rng.choice((1, 2, 7)), shown)]
            found.append(asked(harness, rng, len(found), items[:longest], shown))
    return found, alone(harness, model, found)


def check(
    harness: Any, model: Any, seed: int, shown: Shown = NO_PICTURES, drafters: Sequence[Any] = DRAFTERS, n: int = 1
) -> None:
    """drafters: names, or functions that make one.  n: of requests that ask for several answers."""
    rng = random.Random(seed)
    requests, expected = requests_of(harness, model, rng, shown, n)
    sizes = StateSizes(rng.choice((3, 5, 16, 40)), *rng.choice(((8, 4), (64, 1), (64, 64))))
    longest = max(len(one.prompt) + one.params.max_new_tokens for one in requests)
    rig = harness.Rig(
        model,
        policy=AtRandom(rng, *(shape(rng) for _ in range(rng.randint(1, 3)))),
        drafter=_made(rng.choice(drafters)),
        book=harness.make_book([one.prompt for one in requests], expected),
        miss=rng.choice((0, 1, 4)),
        lag=rng.randint(0, 1),
        slots=max(rng.choice((150, 180, 1000)), longest + ROOM),
        rows=rng.choice((1, 2, 6)),
        chunk=rng.choice((1, 8, 33, 100)),
        mixed=rng.random() < 0.6,
        ahead=rng.choice((0, 16)),
        radix=rng.random() < 0.9,
        states=sizes if delta_specs(model.kv_layers) else None,
    )
    for turn in range(ROUNDS):
        _round(rng, rig, requests, expected, str(turn))
    rig.sched.flush_cache()
    rig.sched.kv.check_idle()


def _made(drafter: Any) -> Any:
    return drafter() if callable(drafter) else drafter


def _round(rng: random.Random, rig: Any, requests: list[Asked], expected: Any, name: str) -> None:
    """Submits all of them in another order, at once or one every few turns."""
    waiting, every = rng.sample(range(len(requests)), len(requests)), rng.choice((0, 1, 3))
    gone: set[int] = set()

    def between(turn: int) -> None:
        for i in waiting[: 1 if every else None] if not every or turn % every == 0 else ():
            waiting.remove(i)
            limits = rng.choice((None, None, None, SpecLimits(0, 1, 1), SpecLimits(2, 2, 5)))
            guess = tuple(expected.tokens.get(str(i), ())[: rng.choice((0, 0, 6))])
            requests[i].submit(
                rig, f"{name}.{i}", priority=rng.choice((0, 0, 2)), limits=limits, prediction=guess and (*guess, 3)
            )
        if rng.random() < 0.03:
            gone.add(rng.randrange(len(requests)))
            for i in gone:
                rig.sched.abort(f"{name}.{i}")

    answers: Any = None
    while waiting or not rig.loop.idle:
        between(0)
        answers = rig.run(answers, between=between)
    for i, one in enumerate(requests):
        uid, tokens = f"{name}.{i}", expected.tokens.get(str(i), [])
        got = answers.tokens.get(uid, [])
        if i in gone and got == tokens[: len(got)]:
            continue
        assert got == tokens, (uid, one)
        reason, wanted = answers.final[uid].finish_reason, expected.final[str(i)].finish_reason
        assert reason == wanted, (uid, one)
        if one.logprobs is not None:
            for found, known in zip(answers.logprobs[uid], expected.logprobs[str(i)], strict=True):
                assert abs(found.value - known.value) < 1e-3, (uid, one)
