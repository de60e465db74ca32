"""Steps from graphs: the same text as without them, padded batches, nothing of one row or step in another.

On a CPU `record_by_calling` stands in for CUDA's graphs: what a stage reads comes from where the capture left it.
"""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from toy_grammar import ToyGrammar

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine import captures
from draftwing.engine.devices import pick_device
from draftwing.engine.graphs import GraphCache, Key, batch_sizes, first_sizes
from draftwing.models.heads.base import DraftLM
from draftwing.requests.request import LogprobParams, SpecLimits, ThinkingBudget
from draftwing.spec.build import make_model_drafter

pytestmark = pytest.mark.slow

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)


@pytest.fixture(scope="module")
def case(harness):
    model = harness.tiny_model()
    prompts = harness.prompts_for(9)
    params = [harness.greedy(20 + 3 * i) for i in range(len(prompts))]  # batches shrink through all sizes
    expected = harness.plain_answers(model, prompts, params)
    return model, prompts, params, expected, harness.make_book(prompts, expected)


def answer(harness, case, params=None, **kw):
    model, prompts, plain, _, book = case
    rig = harness.Rig(model, book=book, **kw)
    calls = count_calls(rig.executor)
    return rig, rig.answer(prompts, params or plain), calls


def count_calls(executor, calls=None):
    """(replays of tree steps' stages, calls without a graph), counted from now on. calls: gets also those of each
    stage, by its name and whether it is a replay."""
    calls, run = [0, 0] if calls is None else calls, executor.run_stage

    def spy(stage, key, fn, *inputs, **kw):
        calls[key is None] += 1
        if isinstance(calls, Counter):
            calls[stage, key is not None] += 1
        return run(stage, key, fn, *inputs, **kw)

    executor.run_stage = spy
    return calls


@pytest.mark.parametrize(("lag", "ahead"), [(0, 0), (1, 24)])
@pytest.mark.parametrize("drafter", [None, "oracle", "ngram"])
def test_the_text_is_the_same(harness, case, drafter, lag, ahead):
    policy = harness.Cycle(TREE, CHAIN) if drafter else None
    rig, got, calls = answer(harness, case, drafter=drafter, policy=policy, miss=2, lag=lag, graph_size=8, ahead=ahead)
    assert got.tokens == case[3].tokens
    assert calls[0] > 60 and calls[1] == 0
    if drafter == "oracle":
        assert rig.accept_length > 1.4 and rig.stats.moved > 10


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drafter", [None, "oracle", "ngram"])
def test_with_the_attention_of_cuda(harness, case, drafter, exact):
    if harness.device != "cuda":
        pytest.skip("kernels for CUDA")
    paged = pytest.importorskip("draftwing.ops.attention.triton")
    attn = partial(paged.PagedAttention, exact=exact)
    model, prompts, params, _, _ = case
    expected = harness.plain_answers(model, prompts, params, attn=attn)
    policy = harness.Cycle(TREE, CHAIN) if drafter else None
    rig = harness.Rig(
        model, drafter=drafter, policy=policy, book=harness.make_book(prompts, expected), lag=1, graph_size=8,
        attn=attn, ahead=24,
    )  # fmt: skip
    calls = count_calls(rig.executor)
    assert rig.answer(prompts, params).tokens == expected.tokens
    assert calls[0] > 60 and calls[1] == 0


def test_rows_past_the_largest_graph_run_without(harness, case):
    _, got, calls = answer(harness, case, drafter="oracle", shapes=(TREE,), graph_size=2)
    assert got.tokens == case[3].tokens
    assert calls[0] > 5 and calls[1] > 10


def test_rows_with_a_temperature_run_without_where_the_host_names_them(harness, case):
    """As long as they are there. Triton's kernels look it up themselves, so there they run from graphs, too."""
    model, prompts, plain, expected, _ = case
    params = [harness.seeded(9, seed=i) if i == 2 else p for i, p in enumerate(plain)]
    seeded = harness.plain_answers(model, prompts[2:3], params[2:3]).tokens["0"]
    rig, got, calls = answer(harness, case, params, drafter="oracle", shapes=(CHAIN,), graph_size=8)
    assert got.tokens == {**expected.tokens, "2": seeded}
    assert calls[0] > 10 and (calls[1] == 0 if rig.executor.ops.draws_by_row else calls[1] > 10)


def special_requests(harness, rig):
    """Of each kind that the stages around the target's forward have more to do for, three times, of other lengths."""
    banned = harness.seeded(
        10, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 1.0),), allowed_token_ids=tuple(range(40)),
        bad_words=("x",), top_k=20, top_p=0.9, min_p=0.02, min_new_tokens=3,
    )  # fmt: skip
    kinds = {
        "banned": (banned, {"stop_ids": (5,), "bad_word_ids": ((4,), (6, 7, 8))}),
        "guided": (harness.greedy(10), {}),
        "limited": (harness.seeded(10), {"limits": SpecLimits(2, 2, 4)}),
        "predicted": (harness.greedy(10), {"prediction": (1, 2, 3, 4)}),
        "logprobs": (harness.greedy(10), {"logprobs": LogprobParams(3, (1, 2), 0)}),
        "thinking": (harness.seeded(10), {"thinking": ThinkingBudget(5, (9,), (9, 9, 8), True, True)}),
    }
    for turn in range(3):
        for number, (name, (params, more)) in enumerate(kinds.items()):
            params = params.model_copy(update={"max_new_tokens": 10 + 7 * turn + number})
            guided = {"grammar": ToyGrammar(turn, harness.VOCAB)} if name == "guided" else {}
            rig.submit(f"{name} {turn}", [number + 1, turn + 1, 3], params, **more, **guided)


@pytest.mark.parametrize("drafter", [None, "oracle", "ngram", "suffix", "STANDALONE"])
def test_special_rows_have_the_forward_alone_from_graphs(harness, case, drafter):
    """With whoever runs with them, as long as they are there; the text is that without any graphs."""
    model, prompts, params, expected, book = case
    found, calls = [], []
    for size in (0, 8):
        more = {"book": book, "shapes": (TREE,), "graph_size": size}
        drafts = drafter
        if drafter == "STANDALONE":
            head = DraftLM(harness.tiny_model(seed=1), harness.VOCAB)
            ops = pick_device(harness.device).ops
            drafts = make_model_drafter(head, 7, TREE.topk, torch.float32, ops)
        rig = harness.Rig(model, drafter=drafts, **more)
        special_requests(harness, rig)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            rig.submit(str(i), prompt, param)
        calls.append(count_calls(rig.executor, Counter()))
        found.append(rig.run())
    assert found[0].tokens == found[1].tokens
    for uid, tokens in found[0].logprobs.items():  # a GPU's products have other bits in a padded batch
        ours, theirs = ([one.value for one in some] for some in (tokens, found[1].logprobs[uid]))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert {name: tokens for name, tokens in found[1].tokens.items() if name in expected.tokens} == expected.tokens
    without, some = calls
    assert without["verify", False] == without["commit", False] > 30
    # Predicted outputs alone make trees of which there are no graphs.
    assert some["commit", False] > 30 and some["verify", False] < (10 if drafter is None else 1)


@pytest.mark.parametrize("drafter", ["oracle", "ngram"])
def test_padding_leaves_no_trace(harness, case, drafter):
    """The dummy row stays empty and its page table points at the pool's dummy slot."""
    rig, _, _ = answer(harness, case, drafter=drafter, shapes=(TREE,), miss=2, graph_size=8)
    slots = rig.slots
    assert int(slots.kv_len[-1]) == 0 and not slots.page_table[-1].any()
    assert int(slots.tokens[-1].max()) < harness.VOCAB and int(slots.last[-1]) < harness.VOCAB


def test_capturing_leaves_running_requests_alone(harness, case):
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, drafter="oracle", shapes=(TREE,), book=book, graph_size=8)
    got = rig.answer(
        prompts, params, between=lambda turn: rig.executor.captures.capture((TREE, PLAIN)) if turn == 6 else None
    )
    assert got.tokens == expected.tokens


def test_what_is_left_is_captured_while_requests_run(harness, case, monkeypatch):
    """Once steps want it, those that they want most first; until then they are padded further."""
    monkeypatch.setattr("draftwing.engine.graphs.WANTED", 3)
    monkeypatch.setattr(captures, "first_sizes", lambda sizes: {sizes[-1]})
    model, prompts, params, expected, book = case
    rig = harness.Rig(model, drafter="oracle", policy=harness.Cycle(TREE), book=book, graph_size=6, lag=1)
    graphs, menu, sizes = rig.executor.graphs, (TREE, PLAIN), []
    graphs.clear()
    assert rig.executor.captures.capture(menu, some=True) == [Key(TREE, 6), Key(PLAIN, 6)]
    assert {*graphs.later} == {Key(shape, size) for shape in menu for size in (1, 2, 4)}
    calls = count_calls(rig.executor)

    def between(turn):
        if graphs.wanted >= 1:
            before = {*graphs.later}
            rig.executor.captures.capture_next()
            sizes.extend(before - {*graphs.later})
            assert len(before) - len(graphs.later) == 1

    assert rig.answer(prompts, params, between=between).tokens == expected.tokens
    assert calls[0] > 60 and calls[1] == 0
    assert len(sizes) >= 2 and all(graphs.key(*key) == key for key in sizes)
    for _ in range(9):  # more than there are
        rig.executor.captures.capture_next()
    assert not graphs.later and all(graphs.key(shape, size) == (shape, size) for shape in menu for size in (1, 2, 4, 6))


@pytest.mark.parametrize("stages", [0, 2])
def test_what_finds_no_memory_is_left_out(harness, case, caplog, monkeypatch, stages):
    """With those stages of the same step that had found some."""
    rig = harness.Rig(case[0], graph_size=16)
    graphs, device = rig.executor.graphs, rig.executor.device
    graphs.clear()
    rig.executor.captures.capture((PLAIN,), some=True)
    assert {*graphs.later} == {Key(PLAIN, 12)}

    before, recorded, record = len(graphs), [], device.record

    def full(fn, pool="steps"):
        if len(recorded) == stages:
            raise device.out_of_memory
        recorded.append(record(fn, pool))
        return recorded[-1]

    monkeypatch.setattr(device, "record", full)
    rig.executor.captures.capture_next()
    assert len(recorded) == stages and len(graphs) == before
    assert not graphs.later and "for want of memory" in caplog.text
    assert graphs.key(PLAIN, 9) == Key(PLAIN, 16)


def test_every_shape_is_captured_for_every_size(harness, case):
    rig = harness.Rig(case[0], drafter="ngram", policy=harness.Cycle(TREE, CHAIN), graph_size=6)
    assert set(rig.captured) == {Key(shape, size) for shape in (TREE, CHAIN, PLAIN) for size in (1, 2, 4, 6)}
    graphs = rig.executor.graphs
    assert [graphs.key(TREE, size) for size in (1, 3, 4, 6, 7)] == [Key(TREE, n) for n in (1, 4, 4, 6)] + [None]
    assert graphs.key(TreeShape(1, 1, 2), 1) is None
    # Draft, verify, commit; with Triton another commit for rows with filters, which torch's code takes without graphs.
    stages = 4 if rig.executor.ops.draws_by_row else 3
    assert len(graphs) == stages * 3 * 4


def test_rows_are_copied_only_when_they_change():
    copies = []
    device = pick_device("cpu")
    upload_into = device.upload_into
    device.upload_into = lambda out, host: (copies.append(host.tolist()), upload_into(out, host))
    graphs = GraphCache(device, 9, 8)
    for rows, size in (([3], 1), ([3], 1), ([3], 2), ([3, 4, 5], 4), ([3, 4], 2), ([3, 4], 4), ([], 4), ([4], 1)):
        graphs.set_rows(np.asarray(rows, np.int64), size)
        assert graphs.rows[:size].tolist() == rows + [9] * (size - len(rows))
    assert copies == [[3], [3, 4, 5, 9], [3, 4, 9, 9], [9, 9, 9, 9], [4]]


def test_first_sizes():
    for most in (1, 2, 6, 100, 128, 256):
        sizes = batch_sizes(most)
        first = sorted(first_sizes(sizes))
        assert {*first} <= {*sizes} and first[-1] == most
        assert all(min(size for size in first if size >= rows) < 2 * rows for rows in range(1, most + 1))
    assert first_sizes([]) == set()


def test_batch_sizes():
    assert batch_sizes(0) == []
    assert batch_sizes(1) == [1] and batch_sizes(3) == [1, 2, 3] and batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(64) == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    for most in (5, 100, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(b <= max(a + 32, 2 * a) for a, b in itertools.pairwise(sizes))
