"""Speculation on equals speculation off, token for token, in float32 and with weights in blocks, whatever else happens.

Every test also asserts that it met its subject: accepted drafts, later children, retractions, cached tokens.
"""

from types import SimpleNamespace

import pytest
import torch
from engine_rig import BLOCKS, CUDA, RANKS, TORCH
from made_up_costs import OnMadeUpMachine

from draftwing.config.trees import LOOKUP_ALONE, PLAIN, TreeShape
from draftwing.core import DraftDeferral
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.ops.assign.spec import new_calibration
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.pair_drafter import PairDrafter

CHAIN, TREE, BUSHY = TreeShape(4, 1, 5), TreeShape(4, 3, 11), TreeShape(2, 4, 9)
PART = TreeShape(4, 3, 11, 4)  # of whose nodes the batch verifies 4 for each row
MENU = (TreeShape(6, 2, 8), CHAIN, TreeShape(1, 1, 2), TreeShape(6, 2, 8, proposer=LOOKUP_ALONE), PLAIN)  # of a pair


TOKENS = 30  # of an answer
COPIES = ["torch", "blocks", "ranks"]  # of what "cpu" shows
pytestmark = [
    pytest.mark.parametrize("harness", ["cpu", TORCH, BLOCKS, RANKS, CUDA], indirect=True, scope="session"),
    pytest.mark.further(harness=COPIES, lag=0),
    pytest.mark.further(harness=COPIES, drafter="ngram"),
    pytest.mark.further(harness=COPIES, shape=[CHAIN, BUSHY]),
    pytest.mark.further(harness="cpu", lag=0, shape=[CHAIN, BUSHY]),
]


def mixed_params(h, count, tokens=TOKENS):
    return [h.greedy(tokens) if i % 2 else h.seeded(tokens, seed=i) for i in range(count)]


@pytest.fixture(scope="session")
def case(harness, one_thread):
    """Model, prompts, parameters and the answers of plain decoding."""
    model = harness.tiny_model()
    prompts = harness.prompts_for(8)
    params = mixed_params(harness, len(prompts))
    expected = harness.plain_answers(model, prompts, params)
    assert all(len(expected.tokens[str(i)]) == TOKENS for i in range(len(prompts)))
    assert len({tuple(t) for t in expected.tokens.values()}) == len(prompts)
    return model, prompts, params, expected, harness.make_book(prompts, expected)


@pytest.fixture(scope="session")
def unlimited(harness, one_thread):
    """As `case`, with requests that end at the context length."""
    model, prompts = harness.tiny_model(), harness.prompts_for(4)
    params = [harness.greedy(None), harness.seeded(None, seed=5)] * 2
    expected = harness.plain_answers(model, prompts, params)
    return model, prompts, params, expected, harness.make_book(prompts, expected)


@pytest.fixture(scope="session")
def repetitive(harness, one_thread):
    """As `case`, with text that repeats itself: greedy decoding of a tiny model runs into loops by itself."""
    model, prompts = harness.tiny_model(seed=3), harness.prompts_for(8, seed=5)
    params = [harness.greedy(90) if i % 2 else harness.seeded(90, seed=i, temperature=0.3) for i in range(8)]
    expected = harness.plain_answers(model, prompts, params)
    return model, prompts, params, expected, None


def answer(h, case, **kw):
    model, prompts, params, expected, book = case
    rig = h.Rig(model, book=book, **kw)
    got = rig.answer(prompts, params)
    assert got.tokens == expected.tokens
    return rig, got


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE, BUSHY], ids=["chain", "tree", "bushy"])
def test_oracle_drafts(harness, case, shape, lag):
    rig, _ = answer(harness, case, shapes=(shape,), drafter="oracle", miss=2, lag=lag)
    assert rig.accept_length > 1.5
    if shape != CHAIN:
        assert rig.stats.moved > 30, "no later child was accepted"


@pytest.mark.slow
@pytest.mark.further(harness="torch")
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["oracle", "ngram"])
def test_the_best_nodes_of_a_batch(harness, case, drafter, lag):
    """What is verified changes with every step and every batch, and no text does."""
    model, prompts, _, _, book = case
    params = [harness.greedy(TOKENS) for _ in prompts]
    expected = harness.plain_answers(model, prompts, params)
    rig, _ = answer(
        harness, (model, prompts, params, expected, book), drafter=drafter, miss=1, lag=lag,
        policy=harness.Cycle(PART, PART, TREE),
    )  # fmt: skip
    assert rig.stats.shapes == {PART, TREE, PLAIN} and rig.accept_length > 1.2
    seen = rig.executor.calibration.seen
    assert seen.sum() > new_calibration(seen.device).seen.sum() + 20  # more than the first guesses


@pytest.mark.slow
@pytest.mark.further(harness=["torch", "ranks"])
@pytest.mark.further(drafter="suffix", lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_matched_drafts(harness, repetitive, drafter, lag):
    rig, _ = answer(harness, repetitive, shapes=(TreeShape(7, 4, 8),), drafter=drafter, lag=lag)
    assert rig.accept_length > 1.5


@pytest.mark.further(harness=COPIES)
@pytest.mark.further(drafter=["ngram", "oracle"], lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["oracle", "ngram", "suffix"])
def test_changing_shapes(harness, case, drafter, lag):
    rig, _ = answer(harness, case, drafter=drafter, policy=harness.Cycle(CHAIN, TREE, BUSHY), miss=1, lag=lag)
    assert rig.stats.shapes == {CHAIN, TREE, BUSHY, PLAIN}
    assert rig.accept_length > (1.5 if drafter == "oracle" else 1.2)  # every fourth step is plain


@pytest.mark.slow
@pytest.mark.further(harness="ranks", lookup=NGramDrafter)
@pytest.mark.further(harness=["torch", "blocks"])
@pytest.mark.parametrize(("lag", "lookup"), [(0, SuffixDrafter), (1, NGramDrafter), (1, SuffixDrafter)])
def test_the_policy_drafts_rests_and_begins_again(harness, repetitive, lag, lookup):
    """A model and a lookup, and shapes chosen by what steps bring: two long answers draft, and rest with what the model
    has not seen of them while short ones run with them."""
    model, prompts, params, expected, _ = repetitive
    ops, copied = make_ops(torch.device(harness.device)), TreeShape(6, 2, 8)
    draft = harness.tiny_model(seed=3, sharpen=3.0)  # right where it is greedy, else now and then
    (draft,) = getattr(draft, "whole", (draft,))
    seen, spread = [], hasattr(model, "whole")

    def make(share=None):
        grown = ModelDrafter(DraftLM(draft, harness.VOCAB), 7, CHAIN.topk, torch.float32, ops)
        catch_up = grown.catch_up
        grown.catch_up = lambda *args: (seen.append(args[-1]), catch_up(*args))
        known = {"secret": 1} if lookup is SuffixDrafter else {}  # one on all ranks
        return PairDrafter(grown, lookup(7, ops, capacity=4096, **known), CHAIN, copied)

    policy = OnMadeUpMachine(MENU)
    rig = harness.Rig(model, drafter=make if spread else make(), policy=policy, lag=lag)
    # What prefills take decides how prompts are cut, and what a step behind one may take.
    rig.executor.device.seconds = lambda begin, end: 0.0 if begin is end else 2e-3

    def between(turn):
        if turn in (6, 28, 50):
            for i in range(2, 6):
                param = harness.greedy(14) if i % 2 else harness.seeded(14, seed=i, temperature=0.3)
                rig.submit(f"{i} {turn}", prompts[i], param)

    for i in range(2):
        rig.submit(str(i), prompts[i], params[i])
    got = rig.run(between=between)
    for uid, tokens in got.tokens.items():
        assert tokens == expected.tokens[uid[0]][: len(tokens)] and len(tokens) == (14 if " " in uid else 90)
    drafted = sum(steps for shape, steps in policy.chosen.items() if shape.depth and shape.proposer != LOOKUP_ALONE)
    assert len(rig.stats.shapes) > 2 and drafted > 3 and policy.chosen[PLAIN] > 15
    assert sum(seen) >= 3, "rows caught up to draft at once"
    assert rig.accept_length > 1.2


@pytest.mark.slow
@pytest.mark.further(chunk=[2, 17])
@pytest.mark.further(chunk=1, lag=0)
@pytest.mark.further(harness=["torch", "ranks"])
@pytest.mark.further(harness="blocks", chunk=5)
@pytest.mark.further(harness="cpu", chunk=5, lag=0)
@pytest.mark.parametrize("chunk", [1, 2, 5, 17])
@pytest.mark.parametrize("lag", [0, 1])
def test_prefill_chunks_of_any_size(harness, case, chunk, lag):
    rig, _ = answer(harness, case, shapes=(TREE,), drafter="oracle", chunk=chunk, lag=lag)
    assert rig.stats.prefills >= 6 and rig.accept_length > 1.5


@pytest.mark.further(harness=COPIES)
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_prefix_hits(harness, case, lag):
    """Every prompt twice, and then again continued: the radix cache serves what it has, with the drafter's KV."""
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book, lag=lag)
    for round_ in range(2):
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(f"{round_}/{i}", prompt, param)
        got = rig.run()
        assert {uid.split("/")[1]: tokens for uid, tokens in got.tokens.items()} == expected.tokens
        cached = sum(out.meta["cached_tokens"] for out in got.final.values())
    # all but the last 1 + lookahead - 1 tokens of every prompt
    assert cached == sum(len(prompt) - 1 for prompt in prompts)
    for i, prompt in enumerate(prompts):  # conversations go on
        whole = [*prompt, *expected.tokens[str(i)]]
        rig.submit(str(i), whole[: len(prompt) + 20], harness.greedy(10))
    greedy_rows = [i for i in range(len(prompts)) if i % 2]
    got = rig.run()
    for i in greedy_rows:
        assert got.tokens[str(i)] == expected.tokens[str(i)][20:30]
        assert got.final[str(i)].meta["cached_tokens"] == len(prompts[i]) + 19
    assert rig.accept_length > 1.5


@pytest.mark.further(harness=COPIES, drafter="suffix")
@pytest.mark.further(drafter="ngram")
@pytest.mark.further(drafter="suffix", lag=0)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["oracle", "ngram", "suffix"])
def test_preemption(harness, case, drafter, lag):
    """A pool for less than two requests, six rows: requests are retracted and resume exactly."""
    rig, got = answer(harness, case, shapes=(TREE,), drafter=drafter, lag=lag, slots=120, chunk=8)
    assert rig.sched.retractions >= 2 and rig.accept_length > 1.5
    assert sum(out.meta["num_retractions"] for out in got.final.values()) == rig.sched.retractions
    if lag:
        assert rig.sched.results.stale > 0, "no step was in flight for a retracted request"


@pytest.mark.slow
@pytest.mark.further(harness=COPIES)
@pytest.mark.further(shape=CHAIN)
@pytest.mark.further(shape=TREE, lag=0)
@pytest.mark.further(shape=PLAIN, lag=1)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_request_that_ends_exactly_at_the_context_length(harness, unlimited, shape, lag):
    prompts = unlimited[1]
    rig, got = answer(harness, unlimited, shapes=(shape,), drafter="oracle", lag=lag)
    for i, prompt in enumerate(prompts):
        assert len(prompt) + len(got.tokens[str(i)]) == harness.CONTEXT
        assert got.final[str(i)].finish_reason["type"] == "length"
    assert shape == PLAIN or rig.accept_length > 1.5


@pytest.mark.further(harness=COPIES)
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_stop_ids_end_a_request_in_the_middle_of_an_accepted_path(harness, case, lag):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, shapes=(CHAIN,), drafter="oracle", book=book, lag=lag)
    want, cut_inside = {}, 0
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        tokens = expected.tokens[str(i)]
        stop = tokens[13]
        at = tokens.index(stop)
        cut_inside += at % 5 not in (0, 4)
        want[str(i)] = tokens[: at + 1]
        rig.submit(str(i), prompt, param, stop_ids=[stop])
    got = rig.run()
    assert got.tokens == want and cut_inside > 3
    assert all(out.finish_reason == {"type": "stop", "matched": want[uid][-1]} for uid, out in got.final.items())
    # what the device committed past the stop must not be served from the cache
    for i, prompt in enumerate(prompts):
        rig.submit(str(i), prompt, params[i])
    assert rig.run().tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.further(seed=[1, 2, 3])
@pytest.mark.further(harness=["torch", "blocks"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_aborts_and_preemption(harness, case, lag, seed, monkeypatch):
    """Aborts at random moments leave every other answer exact and no slot behind (checked after every turn). Half of
    them are of a drafter that sees prompts when it drafts, but for those right after it has drafted."""
    monkeypatch.setattr("draftwing.sched.draft_backlog.RESTED", 0)
    model, prompts, params, expected, book = case
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(0, n, (1,), generator=generator))

    rig = harness.Rig(
        model, drafter="oracle", policy=harness.Cycle(TREE, CHAIN), book=book, lag=lag, slots=150, chunk=7, miss=1,
        deferral=DraftDeferral(0, 16, by_slot=True) if (seed + lag) % 2 else DraftDeferral(40, 16),
    )  # fmt: skip
    todo, aborted = list(range(24)), set()

    def between(turn):
        for _ in range(draw(3)):
            if todo:
                j = todo.pop()
                rig.submit(str(j), prompts[j % 8], params[j % 8], priority=draw(2))
        if draw(12) == 0:
            uid = str(draw(24))
            if rig.sched._by_uid.get(uid):
                aborted.add(uid)
                rig.sched.abort(uid)

    for _ in range(4):
        between(0)
    answers = SimpleNamespace(tokens={}, final={})
    while todo or not rig.loop.idle:
        between(0)
        if not rig.loop.idle:
            _turn(rig, answers)
    for uid, out in answers.final.items():
        if uid in aborted:
            assert out.finish_reason["type"] == "abort"
        else:
            assert answers.tokens[uid] == expected.tokens[str(int(uid) % 8)]
    assert len(answers.final) == 24 and aborted and rig.sched.retractions > 0 and rig.accept_length > 1.5
    assert int(rig.drafter.wrong_kv) == 0
    assert rig.sched.flush_cache() and rig.sched.kv.pool.available == 150


def _turn(rig, answers):
    rig.loop.turn()
    rig.sched.check_integrity()
    for out in rig.sched.take_outputs():
        answers.tokens.setdefault(out.uid, []).extend(out.token_ids)
        if out.finish_reason:
            answers.final[out.uid] = out


@pytest.mark.slow
@pytest.mark.further(harness="cpu", lag=0)
@pytest.mark.further(harness=["torch", "blocks"])
@pytest.mark.parametrize("lag", [0, 1])
def test_filters_and_bans_on_trees_and_across_preemption(harness, lag):
    """top-k, top-p, min-p and min_new_tokens, mixed with greedy rows in one batch, in a pool that is too small."""
    model = harness.tiny_model(sharpen=3.0)
    prompts = harness.prompts_for(10, seed=4)
    kinds = [
        dict(top_k=4), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=9, top_p=0.9, min_new_tokens=25),
        dict(temperature=0.0, min_new_tokens=30),
    ]  # fmt: skip
    params = [harness.seeded(40, seed=i, stop_token_ids=(5, 9, 11), **kinds[i % 5]) for i in range(10)]
    expected = harness.plain_answers(model, prompts, params)
    lengths = [len(expected.tokens[str(i)]) for i in range(10)]
    assert min(lengths) < 20, "no request met a stop id"
    assert all(n >= (25 if i % 5 == 3 else 30) for i, n in enumerate(lengths) if i % 5 > 2)
    rig = harness.Rig(
        model, shapes=(TREE,), drafter="oracle", book=harness.make_book(prompts, expected), lag=lag, slots=110, chunk=8
    )
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert rig.sched.retractions > 0 and rig.accept_length > 1.5


@pytest.mark.slow
@pytest.mark.further(harness=COPIES)
def test_filters_and_bans_do_what_they_say(harness):
    model = harness.tiny_model()
    prompts = harness.prompts_for(4)
    greedy = harness.plain_answers(model, prompts, [harness.greedy(20)] * 4)
    for only_one in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        params = [harness.seeded(20, temperature=1.5, **only_one)] * 4
        assert harness.plain_answers(model, prompts, params).tokens == greedy.tokens
    free = harness.plain_answers(model, prompts, [harness.seeded(20, temperature=1.5)] * 4)
    assert free.tokens != greedy.tokens
    for i, prompt in enumerate(prompts):
        stop = greedy.tokens[str(i)][2]
        at = greedy.tokens[str(i)].index(stop)
        stopped = harness.plain_answers(model, [prompt], [harness.greedy(20, stop_token_ids=(stop,))]).tokens["0"]
        assert stopped == greedy.tokens[str(i)][: at + 1]
        params = harness.greedy(20, stop_token_ids=(stop,), min_new_tokens=10, logit_bias=((stop, 100.0),))
        longer = harness.plain_answers(model, [prompt], [params]).tokens["0"]
        assert longer.index(stop) == 10 and len(longer) == 11, "as soon as it may"
