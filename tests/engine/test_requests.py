"""What requests may ask for besides sampling: the same tokens with speculation on and off, in float32, for random
requests over everything there is; and what each of them means."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
import torch
from engine_rig import CUDA, RANKS
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.errors import RequestError
from draftwing.requests.request import LogprobParams, SpecLimits
from draftwing.sched import guidance

pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness="ranks", lag=0),
]
CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)
COUNT, NEW = 16, 20


def favourite(tokens, logits):
    """A logits processor: likes a token that depends on the path."""
    logits[(sum(tokens[-4:]) * 7 + len(tokens)) % len(logits)] += 4.0
    return logits


def random_request(h, draw: random.Random, number: int):
    """(sampling parameters, what else the request has)"""

    def maybe(probability, value, otherwise):
        return value() if draw.random() < probability else otherwise

    def some_ids(count):
        return draw.sample(range(h.VOCAB), count)

    fields = dict(
        frequency_penalty=maybe(0.3, lambda: draw.uniform(-1, 2), 0.0),
        presence_penalty=maybe(0.3, lambda: draw.uniform(-1, 2), 0.0),
        repetition_penalty=maybe(0.3, lambda: draw.uniform(0.7, 1.6), 1.0),
        dry_multiplier=maybe(0.3, lambda: draw.uniform(0.1, 3), 0.0),
        dry_allowed_length=draw.randint(1, 3),
        logit_bias=maybe(0.3, lambda: tuple((i, draw.uniform(-8, 8)) for i in sorted(some_ids(5))), ()),
        allowed_token_ids=maybe(0.2, lambda: tuple(some_ids(20)), ()),
        bad_words=maybe(0.3, lambda: ("named by ids",), ()),
    )
    if draw.random() < 0.5:
        fields |= dict(
            top_k=draw.choice((-1, 5)), top_p=draw.choice((1.0, 0.7)), min_p=draw.choice((0.0, 0.1)),
            temperature=draw.choice((0.5, 1.0)),
        )  # fmt: skip
        params = h.seeded(NEW, seed=number, **fields)
    else:
        params = h.greedy(NEW, **fields)
    more = {}
    guided = draw.random() < 0.4 and not params.allowed_token_ids
    if params.bad_words and not guided:
        more["bad_word_ids"] = tuple(tuple(some_ids(draw.choice((1, 1, 2, 3)))) for _ in range(6))
    if draw.random() < 0.3:
        more["logprobs"] = LogprobParams(
            draw.choice((0, 3)), tuple(some_ids(draw.choice((0, 2)))), draw.choice((-1, 0, 2))
        )
    return params, more, guided, draw.random() < 0.2


def submit(h, rig, case, number, limits=None, prediction=()):
    prompt, (params, more, guided, processed) = case
    grammar = ToyGrammar(number, h.VOCAB) if guided else None
    rig.submit(
        str(number), prompt, params, grammar=grammar, processor=favourite if processed else None, limits=limits,
        prediction=prediction, **more,
    )  # fmt: skip


def same_logprobs(got, expected):
    assert got.logprobs.keys() == expected.logprobs.keys()
    for uid, values in expected.logprobs.items():
        assert len(values) == len(got.logprobs[uid])
        for a, b in zip(values, got.logprobs[uid], strict=True):
            assert a.value == pytest.approx(b.value, abs=1e-4)
            assert [token for _, token in a.top] == [token for _, token in b.top]
            assert [value for value, _ in a.top] == pytest.approx([value for value, _ in b.top], abs=1e-4)
            assert a.wanted == pytest.approx(b.wanted, abs=1e-4)


@pytest.fixture(scope="module")
def cases(harness):
    h = harness
    draw = random.Random(11)
    prompts = h.prompts_for(COUNT, seed=2)
    every = [(prompt, random_request(h, draw, i)) for i, prompt in enumerate(prompts)]
    model = h.tiny_model(seed=4)
    whole = getattr(model, "whole", None)  # of a model that is spread over ranks
    plain = h.one_rank(*whole, rows=1, radix=False) if whole else h.Rig(model, rows=1, radix=False)
    for i, case in enumerate(every):
        submit(h, plain, case, i)
    expected = plain.run()
    early = {uid: out.finish_reason for uid, out in expected.final.items() if out.finish_reason["type"] != "length"}
    assert not early
    return model, every, expected, h.make_book(prompts, expected)


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
@pytest.mark.further(shape=CHAIN, lag=1)
@pytest.mark.further(shape=TREE, lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_random_requests_give_the_same_tokens(harness, cases, shape, lag):
    model, every, expected, book = cases
    mixed = lag == 1
    rig = harness.Rig(
        model, shapes=(shape,), drafter="oracle", book=book, miss=2, lag=lag, mixed=mixed, chunk=100 if mixed else 64
    )
    for i, case in enumerate(every):
        submit(harness, rig, case, i)
    got = rig.run()
    assert got.tokens == expected.tokens
    assert rig.accept_length > 1.8 and (rig.stats.mixed > 5) == mixed
    same_logprobs(got, expected)


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
def test_random_requests_under_preemption_and_small_chunks(harness, cases):
    model, every, expected, book = cases
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=2, slots=80, chunk=7)
    for i, case in enumerate(every):
        submit(harness, rig, case, i)
    got = rig.run()
    assert got.tokens == expected.tokens and rig.sched.retractions > 0
    same_logprobs(got, expected)
    for uid, values in expected.prompt_logprobs.items():
        assert [v and v.value for v in got.prompt_logprobs[uid]] == pytest.approx(
            [v and v.value for v in values], abs=1e-4
        )


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
def test_limits_of_requests_mixed_in_a_batch(harness, cases):
    model, every, expected, book = cases
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=0)
    limits = [None, SpecLimits(0, 1, 1), SpecLimits(2, 3, 11), SpecLimits(4, 3, 2)]
    for i, case in enumerate(every):
        submit(harness, rig, case, i, limits=limits[i % 4])
    got = rig.run()
    assert got.tokens == expected.tokens
    deepest = {i: len(got.final[str(i)].meta["spec_correct_drafts_histogram"]) - 1 for i in range(len(every))}
    for i, most in enumerate([4, 0, 2, 1] * (COUNT // 4)):
        assert deepest[i] <= most, f"request {i} was drafted deeper than it allows"
    assert max(deepest[i] for i in range(0, COUNT, 4)) == 4 and max(deepest[i] for i in range(2, COUNT, 4)) == 2


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
@pytest.mark.parametrize("drafter", [None, "oracle"])
def test_predicted_outputs(harness, cases, drafter):
    model, every, expected, book = cases
    rig = harness.Rig(model, shapes=(TreeShape(6, 1, 7),), drafter=drafter, book=book, miss=7)
    for i, case in enumerate(every):
        text = expected.tokens[str(i)]
        # the answer with an error in it, or something else altogether
        prediction = (*text[:9], (text[9] + 1) % harness.VOCAB, *text[10:]) if i % 3 else tuple(range(20))
        submit(harness, rig, case, i, prediction=prediction)
    got = rig.run()
    assert got.tokens == expected.tokens
    right = [got.final[str(i)].meta["spec_accept_length"] for i in range(len(every)) if i % 3]
    assert np.mean(right) > 2.0


@pytest.mark.further(harness="ranks")
def test_predictions_stay_with_their_request(harness):
    """The row of a request with a prediction goes to one without."""
    h, prompt = harness, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    model = h.tiny_model(seed=3)
    rig = h.Rig(model, shapes=(TreeShape(6, 1, 7),), rows=1, radix=False)
    rig.submit("plain", prompt, h.greedy(30))
    text = rig.run().tokens["plain"]
    rig.submit("predicted", prompt, h.greedy(30), prediction=tuple(text))
    assert rig.run().final["predicted"].meta["spec_accept_length"] > 3.0
    rig.submit("after", prompt, h.greedy(30))
    got = rig.run()
    assert got.tokens["after"] == text and got.final["after"].meta["spec_num_proposed_drafts"] == 0


@pytest.mark.slow
def test_a_guided_request_beside_unguided_ones_with_overlap(harness, cases):
    model, every, expected, book = cases
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=2, lag=1, rows=COUNT)
    for i, case in enumerate(every):
        submit(harness, rig, case, i)
    assert rig.run().tokens == expected.tokens
    assert rig.drafter.constrained


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
def test_forced_text_is_accepted_without_a_good_draft(harness):
    """The oracle is always wrong: what is accepted was put there by the host."""
    h = harness
    model, prompt = h.tiny_model(seed=4), [1, 2, 3]
    plain = h.Rig(model)
    plain.submit("0", prompt, h.greedy(60), grammar=ToyGrammar(5, h.VOCAB))
    expected = plain.run()
    wrong = h.make_book([prompt], expected)
    rig = h.Rig(model, shapes=(TREE,), drafter="oracle", book=(wrong + 1) % h.VOCAB, miss=0)
    rig.submit("0", prompt, h.greedy(60), grammar=ToyGrammar(5, h.VOCAB))
    assert rig.run().tokens == expected.tokens
    forced = sum(
        len(ToyGrammar(5, h.VOCAB, tuple(expected.tokens["0"][:i]))._allowed()) == 1
        for i in range(len(expected.tokens["0"]))
    )
    assert forced > 10 and rig.stats.tokens - rig.stats.rows >= forced // 2


class Fragile(ToyGrammar):
    """Gives up, for good, after a certain token: as the library does where a grammar becomes too complex."""

    poison, broken = -1, False

    def fork(self):
        state = super().fork()
        state.poison, state.broken = self.poison, self.broken
        return state

    def advance(self, token):
        if self.broken:
            raise RequestError("the grammar became too complex", "grammar")
        legal = super().advance(token)
        self.broken = legal and token == self.poison
        return legal

    def mask(self, out=None):
        if self.broken:
            raise RequestError("the grammar became too complex", "grammar")
        return super().mask(out)


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
def test_a_grammar_that_gives_up_on_a_draft_harms_nobody(harness):
    """Drafts that the answer never takes lead where the grammar fails."""
    h = harness
    model, prompt = h.tiny_model(seed=4), [1, 2, 3]

    def ask(rig, poison):
        grammar = Fragile(5, h.VOCAB)
        grammar.poison = poison
        rig.submit("0", prompt, h.greedy(60), grammar=grammar)
        return rig.run()

    expected = ask(h.Rig(model), poison=-1).tokens["0"]
    book = h.make_book([prompt], ask(h.Rig(model), poison=-1))
    met = 0
    for poison in sorted(set(range(h.VOCAB)) - set(expected))[::3]:
        rig = h.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=2)
        assert ask(rig, poison).tokens["0"] == expected
        met += 1
    poison = expected[20]
    plain, rig = h.Rig(model), h.Rig(model, shapes=(TREE,), drafter="oracle", book=book, miss=2)
    a, b = ask(plain, poison), ask(rig, poison)
    assert met > 3 and a.tokens == b.tokens and len(a.tokens["0"]) < 60
    assert a.final["0"].finish_reason["type"] == b.final["0"].finish_reason["type"] == "abort"


def test_prompt_logprobs_are_those_of_the_answer(harness):
    """A text as an answer, token by token, and the same text as a prompt."""
    h = harness
    model, prompt = h.tiny_model(seed=4), [5, 6, 7, 8]
    rig = h.Rig(model)
    wanted = LogprobParams(4, (3, 9), 0)
    rig.submit("a", prompt, h.greedy(20), logprobs=wanted)
    first = rig.run()
    rig = h.Rig(model, chunk=6)
    whole = [*prompt, *first.tokens["a"]]
    rig.submit("cached", whole, h.greedy(1))  # leaves its KV in the prefix cache
    rig.run()
    rig.submit("b", whole, h.greedy(1), logprobs=wanted)
    second = rig.run()
    values = second.prompt_logprobs["b"]
    assert len(values) == len(whole) and values[0] is None
    assert [v.value for v in values[1:4]] == pytest.approx([v.value for v in first.prompt_logprobs["a"][1:]], abs=1e-4)
    for a, b in zip(values[4:], first.logprobs["a"], strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-4) and [t for _, t in a.top] == [t for _, t in b.top]
        assert a.top[0][0] == pytest.approx(b.value, abs=1e-4), "greedy text is the most probable"


@pytest.mark.further(harness="ranks")
def test_what_the_edits_do(harness):
    h = harness
    rig = h.Rig(h.tiny_model(seed=4), shapes=(PLAIN,))
    rig.submit("allowed", [1, 2], h.seeded(40, allowed_token_ids=(3, 9, 11)))
    rig.submit("bias", [1, 2], h.greedy(10, logit_bias=((7, 100.0),)))
    free = h.Rig(h.tiny_model(seed=4))
    free.submit("free", [1, 2], h.seeded(60))
    text = free.run().tokens["free"]
    one, pair = text[3], (text[10], text[11])
    before = text.index(one)
    rig.submit("words", [1, 2], h.seeded(60, bad_words=("x",)), bad_word_ids=((one,), pair))
    rig.submit(
        "never twice", [1, 2], h.greedy(h.VOCAB - 3, presence_penalty=2.0, repetition_penalty=2.0), bad_word_ids=()
    )
    got = rig.run().tokens
    assert set(got["allowed"]) <= {3, 9, 11} and len(set(got["allowed"])) > 1
    assert got["bias"] == [7] * 10
    words = got["words"]
    assert words[:before] == text[:before], "nothing changes before the first bad word"
    assert one not in words and pair not in set(itertools.pairwise(words))
    assert len(words) == 60


def test_a_vocabulary_that_fills_no_whole_words(harness):
    """Masks and logits are copied in words of 64 bits: here the last is half empty."""
    h, vocab = harness, 71

    def last(tokens, logits):
        logits[-1] += 100.0
        return logits

    rig = h.Rig(h.tiny_model(seed=4, vocab=vocab))
    rig.submit("grammar", [1, 2, 3], h.greedy(20), grammar=ToyGrammar(5, vocab))
    rig.submit("processor", [1, 2, 3], h.greedy(5), processor=last)
    rig.submit("allowed", [1, 2, 3], h.seeded(40, temperature=9.0, allowed_token_ids=(3, vocab - 1)))
    got = rig.run().tokens
    answer = got["grammar"]
    assert all(token in ToyGrammar(5, vocab, tuple(answer[:i]))._allowed() for i, token in enumerate(answer))
    assert got["processor"] == [vocab - 1] * 5
    assert set(got["allowed"]) == {3, vocab - 1}


def give_up(*_):
    raise RequestError("it broke", "grammar")


class GivesUp(ToyGrammar):
    """With the answer's fourth token: when it is taken, or when it is asked whether it ends there."""

    at = ""

    def fork(self):
        made = super().fork()
        made.at = self.at
        return made

    def advance(self, token):
        return give_up() if self.at == "taken" and len(self.tokens) == 3 else super().advance(token)

    complete = property(lambda self: give_up() if self.at == "ended" and len(self.tokens) == 4 else False)


def grammar_of(vocab, at):
    made = GivesUp(1, vocab)
    made.at = at
    return made


CANNOT_GO_ON = {
    "a processor that fails": ({}, lambda h: {"processor": lambda ids, logits: logits if len(ids) < 9 else give_up()}),
    "a grammar that fails when a token is taken": ({}, lambda h: {"grammar": grammar_of(h.VOCAB, "taken")}),
    "a grammar that fails when it is asked for its end": ({}, lambda h: {"grammar": grammar_of(h.VOCAB, "ended")}),
    "a grammar that takes too long": ({}, lambda h: {"grammar": grammar_of(h.VOCAB, "")}),
    "bad_words forbid what is allowed": (
        {"allowed_token_ids": (3,), "bad_words": ("x",)}, lambda h: {"bad_word_ids": ((3, 3),)}
    ),
    "grammar forbids what is allowed": ({"allowed_token_ids": (0,)}, lambda h: {"grammar": grammar_of(h.VOCAB, "")}),
}  # fmt: skip


@pytest.mark.parametrize("why", CANNOT_GO_ON)
def test_what_cannot_go_on_ends_its_request_alone(harness, why, monkeypatch):
    """And says why. Beside it another one goes on."""
    h, (fields, more) = harness, CANNOT_GO_ON[why]
    if "too long" in why:
        monkeypatch.setattr(guidance, "LIMIT", -1.0)
    rig = h.Rig(h.tiny_model(seed=4))
    rig.submit("bad", [1, 2, 3], h.greedy(20, **fields), **more(h))
    rig.submit("good", [1, 2, 3, 4], h.greedy(20), grammar=None if "too long" in why else ToyGrammar(1, h.VOCAB))
    got = rig.run()
    reason, said = got.final["bad"].finish_reason, "it broke" if "fails" in why else why.split()[0]
    assert reason["type"] == "abort" and ("grammar takes too long" if "too long" in why else said) in reason["message"]
    assert len(got.tokens["good"]) == 20


class Strict(ToyGrammar):
    """Never allows token 0, which ends texts."""

    def _allowed(self):
        return super()._allowed() - {0} or {1}


def only(ids, prompt, text, after):
    """A logits processor: leaves nothing but `ids` where the answer is the first `after` tokens of `text`."""

    def processor(tokens, logits):
        if tokens == [*prompt, *text[:after]]:
            kept = logits[list(ids)].clone()
            logits.fill_(-torch.inf)[list(ids)] = kept
        return logits

    return processor


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
@pytest.mark.further(seeded=True, shape=PLAIN)
@pytest.mark.further(seeded=False, shape=TREE)
@pytest.mark.parametrize("shape", [PLAIN, TREE])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("grammar", ("grammar", "logits processor")),
        ("stop id", ("grammar", "logits processor")),
        ("allowed_token_ids", ("allowed_token_ids", "logits processor")),
        ("min_new_tokens", ("min_new_tokens", "logits processor")),
        ("bad_words", ("bad_words", "allowed_token_ids")),
    ],
)
def test_what_is_left_by_none_of_the_parameters_ends_the_answer_there(harness, kind, named, shape, seeded):
    """Token 0 is the first of those that are all banned, and would end the answer as if it was whole."""
    h, prompt, stop = harness, [1, 2, 3], 0
    made = h.seeded if seeded else h.greedy
    grammar = (lambda: Strict(2, h.VOCAB)) if kind in ("grammar", "stop id") else lambda: None
    fields = {"allowed_token_ids": tuple(range(1, 9))} if kind in ("allowed_token_ids", "bad_words") else {}
    fields |= {"min_new_tokens": 20} if kind == "min_new_tokens" else {}
    free = h.Rig(h.tiny_model(seed=4))
    free.submit("0", prompt, made(20, **fields), stop_ids=(stop,), grammar=grammar())
    answers = free.run()
    text = answers.tokens["0"]
    assert len(text) == 20
    for after in (0, 1, 5):
        rig = h.Rig(
            h.tiny_model(seed=4), shapes=(shape,), drafter=None if shape is PLAIN else "oracle",
            **({} if shape is PLAIN else dict(book=h.make_book([prompt], answers), miss=0)),
        )  # fmt: skip
        more, asked = {}, dict(fields)
        if kind == "bad_words":
            path = tuple(text[:after])
            asked |= {"bad_words": ("named by ids",)}
            more["bad_word_ids"] = tuple((*path, token) for token in fields["allowed_token_ids"])
        else:
            refused = Strict(2, h.VOCAB, tuple(text[:after]))._allowed() | set(range(1, 9)) | {stop}
            ids = [stop] if kind in ("stop id", "min_new_tokens") else sorted(set(range(h.VOCAB)) - refused)
            more["processor"] = only(ids, prompt, text, after)
        rig.submit("0", prompt, made(20, **asked), stop_ids=(stop,), grammar=grammar(), **more)
        got = rig.run()
        reason = got.final["0"].finish_reason
        assert (got.tokens["0"], reason["type"]) == (text[:after], "abort"), reason
        assert all(name in reason["message"] for name in named)


def test_nothing_left_after_a_draft_that_is_not_accepted_does_not_matter(harness):
    h, prompt, wrong = harness, [1, 2, 3], []
    free = h.Rig(h.tiny_model(seed=4))
    free.submit("0", prompt, h.greedy(20))
    answers = free.run()
    text = answers.tokens["0"]

    def on_the_way(tokens, logits):
        if tokens[len(prompt) :] != text[: len(tokens) - len(prompt)]:
            wrong.append(tokens)
            logits.fill_(-torch.inf)
        return logits

    rig = h.Rig(h.tiny_model(seed=4), shapes=(TREE,), drafter="oracle", book=h.make_book([prompt], answers), miss=0)
    rig.submit("0", prompt, h.greedy(20), processor=on_the_way)
    got = rig.run()
    assert got.tokens["0"] == text and got.final["0"].finish_reason["type"] == "length" and wrong


def test_a_processor_may_want_a_token_infinitely(harness):
    def wanting(tokens, logits):
        logits[7 + len(tokens) % 2] = torch.inf
        return logits

    h = harness
    rig = h.Rig(h.tiny_model(seed=4))
    rig.submit("greedy", [1, 2, 3], h.greedy(4), processor=wanting)
    rig.submit("seeded", [1, 2, 3], h.seeded(4), processor=wanting)
    got = rig.run()
    assert got.tokens["greedy"] == got.tokens["seeded"] == [8, 7, 8, 7]
    assert got.final["greedy"].finish_reason["type"] == "length"


@pytest.mark.slow
@pytest.mark.further(harness="ranks")
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_grammars_that_are_slow_give_the_same_text(harness, monkeypatch, lag):
    """Their masks are worked out while steps run, for rows without drafts; the others go on as they did."""
    h, model = harness, harness.tiny_model(seed=4)
    made = []

    class Counting(ToyGrammar):
        def mask(self, out=None):
            made.append(threading.current_thread().name)
            return super().mask(out)

    def ask(slow):
        made.clear()
        monkeypatch.setattr(guidance, "SLOW_FROM", 0.0 if slow else 100.0)
        rig = h.Rig(model, shapes=(TreeShape(3, 2, 7),), drafter="ngram", lag=lag)
        for i in range(3):
            params = h.seeded(30, seed=i) if i else h.greedy(30)
            rig.submit(f"guided {i}", [1, 2, 3, i], params, grammar=Counting(i, h.VOCAB))
            rig.submit(f"free {i}", [1, 2, 3, i], params)
        return rig.run().tokens

    expected = ask(slow=False)
    assert any("draftwing" not in name for name in made)
    assert ask(slow=True) == expected
    assert len(made) >= 90 and all(name.startswith("draftwing") for name in made)


@pytest.mark.further(harness="ranks")
def test_a_processor_fails_only_where_the_answer_gets_to(harness):
    """It is asked about drafts that are then not accepted, too: what it says of those must not matter."""
    h, prompt = harness, [1, 2, 3]
    plain = h.Rig(h.tiny_model(seed=4))
    plain.submit("0", prompt, h.greedy(20))
    answers = plain.run()
    expected, asked = answers.tokens["0"], []

    def picky(after):
        def processor(tokens, logits):
            asked.append(tokens[len(prompt) :])
            if tokens[len(prompt) :] not in [expected[:n] for n in range(after)]:
                raise RequestError(f"not after {len(tokens)}", "custom_logit_processor")
            return logits

        return processor

    for after in (20, 7, 1, 0):
        rig = h.Rig(h.tiny_model(seed=4), shapes=(TREE,), drafter="oracle", book=h.make_book([prompt], answers), miss=0)
        rig.submit("0", prompt, h.greedy(20), processor=picky(after))
        got = rig.run()
        assert got.tokens["0"] == expected[:after]
        assert rig.accept_length > 2 or after < 20
        reason = got.final["0"].finish_reason
        assert reason == ({"type": "length", "length": 20} if after == 20 else
                          {"type": "abort", "message": f"not after {len(prompt) + after}"})  # fmt: skip
    assert any(path != expected[: len(path)] for path in asked), "no draft was wrong"


@pytest.mark.slow
def test_log_probabilities_alone_run_in_the_threads_that_are_active(harness, monkeypatch):
    """What is noted of the model and of drafters runs for good in as many threads as torch had then."""
    model = harness.tiny_model()
    if harness.device != "cpu" or hasattr(model, "whole"):
        pytest.skip("the host's threads, of one rank")
    before = torch.get_num_threads()
    prompts, params = harness.prompts_for(2), [harness.greedy(8)] * 2
    rig = harness.Rig(
        model, drafter="oracle", book=harness.make_book(prompts, harness.plain_answers(model, prompts, params))
    )
    stage, seen = rig.executor.commit_stage, {"logits": set(), "accept": set(), "path": set()}
    for name, owner, attribute in (
        ("logits", stage, "_logits"), ("accept", stage, "_accept"), ("path", stage._features, "path_logprobs")
    ):  # fmt: skip
        plain = getattr(owner, attribute)

        def noted(*args, fn=plain, its=seen[name]):
            its.add(torch.get_num_threads())
            return fn(*args)

        monkeypatch.setattr(owner, attribute, noted)
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(CpuDevice, "active_threads", 0.5)
        for i, prompt in enumerate(prompts):
            rig.submit(str(i), prompt, params[i], logprobs=LogprobParams(2))
        rig.run()
    finally:
        torch.set_num_threads(before)
    assert seen == {"logits": {2}, "accept": {2}, "path": {1}}
